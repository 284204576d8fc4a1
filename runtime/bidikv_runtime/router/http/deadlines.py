"""Coarse deadlines for connections.

Why: a timer per chunk of a stream would cost more than relaying the chunk. An owner only assigns its ``deadline``
attribute (one store); a single periodic sweep looks for those that passed. Precision is one sweep, which suits limits
of seconds and more.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import Final, Protocol

logger = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 0.25


class HasDeadline(Protocol):
    """Something that must make progress."""

    deadline: float
    """Time of :meth:`Deadlines.now`; ``inf`` when nothing is awaited."""

    def on_deadline(self) -> None:
        """Called once or more after the deadline passed; must move the deadline or leave."""


class Deadlines:
    """The set of watched owners and their sweep."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._watched: set[HasDeadline] = set()
        self._timer: asyncio.TimerHandle | None = None

    now = staticmethod(monotonic)
    """The clock of deadlines: the event loop's, with full resolution (uvloop's own has 1 ms)."""

    def watch(self, owner: HasDeadline) -> None:
        """Start to watch ``owner``; the sweep runs only while something is watched."""
        self._watched.add(owner)
        if self._timer is None:
            self._timer = self._loop.call_later(SWEEP_SECONDS, self._sweep)

    def forget(self, owner: HasDeadline) -> None:
        """Stop to watch ``owner``."""
        self._watched.discard(owner)

    def close(self) -> None:
        """Forget everybody and stop the sweep."""
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        now = monotonic()
        for owner in [owner for owner in self._watched if owner.deadline <= now]:
            try:
                owner.on_deadline()
            except Exception:  # must not end the sweep, and with it the limits of everybody else
                logger.exception("A deadline could not be enforced")
        self._timer = self._loop.call_later(SWEEP_SECONDS, self._sweep) if self._watched else None
