"""Sets of engines read from objects, and what is said of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bidikv_operator import names
from bidikv_operator.cache import ChildRef
from bidikv_operator.kinds import CONTROLLER_REVISION, DEPLOYMENT, LEADER_WORKER_SET, Kind
from bidikv_operator.names import DECODE, PREFILL
from bidikv_operator.rollout.describe import describe_rollout
from bidikv_operator.rollout.plan import EngineSet
from bidikv_operator.rollout.scale import PodCost, plan_costs
from bidikv_operator.rollout.sets import LEADER_WORKER_SET_LABEL, find_engine_set, find_lost_sets, read_sets
from bidikv_operator.tests.engine_samples import make_facts, make_pod, make_report
from bidikv_operator.tests.samples import make_resource, resolve

Object = dict[str, Any]
NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
RESOLVED = resolve(make_resource(prefill={"replicas": 2}, decode={"replicas": 2}))
GROUP = RESOLVED.identity.group
ROLLED_OUT = {"observedGeneration": 2, "replicas": 2, "updatedReplicas": 2, "readyReplicas": 2}
EMPTY = {"observedGeneration": 2}


def make_set(
    name: str,
    role: str,
    *,
    group: str = GROUP,
    replicas: int = 2,
    kind: Kind = DEPLOYMENT,
    status: Object | None = None,
) -> tuple[ChildRef, Object]:
    labels = {names.LABEL_ROLE: role, names.LABEL_OWNER: "chat"} | ({names.LABEL_GROUP: group} if group else {})
    annotations = {names.ANNOTATION_INPUT: RESOLVED.identity.input_of(role)}
    obj = {
        "metadata": {"name": name, "labels": labels, "annotations": annotations, "generation": 2},
        "spec": {"replicas": replicas},
        "status": ROLLED_OUT if status is None else status,
    }
    return ChildRef(kind, name), obj


def make_current(role: names.Role, **changes: Any) -> tuple[ChildRef, Object]:
    return make_set(find_engine_set(RESOLVED, role).name, role, **changes)


def grouped(name: str, role: names.Role, group: str = GROUP, **changes: Any) -> Object:
    """A pod of a group."""
    return make_pod(name, role, labels={names.LABEL_GROUP: group}, **changes)


def read_one(obj: tuple[ChildRef, Object], *pods: Object) -> EngineSet:
    (found,) = read_sets(dict([obj]), pods, current=None, now=NOW)
    return found


def test_only_sets_of_engines_are_read() -> None:
    ref, going = make_set("chat-decode-going", DECODE)
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    others = (
        make_set("chat-router", "router"),
        make_set("chat-prefill", PREFILL, kind=Kind("", "v1", "Service", "services")),
        (ref, going),
    )
    children = dict((make_current(PREFILL), *others))
    found = read_sets(children, (), current={find_engine_set(RESOLVED, PREFILL): "x"}, now=NOW)
    assert [(each.ref.name, each.is_current) for each in found] == [(f"chat-prefill-{GROUP}", True)]


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({}, (1, 0)),
        ({"metadata": {"deletionTimestamp": "2026-01-01T12:00:10Z"}}, (0, 1)),
        ({"metadata": {"deletionTimestamp": "2026-01-01T11:59:30+00:00"}}, (0, 1)),
        # its grace period ended long ago: no kubelet ends it
        ({"metadata": {"deletionTimestamp": "2026-01-01T11:58:00Z"}}, (0, 0)),
        ({"status": {"phase": "Failed"}}, (0, 0)),
        ({"status": {"phase": "Succeeded"}}, (0, 0)),
        ({"metadata": {"labels": {names.LABEL_ROLE: PREFILL}}}, (0, 0)),
        ({"metadata": {"labels": {names.LABEL_ROLE: "prefill-worker", names.LABEL_GROUP: GROUP}}}, (0, 0)),
        ({"metadata": {"labels": {names.LABEL_ROLE: DECODE, names.LABEL_GROUP: GROUP}}}, (0, 0)),
    ],
)
def test_pods_are_counted_by_what_they_hold(changes: Object, counted: tuple[int, int]) -> None:
    pod = grouped("a", PREFILL)
    pod = {**pod, "status": changes.get("status", {}), "metadata": {**pod["metadata"], **changes.get("metadata", {})}}
    found = read_one(make_current(PREFILL), pod)
    assert (found.live, found.leaving) == counted


def test_sets_of_before_there_were_groups_have_their_pods() -> None:
    found = read_one(make_set("chat-prefill", PREFILL, group=""), make_pod("a", PREFILL), grouped("b", PREFILL))
    assert (found.group, found.live) == ("", 1)


@pytest.mark.parametrize(
    ("status", "rolled_out", "late"),
    [
        (ROLLED_OUT, True, False),
        ({**ROLLED_OUT, "observedGeneration": 1}, False, False),
        ({**ROLLED_OUT, "readyReplicas": 1}, False, False),
        ({**ROLLED_OUT, "updatedReplicas": 1}, False, False),
        ({**ROLLED_OUT, "replicas": 3}, False, False),
        ({}, False, False),
        (
            {**ROLLED_OUT, "conditions": [{"type": "Progressing", "reason": "ProgressDeadlineExceeded"}]},
            True,
            True,
        ),
    ],
)
def test_a_deployment_is_rolled_out_as_kubectl_says(status: Object, rolled_out: bool, late: bool) -> None:
    found = read_one(make_current(PREFILL, status=status))
    assert (found.is_rolled_out, found.is_late) == (rolled_out, late)


def test_a_leader_worker_set_need_not_tell_what_it_has_seen() -> None:
    status = {key: value for key, value in ROLLED_OUT.items() if key != "observedGeneration"}
    assert read_one(make_set("chat-prefill-x", PREFILL, kind=LEADER_WORKER_SET, status=status)).is_rolled_out


def test_lost_sets_are_found_by_their_pods() -> None:
    spanning = grouped("d", DECODE, "lws")
    spanning["metadata"]["labels"][LEADER_WORKER_SET_LABEL] = "chat-0f0f0f0f-decode-lws"
    pods = (
        grouped("a", PREFILL),
        grouped("b", PREFILL, "old"),
        grouped("c", PREFILL, "old"),
        make_pod("e", PREFILL),
        spanning,
        grouped("f", DECODE, "gone", deleted=True),
        make_pod("g", "router"),
        make_pod("h", labels={names.LABEL_ROLE: "decode-worker", names.LABEL_GROUP: "lws"}),
    )
    labels = {names.LABEL_OWNER: "chat", names.LABEL_MANAGED_BY: names.MANAGED_BY}
    prefill = labels | {names.LABEL_ROLE: PREFILL}
    assert find_lost_sets("chat", dict([make_current(PREFILL)]), pods) == {
        ChildRef(DEPLOYMENT, "chat-prefill-old"): prefill | {names.LABEL_GROUP: "old"},
        ChildRef(DEPLOYMENT, "chat-prefill"): prefill,
        ChildRef(LEADER_WORKER_SET, "chat-0f0f0f0f-decode-lws"): labels
        | {names.LABEL_ROLE: DECODE, names.LABEL_GROUP: "lws"},
    }


@pytest.mark.parametrize(
    ("paused", "status", "expected"),
    [
        (False, {**ROLLED_OUT, "updatedReplicas": 0}, (False, False)),
        (True, ROLLED_OUT, (True, False)),  # it lacks nothing now
        (True, {**ROLLED_OUT, "readyReplicas": 0}, (True, False)),  # its pods start as they would without
        (True, {**ROLLED_OUT, "updatedReplicas": 0}, (True, True)),
        (True, {**ROLLED_OUT, "replicas": 3}, (True, True)),  # paused in the middle
        (True, EMPTY, (True, True)),  # before it had made anything
        (True, {**ROLLED_OUT, "observedGeneration": 1, "updatedReplicas": 0}, (True, False)),
    ],
)
def test_a_pause_holds_what_has_not_reached_the_pods(paused: bool, status: Object, expected: tuple[bool, bool]) -> None:
    ref, obj = make_current(PREFILL, status=status)
    found = read_one((ref, {**obj, "spec": {**obj["spec"], "paused": paused}}))
    assert (found.is_paused, found.is_held) == expected


def test_a_pause_of_what_should_be_empty_holds_nothing() -> None:
    ref, obj = make_current(PREFILL, replicas=0, status=EMPTY)
    assert not read_one((ref, {**obj, "spec": {**obj["spec"], "paused": True}})).is_held


HOUR_AGO, HALF_AN_HOUR_AGO, LONG_AGO = "2026-01-01T11:00:00Z", "2026-01-01T11:30:00Z", "2025-12-01T00:00:00Z"
DEADLINE = timedelta(minutes=60)
BEHIND = {"replicas": 2, "updatedReplicas": 2, "readyReplicas": 1}


def under_way(since: str, *more: Object, status: str = "True") -> Object:
    """What a LeaderWorkerSet says while not all of it is ready."""
    available = {"type": "Available", "status": "False" if status == "True" else "True", "lastTransitionTime": since}
    progressing = {"type": "Progressing", "status": status, "lastTransitionTime": since}
    return {**BEHIND, "conditions": [available, progressing, *more]}


def ready_since(
    name: str, since: str, group: str = GROUP, role: names.Role = PREFILL, *, status: str = "True"
) -> Object:
    pod = grouped(name, role, group)
    pod["status"]["conditions"] = [{"type": "Ready", "status": status, "lastTransitionTime": since}]
    return pod


@pytest.mark.parametrize(
    ("status", "pods", "late_at"),
    [
        (under_way(HALF_AN_HOUR_AGO), (), "12:30"),
        (under_way(HOUR_AGO), (), "12:00"),
        # complete, or about to look at a change of its replicas
        (ROLLED_OUT, (), None),
        ({**under_way(LONG_AGO, status="False"), "readyReplicas": 2}, (), None),
        (under_way(LONG_AGO, status="False"), (), None),
        # a replica of several became ready meanwhile; that of another group or role is none of them
        (under_way(HOUR_AGO), (ready_since("a", HALF_AN_HOUR_AGO),), "12:30"),
        (under_way(HOUR_AGO), (ready_since("a", LONG_AGO),), "12:00"),
        # one was lost meanwhile: that is none
        (under_way(HOUR_AGO), (ready_since("a", HALF_AN_HOUR_AGO, status="False"),), "12:00"),
        (under_way(HOUR_AGO), (ready_since("a", HALF_AN_HOUR_AGO, "old"),), "12:00"),
        (under_way(HOUR_AGO), (ready_since("a", HALF_AN_HOUR_AGO, role=DECODE),), "12:00"),
        # its template was changed while it was not complete: seen by one condition, or by none (up to release 0.8)
        (
            under_way(HOUR_AGO, {"type": "UpdateInProgress", "status": "True", "lastTransitionTime": HALF_AN_HOUR_AGO}),
            (),
            "12:30",
        ),
        (
            under_way(
                HOUR_AGO, {"type": "UpdateInProgress", "status": "False", "lastTransitionTime": HALF_AN_HOUR_AGO}
            ),
            (),
            "12:00",
        ),
        # its controller has said nothing, or nothing yet about this spec
        ({}, (), "11:10"),
        ({**under_way(HOUR_AGO), "observedGeneration": 1}, (), None),
        ({**under_way(HOUR_AGO), "observedGeneration": 2}, (), "12:00"),
    ],
)
def test_a_leader_worker_set_is_late_by_what_it_says_of_its_progress(
    status: Object, pods: tuple[Object, ...], late_at: str | None
) -> None:
    ref, obj = make_set("chat-prefill-x", PREFILL, kind=LEADER_WORKER_SET, status=status)
    obj["metadata"]["creationTimestamp"] = "2026-01-01T10:10:00Z"
    (found,) = read_sets({ref: obj}, pods, current={ref: "x"}, now=NOW, deadline=DEADLINE)
    assert (found.late_at and found.late_at.strftime("%H:%M")) == late_at
    assert found.is_late == (late_at is not None and late_at <= "12:00")
    before = read_sets({ref: obj}, pods, current={ref: "x"}, now=NOW - timedelta(seconds=1), deadline=DEADLINE)
    assert (before[0].late_at, before[0].is_late) == (found.late_at, late_at == "11:10")


def test_a_template_that_is_made_later_has_the_whole_deadline() -> None:
    ref, obj = make_set("chat-prefill-x", PREFILL, kind=LEADER_WORKER_SET, status=under_way(HOUR_AGO))
    revisions = {}
    for role, present, made in (
        (PREFILL, RESOLVED.identity.input_of(PREFILL), "2026-01-01T11:20:00Z"),
        (PREFILL, "another", HALF_AN_HOUR_AGO),
        (DECODE, RESOLVED.identity.input_of(PREFILL), HALF_AN_HOUR_AGO),
    ):
        metadata = {
            "labels": {names.LABEL_ROLE: role},
            "annotations": {names.ANNOTATION_INPUT: present},
            "creationTimestamp": made,
        }
        revisions[ChildRef(CONTROLLER_REVISION, f"{role}-{present}")] = {"metadata": metadata}
    (found,) = read_sets({ref: obj, **revisions}, (), current={ref: "x"}, now=NOW, deadline=DEADLINE)
    assert found.late_at == datetime(2026, 1, 1, 12, 20, tzinfo=UTC)


def test_only_current_leader_worker_sets_have_a_deadline_that_is_computed() -> None:
    ref, obj = make_set("chat-prefill-x", PREFILL, kind=LEADER_WORKER_SET, status=under_way(LONG_AGO))
    deployment_ref, deployment = make_current(DECODE, status=under_way(LONG_AGO))
    children = {ref: obj, deployment_ref: deployment}
    for current in (None, {deployment_ref: "x"}):
        for deadline in (None, DEADLINE) if current else (None,):
            sets = read_sets(children, (), current=current, now=NOW, deadline=deadline)
            assert {(found.late_at, found.is_late) for found in sets} == {(None, False)}


def test_names_fit_what_is_made_of_them() -> None:
    resource = make_resource(decode={"tensorParallelSize": 2, "nodesPerReplica": 2}, name="a" * 40)
    resolved = resolve(resource)
    assert len(find_engine_set(resolved, PREFILL).name) <= 63
    found = find_engine_set(resolved, DECODE)
    assert found.kind == LEADER_WORKER_SET
    # <name>-<index>-<hash of 10> is a label of the workers.
    assert len(found.name) + len("-1023-") + 10 <= 63


CURRENT = (make_current(PREFILL), make_current(DECODE))
OLD = (make_set("chat-prefill-old", PREFILL, group="old"), make_set("chat-decode-old", DECODE, group="old"))
STARTING = {"observedGeneration": 2, "replicas": 1, "updatedReplicas": 1}


def crashing(name: str, group: str = GROUP) -> Object:
    pod = grouped(name, PREFILL, group, ready=False)
    crashed = {"name": "engine", "image": "x", "ready": False, "state": {"terminated": {"exitCode": 1}}}
    return {**pod, "status": {"containerStatuses": [crashed]}}


@pytest.mark.parametrize(
    ("children", "pods", "settled", "failed", "words"),
    [
        (CURRENT, (), True, False, "newest template"),
        (CURRENT[:1], (), False, False, "being brought up"),
        ((*CURRENT, *OLD), (), False, False, "take their place"),
        (
            (*CURRENT, make_set("chat-prefill-old", PREFILL, group="old", replicas=0, status=EMPTY)),
            (grouped("a", PREFILL, "old", deleted=True),),
            False,
            False,
            "are being brought up",  # that pod's kubelet is long gone
        ),
        ((CURRENT[0], make_current(DECODE, status=STARTING)), (), False, False, "being brought up"),
        ((make_current(PREFILL, status=STARTING), CURRENT[1], *OLD), (crashing("a"),), False, True, "keeps serving"),
        # nothing ran before: the role's own condition tells
        ((make_current(PREFILL, status=STARTING), CURRENT[1]), (crashing("a"),), False, False, "being brought up"),
        # an old engine crashes: no fault of the new ones
        ((make_current(PREFILL, status=STARTING), CURRENT[1], *OLD), (crashing("a", "old"),), False, False, "place"),
        (
            (
                make_current(
                    PREFILL,
                    status={**STARTING, "conditions": [{"type": "Progressing", "reason": "ProgressDeadlineExceeded"}]},
                ),
                CURRENT[1],
            ),
            (),
            False,
            True,
            "do not come up",
        ),
    ],
)
def test_what_is_said_of_a_rollout(
    children: tuple[tuple[ChildRef, Object], ...], pods: tuple[Object, ...], settled: bool, failed: bool, words: str
) -> None:
    found = describe_rollout(RESOLVED, dict(children), pods, NOW)
    assert (found.is_settled, found.is_failed) == (settled, failed)
    assert words in found.message
    assert (found.group, found.wanted) == (GROUP, {PREFILL: 2, DECODE: 2})


def test_a_late_leader_worker_set_fails_a_rollout_as_a_late_deployment_does() -> None:
    spanning = resolve(make_resource(prefill={"replicas": 2, "tensorParallelSize": 2, "nodesPerReplica": 2}))
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    told = []
    for resolved, status in (
        (RESOLVED, {**STARTING, "conditions": [late]}),
        (spanning, {**STARTING, "conditions": under_way("2026-01-01T10:49:59Z")["conditions"]}),
    ):
        ref = find_engine_set(resolved, PREFILL)
        group = resolved.identity.group
        children = [
            make_set(ref.name, PREFILL, group=group, kind=ref.kind, status=status),
            make_set(find_engine_set(resolved, DECODE).name, DECODE, group=group),
            *OLD,
        ]
        found = describe_rollout(resolved, dict(children), (), NOW)
        told.append((found.is_failed, found.message, [each.is_late for each in found.sets]))
    assert told[0] == told[1]
    assert told[0][0]


def test_a_gap_that_nobody_can_avoid_is_told() -> None:
    single = resolve(make_resource(prefill={"replicas": 1}, decode={"replicas": 2}))
    message = describe_rollout(single, dict((*CURRENT, *OLD)), (), NOW).message
    assert "; prefill will be away for as long as an engine takes to start" in message


def test_of_an_invalid_resource_all_sets_are_current() -> None:
    found = describe_rollout(None, dict((*CURRENT, *OLD)), (), NOW)
    assert all(each.is_current for each in found.sets)
    assert (found.group, found.wanted, found.is_failed) == ("", {PREFILL: 4, DECODE: 4}, False)


@pytest.mark.parametrize(
    ("planned", "costs"),
    [
        (2, [PodCost("pod-a", "uid-a", 20_000)]),
        (3, []),  # nothing goes
        (4, []),
        (0, []),  # all go
    ],
)
def test_costs_are_planned_where_some_pods_go_and_some_stay(planned: int, costs: list[PodCost]) -> None:
    found = EngineSet(
        ref=ChildRef(DEPLOYMENT, "x"), role=DECODE, group=GROUP, is_current=True, replicas=3, live=3, ready=3
    )
    known = grouped("pod-b", DECODE)
    known["metadata"]["annotations"] = {names.ANNOTATION_DELETION_COST: "10000"}
    pods = (grouped("pod-a", DECODE), known, grouped("pod-c", DECODE), grouped("pod-d", DECODE, deleted=True))
    for pod in pods:
        pod["metadata"]["uid"] = pod["metadata"]["name"].replace("pod", "uid")
    facts = [
        make_facts("a", report=make_report(unread_sessions=1)),
        make_facts("a", report=make_report(unread_handovers=1)),  # another rank of the same pod
        make_facts("b", report=make_report(unread_sessions=1)),
        make_facts("c"),
        make_facts("d", report=make_report(unread_sessions=9)),
    ]
    assert list(plan_costs([found], {found.ref: planned}, pods, facts)) == costs
