"""Which prefill engine computes a turn's prompt; pure.

Where computing would begin first; among about equals in the zone of decode, then by the session's ranking, so that an
idle fleet also reuses prefill's own prefix cache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from bidikv_runtime.router.choice.engine import Engine
from bidikv_runtime.router.choice.ring import compute_weight

_WAIT_STEP: Final = 0.02
"""Seconds: waits within one step are equal."""
_ASSUMED_SPEED: Final = 10_000.0
"""Prompt tokens per second of an engine of which no speed is known; only to compare waits."""


def compute_wait(engine: Engine, typical_speed: float) -> float:
    """Seconds until a prefill engine begins a new prompt."""
    queued = engine.queued_tokens
    return queued / (engine.speed or typical_speed or _ASSUMED_SPEED) if queued else 0.0


def choose_prefill(
    session: bytes,
    ready: Sequence[Engine],
    decode: Engine,
    exclude: Collection[str],
    *,
    typical_speed: float,
    zone_margin_seconds: float,
) -> Engine | None:
    """The prefill engine for the turn, or None when there is no other.

    Args:
        session: breaks ties.
        ready: engines that may be chosen.
        decode: the engine that will read what is computed.
        exclude: addresses that failed this very turn.
        typical_speed: prompt tokens per second of an engine that has not reported its own; 0 when unknown.
        zone_margin_seconds: added to the wait in another zone.
    """
    best: list[Engine] = []
    least: tuple[bool, int] = (True, 1 << 62)
    zone = decode.endpoint.zone
    for engine in ready:
        if engine.endpoint.address in exclude or not engine.fits(decode):
            continue
        wait = compute_wait(engine, typical_speed)
        if zone and engine.endpoint.zone != zone:
            wait += zone_margin_seconds
        key = (engine.breaker.state != "closed", int(wait / _WAIT_STEP))
        if key < least:
            least, best = key, [engine]
        elif key == least:
            best.append(engine)
    if len(best) < 2:
        return best[0] if best else None
    return max(best, key=lambda e: (compute_weight(session, e.endpoint.address), e.endpoint.address))
