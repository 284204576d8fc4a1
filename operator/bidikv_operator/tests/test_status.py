"""Conditions and counts for what a cluster may show."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_operator import names
from bidikv_operator.api.v1alpha1 import BidiKVInferenceStatus
from bidikv_operator.cache import ChildRef
from bidikv_operator.kinds import DEPLOYMENT, SERVICE
from bidikv_operator.resolved import Resolved
from bidikv_operator.state import Applied, Failure, Observed
from bidikv_operator.status.compute import compute_status
from bidikv_operator.status.conditions import Condition, build_conditions
from bidikv_operator.status.pods import diagnose_pod, find_trouble
from bidikv_operator.status.write import is_same
from bidikv_operator.tests.samples import UID, make_resource, resolve
from bidikv_operator.validate import Problem, Rejected

Object = dict[str, Any]
NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T01:00:00Z"
ROLES = ("prefill", "decode", "router")


def deployment(
    wanted: int = 1,
    ready: int = 1,
    updated: int | None = None,
    *,
    replicas: int | None = None,
    seen: bool = True,
    **status: Any,
) -> Object:
    updated = wanted if updated is None else updated
    return {
        "metadata": {"generation": 2},
        "spec": {"replicas": wanted},
        "status": {
            "observedGeneration": 2 if seen else 1,
            "replicas": wanted if replicas is None else replicas,
            "readyReplicas": ready,
            "updatedReplicas": updated,
            **status,
        },
    }


def pod(role: str = "prefill", **status: Any) -> Object:
    return {"metadata": {"name": "chat-x-1", "labels": {names.LABEL_ROLE: role}}, "status": status}


def waiting(reason: str, **more: Any) -> Object:
    return {"name": "engine", "image": "reg/i:1", "state": {"waiting": {"reason": reason, **more}}}


def ended(code: int, reason: str = "Error", *, phase: str = "waiting") -> Object:
    """A crashing container in one of the three phases between which it alternates."""
    end = {"terminated": {"exitCode": code, "reason": reason}}
    states: Object = {
        "waiting": {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": end},
        "running": {"state": {"running": {}}, "lastState": end},
        "terminated": {"state": end, "lastState": {}},
    }
    return {"name": "engine", "image": "reg/i:1", "ready": False, "restartCount": 4, **states[phase]}


def status_of(
    deployments: dict[str, Object] | None = None,
    *,
    pods: tuple[Object, ...] = (),
    resource: Object | None = None,
    checked: Resolved | Rejected | None = None,
    failures: tuple[Failure, ...] = (),
    waiting_for: tuple[ChildRef, ...] = (),
    now: str = NOW,
) -> Object:
    resource = resource or make_resource()
    found = {ChildRef(DEPLOYMENT, f"chat-{role}"): obj for role, obj in (deployments or {}).items()}
    observed = Observed(resource=resource, children=found, pods=pods)
    applied = Applied(children=found, failures=failures, waiting=waiting_for)
    status = compute_status(observed, checked or resolve(make_resource()), applied, now=now)
    BidiKVInferenceStatus.model_validate(status)
    return status


def conditions_of(status: Object) -> dict[str, tuple[str, str]]:
    return {condition["type"]: (condition["status"], condition["reason"]) for condition in status["conditions"]}


def message_of(status: Object, name: str) -> str:
    return next(str(condition["message"]) for condition in status["conditions"] if condition["type"] == name)


ALL_READY = {role: deployment() for role in ROLES}


def test_all_ready() -> None:
    status = status_of(ALL_READY)
    assert conditions_of(status) == {
        "Accepted": ("True", "Valid"),
        "PrefillReady": ("True", "AllReplicasReady"),
        "DecodeReady": ("True", "AllReplicasReady"),
        "RouterReady": ("True", "AllReplicasReady"),
        "Progressing": ("False", "RolledOut"),
        "Ready": ("True", "Ready"),
    }
    assert status["observedGeneration"] == 3
    assert {condition["observedGeneration"] for condition in status["conditions"]} == {3}
    assert status["endpoint"] == "http://chat.team.svc:8000/v1"
    assert status["decode"] == {
        "replicas": 1,
        "readyReplicas": 1,
        "updatedReplicas": 1,
        "selector": "serving.bidikv.io/owner=chat,serving.bidikv.io/role=decode",
    }


def test_every_condition_from_the_first_pass_on() -> None:
    conditions = conditions_of(status_of())
    assert set(conditions) == set(names.CONDITION_TYPES)
    assert conditions["PrefillReady"] == ("Unknown", "NotCreated")
    assert conditions["Ready"] == ("False", "NotCreated")
    assert conditions["Progressing"] == ("True", "RollingOut")


def test_rejected_resource_keeps_telling_of_what_runs() -> None:
    rejected = Rejected((Problem("spec.fabric", "set one of them"), Problem("spec.prefill", "lower it")))
    status = status_of(ALL_READY, checked=rejected)
    conditions = conditions_of(status)
    assert conditions["Accepted"] == ("False", "Invalid")
    assert message_of(status, "Accepted") == "spec.fabric: set one of them; spec.prefill: lower it"
    assert conditions["PrefillReady"] == ("True", "AllReplicasReady")
    assert conditions["Ready"] == ("False", "Invalid")
    assert conditions["Progressing"] == ("False", "Invalid")


@pytest.mark.parametrize(
    ("found", "ready", "progressing"),
    [
        (deployment(2, 0), ("False", "Starting"), ("True", "RollingOut")),
        (deployment(2, 1), ("False", "Starting"), ("True", "RollingOut")),
        (deployment(0, 0), ("False", "ScaledToZero"), ("False", "RolledOut")),
        # Ready pods of the old template only: it serves, and it rolls.
        (deployment(2, 2, updated=1), ("True", "AllReplicasReady"), ("True", "RollingOut")),
        # An old pod is still there beside all new ones.
        (deployment(2, 2, replicas=3), ("True", "AllReplicasReady"), ("True", "RollingOut")),
        # The Deployment's controller has not seen the new spec: what was ready still serves.
        (deployment(2, 2, seen=False), ("True", "AllReplicasReady"), ("True", "RollingOut")),
        ({"metadata": {"generation": 1}, "spec": {"replicas": 1}}, ("False", "Starting"), ("True", "RollingOut")),
        (
            deployment(
                2, 1, conditions=[{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]
            ),
            ("False", "Starting"),
            ("False", "Stalled"),
        ),
        (
            deployment(2, 0, conditions=[{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}]),
            ("False", "PodCreationFailed"),
            ("True", "RollingOut"),
        ),
    ],
)
def test_rollout(found: Object, ready: tuple[str, str], progressing: tuple[str, str]) -> None:
    conditions = conditions_of(status_of({**ALL_READY, "prefill": found}))
    assert conditions["PrefillReady"] == ready
    assert conditions["Progressing"] == progressing
    assert conditions["Ready"] == (("True", "Ready") if ready[0] == "True" else ready)


def test_failures_are_told_together_and_in_order() -> None:
    failures = (
        Failure(ChildRef(SERVICE, "b"), names.REASON_NAME_TAKEN, "taken"),
        Failure(ChildRef(DEPLOYMENT, "a"), names.REASON_APPLY_FAILED, "refused"),
    )
    status = status_of(ALL_READY, failures=failures)
    assert conditions_of(status)["Progressing"] == ("False", "NameTaken")
    assert message_of(status, "Progressing") == "Deployment a: refused; Service b: taken"


def test_not_ready_without_one_of_its_children() -> None:
    """The endpoint's Service may belong to somebody else: ready pods alone serve nobody."""
    taken = Failure(ChildRef(SERVICE, "chat"), names.REASON_NAME_TAKEN, "exists and belongs to something else")
    status = status_of(ALL_READY, failures=(taken,))
    assert conditions_of(status)["Ready"] == ("False", "NameTaken")
    assert message_of(status, "Ready") == "Service chat: exists and belongs to something else"
    absent = Failure(ChildRef(SERVICE, "chat"), names.REASON_APPLY_FAILED, "exceeded quota")
    assert conditions_of(status_of(ALL_READY, failures=(absent,)))["Ready"] == ("False", "ApplyFailed")


