"""Leaves an engine alone that fails, and lets a health check, never a client's request, find out when it is back; pure.

``closed`` engines are used. After a refused connection, or several failures in a row, an engine is ``open``: it is not
chosen while any other can be. When its time is over it is ``half_open``: still not chosen, but due for ``GET /health``.
A healthy answer closes the breaker, anything else opens it again for twice as long, up to a bound, with jitter so that
replicas do not ask at the same moment.

Invariant: nothing can get stuck. A probe that never reports its result is due again after its own time-out, and any
success closes the breaker, since with all engines open clients' requests are tried; but not the late answer to what was
asked before it opened.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final, Literal

State = Literal["closed", "half_open", "open"]
Failure = Literal["connect", "timeout", "status", "broken", "probe"]
"""connect: no connection. timeout: no answer in time. status: a 5xx by the engine's own fault. broken: the connection
ended before the whole answer. probe: the health check failed."""
_AT_ONCE: Final = ("connect", "probe")
_JITTER: Final = 0.25
"""A pause lasts up to this share longer."""


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When a breaker opens, and for how long in seconds."""

    failures: int
    seconds: float
    max_seconds: float
    probe_seconds: float


class Breaker:
    """Of one engine."""

    __slots__ = ("_closed_at", "_failures", "_limits", "_opened_at", "_random", "_trips", "_until", "state")

    def __init__(self, limits: BreakerLimits, random_source: random.Random) -> None:
        self._limits, self._random = limits, random_source
        self.state: State = "closed"
        self._failures = 0
        """In a row, while closed."""
        self._trips = 0
        """Pauses without a calm time in between; the next one is ``seconds * 2 ** trips`` long."""
        self._until = 0.0
        """Open: end of the pause. Half open: when the probe is given up."""
        self._opened_at = self._closed_at = float("-inf")

    def note_failure(self, kind: Failure, now: float) -> bool:
        """Count a failure; whether the state changed."""
        if self.state == "closed":
            self._failures += 1
            if kind not in _AT_ONCE and self._failures < self._limits.failures:
                return False
            # An engine that fails again right after it came back goes on where it was.
            if now - self._closed_at > self._limits.max_seconds:
                self._trips = 0
        elif kind != "probe":
            return False  # a request that was under way, or tried because all are open: tells nothing new
        changed = self.state != "open"
        if self.state == "closed":
            self._opened_at = now
        self.state, self._failures = "open", 0
        pause = min(self._limits.seconds * 2**self._trips, self._limits.max_seconds)
        self._trips = min(self._trips + 1, 32)
        self._until = now + pause * self._random.uniform(1.0, 1.0 + _JITTER)
        return changed

    def note_success(self, now: float, began: float) -> bool:
        """The engine answered what it was asked at ``began``; whether the state changed."""
        if self.state == "closed":
            self._failures = 0
            return False
        if began < self._opened_at:
            return False
        self.state, self._closed_at = "closed", now
        return True

    def take_probe(self, now: float) -> bool:
        """Whether a probe is to be sent now; counts as sent."""
        if self.state == "closed" or now < self._until:
            return False
        self.state, self._until = "half_open", now + self._limits.probe_seconds * 2
        return True
