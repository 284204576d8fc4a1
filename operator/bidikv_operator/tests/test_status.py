"""Conditions and counts for what a cluster may show."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bidikv_operator import names
from bidikv_operator.api.v1alpha1 import BidiKVInferenceStatus
from bidikv_operator.cache import ChildRef
from bidikv_operator.kinds import DEPLOYMENT, LEADER_WORKER_SET, POD_MONITOR, RESOURCE_CLAIM_TEMPLATE, SERVICE, Kind
from bidikv_operator.resolved import (
    Resolved,
    ResolvedFabric,
    ResolvedMonitoring,
    ResolvedScaling,
    ResolvedUpdates,
)
from bidikv_operator.rollout.plan import EngineSet, Rollout
from bidikv_operator.state import Applied, EngineFacts, Failure, Observed
from bidikv_operator.status.compute import compute_status
from bidikv_operator.status.conditions import MESSAGE_LIMIT, Condition, build_conditions
from bidikv_operator.tests.samples import make_resource, resolve
from bidikv_operator.validate import Problem, Rejected
from bidikv_runtime.contract import EngineReport, TransportReport

Object = dict[str, Any]
NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T01:00:00Z"
OLD, NEW = "0d0d0d0d", "3e3e3e3e"
RESOLVED = resolve(make_resource())


@dataclasses.dataclass(frozen=True)
class Healing:
    """What ``healing.py`` hands over."""

    reason: str | None = None
    message: str = ""
    recycled: tuple[dict[str, str], ...] = ()


def engines(
    role: names.Role,
    replicas: int = 1,
    ready: int | None = None,
    *,
    group: str = NEW,
    is_current: bool = True,
    live: int | None = None,
    updated: int | None = None,
    leaving: int = 0,
    is_late: bool = False,
    is_paused: bool = False,
) -> EngineSet:
    """One set; complete unless said otherwise."""
    ready = replicas if ready is None else ready
    live = replicas if live is None else live
    updated = replicas if updated is None else updated
    return EngineSet(
        ref=ChildRef(DEPLOYMENT, f"chat-{role}-{group}"),
        role=role,
        group=group,
        is_current=is_current,
        replicas=replicas,
        live=live,
        ready=ready,
        updated=updated,
        has_outdated=live > updated,
        leaving=leaving,
        is_paused=is_paused,
        is_rolled_out=ready >= replicas and updated >= replicas and live <= updated,
        is_late=is_late,
    )


def rollout_of(*sets: EngineSet, wanted: tuple[int, int] | None = None, **changes: Any) -> Rollout:
    """Prefill and decode of one engine each, where ``sets`` has none."""
    given_roles = {found.role for found in sets}
    rest = [engines(role) for role in names.ENGINE_ROLES if role not in given_roles]
    every = (*sets, *rest)
    counts = wanted or tuple(
        sum(found.replicas for found in every if found.role == role and found.is_current) for role in names.ENGINE_ROLES
    )
    return Rollout(sets=every, group=NEW, wanted=dict(zip(names.ENGINE_ROLES, counts, strict=True)), **changes)


def router(
    wanted: int = 2,
    ready: int = 2,
    updated: int | None = None,
    *,
    replicas: int | None = None,
    is_seen: bool = True,
    paused: bool = False,
    **status: Any,
) -> Object:
    return {
        "metadata": {"generation": 2},
        "spec": {"replicas": wanted, "paused": paused},
        "status": {
            "observedGeneration": 2 if is_seen else 1,
            "replicas": wanted if replicas is None else replicas,
            "readyReplicas": ready,
            "updatedReplicas": wanted if updated is None else updated,
            **status,
        },
    }


def pod(role: str = "prefill", *, leaving: bool = False, group: str = NEW, **status: Any) -> Object:
    metadata: Object = {"name": "chat-x-1", "labels": {names.LABEL_ROLE: role, names.LABEL_GROUP: group}}
    if leaving:
        metadata["deletionTimestamp"] = NOW
    return {"metadata": metadata, "status": status}


CRASHING: Object = {
    "containerStatuses": [
        {
            "name": "engine",
            "ready": False,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"exitCode": 1, "message": "RuntimeError: boom"}},
        }
    ]
}
UNSCHEDULABLE: Object = {
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
        }
    ]
}


def status_of(
    rollout: Rollout | None = None,
    *,
    router_deployment: Object | None = None,
    pods: tuple[Object, ...] = (),
    resource: Object | None = None,
    checked: Resolved | Rejected = RESOLVED,
    failures: tuple[Failure, ...] = (),
    waiting_for: tuple[ChildRef, ...] = (),
    healing: Healing | None = None,
    engine_facts: tuple[EngineFacts, ...] = (),
    missing_kinds: frozenset[Kind] = frozenset(),
    children: dict[ChildRef, Object] | None = None,
    now: str = NOW,
) -> Object:
    plan = rollout if rollout is not None else rollout_of(is_settled=True)
    found: dict[ChildRef, Object] = {ChildRef(DEPLOYMENT, "chat-router"): router_deployment or router()}
    for one in plan.sets:
        counts = {"replicas": one.live, "updatedReplicas": one.updated}
        found[one.ref] = {"metadata": {}, "spec": {}, "status": counts}
    found |= children or {}
    observed = Observed(
        resource=resource or make_resource(),
        children=found,
        pods=pods,
        engines=engine_facts,
        missing_kinds=missing_kinds,
    )
    applied = Applied(children=found, failures=failures, waiting=waiting_for)
    status = compute_status(observed, checked, applied, plan, healing, now=now)
    BidiKVInferenceStatus.model_validate(status)
    return status


def conditions_of(status: Object) -> dict[str, tuple[str, str]]:
    return {condition["type"]: (condition["status"], condition["reason"]) for condition in status["conditions"]}


def message_of(status: Object, name: str) -> str:
    return next(str(condition["message"]) for condition in status["conditions"] if condition["type"] == name)


def facts(role: names.Role, transport: TransportReport | None) -> EngineFacts:
    report = EngineReport(
        engine="e",
        epoch="1",
        sequence=1,
        compatibility="c",
        requests=0,
        queued_tokens=0,
        prefill_tokens_per_second=0.0,
        free_blocks=1.0,
        transport=transport,
    )
    return EngineFacts(pod=f"chat-{role}", uid=role, role=role, address=f"{role}:5700", report=report)


EFA = dataclasses.replace(RESOLVED, fabric=ResolvedFabric(type="EFA", instance_type="p5en.48xlarge"))
GATED = dataclasses.replace(EFA, fabric=dataclasses.replace(EFA.fabric, gates_ready=True))
OVER_TCP = tuple(facts(role, TransportReport("LIBFABRIC", "tcp", read_bytes=1 << 30)) for role in names.ENGINE_ROLES)
OVER_EFA = tuple(facts(role, TransportReport("LIBFABRIC", "efa", read_bytes=1 << 30)) for role in names.ENGINE_ROLES)


# --- the whole --------------------------------------------------------------------------------------------------------
def test_at_rest() -> None:
    status = status_of()
    assert conditions_of(status) == {
        "Accepted": ("True", "Valid"),
        "PrefillReady": ("True", "AllReplicasReady"),
        "DecodeReady": ("True", "AllReplicasReady"),
        "RouterReady": ("True", "AllReplicasReady"),
        "TransportVerified": ("Unknown", "NoReports"),
        "Scaling": ("False", "Disabled"),
        "Progressing": ("False", "RolledOut"),
        "Degraded": ("False", "AsExpected"),
        "Ready": ("True", "Ready"),
    }
    assert [condition["type"] for condition in status["conditions"]] == list(names.CONDITION_TYPES)
    assert status["observedGeneration"] == 3
    assert {condition["observedGeneration"] for condition in status["conditions"]} == {3}
    assert status["endpoint"] == "http://chat.team.svc:8000/v1"
    assert status["decode"] == {
        "replicas": 1,
        "readyReplicas": 1,
        "updatedReplicas": 1,
        "selector": "serving.bidikv.io/owner=chat,serving.bidikv.io/role=decode",
        "group": NEW,
    }
    assert "group" not in status["router"]


def test_every_condition_from_the_first_pass_on() -> None:
    found = Observed(resource=make_resource(), children={}, pods=())
    empty = Rollout(wanted={"prefill": 1, "decode": 1})
    conditions = conditions_of(compute_status(found, RESOLVED, Applied(children={}), empty, now=NOW))
    assert set(conditions) == set(names.CONDITION_TYPES)
    assert conditions["PrefillReady"] == ("Unknown", "NotCreated")
    assert conditions["Ready"] == ("False", "NotCreated")
    assert conditions["Progressing"] == ("True", "Starting")
    assert conditions["Degraded"] == ("False", "AsExpected")


def test_counts_are_summed_over_the_sets_of_a_role() -> None:
    old = engines("decode", 2, group=OLD, is_current=False, leaving=1)
    new = engines("decode", 2, 1, updated=2)
    status = status_of(rollout_of(new, old, wanted=(1, 4)))
    decode = {key: value for key, value in status["decode"].items() if key != "selector"}
    assert decode == {"replicas": 4, "readyReplicas": 3, "updatedReplicas": 2, "group": NEW}


def test_https_with_a_certificate() -> None:
    secured = dataclasses.replace(RESOLVED, router=dataclasses.replace(RESOLVED.router, tls_secret_name="cert"))
    status = status_of(checked=secured)
    assert status["endpoint"] == "https://chat.team.svc:8000/v1"
    rejected = Rejected((Problem("spec.fabric", "set one of them"),))
    later = status_of(checked=rejected, resource={**make_resource(), "status": status})
    assert later["endpoint"] == status["endpoint"], "what runs keeps running as it was"


def test_the_runtime_image_in_use_is_that_of_the_template() -> None:
    template = {"spec": {"initContainers": [{"name": "install-connector", "image": "reg/runtime:v0"}]}}
    child = {"metadata": {}, "spec": {"template": template}}
    status = status_of(children={ChildRef(DEPLOYMENT, f"chat-prefill-{NEW}"): child})
    assert status["runtimeImage"] == "reg/runtime:v0"
    assert "runtimeImage" not in status_of()


# --- roles and Ready --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("prefill", "max_unavailable", "ready", "reason"),
    [
        (engines("prefill", 4, 4), 1, "True", "AllReplicasReady"),
        (engines("prefill", 4, 3), 1, "True", "EnoughReplicasReady"),
        (engines("prefill", 4, 2), 1, "False", "Starting"),
        (engines("prefill", 4, 2), "50%", "True", "EnoughReplicasReady"),
        (engines("prefill", 4, 3), 0, "False", "Starting"),
        (engines("prefill", 2, 1), 2, "True", "EnoughReplicasReady"),
        (engines("prefill", 2, 0), 2, "False", "Starting"),
        (engines("prefill", 1, 0), 1, "False", "Starting"),
        (engines("prefill", 0, 0), 1, "False", "ScaledToZero"),
    ],
)
def test_a_role_is_ready_from_its_floor_on(
    prefill: EngineSet, max_unavailable: int | str, ready: str, reason: str
) -> None:
    updates = ResolvedUpdates(max_surge=1, max_unavailable=max_unavailable)
    status = status_of(rollout_of(prefill), checked=dataclasses.replace(RESOLVED, updates=updates))
    assert conditions_of(status)["PrefillReady"] == (ready, reason)
    assert conditions_of(status)["Ready"] == (("True", "Ready") if ready == "True" else ("False", reason))


def test_one_router_of_two_is_enough() -> None:
    status = status_of(router_deployment=router(2, 1))
    assert conditions_of(status)["RouterReady"] == ("True", "EnoughReplicasReady")
    assert conditions_of(status)["Progressing"] == ("True", "Starting")
    assert conditions_of(status_of(router_deployment=router(2, 0)))["Ready"] == ("False", "Starting")


def test_a_router_without_engines_is_not_at_fault() -> None:
    """It says itself that it is not ready, after it was."""
    lost: Object = {
        "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": LATER}],
        "containerStatuses": [
            {"name": "router", "ready": False, "started": True, "state": {"running": {"startedAt": NOW}}}
        ],
    }

    def tell(prefill: EngineSet, *engine_pods: Object) -> tuple[tuple[str, str], tuple[str, str]]:
        deployment, pods = router(1, 0), (pod("router", **lost), *engine_pods)
        conditions = conditions_of(status_of(rollout_of(prefill), router_deployment=deployment, pods=pods))
        return conditions["RouterReady"], conditions["Degraded"]

    assert tell(engines("prefill", 1, 0)) == (("False", "Starting"), ("False", "AsExpected"))
    # The engine has just come; the router will be probed again within seconds.
    came = pod(conditions=[{"type": "Ready", "status": "True", "lastTransitionTime": LATER}])
    assert tell(engines("prefill", 1, 1), came) == (("False", "Starting"), ("False", "AsExpected"))
    assert tell(engines("prefill", 1, 1)) == (("False", "PodNotAnswering"), ("True", "PodNotAnswering"))


def test_a_router_that_waits_for_slow_engines_is_not_late() -> None:
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}

    def progressing(prefill: EngineSet) -> tuple[str, str]:
        deployment = router(1, 0, conditions=[late])
        return conditions_of(status_of(rollout_of(prefill), router_deployment=deployment))["Progressing"]

    assert progressing(engines("prefill", 1, 0)) == ("True", "Starting")
    assert progressing(engines("prefill", 1, 1)) == ("False", "Stalled")


def test_not_ready_without_a_pair_of_one_group() -> None:
    apart = rollout_of(
        engines("prefill", 1, group=OLD, is_current=False),
        engines("prefill", 0),
        engines("decode", 1),
        wanted=(1, 1),
        message="waits for prefill",
    )
    conditions = conditions_of(status_of(apart))
    assert conditions["PrefillReady"] == conditions["DecodeReady"] == ("True", "AllReplicasReady")
    assert conditions["Ready"] == ("False", "NoPairOfOneGroup")
    assert conditions["Progressing"] == ("True", "RollingOut")


def test_ready_throughout_a_rollout_that_keeps_the_floor() -> None:
    steps = [
        rollout_of(engines("decode", 2, group=OLD, is_current=False), engines("prefill", 1, group=OLD), wanted=(1, 2)),
        rollout_of(
            *(engines(role, 1, group=OLD, is_current=False) for role in names.ENGINE_ROLES),
            *(engines(role, 1, 0) for role in names.ENGINE_ROLES),
            wanted=(2, 2),
            message="2 groups",
        ),
    ]
    for step in steps:
        conditions = conditions_of(status_of(step))
        assert conditions["Ready"] == ("True", "Ready")
        assert conditions["Degraded"] == ("False", "AsExpected")
        assert conditions["Progressing"][0] == "True"


def test_not_ready_without_one_of_its_children() -> None:
    """The endpoint's Service may belong to somebody else: ready pods alone serve nobody."""
    taken = Failure(ChildRef(SERVICE, "chat"), names.REASON_NAME_TAKEN, "exists and belongs to something else")
    status = status_of(failures=(taken,))
    assert conditions_of(status)["Ready"] == ("False", "NameTaken")
    assert conditions_of(status)["Degraded"] == ("True", "NameTaken")
    assert message_of(status, "Ready") == "Service chat: exists and belongs to something else"
    absent = Failure(ChildRef(SERVICE, "chat"), names.REASON_APPLY_FAILED, "exceeded quota")
    assert conditions_of(status_of(failures=(absent,)))["Ready"] == ("False", "ApplyFailed")


