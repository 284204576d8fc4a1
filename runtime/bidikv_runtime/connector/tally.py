"""What has moved this engine's KV since its start, added up for the report (``contract.TransportReport``).

The scheduler's thread writes, any thread reads. Bounded: peers beyond ``MAXIMUM_PEERS`` push out the ones that were
read from longest ago.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from bidikv_runtime.connector.transport import TransportInfo
from bidikv_runtime.contract import TransportReport

MAXIMUM_PEERS: Final = 256
RECENT_SECONDS: Final = 600.0
"""A peer's bandwidth counts while reads from it are at most so much older than the newest read from any peer. So one
that is gone is forgotten, and an idle engine keeps what it knows."""


@dataclass
class _Measured:
    rate: float
    used: float


class TransportTally:
    def __init__(self) -> None:
        self.info: TransportInfo | None = None
        """What the workers read with, as they told; of several ranks the one with a warning."""
        self._read_bytes = 0
        self._failed_reads = 0
        self._measured: dict[Hashable, _Measured] = {}

    def note_read(self, source: Hashable, size: int, now: float) -> None:
        """A rank has read so many bytes. ``now`` is of ``time.monotonic``."""
        self._read_bytes += size
        if (measured := self._measured.pop(source, None)) is not None:
            measured.used = now
            self._measured[source] = measured

    def note_failure(self) -> None:
        """A read has failed or was given up."""
        self._failed_reads += 1

    def note_bandwidth(self, source: Hashable, rate: float, now: float) -> None:
        """Bytes a second that were measured at the first contact with a source."""
        self._measured.pop(source, None)
        while len(self._measured) >= MAXIMUM_PEERS:
            del self._measured[next(iter(self._measured))]
        self._measured[source] = _Measured(rate, now)

    def list_bandwidths(self) -> dict[str, float]:
        """Bytes a second by source, of all that are remembered."""
        return {str(source): measured.rate for source, measured in list(self._measured.items())}

    def build(self) -> TransportReport | None:
        """None before the workers have told what they read with."""
        info = self.info
        if info is None:
            return None
        measured = list(self._measured.values())
        newest = max((one.used for one in measured), default=0.0)
        return TransportReport(
            backend=info.backend,
            provider=info.provider,
            warning=info.warning or "",
            read_bytes=self._read_bytes,
            failed_reads=self._failed_reads,
            bandwidth=min((one.rate for one in measured if newest - one.used <= RECENT_SECONDS), default=0.0),
        )
