"""What scheduler and workers tell each other with a step: the reads and their tickets, and what became of them.

A request's match may be joined from several sources. Each part is a read of its own to vLLM's code, known by a part id;
only the scheduler side and the end of a read see the request as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from bidikv_runtime.connector.sources import Source


def build_part_id(request_id: str, part: int) -> str:
    """Name of a part among the reads; the first part goes by the request's own name."""
    return request_id if part == 0 else f"{request_id}/{part}"


@dataclass(frozen=True)
class Ticket:
    """All that the question VALIDATE needs for one part of a request's read; pickled to every worker."""

    request_id: str
    parts: int
    """How many parts the request's read has in all."""
    offset: int
    """Position of this part's first block among the blocks that the request reads."""
    source: Source
    epoch: int
    blocks: tuple[int, ...]
    publications: tuple[int, ...]


class VerifiedReadMetadata(NixlConnectorMetadata):  # type: ignore[misc]
    """Upstream's metadata plus ``tickets`` by part id, one for each of ``reqs_to_recv``."""

    def __init__(self) -> None:
        super().__init__()
        self.tickets: dict[str, Ticket] = {}


@dataclass(frozen=True)
class ReadReport:
    """One part that one rank has read, for the cost model."""

    source: Source
    bytes: int
    descriptors: int
    seconds: float
    """From the start of the transfer (not of the handshake) to its end."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the workers say with a step; vLLM adds up the reports of all ranks."""

    reads: list[ReadReport] = field(default_factory=list)
    quarantined: dict[str, int] = field(default_factory=dict)
    """Requests whose read was abandoned while its transfer may still write, and in how many ranks. Such a request is
    reported as failed in the same step: its blocks must not be re-used before as many ranks have released it."""
    released: dict[str, int] = field(default_factory=dict)
    """Requests of ``quarantined`` whose transfers have ended since."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """The sum of two ranks' reports."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            self.reads + other.reads, _add(self.quarantined, other.quarantined), _add(self.released, other.released)
        )


def _add(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    return {key: first.get(key, 0) + second.get(key, 0) for key in first.keys() | second.keys()}