def test_ready_while_a_child_can_only_not_be_changed() -> None:
    refused = Failure(ChildRef(DEPLOYMENT, "chat-router"), names.REASON_APPLY_FAILED, "exceeded quota")
    conditions = conditions_of(status_of(failures=(refused,)))
    assert conditions["Ready"] == ("True", "Ready")
    assert conditions["Progressing"] == ("False", "ApplyFailed")
    assert conditions["Degraded"] == ("True", "ApplyFailed")


@pytest.mark.parametrize(
    ("checked", "reports", "ready", "progressing", "degraded"),
    [
        (EFA, OVER_TCP, ("True", "Ready"), ("False", "RolledOut"), ("True", "FellBackToTCP")),
        (GATED, OVER_TCP, ("False", "FellBackToTCP"), ("False", "RolledOut"), ("True", "FellBackToTCP")),
        (GATED, (), ("False", "NoReports"), ("True", "VerifyingTransport"), ("False", "AsExpected")),
        (GATED, OVER_EFA, ("True", "Ready"), ("False", "RolledOut"), ("False", "AsExpected")),
        (EFA, (), ("True", "Ready"), ("False", "RolledOut"), ("False", "AsExpected")),
    ],
)
def test_ready_may_wait_for_the_transport(
    checked: Resolved,
    reports: tuple[EngineFacts, ...],
    ready: tuple[str, str],
    progressing: tuple[str, str],
    degraded: tuple[str, str],
) -> None:
    conditions = conditions_of(status_of(checked=checked, engine_facts=reports))
    assert (conditions["Ready"], conditions["Progressing"], conditions["Degraded"]) == (ready, progressing, degraded)


