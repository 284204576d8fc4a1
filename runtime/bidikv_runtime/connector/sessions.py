"""The sessions whose last turn ended on this engine, and how much of each is still cached: what routers steer by.

Why here: an engine outlives any router and knows what it holds, so routers that ask keep no state of their own.

Held tokens are looked up when somebody asks, in the publication index. Of a sequence only some block hashes are kept,
its *marks*, close together at its end (vLLM evicts a sequence from its end) and ever wider apart before it.

Invariants:

- Held tokens count up to the last mark before the first one that is missing. Of a sequence that was evicted from its
  end they are never too many, and the blocks that they leave out are at most an eighth too many.
- At most ``limit`` sessions, each with about ``SPREAD * (2 + ln(blocks / SPREAD))`` hashes: 71 for 8,192 blocks.
- The threads of the scheduler and of the lookup port only append to ``_events``, in the order in which things happened;
  all else belongs to whoever calls ``collect``, one at a time. So none waits for another.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from bidikv_runtime.connector.index import PublicationIndex
from bidikv_runtime.connector.unread import LEAST_TOKENS, UnreadSessions
from bidikv_runtime.contract import MAXIMUM_REPORTED_SESSIONS, SessionReport

SPREAD: Final = 8
"""From one mark to the one before it is an eighth of its distance to the end."""

SLICE: Final = 64
"""Sessions looked at in one go: no other thread of the interpreter runs meanwhile (0.5 to 15 us for each)."""
PAUSE_SECONDS: Final = 1e-4
"""Between two slices. With 0 the interpreter's lock is given up and taken again before another thread wakes up."""


@lru_cache(maxsize=512)
def choose_marks(blocks: int) -> tuple[int, ...]:
    """Numbers of the blocks to remember of a sequence of so many full blocks, ascending, the last one among them."""
    marks = []
    block = blocks - 1
    while block >= 0:
        marks.append(block)
        block -= max(1, (blocks - 1 - block) // SPREAD)
    return tuple(reversed(marks))


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """A turn that has ended."""

    session: str
    prompt_tokens: int
    total_tokens: int
    body_bytes: int
    blocks: int
    """Full blocks of all its tokens."""
    marks: tuple[bytes, ...]
    """Hashes of the blocks of ``choose_marks``."""
    ended_at: float = 0.0
    is_last: bool = False
    """No further turn of the session is expected."""


def build_turn(
    session: str,
    prompt_tokens: int,
    total_tokens: int,
    body_bytes: int,
    hashes: Sequence[bytes],
    ended_at: float = 0.0,
    is_last: bool = False,
) -> SessionTurn:
    """A turn whose full blocks are published under ``hashes``, as far as they are."""
    marks = tuple(bytes(hashes[block]) for block in choose_marks(len(hashes)))
    return SessionTurn(session, prompt_tokens, total_tokens, body_bytes, len(hashes), marks, ended_at, is_last)


@dataclass(frozen=True, slots=True)
class _Interest:
    """Another engine asks for a session's KV, or has read it."""

    session: str
    at: float
    has_read: bool


@dataclass(slots=True)
class _Record:
    turn: SessionTurn
    kept: int
    """Leading marks that were published when it was looked at last."""
    changed: int
    """``sequence`` of the first collection that had it like this."""
    report: SessionReport


class Sessions:
    """The table."""

    def __init__(self, index: PublicationIndex, block_size: int, limit: int = MAXIMUM_REPORTED_SESSIONS) -> None:
        self.sequence = 0
        """Goes up with every collection that finds something changed."""
        self.unread = UnreadSessions()
        """As of the last collection."""
        self._index, self._block_size, self._limit = index, block_size, limit
        self._events: deque[SessionTurn | _Interest] = deque(maxlen=2 * limit)
        self._records: OrderedDict[str, _Record] = OrderedDict()
        """The session whose turn ended last comes last."""
        self._looked: int | None = None
        """``index.changes`` when the records were looked at."""

    def end_turn(self, turn: SessionTurn) -> None:
        """A turn has ended and is published. For the scheduler's thread; the turns of sessions that nobody asks about
        push each other out."""
        self._events.append(turn)

    def note_interest(self, session: str, now: float, *, has_read: bool) -> None:
        """Another engine asks for a session's KV, or has read valid KV of it. For the lookup port's thread."""
        self._events.append(_Interest(session, now, has_read))

    def collect(self, since: int) -> list[SessionReport]:
        """The sessions that have changed after the collection that ended with ``sequence`` at ``since``."""
        following = self.sequence + 1
        changes = self._index.changes
        if changes != self._looked:
            self._looked = changes
            for number, record in enumerate(self._records.values()):
                if number % SLICE == 0:
                    time.sleep(PAUSE_SECONDS)
                kept = self._index.count_leading(record.turn.marks)
                if kept != record.kept:
                    self._set(record, kept, following)
        while self._events:
            event = self._events.popleft()
            if isinstance(event, _Interest):
                self._take_interest(event)
            else:
                self._take_turn(event, following)
        while len(self._records) > self._limit:
            name, _ = self._records.popitem(last=False)
            self.unread.forget(name)
        if since == self.sequence:
            return []
        return [record.report for record in self._records.values() if record.changed > since]

    def count_held(self) -> int:
        """Sessions of which anything was cached at the last collection."""
        return sum(record.kept > 0 for record in self._records.values())

    def _take_turn(self, turn: SessionTurn, sequence: int) -> None:
        kept = self._index.count_leading(turn.marks)
        report = self._build_report(turn, kept)
        self._records[turn.session] = _Record(turn, kept, sequence, report)
        self._records.move_to_end(turn.session)
        self.sequence = sequence
        if turn.is_last or report.held_tokens < LEAST_TOKENS:
            self.unread.forget(turn.session)
        else:
            self.unread.end_turn(turn.session, turn.ended_at)

    def _take_interest(self, interest: _Interest) -> None:
        if interest.has_read:
            self.unread.forget(interest.session)
        else:
            self.unread.note_question(interest.session, interest.at)

    def _set(self, record: _Record, kept: int, sequence: int) -> None:
        record.kept, record.changed = kept, sequence
        record.report = self._build_report(record.turn, kept)
        if record.report.held_tokens < LEAST_TOKENS:
            self.unread.forget(record.turn.session)
        self.sequence = sequence

    def _build_report(self, turn: SessionTurn, kept: int) -> SessionReport:
        held = choose_marks(turn.blocks)[kept - 1] + 1 if kept else 0
        return SessionReport(
            turn.session, turn.prompt_tokens, turn.total_tokens, held * self._block_size, turn.body_bytes
        )
