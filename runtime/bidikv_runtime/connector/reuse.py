"""What one request does about the KV that its sources may hold: ask, choose, read, and then be done. Pure.

All positions are block indices within the request. Sources may be asked before the local prefix is known, and the local
prefix may grow or shrink afterwards (others evict it): every answer is taken relative to the current one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from bidikv_runtime.connector import wire
from bidikv_runtime.connector.choice import Match, Part, choose_parts, is_decided
from bidikv_runtime.connector.lookup_client import Question
from bidikv_runtime.connector.sources import Source

ANSWER_LIFE: Final = 2.0
"""Seconds after which the sources of a request that still waits for blocks are asked again: what they said is likely
stale."""
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
    """Blocks to read: block ``first + part.offset + i`` of the request is ``part.blocks[i]`` of that part's source."""

    first: int
    parts: tuple[Part, ...]

    @property
    def count(self) -> int:
        return sum(len(part.blocks) for part in self.parts)


@dataclass
class Reuse:
    """Times are of ``time.monotonic``."""

    sources: Sequence[Source]
    drop_last: bool = False
    """See ``choose_parts``."""
    phase: Phase = Phase.SETTLED
    lookups: int = 0
    first: int = 0
    """The first block that was asked for."""
    asked: int = 0
    started: float = 0.0
    waited: bool = False
    """Whether the scheduler has waited in place for the answers to these questions."""
    questions: Sequence[Question] = ()
    offer: Match | None = None
    """What the last ``match`` found, the request's block ``offered_from`` first."""
    offered_from: int = 0
    read: Read | None = None
    _answers: Sequence[tuple[Source, wire.Found]] = field(default=(), repr=False)
    _settle_until: float = field(default=float("inf"), repr=False)

    @property
    def may_ask(self) -> bool:
        return self.lookups < LOOKUP_BUDGET

    def start(self, questions: Sequence[Question], first: int, asked: int, now: float) -> None:
        """Questions about ``asked`` blocks from ``first`` on are on their way."""
        self.phase, self.offer, self._answers, self._settle_until = Phase.ASKING, None, (), float("inf")
        self.questions, self.first, self.asked, self.started = questions, first, asked, now
        self.waited = False
        self.lookups += 1

    def settle(self) -> None:
        self.phase, self.questions, self._answers = Phase.SETTLED, (), ()

    def is_outdated(self, local: int, now: float) -> bool:
        """Whether to ask again: the local prefix of ``local`` blocks no longer reaches to where the questions began, or
        what was found was asked for long ago."""
        if self.phase not in (Phase.ASKING, Phase.MATCHED):
            return False
        old = self.phase is Phase.MATCHED and self.may_ask and now - self.started > ANSWER_LIFE
        return local < self.first or old

    def decide(self, own_engine: str, local: int, settle_wait: float, now: float) -> str | None:
        """Settle on the answers so far; the result for the metrics, or None while waiting may still help.

        Args:
            own_engine: engine id of this engine, which never reads from itself.
            local: blocks of the local prefix.
            settle_wait: how long slower sources may still add to what was found.
            now: the time.
        """
        replies = [(question.source, question.reply) for question in self.questions]
        answers = [
            (source, reply)
            for source, reply in replies
            if isinstance(reply, wire.Found) and reply.peer.engine_id != own_engine
        ]
        start = max(0, local - self.first)
        match = choose_parts(answers, start, self.asked, self.drop_last)
        if match is not None and self._settle_until == float("inf"):
            self._settle_until = now + settle_wait
        complete = start + (0 if match is None else match.count) + self.drop_last >= self.asked
        if not is_decided(self.questions, complete, match is not None, self._settle_until, now):
            return None
        self._answers, self.questions = answers, ()
        self.phase = Phase.SETTLED if match is None else Phase.MATCHED
        if match is not None:
            return "hit"
        if any(isinstance(reply, wire.Found) for _, reply in replies):
            return "miss"
        return "refused" if any(reply is not None for _, reply in replies) else "silent"

    def peek(self) -> int:
        """Blocks from the request's first on that are here or at one of the sources that have answered. Not exact; any
        thread may call it."""
        replies = [question.reply for question in self.questions]
        runs = [reply.runs[0] for reply in replies if isinstance(reply, wire.Found) and reply.runs]
        return self.first + max((run.end for run in runs if run.first == 0), default=0)

    def match(self, local: int, last: int) -> int:
        """Blocks that the answers add to a local prefix of ``local`` blocks, none of them from ``last`` on."""
        if self.phase is not Phase.MATCHED or local < self.first:
            return 0
        self.offer = choose_parts(self._answers, local - self.first, last - self.first, self.drop_last)
        self.offered_from = local
        return 0 if self.offer is None else self.offer.count

    def begin_read(self, count: int) -> Read:
        """Read the first ``count`` blocks of those that the last ``match`` offered."""
        assert self.phase is Phase.MATCHED
        assert self.offer is not None
        read = Read(self.offered_from, self.offer.trim(count).parts)
        assert read.count == count, (self, count)
        self.phase, self.read, self.offer, self._answers = Phase.LOADING, read, None, ()
        return read