# --- Progressing and Degraded -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("decode", "progressing"),
    [
        (engines("decode", 2, 0), ("True", "Starting")),
        (engines("decode", 0, 0), ("False", "RolledOut")),
        # Ready pods of the old template only: it serves, and it rolls.
        (engines("decode", 2, 2, updated=1), ("True", "RollingOut")),
        # An old pod is still there beside all new ones.
        (engines("decode", 2, 2, live=3), ("True", "RollingOut")),
        (engines("decode", 2, 1, is_late=True), ("False", "Stalled")),
    ],
)
def test_progress_of_one_set(decode: EngineSet, progressing: tuple[str, str]) -> None:
    assert conditions_of(status_of(rollout_of(decode)))["Progressing"] == progressing


def test_a_set_that_its_controller_has_not_seen_yet_keeps_serving() -> None:
    conditions = conditions_of(status_of(router_deployment=router(2, 2, is_seen=False)))
    assert conditions["RouterReady"] == ("True", "AllReplicasReady")
    assert conditions["Progressing"][0] == "True"


def test_an_old_group_that_leaves_is_progress() -> None:
    old = engines("decode", 0, group=OLD, is_current=False, leaving=1)
    conditions = conditions_of(status_of(rollout_of(engines("decode"), old)))
    assert conditions["Progressing"] == ("True", "RollingOut")


