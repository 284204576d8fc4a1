"""What the scheduler hands to the workers in a step: upstream's reads, and a ticket to validate each."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from bidikv_runtime.connector.sources import Source


@dataclass(frozen=True)
class Ticket:
    """All that the question VALIDATE needs; pickled to every worker."""

    source: Source
    epoch: int
    blocks: tuple[int, ...]
    publications: tuple[int, ...]


class VerifiedReadMetadata(NixlConnectorMetadata):  # type: ignore[misc]
    """Upstream's metadata plus ``tickets`` by request id, one for each of ``reqs_to_recv``."""

    def __init__(self) -> None:
        super().__init__()
        self.tickets: dict[str, Ticket] = {}