def test_ready_while_a_child_can_only_not_be_changed() -> None:
    refused = Failure(ChildRef(DEPLOYMENT, "chat-decode"), names.REASON_APPLY_FAILED, "exceeded quota")
    status = status_of(ALL_READY, failures=(refused,))
    assert conditions_of(status)["Ready"] == ("True", "Ready")
    assert conditions_of(status)["Progressing"] == ("False", "ApplyFailed")


def test_waiting_for_a_predecessor() -> None:
    status = status_of(ALL_READY, waiting_for=(ChildRef(SERVICE, "chat"),))
    assert conditions_of(status)["Progressing"] == ("True", "WaitingForDeletion")
    assert "Service chat" in message_of(status, "Progressing")


UNSCHEDULABLE: Object = {
    "conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes are available"}
    ]
}


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        (UNSCHEDULABLE, "Unschedulable", "0/2 nodes are available"),
        ({"containerStatuses": [waiting("ErrImagePull")]}, "ImagePullFailed", "image reg/i:1 of container engine"),
        ({"containerStatuses": [waiting("ImagePullBackOff")]}, "ImagePullFailed", "spec.imagePullSecrets"),
        ({"initContainerStatuses": [waiting("ErrImagePull")]}, "ImagePullFailed", "reg/i:1"),
        (
            {"containerStatuses": [waiting("CreateContainerConfigError", message='secret "hub" not found')]},
            "ContainerConfigError",
            'secret "hub" not found',
        ),
        ({"containerStatuses": [ended(1)]}, "ContainerCrashing", "exit code 1"),
        ({"containerStatuses": [ended(137, "OOMKilled")]}, "OutOfMemory", "raise its memory limit"),
        ({"containerStatuses": [waiting("ContainerCreating")]}, None, ""),
        ({"containerStatuses": [{"name": "engine", "ready": False, "state": {"running": {}}}]}, None, ""),
        ({"initContainerStatuses": [{"name": "i", "state": {"terminated": {"exitCode": 0}}}]}, None, ""),
        ({"conditions": [{"type": "Ready", "status": "True"}], "containerStatuses": [ended(1)]}, None, ""),
        ({}, None, ""),
    ],
)
def test_pod_troubles(status: Object, reason: str | None, words: str) -> None:
    trouble = diagnose_pod(pod(**status))
    if reason is None:
        assert trouble is None
    else:
        assert trouble is not None
        assert trouble.reason == reason
        assert words in trouble.message


