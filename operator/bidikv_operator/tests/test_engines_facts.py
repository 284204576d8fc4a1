"""What is kept of reports, and what of a change is worth a reconcile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bidikv_operator import names
from bidikv_operator.cache import Key
from bidikv_operator.engines.facts import Expectation, FactStore, build_expectation
from bidikv_operator.engines.reach import GRACE_SECONDS
from bidikv_operator.resolved import ResolvedFabric
from bidikv_operator.state import Fault
from bidikv_operator.tests.engine_samples import make_pod, make_report
from bidikv_operator.tests.samples import make_resource, resolve
from bidikv_runtime.contract import REACH_SECONDS, EngineReport, TransportReport

Object = dict[str, Any]
KEY = Key("team", "chat")
PODS = (make_pod("d", "decode", "10.0.0.2"), make_pod("p", "prefill", "10.0.0.1"))
MOVED = TransportReport("UCX", "tcp", read_bytes=1000, bandwidth=2.2e9)


class Rig:
    def __init__(self) -> None:
        self.now = 1000.0
        self.store = FactStore(clock=lambda: self.now)
        self.pods: Sequence[Object] = PODS
        self.status: Object = {}
        self.expect()

    def expect(self, decode: int = 1) -> None:
        self.store.expect(KEY, Expectation({"prefill": 1, "decode": decode}, ResolvedFabric(type="TCP"), 60))

    def poll(self, **answers: EngineReport | Fault) -> bool:
        """All engines answer, by pod; an idle one's report by default. Returns whether to reconcile."""
        for target in self.store.targets(KEY, self.pods):
            self.store.take(KEY, target, answers.get(target.pod, make_report(MOVED)))
        return self.store.judge(KEY, self.pods, self.status)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_an_engine_is_known_before_it_was_asked(rig: Rig) -> None:
    decode, prefill = rig.store.observe(KEY, PODS)
    assert (decode.role, decode.pod, decode.uid, decode.address) == ("decode", "d", "uid-d", "10.0.0.2:5700")
    assert (prefill.report, prefill.fault, prefill.age_seconds) == (None, None, 0.0)


def test_a_report_stays_with_its_age_when_the_engine_falls_silent(rig: Rig) -> None:
    report = make_report(requests=3)
    rig.poll(d=report, p="silent")
    rig.now += 15
    rig.poll(d="silent", p="refused")
    decode, prefill = rig.store.observe(KEY, PODS)
    assert (decode.report, decode.age_seconds, decode.fault) == (report, 15.0, "silent")
    assert (prefill.report, prefill.age_seconds, prefill.fault) == (None, 15.0, "refused")
    rig.poll(d=report)
    assert rig.store.observe(KEY, PODS)[0].fault is None


def test_pods_that_are_gone_are_forgotten(rig: Rig) -> None:
    rig.poll()
    assert rig.store.count() == 2
    rig.pods = PODS[:1]
    rig.poll()
    assert rig.store.count() == 1
    rig.store.forget(KEY)
    assert (rig.store.count(), rig.store.keys(), rig.store.observe(KEY, PODS)) == (0, (), ())
    assert not rig.poll()


def test_answers_that_come_after_a_deletion_are_dropped(rig: Rig) -> None:
    [target, _] = rig.store.targets(KEY, PODS)
    rig.store.forget(KEY)
    rig.store.take(KEY, target, make_report())
    assert not rig.store.judge(KEY, PODS, {})
    assert rig.store.count() == 0


def test_ranks_have_reports_of_their_own(rig: Rig) -> None:
    rig.expect(decode=2)
    for number, target in enumerate(rig.store.targets(KEY, PODS)):
        rig.store.take(KEY, target, make_report(requests=number))
    assert [(one.address, one.report.requests) for one in rig.store.observe(KEY, PODS) if one.report] == [
        ("10.0.0.2:5700", 0),
        ("10.0.0.2:5701", 1),
        ("10.0.0.1:5700", 2),
    ]


def test_that_it_is_known_long_enough_to_judge_is_news(rig: Rig) -> None:
    rig.poll()
    rig.now += REACH_SECONDS + 59
    assert not rig.poll()
    rig.now += 1
    assert rig.poll()
    rig.now += 100
    assert not rig.poll()


