"""Which sessions would be lost with this engine: their last turn ended here, and no other engine has taken them over.

A session is taken over when another engine has read some of its KV and found it valid, or has asked for it and read
nothing within ``ASKED_SECONDS``: it had the KV already, or found it cheaper to compute. Whoever asks names the session
(``wire.Lookup``), so edited histories and prefixes in common with others mislead nobody. A further turn that ends here
makes a session unread again; none is that is over, or whose user has not come back within the idle time.

Pure: times are passed in. Bounded by whoever calls: what is forgotten there is to be forgotten here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

ASKED_SECONDS: Final = 30.0
"""A request may wait in its engine's queue between question and read, and a read may take ten seconds."""
LEAST_TOKENS: Final = 512
"""Sessions of which fewer tokens are held count as read: computing them anew takes less than any wait, and a router
sends a prompt as short as that to its new engine without asking the old one (``RouterConfig.local_limit_tokens``)."""


class UnreadSessions:
    """Their names, and since when."""

    def __init__(self, idle_seconds: float = math.inf) -> None:
        self.idle_seconds = idle_seconds
        """After a turn, for how long the next one is waited for."""
        self._ended: OrderedDict[str, float] = OrderedDict()
        """When the turn ended; the session whose turn ended last comes last."""
        self._asked: OrderedDict[str, float] = OrderedDict()
        """When somebody asked for an unread session first; in that order."""

    def end_turn(self, session: str, now: float) -> None:
        """A turn of the session has ended here, and another one is expected."""
        self._asked.pop(session, None)
        self._ended[session] = now
        self._ended.move_to_end(session)

    def note_question(self, session: str, now: float) -> None:
        """Another engine looks for the session's KV."""
        if session in self._ended:
            self._asked.setdefault(session, now)

    def forget(self, session: str) -> None:
        """Nothing of the session would be lost (any more)."""
        self._ended.pop(session, None)
        self._asked.pop(session, None)

    def count(self, now: float) -> int:
        """How many there are."""
        for times, seconds in ((self._ended, self.idle_seconds), (self._asked, ASKED_SECONDS)):
            while times and next(iter(times.values())) <= now - seconds:
                self.forget(next(iter(times)))
        return len(self._ended)
