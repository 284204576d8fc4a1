"""A session's ranking of engines, and which of them hold its KV; pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from bidikv_runtime.router.choice.engine import Engine
from bidikv_runtime.router.choice.path import LastTurn
from bidikv_runtime.router.choice.ring import compute_weight

FRACTIONS: Final = 0x10000


@dataclass(frozen=True, slots=True)
class Ranked:
    """An engine in a session's ranking."""

    engine: Engine
    fraction: int
    """0 to 65535, from the low bits of the weight, so independent of the rank: a joining engine takes the session when
    its share exceeds it."""


@dataclass(frozen=True, slots=True)
class Holder:
    """An engine that holds a session's KV."""

    engine: Engine
    last: LastTurn


def rank_engines(session: bytes, engines: Iterable[Engine]) -> list[Ranked]:
    """``engines`` by their weight for ``session``, highest first."""
    weighed = [(compute_weight(session, e.endpoint.address), e.endpoint.address, e) for e in engines]
    weighed.sort(reverse=True, key=lambda entry: entry[:2])
    return [Ranked(engine, weight % FRACTIONS) for weight, _, engine in weighed]
