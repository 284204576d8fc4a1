"""What scheduler and workers tell each other with a step: the reads and their tickets, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from bidikv_runtime.connector.sources import Source
from bidikv_runtime.connector.ticket import ReadReport, Ticket
from bidikv_runtime.connector.transport import TransportInfo


class VerifiedReadMetadata(NixlConnectorMetadata):  # type: ignore[misc]
    """Upstream's metadata plus ``tickets`` by part id, one for each of ``reqs_to_recv``."""

    def __init__(self) -> None:
        super().__init__()
        self.tickets: dict[str, Ticket] = {}


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the workers say with a step; vLLM adds up the reports of all ranks."""

    reads: list[ReadReport] = field(default_factory=list)
    quarantined: dict[str, int] = field(default_factory=dict)
    """Requests whose read was abandoned while its transfer may still write, and in how many ranks. Such a request is
    reported as failed in the same step: its blocks must not be re-used before as many ranks have released it."""
    released: dict[str, int] = field(default_factory=dict)
    """Requests of ``quarantined`` whose transfers have ended since."""
    failed_sources: set[Source] = field(default_factory=set)
    """Sources from which a read failed or took too long."""
    transport: TransportInfo | None = None
    """Once: what the workers read with. Of several ranks, the one with a warning."""
    bandwidths: dict[Source, float] = field(default_factory=dict)
    """Bytes per second, measured at the first contact with these sources; of several ranks the least."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """The sum of two ranks' reports."""
        assert isinstance(other, WorkerReport)
        transports = sorted(filter(None, (self.transport, other.transport)), key=lambda t: t.warning is None)
        return WorkerReport(
            reads=self.reads + other.reads,
            quarantined=_add(self.quarantined, other.quarantined),
            released=_add(self.released, other.released),
            failed_sources=self.failed_sources | other.failed_sources,
            transport=transports[0] if transports else None,
            bandwidths=self.bandwidths
            | other.bandwidths
            | {
                source: min(self.bandwidths[source], other.bandwidths[source])
                for source in self.bandwidths.keys() & other.bandwidths.keys()
            },
        )


def _add(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    return {key: first.get(key, 0) + second.get(key, 0) for key in first.keys() | second.keys()}
