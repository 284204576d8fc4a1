"""The table of sessions: what is held is what is published now, and only what has changed is told again."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_runtime.connector.index import PublicationIndex
from bidikv_runtime.connector.sessions import SPREAD, Sessions, SessionTurn, build_turn, choose_marks
from bidikv_runtime.contract import SessionReport

BLOCK = 16


def name(sequence: int, block: int) -> bytes:
    return b"%d/%d" % (sequence, block)


def hashes(sequence: int, count: int) -> list[bytes]:
    return [name(sequence, block) for block in range(count)]


class Engine:
    """An index whose blocks are numbered ``1000 * sequence + block``, and the table on it."""

    def __init__(self, limit: int = 100) -> None:
        self.index = PublicationIndex()
        self.sessions = Sessions(self.index, BLOCK, limit)

    def end_turn(self, session: str, sequence: int, blocks: int, *, tokens: int | None = None, size: int = 0) -> None:
        """A turn of so many full blocks ends and is published."""
        self.index.publish(hashes(sequence, blocks), [1000 * sequence + block for block in range(blocks)])
        total = tokens or blocks * BLOCK + 3
        self.sessions.end_turn(build_turn(session, total - 2, total, size, hashes(sequence, blocks)))

    def evict(self, sequence: int, blocks: Sequence[int]) -> None:
        self.index.unpublish([1000 * sequence + block for block in blocks])

    def held(self) -> dict[str, int]:
        return {report.name: report.held_tokens for report in self.sessions.collect(0)}


@given(st.integers(0, 100_000))
def test_marks_ascend_to_the_last_block_and_get_closer(blocks: int) -> None:
    marks = choose_marks(blocks)
    assert list(marks) == sorted(set(marks))
    assert marks[-1:] == ((blocks - 1,) if blocks else ())
    for before, mark in zip((-1, *marks), marks, strict=False):
        assert before >= -1
        assert mark - before <= max(1, (blocks - mark) // (SPREAD - 1) + 1)


@pytest.mark.parametrize(("blocks", "count"), [(0, 0), (1, 1), (8, 8), (16, 16), (512, 47), (8192, 71)])
def test_few_marks_are_enough(blocks: int, count: int) -> None:
    assert len(choose_marks(blocks)) == count


def test_a_turn_is_reported_as_it_ended() -> None:
    engine = Engine()
    engine.end_turn("s", 1, 4, tokens=70, size=900)
    assert engine.sessions.collect(0) == [SessionReport("s", 68, 70, 64, 900)]
    assert engine.sessions.sequence == 1


def test_of_several_turns_the_last_counts() -> None:
    engine = Engine()
    engine.end_turn("s", 1, 4)
    engine.end_turn("s", 1, 9)
    engine.end_turn("t", 2, 2)
    engine.end_turn("s", 3, 3)  # an edited history
    assert engine.held() == {"t": 2 * BLOCK, "s": 3 * BLOCK}


@given(st.integers(1, 3000), st.data())
def test_of_a_sequence_evicted_from_its_end_never_too_much_is_held_and_little_too_few(
    blocks: int, data: st.DataObject
) -> None:
    left = data.draw(st.integers(0, blocks))
    engine = Engine()
    index, turn = engine.index, build_turn("s", 0, blocks * BLOCK, 0, hashes(0, blocks))
    index.publish(hashes(0, left), range(left))
    engine.sessions.end_turn(turn)
    held = engine.held()["s"] // BLOCK
    assert held <= left
    assert blocks - held <= (blocks - left) * (1 + 1 / SPREAD)
    assert (held == blocks) == (left == blocks)


def test_what_is_evicted_or_comes_back_is_a_change() -> None:
    engine = Engine()
    engine.end_turn("s", 1, 10)
    engine.end_turn("t", 2, 10)
    engine.sessions.collect(0)
    first = engine.sessions.sequence
    engine.evict(1, [8, 9])
    [report] = engine.sessions.collect(first)
    assert (report.name, report.held_tokens) == ("s", 8 * BLOCK)
    second = engine.sessions.sequence
    assert second > first
    engine.evict(1, [0])
    assert [report.held_tokens for report in engine.sessions.collect(second)] == [0]
    engine.index.publish(hashes(1, 10), [1000 + block for block in range(10)])
    assert [report.held_tokens for report in engine.sessions.collect(second)] == [10 * BLOCK]
    engine.index.clear()
    assert engine.held() == {"s": 0, "t": 0}


def test_a_hole_in_front_of_the_end_ends_what_is_held() -> None:
    engine = Engine()
    engine.end_turn("s", 1, 10)
    engine.evict(1, [4])
    assert engine.held() == {"s": 4 * BLOCK}


def test_what_did_not_change_is_not_told_again() -> None:
    engine = Engine()
    assert engine.sessions.collect(0) == []
    assert engine.sessions.sequence == 0
    engine.end_turn("s", 1, 4)
    assert len(engine.sessions.collect(0)) == 1
    sequence = engine.sessions.sequence
    engine.evict(2, range(3))  # of no session
    assert engine.sessions.collect(sequence) == []
    assert engine.sessions.sequence == sequence
    engine.end_turn("t", 3, 4)
    assert [report.name for report in engine.sessions.collect(sequence)] == ["t"]
    assert [report.name for report in engine.sessions.collect(0)] == ["s", "t"]


def test_two_readers_get_all_changes_each() -> None:
    engine = Engine()
    seen: dict[str, dict[str, int]] = {"a": {}, "b": {}}
    since = {"a": 0, "b": 0}

    def poll(reader: str) -> None:
        for report in engine.sessions.collect(since[reader]):
            seen[reader][report.name] = report.held_tokens
        since[reader] = engine.sessions.sequence

    for step in range(60):
        engine.end_turn(f"s{step % 7}", step, 1 + step % 5)
        if step % 3 == 0:
            poll("a")
        engine.evict(step // 2, [step % 4])
        if step % 11 == 0:
            poll("b")
    poll("a")
    poll("b")
    assert seen["a"] == seen["b"] == engine.held()


def test_the_sessions_not_used_longest_are_forgotten() -> None:
    engine = Engine(limit=3)
    for number in (1, 2, 3):
        engine.end_turn(f"s{number}", number, 2)
    engine.sessions.collect(0)
    engine.end_turn("s1", 1, 3)
    engine.end_turn("s4", 4, 2)
    engine.evict(3, [1])
    assert set(engine.held()) == {"s3", "s1", "s4"}


def test_nobody_asks_and_nothing_grows() -> None:
    engine = Engine(limit=3)
    for number in range(50):
        engine.end_turn(f"s{number}", number, 2)
    assert len(engine.sessions._events) == 6
    assert set(engine.held()) == {"s47", "s48", "s49"}


def test_a_session_without_full_blocks_holds_nothing() -> None:
    engine = Engine()
    engine.sessions.end_turn(SessionTurn("s", 5, 7, 10, 0, ()))
    assert engine.sessions.collect(0) == [SessionReport("s", 5, 7, 0, 10)]


def test_turns_end_while_they_are_collected() -> None:
    engine = Engine(limit=10_000)
    count = 2000

    def work() -> None:
        for number in range(count):
            engine.end_turn(f"s{number % 500}", number, 3)
            engine.evict(number - 100, range(3))

    thread = threading.Thread(target=work)
    thread.start()
    seen: dict[str, int] = {}
    since = 0
    while thread.is_alive():
        seen |= {report.name: report.held_tokens for report in engine.sessions.collect(since)}
        since = engine.sessions.sequence
    thread.join()
    seen |= {report.name: report.held_tokens for report in engine.sessions.collect(since)}
    assert seen == engine.held()
    assert sum(seen.values()) == 100 * 3 * BLOCK
