"""Which prefill engine computes a turn's prompt; pure.

Where computing would begin first; among about equals in the zone of decode, then by the session's ranking, so that an
idle fleet also reuses prefill's own prefix cache. Engines whose breaker is not closed come last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from bidikv_runtime.router.choice.engine import Engine
from bidikv_runtime.router.choice.ranking import Ranked

_STEP_SECONDS: Final = 0.02
"""Waits within one step are equal."""
_ASSUMED_SPEED: Final = 10_000.0
"""Prompt tokens per second of an engine of which no speed is known; only to compare waits."""


def compute_wait(engine: Engine, typical_speed: float) -> float:
    """Seconds until a prefill engine begins a new prompt."""
    queued = engine.queued_tokens
    return queued / (engine.speed or typical_speed or _ASSUMED_SPEED) if queued else 0.0


def choose_prefill(
    ranking: Sequence[Ranked],
    zone: str,
    exclude: Collection[str],
    *,
    typical_speed: float,
    zone_margin_seconds: float,
) -> Engine | None:
    """The prefill engine for the turn, or None when there is no other.

    Args:
        ranking: of the session, over engines that fit its decode engine.
        zone: of the decode engine; empty when unknown.
        exclude: addresses that failed this very turn.
        typical_speed: prompt tokens per second of an engine that has not reported its own; 0 when unknown.
        zone_margin_seconds: added to the wait in another zone.
    """
    best: Engine | None = None
    least = 0
    unwell: Engine | None = None
    for _, address, engine in ranking:
        if address in exclude:
            continue
        if engine.breaker.state != "closed":
            unwell = unwell or engine
            continue
        wait = compute_wait(engine, typical_speed)
        if zone and engine.endpoint.zone != zone:
            wait += zone_margin_seconds
        steps = int(wait / _STEP_SECONDS)
        if best is None or steps < least:
            best, least = engine, steps
            if not steps:
                break
    return best or unwell