def test_ids_of_one_attempt_are_left_out() -> None:
    def tell(container: str) -> str:
        message = f'failed to reserve name "engine_chat-x-1_team_{UID}_0": reserved for "{container}"'
        trouble = diagnose_pod(pod(containerStatuses=[waiting("CreateContainerError", message=message)]))
        assert trouble is not None
        return trouble.message

    assert tell("a" * 64) == tell("0123456789ab" * 5)
    assert "chat-x-1" not in tell("a" * 64)
    assert "reserved for" in tell("a" * 64)


def test_a_leaving_pod_is_no_trouble() -> None:
    leaving = pod(containerStatuses=[ended(137)])
    leaving["metadata"]["deletionTimestamp"] = NOW
    assert diagnose_pod(leaving) is None


def test_the_phases_of_one_trouble_look_the_same() -> None:
    crashes = {
        diagnose_pod(pod(containerStatuses=[ended(1, phase=phase)])) for phase in ("waiting", "running", "terminated")
    }
    pulls = {diagnose_pod(pod(containerStatuses=[waiting(reason)])) for reason in ("ErrImagePull", "ImagePullBackOff")}
    assert len(crashes) == len(pulls) == 1


def test_the_worst_trouble_is_told_whatever_the_order() -> None:
    pods = [pod(**UNSCHEDULABLE), pod(containerStatuses=[ended(1)]), pod(containerStatuses=[waiting("ErrImagePull")])]
    for order in (pods, pods[::-1]):
        trouble = find_trouble(order)
        assert trouble is not None
        assert trouble.reason == "ImagePullFailed"


def test_trouble_of_a_role_reaches_ready() -> None:
    starting = deployment(2, 1)
    status = status_of({**ALL_READY, "decode": starting}, pods=(pod("decode", **UNSCHEDULABLE), pod("prefill")))
    assert conditions_of(status)["DecodeReady"] == ("False", "Unschedulable")
    assert conditions_of(status)["Ready"] == ("False", "Unschedulable")
    assert message_of(status, "Ready").startswith("1 of 2 decode pods are ready: a pod cannot be scheduled: 0/2")
    assert "chat-x-1" not in str(status), "a pod's random name would be written anew for each pod"


def test_transition_times_move_with_the_status_only() -> None:
    first = status_of({**ALL_READY, "prefill": deployment(2, 0)})
    resource = {**make_resource(), "status": first}
    second = status_of({**ALL_READY, "prefill": deployment(2, 1)}, resource=resource, now=LATER)
    third = status_of(ALL_READY, resource=resource, now=LATER)
    times = [
        {condition["type"]: condition["lastTransitionTime"] for condition in status["conditions"]}
        for status in (second, third)
    ]
    assert set(times[0].values()) == {NOW}
    assert times[1]["PrefillReady"] == times[1]["Ready"] == LATER
    assert times[1]["DecodeReady"] == NOW


def test_all_conditions_are_required() -> None:
    with pytest.raises(ValueError, match="are not"):
        build_conditions([Condition("Accepted", "True", "Valid", "")], [], generation=1, now=NOW)


def test_status_is_written_only_when_it_says_something_new() -> None:
    status = status_of(ALL_READY)
    foreign = {**status["conditions"][0], "type": "SomebodyElses"}
    live = {**status, "conditions": [foreign, *status["conditions"][::-1]], "more": 1}
    assert is_same(live, status)
    assert not is_same({}, status)
    changed = [{**condition, "message": "x"} for condition in status["conditions"]]
    assert not is_same({**live, "conditions": changed}, status)
    assert not is_same({**live, "endpoint": "x"}, status)
    assert not is_same({**live, "decode": {**status["decode"], "readyReplicas": 0}}, status)


@given(
    wanted=st.integers(0, 3),
    ready=st.integers(0, 3),
    updated=st.integers(0, 3),
    seen=st.booleans(),
    created=st.booleans(),
)
def test_ready_follows_from_the_roles(wanted: int, ready: int, updated: int, seen: bool, created: bool) -> None:
    found = {**ALL_READY, "decode": deployment(wanted, ready, updated, seen=seen)}
    if not created:
        del found["decode"]
    conditions = conditions_of(status_of(found))
    assert set(conditions) == set(names.CONDITION_TYPES)
    roles = [conditions[name][0] for name in names.ROLE_CONDITIONS.values()]
    assert (conditions["Ready"][0] == "True") == all(state == "True" for state in roles)
