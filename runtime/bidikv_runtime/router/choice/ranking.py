"""Sessions' rankings of engines, kept while the engines stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bidikv_runtime.router.choice.engine import Engine
from bidikv_runtime.router.choice.ring import compute_weights

Ranked = tuple[bytes, str, Engine]
"""An engine in a session's ranking: its weight, its address, itself."""

_MOST_KEPT: Final = 131_072
"""Engines in all rankings kept, each about 120 bytes: 4096 rankings of 32 engines."""


class Rankings:
    """Of one set of engines."""

    __slots__ = ("_addresses", "_kept", "_most", "_names", "engines")

    def __init__(self, engines: Sequence[Engine] = ()) -> None:
        self.engines = tuple(engines)
        self._addresses = [engine.endpoint.address for engine in engines]
        self._names = [address.encode() for address in self._addresses]
        self._kept: dict[bytes, list[Ranked]] = {}
        self._most = _MOST_KEPT // max(len(self.engines), 32)

    def get(self, session: bytes) -> list[Ranked]:
        """The engines by their weight for ``session``, highest first."""
        ranking = self._kept.get(session)
        if ranking is None:
            weights = compute_weights(session, self._names)
            # Addresses differ, so that no comparison gets to the engines.
            ranking = sorted(zip(weights, self._addresses, self.engines, strict=True), reverse=True)
            if len(self._kept) >= self._most:
                del self._kept[next(iter(self._kept))]
            self._kept[session] = ranking
        return ranking