def test_a_failed_rollout_says_why_and_how_to_go_back() -> None:
    failed = rollout_of(
        engines("decode", 1, 0, is_late=True),
        engines("decode", 1, group=OLD, is_current=False),
        engines("prefill", 1, 0),
        engines("prefill", 1, group=OLD, is_current=False),
        wanted=(2, 2),
        is_failed=True,
        message="the new engines do not come up, the earlier ones keep serving; set the spec back or correct it",
    )
    status = status_of(failed, pods=(pod("decode", **CRASHING),))
    conditions = conditions_of(status)
    assert conditions["Ready"] == ("True", "Ready")
    assert conditions["Progressing"] == ("False", "RolloutFailed")
    assert conditions["Degraded"] == ("True", "RolloutFailed")
    assert message_of(status, "Progressing").startswith("the new engines do not come up")
    assert "decode: container engine ended with exit code 1: RuntimeError: boom" in message_of(status, "Progressing")


def test_what_ails_engines_that_are_taken_away_is_no_trouble() -> None:
    """A failed rollout is set back: the pods that never came up go."""
    back = rollout_of(engines("decode", 2, 1), engines("decode", 0, 0, group=OLD, is_current=False, live=1))
    status = status_of(back, pods=(pod("decode", group=OLD, **CRASHING),))
    assert conditions_of(status)["Degraded"] == ("False", "AsExpected")
    assert conditions_of(status)["Progressing"] == ("True", "RollingOut")


