"""Which blocks the retention policy keeps, and when it lets them go."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from bidikv_runtime.connector.retention import HANDOVER, HOLD_ENDS, HOLD_REASONS, MAXIMUM_SESSIONS, SESSION, Retention
from bidikv_runtime.connector.settings import Settings
from bidikv_runtime.contract import EXPECT_OVER, EXPECT_RETURN
from bidikv_runtime.tests.kv_blocks import Pool

BLOCK_SIZE = 16
SETTINGS = Settings(
    lookup_host="",
    lookup_port=1,
    retention_budget=0.5,
    retention_idle=600.0,
    handover_seconds=5.0,
    handover_budget=0.2,
)


class Engine:
    """A pool and its policy; the clock goes on by itself, a second per request."""

    def __init__(self, blocks: int = 100, **changes: Any) -> None:
        self.pool = Pool(blocks)
        self.retention = Retention(self.pool.queue, replace(SETTINGS, **changes), BLOCK_SIZE)
        self.now = 0.0

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.retention.expire(self.now)

    def run(
        self,
        session: str | None,
        prefix: list[int],
        new: int,
        expect: str | None = EXPECT_RETURN,
        handover: bool = False,
    ) -> list[int]:
        """A request that finds ``prefix`` in the cache and fills ``new`` blocks; returns all of its blocks."""
        self.retention.request_arrived(session, self.now)
        self.pool.touch(prefix)
        blocks = prefix + self.pool.allocate(new)
        self.now += 1.0
        self.retention.request_finished(session, expect, blocks, self.now, handover)
        self.pool.free(blocks)
        return blocks

    def evicted(self, count: int) -> set[int]:
        """What an allocation of so many blocks gets, given back without content."""
        taken = self.pool.queue.popleft_n(count)
        self.pool.queue.prepend_n(taken)
        for block in taken:
            block.block_hash = None
        return {block.block_id for block in taken}

    @property
    def held(self) -> dict[str, int]:
        return self.retention.held_blocks


def test_a_session_outlives_requests_that_nobody_continues() -> None:
    engine = Engine()
    kept = engine.run("a", [], 20)
    for _ in range(30):
        engine.run(None, [], 20)
    assert engine.held == {SESSION: 20, HANDOVER: 0}
    assert not engine.evicted(80) & set(kept)


def test_lru_holds_no_session() -> None:
    engine = Engine(retention="LRU")
    kept = engine.run("a", [], 20, EXPECT_OVER)
    engine.run(None, [], 80)
    assert engine.held == {SESSION: 0, HANDOVER: 0}
    assert engine.pool.free_ids[:20] == kept[::-1]


def test_pressure_takes_held_blocks_and_counts_the_hold() -> None:
    engine = Engine()
    kept = engine.run("a", [], 20)
    assert set(kept) <= engine.evicted(100)
    assert engine.retention.take_ended() == {(SESSION, "pressure"): 1}
    assert engine.retention.take_ended() == {}
    assert engine.held[SESSION] == 0


def test_the_next_turn_takes_the_hold_over() -> None:
    engine = Engine()
    blocks = engine.run("a", [], 20)
    longer = engine.run("a", blocks, 5)
    assert engine.held[SESSION] == len(longer) == 25
    assert engine.retention.take_ended() == {(SESSION, "used"): 1}


def test_idle_sessions_are_let_go_before_vllms_order() -> None:
    engine = Engine()
    kept = engine.run("a", [], 20)
    engine.wait(300)
    engine.run(None, [], 80)
    engine.wait(298)
    assert engine.held[SESSION] == 20
    engine.wait(2)
    assert engine.held[SESSION] == 0
    assert engine.retention.take_ended() == {(SESSION, "expired"): 1}
    assert engine.pool.free_ids[:20] == kept[::-1]
    assert engine.retention.describe()["sessions"] == 0


def test_a_session_that_is_over_goes_first() -> None:
    engine = Engine()
    older = engine.run(None, [], 80)
    over = engine.run("a", [], 20, EXPECT_OVER)
    assert engine.pool.free_ids[:20] == over[::-1]
    assert engine.evicted(20) == set(over)
    assert engine.pool.free_ids[20:] == older[::-1]


def test_over_releases_what_the_session_held() -> None:
    engine = Engine()
    engine.run("a", [], 20)
    branch = engine.run("a", [], 10)
    engine.run("a", branch, 1, EXPECT_OVER)
    assert engine.held[SESSION] == 0
    assert (SESSION, "over") in engine.retention.take_ended()


def test_a_prefix_in_common_survives_one_session_s_end() -> None:
    engine = Engine()
    prefix = engine.run("a", [], 10)
    own = engine.run("b", prefix, 5)
    engine.run("a", prefix, 5, EXPECT_OVER)
    assert engine.held[SESSION] == len(own)
    assert not engine.evicted(85) & set(own)


def test_a_prefix_in_common_is_the_last_to_go() -> None:
    engine = Engine(retention_budget=0.9)
    prefix = engine.run("a", [], 10)
    engine.run("b", prefix, 30)
    engine.run("c", prefix, 30)
    assert not engine.evicted(90) & set(prefix)


def test_a_request_without_session_revives_what_was_over() -> None:
    engine = Engine()
    over = engine.run("a", [], 20, EXPECT_OVER)
    engine.run(None, over, 0)
    assert not engine.evicted(80) & set(over)


def test_the_budget_keeps_what_is_worth_more_per_block() -> None:
    engine = Engine(retention_budget=0.5)
    short = [engine.run(f"short {i}", [], 10) for i in range(3)]
    long = engine.run("long", [], 40)
    engine.wait(2)
    assert engine.held[SESSION] <= 50
    assert not engine.evicted(60) & set(long)  # equally likely to return, but each of its tokens costs more
    assert engine.retention.take_ended()[SESSION, "budget"] >= 2
    assert short


def test_a_session_larger_than_the_budget_keeps_its_beginning() -> None:
    engine = Engine(retention_budget=0.3)
    blocks = engine.run("a", [], 50)
    assert engine.held[SESSION] == 30
    assert not engine.evicted(70) & set(blocks[:30])


def test_sessions_that_never_come_back_are_no_longer_held() -> None:
    engine = Engine(blocks=1000)
    for i in range(60):
        engine.run(f"single {i}", [], 5, None)
        engine.wait(601)
    engine.run("single", [], 5, None)
    assert engine.held[SESSION] == 0
    assert engine.retention.describe()["returns"]["unknown"]["returned"] < 0.05


def test_contexts_that_a_session_has_left_behind_are_learnt_to_be_dead() -> None:
    engine = Engine(blocks=2000, retention_budget=0.9)
    for i in range(40):  # each session begins anew once
        first = engine.run(f"s{i}", [], 10)
        engine.run(f"s{i}", first, 1)
        again = engine.run(f"s{i}", [], 10)
        for _ in range(3):
            again = engine.run(f"s{i}", again, 1)
        engine.wait(601)
    engine.run("s", [], 10)
    engine.run("s", [], 7)
    assert engine.held[SESSION] == 7


def test_branches_that_a_session_goes_back_to_stay_held() -> None:
    engine = Engine(blocks=2000, retention_budget=0.9)
    for i in range(40):
        first, second = engine.run(f"s{i}", [], 10), engine.run(f"s{i}", [], 7)
        for _ in range(3):
            first, second = engine.run(f"s{i}", first, 1), engine.run(f"s{i}", second, 1)
        engine.run(f"s{i}", first, 0, EXPECT_OVER)
    engine.run("s", [], 10)
    engine.run("s", [], 7)
    assert engine.held[SESSION] == 17


def test_a_handover_is_held_until_it_is_read() -> None:
    engine = Engine(retention="LRU")
    engine.run(None, [], 40)
    handed = engine.run("a", [], 20, handover=True)
    assert engine.held == {SESSION: 0, HANDOVER: 20}
    assert not engine.evicted(80) & set(handed)
    engine.retention.blocks_read(handed[10:], engine.now)
    assert engine.held[HANDOVER] == 0
    assert engine.retention.take_ended() == {(HANDOVER, "used"): 1}


@pytest.mark.parametrize("policy", ["LRU", "SessionAware"])
def test_a_reader_of_the_common_beginning_does_not_end_another_s_handover(policy: str) -> None:
    engine = Engine(retention=policy, handover_budget=0.5)
    first = engine.run("a", [], 10, handover=True)
    second = engine.run("b", first[:5], 10, handover=True)
    engine.retention.blocks_read(first, engine.now)
    assert not engine.evicted(80) & set(second[-10:])
    engine.retention.blocks_read(second[4:-1], engine.now)  # the last block is left out when the prompt fills it
    assert engine.held[HANDOVER] == 0
    assert engine.retention.take_ended()[HANDOVER, "used"] == 2


def test_a_long_running_request_does_not_let_its_session_expire() -> None:
    engine = Engine()
    blocks = engine.run("a", [], 20)
    engine.retention.request_arrived("a", engine.now)
    engine.pool.touch(blocks)
    engine.wait(5000)
    assert engine.held[SESSION] == 20
    engine.retention.request_finished("a", EXPECT_RETURN, blocks, engine.now)
    engine.pool.free(blocks)
    assert engine.retention.take_ended() == {(SESSION, "used"): 1}


def test_a_handover_nobody_reads_expires() -> None:
    engine = Engine(retention="LRU")
    engine.run("a", [], 20, handover=True)
    engine.wait(4.9)
    assert engine.held[HANDOVER] == 20
    engine.wait(1.1)
    assert engine.held[HANDOVER] == 0
    assert engine.retention.take_ended() == {(HANDOVER, "expired"): 1}


def test_unread_handovers_are_counted_also_where_no_step_ends_them() -> None:
    engine = Engine()
    first, second = engine.run("a", [], 6, handover=True), engine.run("b", [], 6, handover=True)
    engine.run("c", [], 6)
    read: set[int] = set()

    def count(later: float = 0.0) -> int:
        return engine.retention.count_unread_handovers(lambda end: not read.isdisjoint(end), engine.now + later)

    assert count() == 2
    read.update(first[:3])
    assert count() == 2, "others share the beginning"
    read.update(first)
    assert count() == 1
    assert count(later=SETTINGS.handover_seconds) == 0
    engine.retention.blocks_read(first, engine.now)
    read.clear()
    assert count() == 1
    engine.retention.blocks_read(second, engine.now)
    assert count() == 0


def test_handovers_beyond_the_budget_wait_in_vllms_order() -> None:
    engine = Engine(retention="LRU")
    first = engine.run("a", [], 20, handover=True)
    engine.run("b", [], 20, handover=True)
    assert engine.held[HANDOVER] == 20
    assert not engine.evicted(80) & set(first)
    assert engine.retention.take_ended() == {(HANDOVER, "budget"): 1}


def test_of_a_handover_larger_than_the_budget_the_end_is_held() -> None:
    engine = Engine(retention="LRU")
    blocks = engine.run("a", [], 30, handover=True)
    assert engine.held[HANDOVER] == 20
    assert not engine.evicted(80) & set(blocks[10:])


def test_a_handover_outlasts_sessions_under_pressure() -> None:
    engine = Engine()
    handed = engine.run("a", [], 15, handover=True)
    engine.run("b", [], 40)
    assert not engine.evicted(85) & set(handed)


def test_the_handover_of_a_session_that_is_over_goes_first_once_read() -> None:
    engine = Engine()
    engine.run(None, [], 80)
    handed = engine.run("a", [], 20, EXPECT_OVER, handover=True)
    engine.retention.blocks_read(handed, engine.now)
    assert engine.pool.free_ids[:20] == handed[::-1]


@pytest.mark.parametrize("changes", [{"handover_seconds": 0.0}, {"handover_budget": 0.0}])
def test_handovers_can_be_turned_off(changes: dict[str, Any]) -> None:
    engine = Engine(**changes)
    engine.run("a", [], 20, handover=True)
    assert engine.held[HANDOVER] == 0
    assert engine.retention.take_ended() == {}


def test_an_aborted_request_leaves_its_session_s_hold() -> None:
    engine = Engine()
    engine.run("a", [], 20)
    engine.retention.request_arrived("a", engine.now)
    engine.retention.request_finished("a", EXPECT_RETURN, [], engine.now)
    assert engine.held[SESSION] == 20


def test_clear_forgets_all_holds() -> None:
    engine = Engine()
    engine.run("a", [], 20)
    engine.run("b", [], 10, handover=True)
    engine.retention.clear()
    assert engine.held == {SESSION: 0, HANDOVER: 0}
    engine.run("a", [], 5)
    assert engine.held[SESSION] == 5


def test_sessions_are_bounded() -> None:
    engine = Engine(blocks=2 * MAXIMUM_SESSIONS, retention_budget=0.9)
    for i in range(MAXIMUM_SESSIONS + 10):
        engine.run(f"s{i}", [], 1)
    description = engine.retention.describe()
    assert description["sessions"] == MAXIMUM_SESSIONS
    assert len(str(description)) < 1500


def test_another_thread_may_describe_at_any_time() -> None:
    engine = Engine(blocks=2000, retention_budget=0.9)
    failures: list[RuntimeError] = []
    described = 0
    done = threading.Event()

    def describe() -> None:
        nonlocal described
        while not done.is_set():
            try:
                engine.retention.describe()
            except RuntimeError as error:
                failures.append(error)
                return
            described += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=describe)
    thread.start()
    try:
        for i in range(1500):
            engine.run(f"s{i % 700}", [], 1, [EXPECT_RETURN, None, EXPECT_OVER][i % 3], handover=i % 5 == 0)
            engine.wait(0.3)
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not failures
    assert described


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c", None]),
            st.sampled_from([None, EXPECT_RETURN, EXPECT_OVER]),
            st.booleans(),
            st.integers(0, 12),
            st.floats(0, 1000),
            st.integers(0, 30),
        ),
        max_size=40,
    ),
    st.sampled_from(["LRU", "SessionAware"]),
)
def test_whatever_happens_blocks_are_conserved_and_holds_bounded(
    steps: list[tuple[str | None, str | None, bool, int, float, int]], policy: str
) -> None:
    engine = Engine(blocks=40, retention=policy)
    latest: dict[str | None, list[int]] = {}
    contents: dict[int, object] = {}
    for session, expect, handover, new, pause, share in steps:
        prefix = []
        for block in latest.get(session, latest.get("a", []))[: min(share, 40 - new)]:  # a request fits the pool
            if engine.pool.blocks[block].block_hash is not contents[block]:
                break  # evicted meanwhile
            prefix.append(block)
        latest[session] = engine.run(session, prefix, new, expect, handover)
        contents |= {block: engine.pool.blocks[block].block_hash for block in latest[session]}
        engine.wait(pause)
        if share % 3 == 0:
            engine.retention.blocks_read(latest[session][-2:], engine.now)
        assert sorted(engine.pool.free_ids) == list(range(40))
        assert engine.held[SESSION] <= 20
        assert engine.held[HANDOVER] <= 8
        groups = {group for group in engine.pool.queue.group_of if group is not None}
        assert engine.held[SESSION] + engine.held[HANDOVER] == sum(
            group.size for group in groups if group.place.value == "held"
        )
        assert all(reason in HOLD_REASONS and ended in HOLD_ENDS for reason, ended in engine.retention.take_ended())
