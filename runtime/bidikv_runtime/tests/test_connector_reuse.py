"""One request's reuse: every answer is taken relative to the local prefix of the moment, whatever happened before."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from bidikv_runtime.connector import wire
from bidikv_runtime.connector.lookup_client import Question
from bidikv_runtime.connector.reuse import ANSWER_LIFE, LOOKUP_BUDGET, Phase, Reuse
from bidikv_runtime.connector.sources import Source

SOURCES = (Source("10.0.0.1", 5700), Source("10.0.0.2", 5700))


def found(first: int, count: int, engine: str = "source", start: int = 0) -> wire.Found:
    """Block ``100 + i`` of the source holds block ``i`` of the request, under publication ``1000 + i``. The run begins
    ``start`` blocks into the question, which is about the blocks from ``first - start`` on."""
    positions = range(first, first + count)
    runs = [wire.Run(start, [100 + i for i in positions], [1000 + i for i in positions])] if count else []
    return wire.Found(1, 7, runs, wire.Peer(engine, "10.0.0.1", 5600, 1))


def asking(first: int, asked: int, now: float = 0.0, sources: int = 1) -> tuple[Reuse, list[Question]]:
    reuse = Reuse(SOURCES)
    questions = [Question(source, now, now + 1) for source in SOURCES[:sources]]
    reuse.start(questions, first, asked, now)
    return reuse, questions


def matched(first: int, count: int, now: float = 0.0) -> Reuse:
    reuse, [question] = asking(first, count, now)
    question.reply = found(first, count)
    assert reuse.decide("me", first, 0.02, now) == "hit"
    return reuse


@pytest.mark.parametrize(
    ("first", "count", "local", "last", "blocks"),
    [
        (0, 10, 0, 20, 10),
        (0, 10, 0, 7, 7),  # the last token is never read
        (4, 10, 4, 20, 10),
        (4, 10, 6, 20, 8),  # the local prefix has grown
        (4, 10, 14, 20, 0),
        (4, 10, 19, 20, 0),
        (4, 10, 3, 20, 0),  # it has shrunk: the answer does not connect to it
        (25, 2, 0, 52, 0),
    ],
)
def test_an_answer_counts_from_the_local_prefix(first: int, count: int, local: int, last: int, blocks: int) -> None:
    assert matched(first, count).match(local, last) == blocks


def test_what_was_answered_can_be_seen_before_it_is_decided() -> None:
    assert Reuse(SOURCES).peek() == 0
    reuse, [first, second] = asking(4, 20, sources=2)
    assert reuse.peek() == 4
    first.reply = found(9, 10, start=5)  # not from the first block on
    assert reuse.peek() == 4
    second.reply = found(4, 10)
    assert reuse.peek() == 14
    first.reply = wire.Refused(1, wire.VERSION, {})
    assert reuse.peek() == 14


def test_a_read_takes_the_offered_blocks() -> None:
    reuse = matched(4, 10)
    assert reuse.match(6, 20) == 8
    read = reuse.begin_read(5)
    [part] = read.parts
    assert (read.first, part.offset, part.blocks, part.publications) == (
        6,
        0,
        (106, 107, 108, 109, 110),
        (1006, 1007, 1008, 1009, 1010),
    )
    assert reuse.phase is Phase.LOADING
    assert reuse.match(6, 20) == 0


@pytest.mark.parametrize("phase", [Phase.ASKING, Phase.MATCHED])
def test_a_shrunken_local_prefix_asks_again(phase: Phase) -> None:
    """Also while the questions are open: their answer would start behind the prefix."""
    reuse = matched(25, 2) if phase is Phase.MATCHED else asking(25, 27)[0]
    assert reuse.phase is phase
    assert not reuse.is_outdated(25, 0.0)
    assert not reuse.is_outdated(30, 0.0)
    assert reuse.is_outdated(24, 0.0)


def test_open_questions_are_not_asked_again() -> None:
    reuse, _ = asking(0, 10)
    assert not reuse.is_outdated(0, 100.0)


def test_an_old_answer_is_asked_for_again_within_the_budget() -> None:
    reuse = matched(0, 10)
    assert not reuse.is_outdated(0, ANSWER_LIFE)
    assert reuse.is_outdated(0, ANSWER_LIFE + 0.1)
    for _ in range(LOOKUP_BUDGET - 1):
        assert reuse.may_ask
        reuse.start([], 0, 10, 0.0)
    assert not reuse.may_ask
    late = matched(0, 10)
    late.lookups = LOOKUP_BUDGET
    assert not late.is_outdated(0, 100.0)


def test_a_settled_request_asks_nothing() -> None:
    reuse = Reuse(())
    assert not reuse.is_outdated(0, 100.0)
    assert reuse.match(0, 10) == 0


def test_open_questions_are_waited_for_until_something_useful_has_settled() -> None:
    reuse, [first, second] = asking(0, 10, sources=2)
    assert reuse.decide("me", 0, 0.02, 0.001) is None
    first.reply = found(0, 4)
    assert reuse.decide("me", 0, 0.02, 0.002) is None
    assert reuse.decide("me", 0, 0.02, 0.0219) is None
    assert reuse.decide("me", 0, 0.02, 0.0221) == "hit"
    assert second.open


def test_the_longer_of_two_answers_wins() -> None:
    reuse, [first, second] = asking(0, 10, sources=2)
    first.reply, second.reply = found(0, 4), found(0, 6)
    assert reuse.decide("me", 0, 0.02, 0.0) == "hit"
    assert reuse.match(0, 10) == 6
    assert [part.source for part in reuse.begin_read(6).parts] == [SOURCES[1]]


def test_two_sources_are_joined_and_a_read_names_both() -> None:
    reuse, [first, second] = asking(4, 20, sources=2)
    first.reply, second.reply = found(4, 6), found(8, 10, start=4)
    assert reuse.decide("me", 4, 0.02, 0.0) == "hit"
    assert reuse.match(5, 24) == 13
    read = reuse.begin_read(8)
    assert (read.first, read.count) == (5, 8)
    assert [(part.source, part.offset, part.blocks) for part in read.parts] == [
        (SOURCES[0], 0, (105, 106, 107, 108, 109)),
        (SOURCES[1], 5, (110, 111, 112)),
    ]


def test_sources_asked_before_the_local_prefix_was_known() -> None:
    """It covers the gap of the first source, and what the second one holds no longer matters."""
    reuse, [first, second] = asking(0, 20, sources=2)
    both = found(0, 2)
    both.runs.append(found(4, 8, start=4).runs[0])
    first.reply, second.reply = both, found(0, 6)
    assert reuse.decide("me", 4, 0.02, 0.0) == "hit"
    assert reuse.match(4, 20) == 8
    assert [part.source for part in reuse.begin_read(8).parts] == [SOURCES[0]]


def test_nothing_is_waited_for_when_the_local_prefix_covers_all() -> None:
    reuse, [question] = asking(0, 10)
    assert reuse.decide("me", 9, 0.02, 0.0) is None
    assert reuse.decide("me", 10, 0.02, 0.0) is not None
    assert question.open
    assert reuse.phase is Phase.SETTLED


def test_the_last_block_of_a_run_is_left_out_for_drafts_that_read_ahead() -> None:
    reuse, [question] = asking(0, 10)
    reuse.drop_last = True
    question.reply = found(0, 10)
    assert reuse.decide("me", 0, 0.02, 0.0) == "hit"
    assert reuse.match(0, 10) == 9


def test_a_complete_answer_is_not_waited_beyond() -> None:
    for drop_last in (False, True):
        reuse, [first, second] = asking(0, 10, sources=2)
        reuse.drop_last = drop_last
        first.reply = found(0, 10)
        assert reuse.decide("me", 0, 0.02, 0.0) == "hit"
        assert second.open


REFUSED = wire.Refused(1, 1, {})


@pytest.mark.parametrize(
    ("replies", "result"),
    [
        ([None, None], "silent"),
        ([None, REFUSED], "refused"),
        ([None, found(0, 0)], "miss"),
        ([REFUSED, found(0, 0)], "miss"),
        ([REFUSED, found(0, 3)], "hit"),
        ([found(0, 9, engine="me"), found(0, 0)], "miss"),
    ],
)
def test_results(replies: list[wire.Reply | None], result: str) -> None:
    reuse, questions = asking(0, 10, sources=2)
    for question, reply in zip(questions, replies, strict=True):
        question.reply, question.silent = reply, reply is None
    assert reuse.decide("me", 0, 0.02, 1.0) == result
    assert reuse.phase is (Phase.MATCHED if result == "hit" else Phase.SETTLED)


@given(
    first=st.integers(0, 30),
    count=st.integers(1, 30),
    steps=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    last=st.integers(1, 60),
)
def test_a_read_never_shifts_blocks(first: int, count: int, steps: list[int], last: int) -> None:
    """However the local prefix moves, block ``i`` of the request is filled from what the source holds for ``i``."""
    reuse = matched(first, count)
    for local in steps:
        blocks = reuse.match(local, last)
    if blocks:
        read = reuse.begin_read(blocks)
        assert read.first == local
        assert sum((part.blocks for part in read.parts), ()) == tuple(range(100 + local, 100 + local + blocks))
        assert local + blocks <= last
