"""The turns that this replica served just now, until the engines' reports tell of them; pure.

Why: reports come once a second, agents' next turns sooner. Invariant: bounded, and only ever a hint: it dies with the
process and no other replica knows it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

_MOST_SKIPPED: Final = 64


@dataclass(slots=True)
class Noted:
    """A session."""

    decode: str = ""
    """Address of the engine that answered its last turn."""
    ended_at: float = float("-inf")
    body_bytes: int = 0
    prompt_tokens: int = 0
    refusals: int = 0
    """Of decode alone, in a row."""
    skip: int = 0
    """Turns that shall not try decode alone."""


class Memory:
    """Sessions, the least recently used ones forgotten first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sessions: OrderedDict[bytes, Noted] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session: bytes) -> Noted | None:
        """What is known of ``session``."""
        return self._sessions.get(session)

    def note_turn(self, session: bytes, decode: str, body_bytes: int, prompt_tokens: int, now: float) -> None:
        """A turn was answered; ``prompt_tokens`` may be an estimate."""
        noted = self._touch(session)
        noted.decode, noted.ended_at = decode, now
        noted.body_bytes, noted.prompt_tokens = body_bytes, prompt_tokens
        noted.skip = max(0, noted.skip - 1)

    def note_local(self, session: bytes, *, refused: bool) -> None:
        """Decode alone answered, or refused: then it is not tried for a while, twice as long each time."""
        if refused:
            noted = self._touch(session)
            noted.refusals += 1
            noted.skip = min(2**noted.refusals, _MOST_SKIPPED)
        elif (known := self._sessions.get(session)) is not None:
            known.refusals = 0

    def _touch(self, session: bytes) -> Noted:
        noted = self._sessions.get(session)
        if noted is None:
            noted = self._sessions[session] = Noted()
            if len(self._sessions) > self._most:
                self._sessions.popitem(last=False)
        else:
            self._sessions.move_to_end(session)
        return noted
