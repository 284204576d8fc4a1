"""An engine's load: what it reported, corrected by this replica's own work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_runtime.router.choice.endpoints import Pools
from bidikv_runtime.router.choice.engine import Engine, Totals, Work
from bidikv_runtime.router.choice.path import Decision
from bidikv_runtime.tests.choice_rig import FleetRig, decode, held, prefill, report, sessions


def engine() -> Engine:
    made = Engine(decode(1), "decode", None, Totals())  # type: ignore[arg-type]
    made.candidate = True
    return made


def test_others_work_is_what_was_reported_less_ones_own_at_that_time() -> None:
    one = engine()
    mine = [Work(one, 0, sent=True) for _ in range(3)]
    unsent = Work(one, 0, sent=False)
    assert one.load == 4
    one.take_report(report(requests=10), 1.0)
    assert one.load == 7 + 3 + 1, "7 of others; the engine cannot know of the turn that is still at prefill"
    mine[0].end()
    mine[0].end()
    assert one.load == 10
    unsent.send()
    assert one.load == 10
    one.take_report(report(requests=9), 2.0)
    assert one.load == 6 + 3
    one.take_report(report(requests=1), 3.0)
    assert one.load == 3, "not less than one's own: the rest is under way"
    one.take_report(None, 4.0)
    assert one.load == 3
    for work in (*mine, unsent):
        work.end()
    assert one.load == one.totals.load == one.totals.works == 0


def test_prompt_tokens_move_with_ones_own_work_but_never_below_what_is_new() -> None:
    one = engine()
    first = Work(one, 8000, sent=True)
    assert one.queued_tokens == 8000
    one.take_report(report(queued_tokens=3000), 1.0)
    assert one.queued_tokens == 3000, "it has computed 5000 of them"
    second = Work(one, 2000, sent=True)
    assert one.queued_tokens == 5000
    first.end()
    assert one.queued_tokens == 2000, "8000 less, but the second one is new"
    second.finish_prompt()
    assert one.queued_tokens == 0
    second.end()
    one.take_report(report(queued_tokens=700), 2.0)
    assert one.queued_tokens == 700, "of others"


@given(st.lists(st.tuples(st.sampled_from(["begin", "send", "finish", "end", "report", "silent"]), st.integers(0, 50))))
def test_sums_are_right_whatever_happens(steps: list[tuple[str, int]]) -> None:
    one = engine()
    works: list[Work] = []
    for step, number in steps:
        if step == "begin":
            works.append(Work(one, number, sent=number % 2 == 0))
        elif step == "report":
            one.take_report(report(requests=number, queued_tokens=number), 0.0)
        elif step == "silent":
            one.take_report(None, 0.0)
        elif works:
            work = works[number % len(works)]
            {"send": work.send, "finish": work.finish_prompt, "end": work.end}[step]()
        assert one.load == one.totals.load >= one.works + one.unsent
        assert one.queued_tokens >= one.tokens_since_report >= 0
    for work in works:
        work.end()
    one.take_report(None, 0.0)
    assert (one.load, one.totals.load, one.totals.works, one.queued_tokens, one.tokens) == (0, 0, 0, 0, 0)


def test_sessions_follow_the_reports() -> None:
    one = engine()
    a, b, c = sessions(3)
    one.take_report(report(held(a, 100), held(b, 200)), 0.0)
    one.take_report(report(held(a, 0), held(c, 300)), 1.0)
    assert {name: kept.held_tokens for name, kept in one.held.items()} == {b.hex(): 200, c.hex(): 300}
    one.take_report(report(held(a, 50), epoch="2"), 2.0)
    assert list(one.held) == [a.hex()], "it has restarted"
    one.take_report(None, 3.0)
    assert not one.held


def test_known_sessions_are_bounded() -> None:
    one = engine()
    keys = sessions(9000)
    one.take_report(report(*[held(key, 1) for key in keys]), 0.0)
    assert list(one.held) == [key.hex() for key in keys[-8192:]]


def test_an_engine_that_leaves_and_its_work_leave_no_trace() -> None:
    rig = FleetRig([prefill(1)], [decode(1), decode(2)], limits={"spill_floor": 0})
    session = sessions(1)[0]
    gone, kept = rig.fleet.choose_decode(session)
    works = [rig.fleet.decoding(gone) for _ in range(50)]
    rig.fleet.replace(Pools((prefill(1),), (kept,)))
    works.append(rig.fleet.decoding(gone))
    assert rig.fleet.busy
    for work in works:
        work.end()
    assert [rig.fleet.busy] == [False]
    assert [(view.address, view.load) for view in rig.fleet.describe() if view.role == "decode"] == [(kept.address, 0)]
    rig.fleet.replace(Pools((prefill(1),), (gone, kept)))
    assert rig.fleet.choose_decode(session)[0] in (gone, kept)


@pytest.mark.parametrize("reported", [0.0, 2000.0])
def test_the_speed_of_an_engine_that_does_not_report_is_observed(reported: float) -> None:
    rig = FleetRig([prefill(1)], [decode(1)])
    if reported:
        rig.report(prefill(1), prefill_tokens_per_second=reported)
    decision = Decision("plain", "first", uncached_tokens=1000, prompt_tokens=1000)
    rig.fleet.observe_prefill(prefill(1), decision, 1000, 0.5)
    rig.fleet.observe_prefill(prefill(1), decision, 100, 10.0)  # too short to tell
    assert rig.fleet.describe()[0].prefill_tokens_per_second == 2000.0
