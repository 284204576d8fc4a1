"""The path of a turn: a table of situations, and what the fleet makes of reports, memory and observations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_runtime.router.choice.costs import Overheads, TokensPerByte
from bidikv_runtime.router.choice.holdings import Holding
from bidikv_runtime.router.choice.path import Decision, Estimate, Situation, TurnFacts, choose_path, estimate_turn
from bidikv_runtime.tests.choice_rig import FleetRig, decode, held, prefill, sessions

SESSION = sessions(1)[0]
HELD = Situation(
    turn=TurnFacts(SESSION, 40000),
    reuse=True,
    local_limit=512,
    at_decode=Estimate(10000, 300),
    known_at_decode=True,
    at_sources=Estimate(10000, 300),
    known_at_sources=True,
    refused=False,
    backlog=0,
    backlog_limit=2048,
    streams=0,
    stall_seconds=0.1,
    decode_speed=5000.0,
    prefill_speed=10000.0,
    prefill_wait=0.0,
    local_overhead=math.nan,
    prefill_overhead=math.nan,
    explore=False,
)
"""Decode holds nearly all of a long prompt, and nothing speaks against it."""
NOTHING: dict[str, Any] = {
    "known_at_decode": False,
    "known_at_sources": False,
    "at_decode": Estimate(10000, 10000),
    "at_sources": Estimate(10000, 10000),
}
FIRST = {"turn": TurnFacts(SESSION, 40000, first_turn=True)}
TINY = {"at_decode": Estimate(200, 200), "at_sources": Estimate(200, 200)}


def forced(path: Any, **more: Any) -> dict[str, Any]:
    return {"turn": TurnFacts(SESSION, 40000, forced=path, **more)}


@pytest.mark.parametrize(
    ("changes", "path", "reason", "limit"),
    [
        ({}, "local", "held", 512),
        ({"at_decode": Estimate(10000, 512)}, "local", "held", 512),
        ({"at_decode": Estimate(10000, 513)}, "bidirectional", "new", 0),
        ({"local_limit": 0}, "bidirectional", "off", 0),
        ({"reuse": False}, "plain", "oneway", 0),
        ({"reuse": False} | FIRST | NOTHING | TINY, "plain", "oneway", 0),
        (NOTHING, "bidirectional", "unknown", 0),
        (NOTHING | FIRST, "plain", "first", 0),
        (FIRST, "local", "held", 512),  # the first turn once more
        (NOTHING | FIRST | TINY, "local", "tiny", 512),
        (NOTHING | FIRST | TINY | {"local_limit": 0}, "plain", "off", 0),
        ({"at_decode": Estimate(9000, 9000, True)}, "bidirectional", "edited", 0),
        ({"at_decode": Estimate(100, 100, True)}, "local", "tiny", 512),
        ({"refused": True}, "bidirectional", "refused", 0),
        ({"turn": TurnFacts(SESSION, 40000, repeated=True)}, "bidirectional", "refused", 0),
        ({"backlog": 1700}, "local", "held", 348),
        ({"backlog": 1749}, "bidirectional", "busy", 0),
        ({"backlog": 9999}, "bidirectional", "busy", 0),
        ({"streams": 1}, "local", "held", 500),
        ({"streams": 1, "decode_speed": 2999.0}, "bidirectional", "stall", 0),
        ({"streams": 1, "decode_speed": 0.0}, "local", "held", 512),
        ({"prefill_overhead": 0.05, "local_overhead": 0.0}, "local", "held", 512),  # 60 ms and 80 ms
        ({"prefill_overhead": 0.02, "local_overhead": 0.0}, "bidirectional", "slower", 0),  # 60 ms and 50 ms
        ({"prefill_overhead": 0.02, "local_overhead": 0.0, "explore": True}, "local", "explore", 512),
        ({"prefill_overhead": 0.02, "local_overhead": 0.0, "prefill_wait": 0.02}, "local", "held", 512),
        ({"prefill_overhead": 0.05, "local_overhead": 0.03}, "bidirectional", "slower", 0),
        ({"prefill_overhead": 0.05, "local_overhead": 0.0, "backlog": 200}, "bidirectional", "slower", 0),
        ({"prefill_overhead": 0.02, "decode_speed": 0.0}, "local", "held", 512),
        (forced("plain"), "plain", "forced", 0),
        (forced("bidirectional"), "bidirectional", "forced", 0),
        (forced("bidirectional") | {"reuse": False}, "plain", "oneway", 0),
        (forced("bidirectional", first_turn=True) | NOTHING, "bidirectional", "forced", 0),
        (forced("local") | {"local_limit": 0, "refused": True}, "local", "forced", 2**31 - 1),
        (forced("local", repeated=True), "bidirectional", "refused", 0),
        (forced("local") | {"reuse": False}, "local", "forced", 2**31 - 1),
    ],
)
def test_the_table(changes: dict[str, Any], path: str, reason: str, limit: int) -> None:
    decision = choose_path(replace(HELD, **changes))
    assert (decision.path, decision.reason, decision.limit) == (path, reason, limit)


@given(
    st.builds(
        Situation,
        turn=st.builds(TurnFacts, st.just(SESSION), st.integers(1, 10**6), st.booleans(), st.none(), st.booleans()),
        reuse=st.booleans(),
        local_limit=st.integers(0, 4096),
        at_decode=st.builds(Estimate, st.integers(1, 10**5), st.integers(16, 10**5), st.booleans()),
        known_at_decode=st.booleans(),
        at_sources=st.builds(Estimate, st.integers(1, 10**5), st.integers(16, 10**5), st.booleans()),
        known_at_sources=st.booleans(),
        refused=st.booleans(),
        backlog=st.integers(0, 10**4),
        backlog_limit=st.integers(0, 4096),
        streams=st.integers(0, 3),
        stall_seconds=st.floats(0, 1),
        decode_speed=st.floats(0, 10**5),
        prefill_speed=st.floats(0, 10**5),
        prefill_wait=st.floats(0, 10) | st.just(math.inf),
        local_overhead=st.floats(0, 10) | st.just(math.nan),
        prefill_overhead=st.floats(0, 10) | st.just(math.nan),
        explore=st.booleans(),
    )
)
def test_decode_is_never_asked_for_more_than_its_bounds(situation: Situation) -> None:
    decision = choose_path(situation)
    if decision.path == "local":
        assert situation.reuse
        assert not situation.turn.repeated
        assert decision.uncached_tokens <= decision.limit <= situation.local_limit
        assert situation.backlog + decision.limit <= situation.backlog_limit
        if situation.streams and situation.decode_speed:
            assert decision.limit <= situation.stall_seconds * situation.decode_speed
    else:
        assert decision.limit == 0
    assert (decision.path == "bidirectional") <= situation.reuse


@pytest.mark.parametrize(
    ("last", "body", "expected"),
    [
        (None, 4000, (1000, 1000, False)),
        ((1000, 1200, 4000), 4000, (1000, 16, False)),  # the same turn once more
        ((1000, 1200, 4000), 5200, (1300, 100, False)),  # 300 tokens more, 200 of them the answer
        ((1000, 1000, 4000), 5200, (1300, 300, False)),
        ((1000, 400, 4000), 5200, (1300, 900, False)),  # most of it was evicted
        ((1000, 1200, 4000), 3999, (1000, 1000, True)),
        ((1000, 1200, 4000), 10, (3, 3, True)),
        ((1000, 800, 0), 4000, (1000, 200, False)),  # the body's length was not told
    ],
)
def test_what_is_new_follows_from_how_the_body_has_grown(
    last: tuple[int, int, int] | None, body: int, expected: tuple[int, int, bool]
) -> None:
    holding = Holding(None, *last) if last else None  # type: ignore[arg-type]
    assert estimate_turn(holding, body, 1000) == expected


def test_overheads_are_averages_by_length_and_borrow_from_the_nearest() -> None:
    overheads = Overheads()
    assert math.isnan(overheads.estimate(1000))
    overheads.observe(1000, 0.1)
    assert overheads.estimate(1) == overheads.estimate(1000) == overheads.estimate(10**9) == 0.1
    overheads.observe(100_000, 1.0)
    assert overheads.estimate(1023) == 0.1
    assert overheads.estimate(60_000) == 1.0
    for _ in range(100):
        overheads.observe(1000, 0.2)
    assert overheads.estimate(500) == pytest.approx(0.2, rel=0.01)
    overheads.observe(100_000, 1e9)
    assert overheads.estimate(100_000) == pytest.approx(1.0 + 0.1 * 59)
    overheads.observe(10, -5.0)
    assert overheads.estimate(10) == 0.0


def test_tokens_per_byte() -> None:
    ratio = TokensPerByte()
    assert ratio.estimate(1000) == 500
    ratio.observe(0, 10)
    ratio.observe(10, 0)
    ratio.observe(4000, 1000)
    assert ratio.estimate(1000) == 250
    for _ in range(100):
        ratio.observe(1000, 500)
    assert ratio.estimate(1000) == pytest.approx(500, rel=0.01)


# --- the fleet ---


def decide(rig: FleetRig, body_bytes: int, *, at: int = 1, **facts: Any) -> Decision:
    return rig.fleet.choose_path(TurnFacts(SESSION, body_bytes, **facts), decode(at))


def rig_of_two(**more: Any) -> FleetRig:
    return FleetRig([prefill(1)], [decode(1), decode(2)], **more)


def test_a_report_is_enough_for_a_local_turn() -> None:
    """The replica has just started and never saw the session."""
    rig = rig_of_two()
    assert decide(rig, 40400)[:3] == ("bidirectional", "unknown", 0)
    rig.report(decode(1), held(SESSION, 10200, prompt=10000, body=40000))
    assert decide(rig, 41600)[:5] == ("local", "held", 512, 200, 10400)
    assert decide(rig, 41600, at=2)[:4] == ("bidirectional", "unknown", 0, 200), "its KV is elsewhere"
    assert decide(rig, 43000)[:4] == ("bidirectional", "new", 0, 550)
    rig.report(decode(1), held(SESSION, 4000, prompt=10000, body=40000))
    assert decide(rig, 41600)[:4] == ("bidirectional", "new", 0, 6400), "most of it was evicted"


def test_ones_own_turn_is_enough_too() -> None:
    rig = rig_of_two()
    rig.report(decode(1))
    rig.now += 0.2
    rig.fleet.note_turn(SESSION, decode(1), 40000, 10000)
    assert decide(rig, 41600)[:5] == ("local", "held", 512, 400, 10400)
    rig.now += 0.8
    rig.report(decode(1), held(SESSION, 10200, prompt=10000, body=40000))
    assert decide(rig, 41600).uncached_tokens == 200, "the report knows of the answer's tokens"
    rig.now += 0.2
    rig.fleet.note_turn(SESSION, decode(1), 41600, 10400)
    assert decide(rig, 42000).uncached_tokens == 100
    rig.now += 0.8
    rig.report(decode(1), held(SESSION, 0))
    assert decide(rig, 42000)[:2] == ("bidirectional", "unknown")


def test_the_length_of_a_prompt_that_nobody_told_follows_from_the_sessions_last_one() -> None:
    rig = rig_of_two()
    rig.report(decode(1), held(SESSION, 10200, prompt=10000, body=20000), held(sessions(2)[1], 100, body=1000))
    rig.now += 0.2
    rig.fleet.note_turn(SESSION, decode(1), 20800, None)
    assert decide(rig, 21000)[:5] == ("local", "held", 512, 100, 10500)
    rig.fleet.note_turn(SESSION, decode(2), 20800, None)
    assert decide(rig, 21000, at=2).prompt_tokens == 2080 + 20, "elsewhere only the usual ratio is known"


def test_a_first_turn_is_plain_and_a_tiny_one_local() -> None:
    rig = rig_of_two()
    rig.report(decode(1), held(sessions(2)[1], 2500, body=10000))  # a quarter of a token per byte
    assert decide(rig, 40000, first_turn=True)[:5] == ("plain", "first", 0, 10000, 10000)
    assert decide(rig, 2048, first_turn=True)[:5] == ("local", "tiny", 512, 512, 512)
    assert decide(rig, 2052, first_turn=True)[:3] == ("plain", "first", 0)


def test_with_one_way_reuse_there_is_neither_a_local_path_nor_a_source() -> None:
    rig = rig_of_two(reuse="OneWay")
    rig.report(decode(1), held(SESSION, 10200, prompt=10000, body=40000))
    assert decide(rig, 41600)[:2] == ("plain", "oneway")
    assert rig.fleet.choose_sources(SESSION, decode(1), 2) == []


def test_local_turns_under_way_bound_further_ones() -> None:
    rig = rig_of_two(limits={"local_backlog_tokens": 600})
    rig.report(decode(1), held(SESSION, 10200, prompt=10000, body=40000))
    works = [rig.fleet.decoding(decode(1), 200, sent=True) for _ in range(2)]
    assert decide(rig, 41600)[:3] == ("local", "held", 200)
    works.append(rig.fleet.decoding(decode(1), 200, sent=True))
    assert decide(rig, 41600)[:2] == ("bidirectional", "busy")
    works[0].finish_prompt()
    assert decide(rig, 41600)[:3] == ("local", "held", 200)
    rig.report(decode(1), queued_tokens=500)
    assert decide(rig, 41600)[:2] == ("bidirectional", "busy"), "other replicas' local turns"


def test_a_session_that_was_refused_is_left_alone_for_twice_as_long_each_time() -> None:
    rig = rig_of_two()
    rig.report(decode(1), held(SESSION, 10200, prompt=10000, body=40000))
    tried: list[int] = []
    for turn in range(40):
        if decide(rig, 41600).path == "local":
            tried.append(turn)
            rig.fleet.note_local(SESSION, refused=True)
        rig.fleet.note_turn(SESSION, decode(2), 41600, 10400)
        rig.report(decode(1), held(SESSION, 10200, prompt=10000, body=40000))
    assert tried == [0, 2, 6, 14, 30]
    for _ in range(32):
        rig.fleet.note_turn(SESSION, decode(2), 41600, 10400)
    rig.fleet.note_local(SESSION, refused=False)
    rig.fleet.note_local(SESSION, refused=True)
    rig.fleet.note_turn(SESSION, decode(2), 41600, 10400)
    rig.fleet.note_turn(SESSION, decode(2), 41600, 10400)
    assert decide(rig, 41600).path == "local", "an answer makes up for earlier refusals"


def test_the_slower_path_is_learnt_and_explored_rarely() -> None:
    rig = rig_of_two()
    for one in (prefill(1), decode(1)):
        rig.report(one, held(SESSION, 10200, prompt=10000, body=40000), prefill_tokens_per_second=10000.0)
    local = decide(rig, 41600)
    assert local.path == "local"
    rig.fleet.observe_first_byte(local, 0.5)
    other = decide(rig, 43000)
    assert (other.path, other.compute_seconds) == ("bidirectional", 0.055)
    rig.fleet.observe_first_byte(other, 0.155)
    decisions = [decide(rig, 41600) for _ in range(96)]
    assert [n for n, each in enumerate(decisions) if each.path == "local"] == [31, 63, 95]
    assert decisions[0].local_seconds == pytest.approx(0.5)
    assert decisions[0].prefill_seconds == pytest.approx(0.1 + 0.02)
    for _ in range(50):
        rig.fleet.observe_first_byte(decisions[31], 0.03)
    assert decide(rig, 41600).reason == "held", "it has become faster"


def test_prefills_queue_makes_the_local_path_worth_more() -> None:
    rig = rig_of_two()
    for one in (prefill(1), decode(1)):
        rig.report(one, held(SESSION, 10200, prompt=10000, body=40000), prefill_tokens_per_second=10000.0)
    rig.fleet.observe_first_byte(decide(rig, 41600), 0.5)
    rig.fleet.observe_first_byte(decide(rig, 43000), 0.155)
    assert decide(rig, 41600).reason == "slower"
    work = rig.fleet.prefilling(prefill(1), 5000)
    assert decide(rig, 41600).reason == "held"
    work.end()
    assert decide(rig, 41600).reason == "slower"


def test_a_decode_engine_that_left_meanwhile_gets_the_usual_path() -> None:
    rig = rig_of_two()
    assert decide(rig, 40000, at=9)[:2] == ("bidirectional", "unknown")
