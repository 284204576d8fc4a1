"""Which cached blocks to keep beyond vLLM's own order, for whom and how long: the policy behind ``TieredQueue``.

Two reasons to hold blocks, each with a budget of its own:

- ``handover``: a finished prefill waits, for seconds, until the decode engine has read it;
- ``session``: the last request of a session that is likely to come back (policy ``SessionAware`` alone).

A session's hold is worth, per block and second that it occupies,

    rate of return [1/s]  x  seconds to recompute its tokens  /  its blocks

where the rate is a forecast from learnt gaps (``returns.py``) and the seconds come from the cost model: they grow
faster than the context, because attention does, so of two equally likely sessions the longer one is kept. Where budget
or pool are too small, holds of the least worth end first. ``LRU`` is vLLM's order with hand-over holds alone.

Prefixes in common: a block that requests of several sessions (or a fork of one session) have used is held apart, after
all sessions' own blocks, and never counts as over: it ends when none of them has used it for the idle time.

Pure: no clock (times are passed in, monotonic seconds), no I/O. Belongs to the scheduler's thread. Bounded: sessions by
``MAXIMUM_SESSIONS``, holds by the budgets (every one has at least one block).
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from bidikv_runtime import contract
from bidikv_runtime.connector.eviction import Group, Place, TieredQueue
from bidikv_runtime.connector.returns import Forecast, Gaps, Kind, Returns, build_kind
from bidikv_runtime.connector.settings import Settings

SESSION: Final = "session"
HANDOVER: Final = "handover"
HOLD_REASONS: Final = (SESSION, HANDOVER)
HOLD_ENDS: Final = ("used", "expired", "pressure", "budget", "over")

MAXIMUM_SESSIONS: Final = 4096
SWEEP_SECONDS: Final = 1.0
"""How often all holds are checked; hand-overs end up to this much late."""
LEAST_CHANCE: Final = 0.1
"""A session less likely than this to come back within the idle time counts as over."""
CONTINUED_SHARE: Final = 0.5
"""A request that re-uses at least this share of a hold's blocks continues it; one that re-uses fewer is a fork."""
HANDOVER_END: Final = 2
"""Blocks: the reader leaves the last one out when the prompt fills it, for a token is left to compute."""
MAXIMUM_AWAITED: Final = 8
"""Holds per session whose return is awaited: its branches, and what edits have left over."""
SAMPLE: Final = 128
"""Of more holds than this, the least valuable of a random sample is given up instead of the least valuable of all."""


class Hold(Group):
    """The blocks of one finished request, or the prefix that it has in common with others."""

    __slots__ = ("context", "end", "forecast", "kind", "over", "reason", "session", "shared", "since")

    def __init__(self, reason: str, session: str | None, since: float, *, shared: bool = False) -> None:
        super().__init__()
        self.reason = reason
        self.session = session
        self.since = since
        self.shared = shared
        self.context = 0
        """Blocks before the hold's first."""
        self.end: Sequence[int] = ()
        """A hand-over's last blocks: it is over when these are read, not when the beginning is, which others share."""
        self.kind: Kind | None = None
        self.forecast: Forecast | None = None
        self.over = False
        """Nobody will need the blocks once the hold has ended."""


@dataclass
class _Session:
    history: Gaps
    turns: int = 0
    running: int = 0
    arrived: float = 0.0
    changed: float = 0.0
    holds: list[Hold] = field(default_factory=list)
    """Those whose return is awaited, held or not, oldest first."""


def estimate_seconds(context: int, tokens: int) -> float:
    """Relative prefill time when nobody measures it: attention costs as much as all else at 20,000 tokens."""
    return tokens * (1 + (context + tokens / 2) / 20_000)


