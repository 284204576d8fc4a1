"""Which decode engines are offered to prefill as sources of a session's KV; pure.

Those that hold it by their reports, most of it first, then the head of the session's ranking, terminating ones
included: after a scale-up the new winner has no history yet, but the former one is next in the ranking.
"""

from __future__ import annotations

from collections.abc import Sequence

from bidikv_runtime.router.choice.engine import Engine
from bidikv_runtime.router.choice.ranking import Holder, Ranked


def order_sources(ranking: Sequence[Ranked], holders: Sequence[Holder], decode: Engine, count: int) -> list[Engine]:
    """Decode engines that most likely hold the session's KV, in a form that ``decode`` can use, at most ``count``."""
    chosen: list[Engine] = []
    if len(holders) > 1:
        holders = sorted(holders, key=lambda holder: -holder.last.held_tokens)
    for engine in (*[holder.engine for holder in holders], *[ranked.engine for ranked in ranking]):
        if len(chosen) >= count:
            break
        if engine.breaker.state == "closed" and engine.fits(decode) and engine not in chosen:
            chosen.append(engine)
    return chosen
