"""What one request does about the KV that its sources may hold: ask, choose, read, and then be done. Pure.

All positions are block indices within the request. The scheduler may ask several times before it can place a request,
and the local prefix may grow or shrink in between (others evict it): every answer is taken relative to the current one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from bidikv_runtime.connector import wire
from bidikv_runtime.connector.choice import Answer, choose_answer, is_decided
from bidikv_runtime.connector.lookup_client import Question
from bidikv_runtime.connector.sources import Source

ANSWER_LIFE: Final = 2.0
"""Seconds after which the answer for a request that still waits for blocks is asked for again: it is likely stale."""
LOOKUP_BUDGET: Final = 3
"""Lookups per request: one that keeps waiting reads by an old answer, which validation covers."""


class Phase(enum.Enum):
    ASKING = enum.auto()
    MATCHED = enum.auto()
    LOADING = enum.auto()
    SETTLED = enum.auto()
    """Nothing more to read for this request: it computes what is left."""


@dataclass(frozen=True)
class Read:
    """Blocks to read: ``blocks[i]`` of the source goes to the request's block ``first + i``."""

    first: int
    answer: Answer
    blocks: tuple[int, ...]
    publications: tuple[int, ...]


@dataclass
class Reuse:
    """Times are of ``time.monotonic``."""

    sources: Sequence[Source]
    phase: Phase = Phase.SETTLED
    lookups: int = 0
    first: int = 0
    """The first block that was asked for."""
    asked: int = 0
    started: float = 0.0
    questions: Sequence[Question] = ()
    answer: Answer | None = None
    read: Read | None = None
    _settle_until: float = field(default=float("inf"), repr=False)
    _local: int = field(default=0, repr=False)
    """The local prefix of the last match."""

    @property
    def may_ask(self) -> bool:
        return self.lookups < LOOKUP_BUDGET

    def start(self, questions: Sequence[Question], first: int, asked: int, now: float) -> None:
        """Questions about ``asked`` blocks from ``first`` on are on their way."""
        self.phase, self.answer, self._settle_until = Phase.ASKING, None, float("inf")
        self.questions, self.first, self.asked, self.started = questions, first, asked, now
        self.lookups += 1

    def settle(self) -> None:
        self.phase, self.questions = Phase.SETTLED, ()

    def is_outdated(self, local: int, now: float) -> bool:
        """Whether to ask again: the local prefix of ``local`` blocks no longer reaches to where the questions began, or
        the answer is old."""
        if self.phase not in (Phase.ASKING, Phase.MATCHED):
            return False
        old = self.phase is Phase.MATCHED and self.may_ask and now - self.started > ANSWER_LIFE
        return local < self.first or old

    def decide(self, own_engine: str, settle_wait: float, now: float) -> str | None:
        """Choose among the answers so far; the result for the metrics, or None while waiting may still help."""
        answer = choose_answer(self.questions, own_engine)
        if answer is not None and self._settle_until == float("inf"):
            self._settle_until = now + settle_wait
        if not is_decided(self.questions, answer, self.asked, self._settle_until, now):
            return None
        replies = [question.reply for question in self.questions]
        self.answer, self.questions = answer, ()
        self.phase = Phase.SETTLED if answer is None else Phase.MATCHED
        if answer is not None:
            return "hit"
        if any(isinstance(reply, wire.Found) for reply in replies):
            return "miss"
        return "silent" if not any(replies) else "refused"

    def match(self, local: int, last: int) -> int:
        """Blocks that the answer adds to a local prefix of ``local`` blocks, none of them from ``last`` on."""
        if self.phase is not Phase.MATCHED or self.answer is None or local < self.first:
            return 0
        self._local = local
        return max(0, min(self.first + len(self.answer.blocks), last) - local)

    def begin_read(self, count: int) -> Read:
        """Read ``count`` blocks of those that the last ``match`` offered."""
        assert self.phase is Phase.MATCHED
        assert self.answer is not None
        offset = self._local - self.first
        part = slice(offset, offset + count)
        read = Read(self._local, self.answer, tuple(self.answer.blocks[part]), tuple(self.answer.publications[part]))
        assert len(read.blocks) == count, (self, count)
        self.phase, self.read = Phase.LOADING, read
        return read