def test_what_ticks_is_no_news(rig: Rig) -> None:
    assert rig.poll(), "the first reports are"
    rig.now += REACH_SECONDS + 60
    rig.poll()
    for step in range(1, 20):
        rig.now += 15
        moved = TransportReport("UCX", "tcp", read_bytes=1000 + step, bandwidth=2.2e9 + step * 1e6)
        report = make_report(moved, requests=step, queued_tokens=step, sequence=step, free_blocks=1 / step)
        assert not rig.poll(d=report, p=report), step


def test_coarse_changes_are_news_once(rig: Rig) -> None:
    rig.poll()
    fallen = make_report(TransportReport("UCX", "efa", read_bytes=1))
    assert rig.poll(d=fallen)
    assert not rig.poll(d=fallen)
    assert rig.poll()
    assert rig.poll(d=make_report(MOVED, held_sessions=20))
    assert not rig.poll(d=make_report(MOVED, held_sessions=21))


def test_engines_that_never_answer_are_news_when_it_is_no_longer_too_early(rig: Rig) -> None:
    assert rig.poll(d="silent", p="silent")
    news = 0
    for _ in range(int(3 * GRACE_SECONDS / 15)):
        rig.now += 15
        news += rig.poll(d="silent", p="silent")
    assert news == 1, "it is known long enough to judge"
    # Against a live condition that an earlier leader wrote, the change is from "as it was" to NoReports.
    rig = Rig()
    rig.status = {
        "conditions": [{"type": names.TRANSPORT_VERIFIED, "status": "True", "reason": "Verified", "message": "it is"}]
    }
    assert rig.poll(d="silent", p="silent")
    told = []
    for _ in range(int(3 * GRACE_SECONDS / 15)):
        rig.now += 15
        told.append(rig.poll(d="silent", p="silent"))
    assert sum(told) == 2, "and the other is that it is known long enough to judge"


def test_a_peer_is_late_after_as_long_as_the_resource_says(rig: Rig) -> None:
    accuse = make_report(MOVED, unreachable=("10.0.0.2:5700",))
    rig.poll()
    rig.now += REACH_SECONDS
    assert not rig.poll(p=accuse)
    rig.now += 59
    assert not rig.poll(p=accuse)
    rig.now += 1
    assert rig.poll(p=accuse)
    assert [one.unreachable_seconds for one in rig.store.observe(KEY, PODS)] == [60.0, 0.0]
    rig.now += 15
    assert not rig.poll(p=accuse)
    assert rig.poll(), "it is reached again"
    assert [one.unreachable_seconds for one in rig.store.observe(KEY, PODS)] == [0.0, 0.0]
    assert not rig.poll(p=accuse), "and the time begins anew"


def test_what_peers_tell_of_an_earlier_process_does_not_count(rig: Rig) -> None:
    accuse = make_report(MOVED, unreachable=("10.0.0.2:5700",))

    def is_accused() -> bool:
        return rig.store.observe(KEY, PODS)[0].unreachable_seconds > 0

    rig.poll(p=accuse)
    rig.now += REACH_SECONDS + 1
    rig.poll(p=accuse)
    rig.now += 1
    assert is_accused()
    rig.poll(d=make_report(MOVED, epoch="2"), p=accuse)
    assert not is_accused(), "it has restarted in its pod"
    rig.now += REACH_SECONDS - 1
    rig.poll(d=make_report(MOVED, epoch="2"), p=accuse)
    rig.now += 1
    assert not is_accused()
    rig.poll(d=make_report(MOVED, epoch="2"), p=accuse)
    rig.now += 1
    assert is_accused()
    rig.pods = PODS[1:]
    rig.poll(p=accuse)
    rig.pods = PODS
    rig.poll(p=accuse)
    rig.now += 1
    assert not is_accused(), "its container was down for a while"


def test_the_expectation_is_the_resources() -> None:
    resolved = resolve(make_resource(healing={"unreachableSeconds": 90}))
    expectation = build_expectation(resolved)
    assert expectation == Expectation({"prefill": 1, "decode": 1}, resolved.fabric, 90)
