"""How long a source is left alone: doubling silences, failed reads, refusals, all bounded."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from bidikv_runtime.connector.peers import MAXIMUM_PEERS, REFUSAL_PERIOD, SILENT_SECONDS, Peers
from bidikv_runtime.contract import REACH_SECONDS

S = "10.0.0.1:5700"


@pytest.mark.parametrize(
    ("period", "maximum", "periods"),
    [
        (1.0, 60.0, [1, 2, 4, 8, 16, 32, 60, 60]),
        (2.0, 3.0, [2, 3, 3]),
        (5.0, 1.0, [5, 5]),  # the first period counts
        (0.0, 60.0, [0, 0]),
    ],
)
def test_each_silence_in_a_row_doubles_the_period(period: float, maximum: float, periods: list[float]) -> None:
    peers, now = Peers(period, maximum), 100.0
    for expected in periods:
        peers.note_silence(S, asked=now, now=now)
        if expected:
            assert peers.is_silent(S, now + expected - 0.01)
        assert not peers.is_silent(S, now + expected)
        now += expected + 1


def test_an_answer_ends_the_doubling() -> None:
    peers = Peers(1.0, 60.0)
    for now in (0.0, 10.0, 20.0):
        peers.note_silence(S, now, now)
    assert peers.is_silent(S, 23.9)
    peers.note_answer(S, 21.0)
    assert not peers.is_silent(S, 21.0)
    peers.note_silence(S, 30.0, 30.0)
    assert peers.is_silent(S, 30.9)
    assert not peers.is_silent(S, 31.0)


def test_questions_that_were_open_together_are_one_silence() -> None:
    peers = Peers(1.0, 60.0)
    for asked, deadline in ((0.0, 1.0), (0.5, 1.5), (0.9, 1.9)):
        peers.note_silence(S, asked, deadline)
    assert not peers.is_silent(S, 2.0)
    peers.note_silence(S, 2.0, 3.0)  # asked after the first silence was over: the second one
    assert peers.is_silent(S, 4.9)
    assert not peers.is_silent(S, 5.0)


def test_a_lost_message_is_no_silence_of_a_source_that_answers() -> None:
    peers = Peers(1.0, 60.0)
    peers.note_answer(S, 0.5)
    peers.note_silence(S, asked=0.0, now=1.0)
    assert not peers.is_silent(S, 1.0)


def test_failed_reads_are_counted_apart_from_answers() -> None:
    peers = Peers(1.0, 60.0)
    peers.note_failure(S, 0.0)
    peers.note_failure(S, 0.5)  # one that was under way with the first
    peers.note_answer(S, 0.6)
    assert peers.is_silent(S, 0.9)
    assert not peers.is_silent(S, 1.0)
    peers.note_failure(S, 2.0)
    assert peers.is_silent(S, 3.9)
    peers.note_success(S)
    assert not peers.is_silent(S, 2.0)
    peers.note_failure(S, 5.0)
    assert not peers.is_silent(S, 6.0)


def test_failures_of_long_ago_are_forgotten() -> None:
    peers = Peers(1.0, 60.0)
    peers.note_failure(S, 0.0)
    peers.note_failure(S, 60.9)
    assert peers.is_silent(S, 62.8)
    peers.note_failure(S, 62.9 + 60.0)
    assert not peers.is_silent(S, 62.9 + 61.0)


def test_a_refusal_counts_for_a_while_and_is_new_once_a_process_and_reason() -> None:
    peers = Peers(1.0, 60.0)
    assert peers.note_refusal(S, 1, "dtype", 0.0)
    assert peers.is_refused(S, REFUSAL_PERIOD - 0.01)
    assert not peers.is_refused(S, REFUSAL_PERIOD)
    assert not peers.is_silent(S, 1.0)
    assert not peers.note_refusal(S, 1, "dtype", 31.0)
    assert peers.note_refusal(S, 1, "model", 62.0)
    assert peers.note_refusal(S, 2, "model", 93.0)


def test_the_state_names_what_is_the_matter() -> None:
    peers = Peers(1.0, 60.0)
    peers.note_silence("silent", 0.0, 0.0)
    peers.note_failure("failing", 0.0)
    peers.note_refusal("refusing", 1, "dtype differs", 0.0)
    silent, failing, refusing = peers.describe(0.25)
    assert (silent["source"], silent["silences"], silent["silent_seconds_left"]) == ("silent", 1, 0.75)
    assert (failing["failed_reads"], failing["avoided_seconds_left"]) == (1, 0.75)
    assert refusing["refusal"] == "dtype differs"
    assert [peer["silent_seconds_left"] for peer in peers.describe(100.0)] == [0.0] * 3


def test_a_peer_is_unreachable_when_nothing_has_worked_for_a_while() -> None:
    peers = Peers(1.0, 60.0)
    assert peers.judge(0.0) == ([], [])
    peers.note_answer(S, 0.0)
    assert peers.judge(1.0) == ([], [S])
    peers.note_silence(S, 1.0, 2.0)
    assert peers.judge(2.0) == ([], []), "one silence is neither"
    peers.note_silence(S, SILENT_SECONDS, SILENT_SECONDS + 0.9)
    assert peers.judge(SILENT_SECONDS + 0.9) == ([], []), "not long enough"
    peers.note_silence(S, 60.0, 61.0)
    assert peers.judge(61.0) == ([S], [])
    assert peers.judge(61.0 + REACH_SECONDS) == ([], []), "nobody has asked it since"
    peers.note_answer(S, 62.0)
    assert peers.judge(62.0) == ([], [S])


def test_a_peer_that_answers_and_cannot_be_read_is_unreachable() -> None:
    peers = Peers(1.0, 60.0)
    for now in (10.0, 20.0, 45.0):
        peers.note_answer(S, now)
        peers.note_failure(S, now)
    assert peers.judge(46.0) == ([S], [])
    peers.note_success(S)
    assert peers.judge(46.0) == ([], [S])


def test_the_peer_that_is_silent_longest_comes_first() -> None:
    peers = Peers(1.0, 60.0)
    for source, since in (("later", 5.0), ("first", 1.0), ("last", 9.0)):
        peers.note_silence(source, since, since + 1)
        peers.note_silence(source, 60.0, 61.0)
    assert peers.judge(61.0) == (["first", "later", "last"], [])


@given(st.lists(st.tuples(st.integers(0, 2 * MAXIMUM_PEERS), st.sampled_from(["silence", "answer", "failure"]))))
def test_what_is_remembered_is_bounded(events: list[tuple[int, str]]) -> None:
    peers = Peers(1.0, 60.0)
    for now, (source, event) in enumerate([*events, *((n, "answer") for n in range(MAXIMUM_PEERS + 10))]):
        if event == "silence":
            peers.note_silence(source, now, now)
        elif event == "answer":
            peers.note_answer(source, now)
        else:
            peers.note_failure(source, now)
    assert len(peers.describe(0.0)) == MAXIMUM_PEERS
    assert peers.describe(0.0)[-1]["source"] == str(MAXIMUM_PEERS + 9)