def test_a_first_start_that_is_too_slow_is_no_failed_rollout() -> None:
    """Nothing ran before, so there is nothing to go back to."""
    conditions = conditions_of(status_of(rollout_of(engines("decode", 1, 0, is_late=True), is_failed=True)))
    assert conditions["Progressing"] == ("False", "Stalled")
    assert conditions["Degraded"] == ("True", "Stalled")


def test_a_crash_degrades_a_role_that_still_serves() -> None:
    status = status_of(rollout_of(engines("decode", 2, 1)), pods=(pod("decode", **CRASHING),))
    conditions = conditions_of(status)
    assert conditions["DecodeReady"] == ("True", "EnoughReplicasReady")
    assert conditions["Ready"] == ("True", "Ready")
    assert conditions["Degraded"] == ("True", "ContainerCrashing")
    assert message_of(status, "Degraded").startswith("1 of 2 decode pods are ready; container engine ended")


@pytest.mark.parametrize(("is_late", "degraded"), [(False, "False"), (True, "True")])
def test_a_pod_without_a_node_is_a_fault_only_past_the_deadline(is_late: bool, degraded: str) -> None:
    """A cluster autoscaler takes minutes to bring a node."""
    decode = engines("decode", 1, 0, is_late=is_late)
    status = status_of(rollout_of(decode), pods=(pod("decode", **UNSCHEDULABLE),))
    assert conditions_of(status)["DecodeReady"] == ("False", "Unschedulable")
    assert conditions_of(status)["Ready"] == ("False", "Unschedulable")
    assert conditions_of(status)["Degraded"][0] == degraded
    assert message_of(status, "DecodeReady").startswith(
        "0 of 1 decode pod is ready; no node takes a pod; of 2 nodes: 2"
    )
    assert "chat-x-1" not in str(status), "a pod's random name would be written anew for each pod"


def test_needs_come_from_the_template() -> None:
    spec = {"containers": [{"name": "engine", "resources": {"limits": {"nvidia.com/gpu": "4"}}}]}
    child = {"metadata": {}, "spec": {"template": {"spec": spec}}}
    status = status_of(
        rollout_of(engines("decode", 1, 0)),
        pods=(pod("decode", **UNSCHEDULABLE),),
        children={ChildRef(DEPLOYMENT, f"chat-decode-{NEW}"): child},
    )
    expected = "a pod needs 4 nvidia.com/gpu; of 2 nodes: 2 without free nvidia.com/gpu"
    assert expected in message_of(status, "DecodeReady")


