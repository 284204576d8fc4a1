"""Breakers: when they open, for how long, and what closes them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_runtime.router.choice.breaker import Breaker, BreakerLimits, Failure
from bidikv_runtime.tests.choice_rig import FleetRig, decode, prefill, sessions

LIMITS = BreakerLimits(failures=3, seconds=1.0, max_seconds=30.0, probe_seconds=2.0)
KINDS: tuple[Failure, ...] = ("connect", "timeout", "status", "broken", "probe")


def breaker() -> Breaker:
    return Breaker(LIMITS, random.Random(1))


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ((), "closed"),
        (("connect",), "open"),
        (("status", "timeout"), "closed"),
        (("status", "timeout", "broken"), "open"),
        (("status", "status", "success", "status", "status"), "closed"),
        (("connect", "success"), "closed"),
        (("connect", "status", "status", "status"), "open"),
    ],
)
def test_what_opens_and_closes_it(events: tuple[str, ...], state: str) -> None:
    one = breaker()
    for event in events:
        if event == "success":
            one.note_success(0.0, 0.0)
        else:
            one.note_failure(event, 0.0)  # type: ignore[arg-type]
    assert one.state == state


def test_pauses_double_up_to_a_bound_with_jitter() -> None:
    one = breaker()
    one.note_failure("connect", 0.0)
    now, pauses = 0.0, []
    for _ in range(8):
        began = now
        while not one.take_probe(now):
            now += 0.01
        pauses.append(now - began)
        states = [str(one.state)]
        assert not one.take_probe(now), "one probe at a time"
        one.note_failure("probe", now)
        assert [*states, one.state] == ["half_open", "open"]
    for pause, least in zip(pauses, (1, 2, 4, 8, 16, 30, 30, 30), strict=True):
        assert least <= pause <= least * 1.25 + 0.02
    assert len({round(pause / least, 3) for pause, least in zip(pauses, (1, 2, 4, 8, 16, 30, 30, 30), strict=True)}) > 3


def test_an_engine_that_fails_right_after_it_came_back_goes_on_where_it_was() -> None:
    one = breaker()
    for _ in range(3):
        one.note_failure("connect", 10.0)
        one.note_success(10.0, 10.0)
    one.note_failure("connect", 11.0)
    assert not one.take_probe(11.0 + 7.9)
    assert one.take_probe(11.0 + 8 * 1.25)
    one.note_success(20.0, 20.0)
    one.note_failure("connect", 20.0 + 31.0)  # a calm time lies between
    assert one.take_probe(51.0 + 1.25)


def test_a_probe_that_never_reports_is_due_again() -> None:
    one = breaker()
    one.note_failure("connect", 0.0)
    assert one.take_probe(2.0)
    assert not one.take_probe(5.9)
    assert one.take_probe(6.0)


def test_failures_of_requests_under_way_do_not_prolong_a_pause() -> None:
    one = breaker()
    one.note_failure("connect", 0.0)
    for moment in range(5):
        assert not one.note_failure("connect", moment * 0.2)
    assert one.take_probe(1.25)
    assert not one.note_failure("broken", 1.3)
    assert one.state == "half_open"


def test_a_late_answer_does_not_close_it() -> None:
    rig = FleetRig([prefill(1), prefill(2)], [decode(1)])
    began = rig.now
    rig.now += 1
    rig.fleet.note_failure(prefill(1), "connect")
    rig.fleet.note_success(prefill(1), began)
    assert rig.fleet.describe()[0].breaker == "open"
    rig.fleet.note_success(prefill(1), rig.now)
    assert rig.fleet.describe()[0].breaker == "closed"


@given(st.lists(st.tuples(st.sampled_from([*KINDS, "success", "take"]), st.floats(0, 40))))
def test_it_is_never_stuck(events: list[tuple[str, float]]) -> None:
    one, now = breaker(), 0.0
    for event, pause in events:
        now += pause
        if event == "success":
            one.note_success(now, now)
            assert one.state == "closed"
        elif event == "take":
            one.take_probe(now)
        else:
            one.note_failure(event, now)  # type: ignore[arg-type]
    assert one.state == "closed" or one.take_probe(now + LIMITS.max_seconds * 1.25)


def test_open_engines_are_not_chosen_while_another_is_left() -> None:
    rig = FleetRig([prefill(1), prefill(2)], [decode(1), decode(2), decode(3)])
    fleet = rig.fleet
    for session in sessions(20):
        ranking = fleet.choose_decode(session)
        fleet.note_failure(ranking[0], "connect")
        assert fleet.choose_decode(session) == ranking[1:]
        assert ranking[0].lookup not in fleet.choose_sources(session, ranking[1], 3)
        fleet.note_failure(ranking[1], "connect")
        fleet.note_failure(ranking[2], "connect")
        assert fleet.choose_decode(session) == ranking, "with all open, trying is better than refusing"
        fleet.note_success(ranking[2])
        assert fleet.choose_decode(session) == ranking[2:]
        fleet.note_success(ranking[0])
        fleet.note_success(ranking[1])
        chosen = fleet.choose_prefill(session, ranking[0])
        assert chosen is not None
        fleet.note_failure(chosen, "connect")
        other = fleet.choose_prefill(session, ranking[0])
        assert other is not None
        assert other != chosen
        assert fleet.choose_prefill(session, ranking[0], {other.address}) == chosen
        assert {view.address: view.breaker for view in fleet.describe()}[chosen.address] == "open"
        fleet.note_success(chosen)


def test_only_the_routers_own_probes_find_out() -> None:
    rig = FleetRig([prefill(1)], [decode(1), decode(2)])
    assert rig.fleet.due_probes() == []
    rig.fleet.note_failure(decode(1), "connect")
    assert rig.fleet.due_probes() == []
    rig.now += 1.25
    assert rig.fleet.due_probes() == [decode(1)]
    assert rig.fleet.due_probes() == []
    assert all(rig.first(session) == decode(2) for session in sessions(20))
    rig.fleet.note_success(decode(1))
    assert {rig.first(session) for session in sessions(20)} == {decode(1), decode(2)}
    rig.now += 60
    assert rig.fleet.due_probes() == []