class Retention:
    """The facade: tell it what happens, it puts blocks into the queue's groups.

    Args:
        queue: of the pool whose blocks are meant.
        settings: policy, budgets and durations.
        block_size: tokens.
        prefill_seconds: time to compute ``tokens`` after ``context`` tokens; any unit, only ratios count.
    """

    def __init__(
        self,
        queue: TieredQueue,
        settings: Settings,
        block_size: int,
        prefill_seconds: Callable[[int, int], float] = estimate_seconds,
    ) -> None:
        total = len(queue.group_of)
        self._queue = queue
        self._settings = settings
        self._block_size = block_size
        self._prefill_seconds = prefill_seconds
        self._aware = settings.retention == "SessionAware"
        self._budgets = {
            SESSION: int(settings.retention_budget * total) if self._aware else 0,
            HANDOVER: int(settings.handover_budget * total) if settings.handover_seconds else 0,
        }
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._holds: dict[str, dict[Hold, None]] = {SESSION: {}, HANDOVER: {}}
        """Live holds by reason, oldest first."""
        self._returns = Returns(settings.retention_idle)
        self._ended: Counter[tuple[str, str]] = Counter()
        self._totals: Counter[tuple[str, str]] = Counter()
        self._next_sweep = 0.0
        self._now = 0.0
        self._random = random.Random(0)
        queue.choose_hold = self._yield_hold

    # --- what happens -------------------------------------------------------------------------------------------------

    def request_arrived(self, session: str | None, now: float) -> None:
        """A request of the session has reached the engine; call once per request."""
        self._now = now
        if session is None or not self._aware:
            return
        record = self._touch(session, now)
        record.arrived = now
        record.running += 1

    def request_finished(
        self, session: str | None, expect: str | None, blocks: Sequence[int], now: float, handover: bool = False
    ) -> None:
        """A request has ended; call before vLLM frees its blocks.

        Args:
            session: its name, if any.
            expect: ``contract.EXPECT_RETURN``, ``contract.EXPECT_OVER`` or None.
            blocks: ids of its full, computed blocks, from the prompt's first on; none after an abort.
            handover: a decode engine is about to read them.
        """
        self._now = now
        record = None
        if self._aware and session is not None:
            record = self._touch(session, now)
            record.turns += 1
            record.running = max(0, record.running - 1)
        if blocks:
            self._place(session, record, expect, blocks, handover)
        if session is not None and record is not None and expect == contract.EXPECT_OVER:
            self._forget(session, record, "over", Place.FIRST)

    def blocks_read(self, blocks: Sequence[int], now: float) -> None:
        """Another engine has validated what it read: a hand-over of which this is the end is done.

        Blocks read by several ranks are reported by the first of them; the others' blocks are by then the most recently
        used ones.
        """
        self._now = now
        groups, read = self._queue.group_of, set(blocks)
        for group in {groups[block] for block in blocks}:
            handed = isinstance(group, Hold) and group.reason == HANDOVER and group.place is Place.HELD
            if handed and not read.isdisjoint(cast(Hold, group).end):
                self._end(cast(Hold, group), "used")

    def expire(self, now: float) -> None:
        """End what has lasted too long; cheap enough for every step."""
        self._now = now
        if now < self._next_sweep:
            return
        self._next_sweep = now + SWEEP_SECONDS
        for hold in list(self._holds[HANDOVER]):
            if now - hold.since < self._settings.handover_seconds:
                break
            self._end(hold, "expired")
        horizon = now - self._settings.retention_idle
        idle = []
        for session, record in self._sessions.items():
            if record.changed > horizon:
                break
            if not record.running:
                idle.append((session, record))
        for session, record in idle:
            self._forget(session, record, "expired", Place.AGED)
        for hold in list(self._holds[SESSION]):
            if not hold.size:
                del self._holds[SESSION][hold]  # its blocks lost their content otherwise
            elif self._is_in_use(hold):
                continue
            elif hold.since <= horizon:
                self._end(hold, "expired", Place.AGED)
            elif hold.forecast is not None and hold.forecast.chance(now - hold.since) < LEAST_CHANCE:
                self._end(hold, "over", Place.AGED)

    def clear(self) -> None:
        """Forget all holds: the cache's content became invalid."""
        self._queue.clear()
        for holds in self._holds.values():
            holds.clear()
        for record in self._sessions.values():
            record.holds.clear()

    # --- what there is ------------------------------------------------------------------------------------------------

    @property
    def held_blocks(self) -> dict[str, int]:
        """Blocks in holds, in use or free, by reason."""
        return {reason: sum(hold.size for hold in list(holds)) for reason, holds in self._holds.items()}

    def count_unread_handovers(self, has_read: Callable[[Sequence[int]], bool], now: float) -> int:
        """Hand-overs that are still to be read. Any thread may call it, also of an engine without steps, in which
        nothing ends.

        Args:
            has_read: whether one of these blocks was read and ``blocks_read`` does not know it yet.
            now: seconds.
        """
        oldest = now - self._settings.handover_seconds
        return sum(hold.since > oldest and not has_read(hold.end) for hold in list(self._holds[HANDOVER]))

    def take_ended(self) -> Counter[tuple[str, str]]:
        """Holds ended since the last call, by reason (``HOLD_REASONS``) and end (``HOLD_ENDS``)."""
        ended, self._ended = self._ended, Counter()
        return ended

    def describe(self) -> dict[str, Any]:
        """For the JSON state; its size does not depend on the number of sessions. Any thread may call it: it iterates
        over copies, which take one step of the interpreter."""
        return {
            "policy": self._settings.retention,
            "sessions": len(self._sessions),
            "holds": {reason: len(holds) for reason, holds in self._holds.items()},
            "held_blocks": self.held_blocks,
            "budget_blocks": dict(self._budgets),
            "ended": {f"{reason}/{ended}": count for (reason, ended), count in sorted(self._totals.items())},
            "returns": self._returns.describe(),
        }

    # --- holds --------------------------------------------------------------------------------------------------------

    def _place(
        self, session: str | None, record: _Session | None, expect: str | None, blocks: Sequence[int], handover: bool
    ) -> None:
        if record is None and not handover:
            self._revive(blocks)
            return
        groups = self._queue.group_of
        owners = [groups[block] for block in blocks]
        taken = Counter(owners)
        del taken[None]
        touched = cast("dict[Hold, int]", taken)
        common = 0
        if record is not None:
            foreign = {hold for hold, count in touched.items() if _is_foreign(hold, session, count)}
            if foreign:
                common = next(len(owners) - i for i, owner in enumerate(reversed(owners)) if owner in foreign)
        continued = {hold for hold, count in touched.items() if _is_continued(hold, session, count)}
        for hold, count in touched.items():
            if hold.place is Place.HELD and count == hold.size:
                self._end(hold, "used")
        if record is not None:
            self._learn(record, continued)
        if common:
            self._hold_common(session, blocks[:common])
        own, over = blocks[common:], record is not None and expect == contract.EXPECT_OVER
        if handover:
            self._hold_handover(session, own, over)
        elif over:
            self._group(session, own, Place.FIRST)
        elif record is not None:
            self._hold_session(session, record, expect, own, common)

    def _hold_common(self, session: str | None, blocks: Sequence[int]) -> None:
        hold = Hold(SESSION, session, self._now, shared=True)
        self._hold(hold, blocks)
        self._fit(hold, blocks)

    def _hold_session(
        self, session: str | None, record: _Session, expect: str | None, blocks: Sequence[int], context: int
    ) -> None:
        if not blocks:
            return
        hold = Hold(SESSION, session, self._now)
        hold.context = context
        hold.kind = build_kind(expect, record.turns, (context + len(blocks)) * self._block_size)
        hold.forecast = self._returns.forecast(hold.kind, record.history)
        record.holds.append(hold)
        del record.holds[:-MAXIMUM_AWAITED]
        if hold.forecast.chance(0.0) < LEAST_CHANCE:
            hold.place = Place.RECENT
        self._hold(hold, blocks)
        self._fit(hold, blocks)

    def _learn(self, record: _Session, continued: Collection[Hold]) -> None:
        """The session has finished a request that continued these holds and bypassed the others."""
        returned = any(hold in continued for hold in record.holds)
        awaited = []
        for hold in record.holds:
            # One lost to other requests would have been continued, if it was the newest and no other one was.
            lost = not hold.size and hold is record.holds[-1] and not returned
            if hold in continued or lost:
                self._observe(hold, record, max(0.0, record.arrived - hold.since))
                if hold.place is Place.HELD and hold.size:  # the end of an edited history stays held
                    self._tally(hold, "used")
                    self._bypass(hold, record)
                    awaited.append(hold)
            elif hold.size and self._now - hold.since > self._settings.retention_idle:
                self._observe(hold, record, None)
            elif hold.size:
                self._bypass(hold, record)
                awaited.append(hold)
        record.holds = awaited

    def _observe(self, hold: Hold, record: _Session, gap: float | None) -> None:
        if hold.kind is not None:
            self._returns.observe(hold.kind, record.history, gap)

    def _bypass(self, hold: Hold, record: _Session) -> None:
        if hold.kind is None or hold.kind.bypassed:
            return
        hold.kind = hold.kind._replace(bypassed=True)
        hold.forecast = self._returns.forecast(hold.kind, record.history)
        if hold.place is Place.HELD and hold.forecast.chance(self._now - hold.since) < LEAST_CHANCE:
            self._end(hold, "over", Place.AGED)

    def _hold_handover(self, session: str | None, blocks: Sequence[int], over: bool) -> None:
        if not self._budgets[HANDOVER]:
            self._group(session, blocks, Place.FIRST if over else Place.RECENT)
            return
        hold = Hold(HANDOVER, session, self._now)
        hold.over = over
        hold.end = blocks[-HANDOVER_END:]
        self._hold(hold, blocks)
        # Who came first stays: it is read first. Of a prompt too long, the end counts: decode may have the beginning.
        excess = self.held_blocks[HANDOVER] - self._budgets[HANDOVER]
        if excess > 0:
            self._cut(hold, blocks[:excess])

    def _hold(self, hold: Hold, blocks: Sequence[int]) -> None:
        self._queue.assign(blocks, hold)
        if hold.size and hold.place is Place.HELD:
            self._holds[hold.reason][hold] = None

    def _group(self, session: str | None, blocks: Sequence[int], place: Place) -> None:
        """Remember whose blocks these are without holding them."""
        group = Hold(SESSION, session, self._now)
        group.place = place
        self._queue.assign(blocks, group)

    def _revive(self, blocks: Sequence[int]) -> None:
        """Blocks that a request without a session has used are not over."""
        groups = self._queue.group_of
        used = [block for block in blocks if (group := groups[block]) is not None and group.place is Place.FIRST]
        self._group(None, used, Place.RECENT)

    def _fit(self, hold: Hold, blocks: Sequence[int]) -> None:
        """Keep the budget: less valuable holds end, then the end of this one."""
        excess = self.held_blocks[SESSION] - self._budgets[SESSION]
        if excess <= 0 or hold.place is not Place.HELD:
            return
        worth = self._worth(hold)
        for other in sorted(self._sample(self._holds[SESSION]), key=self._worth):
            if excess <= 0 or self._worth(other) >= worth:
                break
            excess -= other.size
            self._end(other, "budget")
        if excess > 0:
            self._cut(hold, blocks[-excess:])

    def _cut(self, hold: Hold, blocks: Sequence[int]) -> None:
        """Take blocks out of a hold that is too large."""
        if len(blocks) >= hold.size:
            self._end(hold, "budget")
        else:
            self._group(hold.session, blocks, Place.RECENT)

    def _end(self, hold: Hold, ended: str, place: Place = Place.RECENT) -> None:
        self._count(hold, ended)
        self._queue.release(hold, Place.FIRST if hold.over else place)

    def _count(self, hold: Hold, ended: str) -> None:
        self._holds[hold.reason].pop(hold, None)
        self._tally(hold, ended)

    def _tally(self, hold: Hold, ended: str) -> None:
        self._ended[hold.reason, ended] += 1
        self._totals[hold.reason, ended] += 1

    def _yield_hold(self, groups: Sequence[Group]) -> Group:
        """The queue has nothing else left to hand out."""
        hold = min(self._sample([cast(Hold, group) for group in groups]), key=self._worth)
        self._count(hold, "pressure")
        return hold

    def _worth(self, hold: Hold) -> tuple[int, float]:
        """Orders holds: those of the least worth end first. Prefixes in common last, for others build on them."""
        if hold.shared:
            return 3, hold.since
        if hold.reason == HANDOVER:
            return 2, hold.since
        if hold.forecast is None or not hold.size:
            return 0, 0.0
        seconds = self._prefill_seconds(hold.context * self._block_size, hold.size * self._block_size)
        return 1, hold.forecast.rate(self._now - hold.since) * seconds / hold.size

    def _sample(self, holds: Collection[Hold]) -> Collection[Hold]:
        return holds if len(holds) <= SAMPLE else self._random.sample(list(holds), SAMPLE)

    def _is_in_use(self, hold: Hold) -> bool:
        """Whether a running request of the session is likely to be using the blocks."""
        record = self._sessions.get(hold.session) if hold.session is not None else None
        return record is not None and record.running > 0 and record.holds[-1:] == [hold]

    # --- sessions -----------------------------------------------------------------------------------------------------

    def _touch(self, session: str, now: float) -> _Session:
        record = self._sessions.get(session)
        if record is None:
            record = self._sessions[session] = _Session(self._returns.build_history())
            if len(self._sessions) > MAXIMUM_SESSIONS:
                oldest, forgotten = next(iter(self._sessions.items()))
                self._forget(oldest, forgotten, "expired", Place.AGED, observed=False)
        record.changed = now
        self._sessions.move_to_end(session)
        return record

    def _forget(self, session: str, record: _Session, ended: str, place: Place, *, observed: bool = True) -> None:
        for hold in record.holds:
            if observed:
                self._observe(hold, record, None)
            if hold.place is Place.HELD and hold.size:
                self._end(hold, ended, place)
        del self._sessions[session]


def _is_continued(hold: Hold, session: str | None, taken: int) -> bool:
    """Whether a request that re-used ``taken`` blocks of a hold is the return that the hold waited for."""
    return (
        hold.reason == SESSION and not hold.shared and hold.session == session and taken >= CONTINUED_SHARE * hold.size
    )


def _is_foreign(hold: Hold, session: str | None, taken: int) -> bool:
    """Whether a re-used block is in common with others: another session, or a fork of the same one."""
    if hold.shared or hold.session not in (session, None):
        return True
    return hold.place is Place.HELD and hold.reason == SESSION and not _is_continued(hold, session, taken)