def test_pods_that_were_never_created() -> None:
    condition = {
        "type": "ReplicaFailure",
        "status": "True",
        "message": 'pods "chat-decode-5d8-x2x5q" is forbidden: exceeded quota: gpus',
    }
    child = {"metadata": {}, "spec": {}, "status": {"conditions": [condition]}}
    status = status_of(
        rollout_of(engines("decode", 2, 0, live=0)), children={ChildRef(DEPLOYMENT, f"chat-decode-{NEW}"): child}
    )
    assert conditions_of(status)["DecodeReady"] == ("False", "PodCreationFailed")
    assert conditions_of(status)["Degraded"] == ("True", "PodCreationFailed")
    assert "a pod is forbidden: exceeded quota" in message_of(status, "DecodeReady")
    assert "x2x5q" not in str(status)


def test_what_healing_says_degrades() -> None:
    healing = Healing(
        "EnginesUnreachable", "no decode engine is reached by its peers", ({"role": "decode", "time": NOW},)
    )
    status = status_of(healing=healing)
    assert conditions_of(status)["Degraded"] == ("True", "EnginesUnreachable")
    assert status["healing"] == {"recycled": [{"role": "decode", "time": NOW}]}
    assert conditions_of(status_of(healing=Healing()))["Degraded"] == ("False", "AsExpected")


def test_rejected_resource_keeps_telling_of_what_runs() -> None:
    rejected = Rejected((Problem("spec.fabric", "set one of them"), Problem("spec.prefill", "lower it")))
    before = status_of(checked=EFA, engine_facts=OVER_EFA)
    status = status_of(checked=rejected, resource={**make_resource(), "status": before})
    conditions = conditions_of(status)
    assert conditions["Accepted"] == ("False", "Invalid")
    assert message_of(status, "Accepted") == "spec.fabric: set one of them; spec.prefill: lower it"
    assert conditions["PrefillReady"] == ("True", "AllReplicasReady")
    assert conditions["TransportVerified"] == ("True", "Verified"), "as it was: the fabric to compare with is unknown"
    assert conditions["Scaling"] == ("Unknown", "Invalid")
    for name in ("Ready", "Progressing"):
        assert conditions[name] == ("False", "Invalid")
    assert conditions["Degraded"] == ("True", "Invalid")


def test_a_paused_deployment_whose_pods_lack_nothing_is_told_of_only() -> None:
    status = status_of(rollout_of(engines("decode", is_paused=True)), router_deployment=router(paused=True))
    assert conditions_of(status) == conditions_of(status_of()), "nothing is wrong with what it is now"
    assert message_of(status, "Progressing") == (
        "all pods are of the newest template; "
        f"Deployment chat-decode-{NEW} is paused, so its pods keep the template that they have; "
        f"kubectl rollout resume deployment/chat-decode-{NEW} lets them follow; "
        "Deployment chat-router is paused, so its pods keep the template that they have; "
        "kubectl rollout resume deployment/chat-router lets them follow"
    )


@pytest.mark.parametrize(
    "held",
    [
        {"rollout": rollout_of(engines("decode", 2, 2, updated=0, is_paused=True))},
        {"rollout": rollout_of(engines("decode", 2, 2, updated=1, is_paused=True))},
        {"rollout": rollout_of(engines("decode", 2, 2, updated=1, is_paused=True, is_late=True))},
        {"router_deployment": router(updated=0, paused=True)},
    ],
)
def test_a_rollout_that_a_pause_holds_waits_for_a_person(held: Object) -> None:
    status = status_of(**held)
    conditions = conditions_of(status)
    assert conditions["Ready"] == ("True", "Ready")
    assert conditions["Progressing"] == ("False", "DeploymentPaused")
    assert conditions["Degraded"] == ("True", "DeploymentPaused")
    name = f"chat-decode-{NEW}" if "rollout" in held else "chat-router"
    assert message_of(status, "Progressing").startswith("the newest template does not reach all ")
    for told in ("Progressing", "Degraded"):
        assert f"kubectl rollout resume deployment/{name}" in message_of(status, told)


def test_a_deployment_that_was_paused_before_it_made_pods_says_so() -> None:
    status = status_of(rollout_of(engines("decode", 2, 0, live=0, updated=0, is_paused=True)))
    conditions = conditions_of(status)
    assert conditions["DecodeReady"] == conditions["Ready"] == ("False", "DeploymentPaused")
    assert conditions["Progressing"] == ("False", "DeploymentPaused")
    assert conditions["Degraded"] == ("True", "DeploymentPaused")
    assert f"kubectl rollout resume deployment/chat-decode-{NEW}" in message_of(status, "DecodeReady")


def test_pods_of_a_paused_deployment_start_as_others_do() -> None:
    decode = engines("decode", 2, 1, is_paused=True)
    status = status_of(rollout_of(decode), pods=(pod("decode"),))
    conditions = conditions_of(status)
    assert conditions["Progressing"] == ("True", "Starting")
    assert conditions["Degraded"] == ("False", "AsExpected")
    assert "is not scheduled yet; Deployment chat-decode-" in message_of(status, "Progressing")


