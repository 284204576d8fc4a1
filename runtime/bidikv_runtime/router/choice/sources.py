"""Which decode engines are offered to prefill as sources of a session's KV; pure.

Those that hold it by their reports, most of it first, then the head of the session's ranking, terminating ones
included: after a scale-up the new winner has no history yet, but the former one is next in the ranking.
"""

from __future__ import annotations

from collections.abc import Sequence

from bidikv_runtime.router.choice.engine import Engine
from bidikv_runtime.router.choice.holdings import Holding
from bidikv_runtime.router.choice.ranking import Ranked


def order_sources(ranking: Sequence[Ranked], holdings: Sequence[Holding], decode: Engine, count: int) -> list[Engine]:
    """At most ``count`` engines whose KV ``decode`` can use; none whose breaker is open."""
    chosen: list[Engine] = []
    if len(holdings) > 1:
        holdings = sorted(holdings, key=lambda holding: -holding.held_tokens)
    for holding in holdings:
        if len(chosen) < count and _is_usable(holding.engine, decode):
            chosen.append(holding.engine)
    for _, _, engine in ranking:
        if len(chosen) >= count:
            break
        if engine not in chosen and _is_usable(engine, decode):
            chosen.append(engine)
    return chosen


def _is_usable(engine: Engine, decode: Engine) -> bool:
    return engine.breaker.state == "closed" and engine.fits(decode)
