"""Which decode engine answers a turn: one that holds the session's KV, else bounded-load rendezvous hashing; pure.

The first engine of the session's ranking whose load is below the capacity takes the turn (Mirrokni, Thorup and
Zadimoghaddam, *Consistent Hashing with Bounded Loads*, SODA 2018). An engine that reports to hold the session's KV
comes first as long as it is below the capacity, too: a scale-up moves no running session, and one that was relieved
elsewhere stays there. Where it cannot take the turn (it leaves, it is full), engines that can read its KV come first.
All replicas see the same reports, so they agree up to the reports' age.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from bidikv_runtime.router.choice.endpoints import is_ready
from bidikv_runtime.router.choice.engine import Engine, Tier
from bidikv_runtime.router.choice.holdings import Holding
from bidikv_runtime.router.choice.ranking import Ranked

LOAD_BOUND: Final = 1.25
"""Most load of a decode engine over the mean."""
TRIES: Final = 3
"""Decode engines that one turn may try."""
_FRACTIONS: Final = 0x10000


def compute_capacity(load: int, engines: float, floor: int) -> int:
    """How many unfinished requests one of ``engines`` may have when one is added to ``load``; ``floor`` at least.

    An engine that joined lately is a part of one: with all of it, the others would be over the bound at once, and their
    sessions would leave their KV behind.
    """
    return max(floor, math.ceil(LOAD_BOUND * (load + 1) / max(engines, 1.0)))


def has_room(engine: Engine, capacity: int) -> bool:
    """Whether an engine may take one more request while another could."""
    return engine.load < capacity and not engine.full


def compute_tier(engine: Engine, ready_prefill: Sequence[Engine]) -> Tier:
    """How well prefill can serve a ready decode engine."""
    tier: Tier = 2
    for prefill in ready_prefill:
        if engine.fits(prefill):
            if prefill.endpoint.zone == engine.endpoint.zone:
                return 0
            tier = 1
    return tier


def choose_candidates(engines: Sequence[Engine]) -> list[Engine]:
    """The best that there are: with prefill before without, well before unwell, staying before leaving."""
    served = [engine for engine in engines if engine.tier <= 1]
    alone = [engine for engine in engines if engine.tier == 2]
    groups = (
        [e for e in served if is_ready(e.endpoint) and e.breaker.state == "closed"],
        [e for e in served if e.breaker.state == "closed"],
        [e for e in served if is_ready(e.endpoint)],
        served,
        [e for e in alone if is_ready(e.endpoint) and e.breaker.state == "closed"],
        [e for e in alone if is_ready(e.endpoint)],
        alone,
    )
    return next((group for group in groups if group), [])


def order_decode(
    ranking: Sequence[Ranked], holdings: Sequence[Holding], capacity: int, *, now: float, warm_seconds: float
) -> list[Engine]:
    """Candidates in the order to try, at most ``TRIES``.

    Args:
        ranking: of the session, over decode engines.
        holdings: what is held of the session.
        capacity: load that an engine must be below to be chosen while another is.
        now: for engines that joined lately (``Engine.warm_from``).
        warm_seconds: until they get all of the new sessions that they win.
    """
    chosen: list[Engine] = []
    home: Engine | None = None
    if holdings:
        home = max(holdings, key=lambda holding: holding.held_tokens).engine
        much = max(max(holding.held_tokens, holding.prompt_tokens) for holding in holdings) / 2
        good = [
            holding
            for holding in holdings
            if holding.held_tokens >= much and holding.engine.candidate and has_room(holding.engine, capacity)
        ]
        if len(good) > 1:
            positions = {address: position for position, (_, address, _) in enumerate(ranking)}
            good.sort(key=lambda h: (-h.held_tokens, positions.get(h.engine.endpoint.address, 0)))
        chosen = [holding.engine for holding in good[:TRIES]]
    usual: list[Engine] = []
    distant: list[Engine] = []
    warming: list[Engine] = []
    crowded: list[Engine] = []
    strange: list[Engine] = []
    foreign: list[Engine] = []
    first = chosen[0] if chosen else None
    wanted = TRIES - len(chosen)
    for weight, _, engine in ranking:
        if len(usual) >= wanted:
            break
        if not engine.candidate or engine in chosen:
            continue
        if first is not None and not engine.fits(first):
            foreign.append(engine)  # what prefill computes for the first one is of no use to it
        elif not has_room(engine, capacity):
            crowded.append(engine)
        elif engine.warm_from is not None and not _takes(engine, weight, now, warm_seconds):
            warming.append(engine)
        elif home is not None and not engine.fits(home):
            strange.append(engine)
        elif engine.tier == 1:
            distant.append(engine)
        else:
            first = first or engine
            usual.append(engine)
    return (chosen + usual + distant + strange + warming + crowded + foreign)[:TRIES]


def _takes(engine: Engine, weight: bytes, now: float, warm_seconds: float) -> bool:
    """Whether an engine that joined lately is one for this session yet.

    The low bits of the weight say so: equal in every replica, and independent of the session's ranking.
    """
    joined = engine.warm_from
    return joined is None or int.from_bytes(weight[-2:]) < (now - joined) / warm_seconds * _FRACTIONS