def test_a_failed_rollout_that_is_paused_tells_both() -> None:
    """Else the correction that is asked for would change nothing, and nobody would know why."""
    decode = engines("decode", 2, 1, live=3, updated=1, is_paused=True)
    status = status_of(rollout_of(decode, is_failed=True), pods=(pod("decode", **CRASHING),))
    conditions = conditions_of(status)
    assert conditions["Progressing"] == ("False", "RolloutFailed")
    message = message_of(status, "Progressing")
    assert "RuntimeError: boom" in message
    assert "kubectl rollout resume" in message


def test_paused() -> None:
    paused = dataclasses.replace(RESOLVED, paused=True)
    conditions = conditions_of(status_of(checked=paused))
    assert conditions["Progressing"] == ("False", "Paused")
    assert conditions["Ready"] == ("True", "Ready")
    starting = conditions_of(status_of(rollout_of(engines("decode", 1, 0)), checked=paused))
    assert (starting["Progressing"], starting["Ready"][0]) == (("False", "Paused"), "False")


def test_failures_are_told_together_and_in_order() -> None:
    failures = (
        Failure(ChildRef(SERVICE, "b"), names.REASON_NAME_TAKEN, "taken"),
        Failure(ChildRef(DEPLOYMENT, "a"), names.REASON_APPLY_FAILED, "refused"),
    )
    status = status_of(failures=failures)
    assert conditions_of(status)["Progressing"] == ("False", "NameTaken")
    assert message_of(status, "Progressing") == "Deployment a: refused; Service b: taken"


def test_waiting_for_a_predecessor() -> None:
    status = status_of(waiting_for=(ChildRef(SERVICE, "chat"),))
    assert conditions_of(status)["Progressing"] == ("True", "WaitingForDeletion")
    assert "Service chat" in message_of(status, "Progressing")


@pytest.mark.parametrize(
    ("kind", "checked", "words"),
    [
        (
            LEADER_WORKER_SET,
            dataclasses.replace(RESOLVED, decode=dataclasses.replace(RESOLVED.decode, nodes=2)),
            "leaderworkersets.leaderworkerset.x-k8s.io",
        ),
        (
            RESOURCE_CLAIM_TEMPLATE,
            dataclasses.replace(EFA, fabric=dataclasses.replace(EFA.fabric, devices="ResourceClaim")),
            "spec.fabric.devices",
        ),
        (
            POD_MONITOR,
            dataclasses.replace(RESOLVED, monitoring=ResolvedMonitoring(pod_monitor=True)),
            "Prometheus operator",
        ),
    ],
)
def test_a_kind_that_the_cluster_lacks(kind: Kind, checked: Resolved, words: str) -> None:
    status = status_of(checked=checked, missing_kinds=frozenset({kind}))
    assert conditions_of(status)["Progressing"] == ("False", "KindNotServed")
    assert conditions_of(status)["Degraded"] == ("True", "KindNotServed")
    assert words in message_of(status, "Progressing")
    assert conditions_of(status_of(checked=checked))["Progressing"] == ("False", "RolledOut")
    assert conditions_of(status_of(missing_kinds=frozenset({kind})))["Progressing"] == ("False", "RolledOut")


# --- Scaling ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("asked", "condition", "words"),
    [
        ({"prefill": 3, "decode": 2}, ("True", "WithinBounds"), "prefill 2 to 4, decode 1 to 2"),
        ({"prefill": 9, "decode": 2}, ("True", "AtMaximum"), "spec.prefill.replicas asks for 9"),
        ({"prefill": 1, "decode": 1}, ("True", "AtMinimum"), "spec.autoscaling.prefill.minReplicas keeps 2"),
        ({"prefill": 1, "decode": 5}, ("True", "AtMaximum"), "maxReplicas allows 2"),
    ],
)
def test_scaling(asked: dict[str, int], condition: tuple[str, str], words: str) -> None:
    scaling = ResolvedScaling(
        mode="External", asked=asked, minimum={"prefill": 2, "decode": 1}, maximum={"prefill": 4, "decode": 2}
    )
    status = status_of(checked=dataclasses.replace(RESOLVED, scaling=scaling))
    assert conditions_of(status)["Scaling"] == condition
    assert words in message_of(status, "Scaling")


# --- bookkeeping ------------------------------------------------------------------------------------------------------
def test_transition_times_move_with_the_status_only() -> None:
    first = status_of(rollout_of(engines("prefill", 3, 0)))
    resource = {**make_resource(), "status": first}
    second = status_of(rollout_of(engines("prefill", 3, 1)), resource=resource, now=LATER)
    third = status_of(rollout_of(engines("prefill", 3, 3)), resource=resource, now=LATER)
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


