"""Which decode engine answers a turn: one that holds the session's KV, else bounded-load rendezvous hashing; pure.

The first engine of the session's ranking whose load is below the capacity takes the turn (Mirrokni, Thorup and
Zadimoghaddam, *Consistent Hashing with Bounded Loads*, SODA 2018). An engine that reports to hold the session's KV
comes first as long as it is below the capacity, too: a scale-up moves no running session, and one that was relieved
elsewhere stays there. All replicas see the same reports, so they agree up to the reports' age.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final

from bidikv_runtime.router.choice.engine import Engine, Tier
from bidikv_runtime.router.choice.ranking import FRACTIONS, Holder, Ranked

LOAD_BOUND: Final = 1.25
"""Most load of a decode engine over the mean."""
TRIES: Final = 3
"""Decode engines that one turn may try."""


def compute_capacity(load: int, engines: int, floor: int) -> int:
    """How many unfinished requests one of ``engines`` may have when one is added to ``load``; ``floor`` at least."""
    return max(floor, math.ceil(LOAD_BOUND * (load + 1) / engines)) if engines else floor


def compute_tier(engine: Engine, ready_prefill: Sequence[Engine]) -> Tier:
    """How well prefill can serve a ready decode engine."""
    tier: Tier = 2
    for prefill in ready_prefill:
        if engine.fits(prefill):
            if prefill.endpoint.zone == engine.endpoint.zone:
                return 0
            tier = 1
    return tier


def order_decode(
    ranking: Sequence[Ranked],
    holders: Sequence[Holder],
    capacity: int,
    share_of: Collection[Engine] | None = None,
    *,
    now: float = 0.0,
    warm_seconds: float = 0.0,
) -> list[Engine]:
    """Candidates in the order to try, at most ``TRIES``.

    Args:
        ranking: of the session, over decode engines.
        holders: of the session.
        capacity: load that none but the last choices may exceed.
        share_of: engines that joined lately; None or empty when there are none.
        now: for these.
        warm_seconds: until they have their full share.
    """
    chosen: list[Engine] = []
    if holders:
        much = max(holder.last.held_tokens for holder in holders) / 2
        good = [h for h in holders if h.engine.candidate and h.engine.load < capacity and h.last.held_tokens >= much]
        if len(good) > 1:
            positions = {id(ranked.engine): position for position, ranked in enumerate(ranking)}
            good.sort(key=lambda h: (-h.last.held_tokens, positions.get(id(h.engine), 0)))
        chosen.extend(holder.engine for holder in good[:TRIES])
    late: list[Engine] = []
    tiers: list[list[Engine]] = [[], [], []]
    for ranked in ranking:
        engine = ranked.engine
        if not engine.candidate or engine in chosen:
            continue
        if engine.load >= capacity or (share_of and engine in share_of and not _takes(ranked, now, warm_seconds)):
            late.append(engine)
            continue
        tiers[engine.tier].append(engine)
        if engine.tier == 0 and len(chosen) + len(tiers[0]) >= TRIES:
            break
    for group in (*tiers, late):
        chosen.extend(group[: TRIES - len(chosen)])
    return chosen


def _takes(ranked: Ranked, now: float, warm_seconds: float) -> bool:
    """Whether an engine that joined lately is one for this session yet."""
    joined = ranked.engine.warm_from
    return joined is None or ranked.fraction < (now - joined) / warm_seconds * FRACTIONS