def test_messages_have_a_bound() -> None:
    rejected = Rejected(tuple(Problem("spec.prefill.env", "x" * 100) for _ in range(100)))
    assert len(message_of(status_of(checked=rejected), "Accepted")) == MESSAGE_LIMIT


# --- everything at once -----------------------------------------------------------------------------------------------
POD_STATES = st.sampled_from([CRASHING, UNSCHEDULABLE, {}, {"phase": "Failed", "reason": "Evicted"}])


@st.composite
def engine_sets(draw: st.DrawFn) -> tuple[EngineSet, ...]:
    sets = []
    for role in names.ENGINE_ROLES:
        for group in (NEW, OLD):
            if draw(st.booleans()):
                replicas = draw(st.integers(0, 3))
                live = draw(st.integers(0, 4))
                sets.append(
                    engines(
                        role,
                        replicas,
                        draw(st.integers(0, live)),
                        live=live,
                        updated=draw(st.integers(0, live)),
                        group=group,
                        is_current=group == NEW,
                        leaving=draw(st.integers(0, 2)),
                        is_late=draw(st.booleans()),
                        is_paused=draw(st.booleans()),
                    )
                )
    return tuple(sets)


@settings(deadline=None)  # it depends on the load of the machine
@given(
    sets=engine_sets(),
    wanted=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    is_failed=st.booleans(),
    routers=st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)),
    is_router_paused=st.booleans(),
    pods=st.lists(st.builds(pod, st.sampled_from(names.ROLES), leaving=st.booleans()), max_size=3),
    states=st.lists(POD_STATES, min_size=3, max_size=3),
    checked=st.sampled_from(
        [RESOLVED, EFA, GATED, dataclasses.replace(RESOLVED, paused=True), Rejected((Problem("spec.x", "y"),))]
    ),
    reports=st.sampled_from([(), OVER_EFA, OVER_TCP]),
    failure=st.sampled_from([names.REASON_NAME_TAKEN, names.REASON_APPLY_FAILED, None]),
    healing=st.sampled_from([None, Healing("EngineRecycled", "one was replaced")]),
)
def test_the_summaries_never_contradict_each_other(
    sets: tuple[EngineSet, ...],
    wanted: tuple[int, int],
    is_failed: bool,
    routers: tuple[int, int, int],
    is_router_paused: bool,
    pods: list[Object],
    states: list[Object],
    checked: Resolved | Rejected,
    reports: tuple[EngineFacts, ...],
    failure: str | None,
    healing: Healing | None,
) -> None:
    for one, state in zip(pods, states, strict=False):
        one["status"] = state
    rollout = Rollout(
        sets=sets, group=NEW, wanted=dict(zip(names.ENGINE_ROLES, wanted, strict=True)), is_failed=is_failed
    )

    def compute(order: int) -> Object:
        return status_of(
            rollout,
            router_deployment=router(*routers, paused=is_router_paused),
            pods=tuple(pods[::order]),
            checked=checked,
            engine_facts=reports,
            failures=(Failure(ChildRef(SERVICE, "chat"), failure, "m"),) if failure else (),
            healing=healing,
        )

    status = compute(1)
    assert compute(-1) == status, "equal facts, equal bytes, in whatever order the cluster tells of its pods"
    conditions = conditions_of(status)
    assert set(conditions) == set(names.CONDITION_TYPES)
    ready, progressing, degraded = (conditions[name] for name in ("Ready", "Progressing", "Degraded"))
    if ready[0] == "True":
        assert all(conditions[name][0] == "True" for name in names.ROLE_CONDITIONS.values())
    if (ready[0], progressing[0], degraded[0]) == ("False", "False", "False"):
        assert progressing[1] == "Paused" or any(
            conditions[name][1] == "ScaledToZero" for name in names.ROLE_CONDITIONS.values()
        )
    if progressing == ("False", "RolledOut"):
        assert not is_failed
        assert all(view.ready >= view.replicas for view in sets if view.is_current)
    if progressing[1] not in ("Paused", "Invalid"):
        paused = {one.ref.name for one in sets if one.is_current and one.is_paused}
        paused |= {"chat-router"} if is_router_paused else set()
        told = re.findall(r"kubectl rollout resume deployment/(\S+) ", message_of(status, "Progressing"))
        assert set(told) == paused, "a pause is told whatever else there is to tell"
    for condition in status["conditions"]:
        assert condition["message"], condition
        assert not re.search(r"chat-x-1|None|\{|\}", condition["message"]), condition
