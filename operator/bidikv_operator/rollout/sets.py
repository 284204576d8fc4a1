"""Sets of engines as the cluster shows them. Pure.

A set is found by its labels, whatever made it: sets of other groups, and those of before there were groups, belong to
the rollout as well. Pods are counted one by one, because the status of a Deployment leaves out those that are being
deleted, and these still hold their accelerators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from bidikv_operator import names
from bidikv_operator.cache import ChildRef
from bidikv_operator.kinds import CONTROLLER_REVISION, DEPLOYMENT, LEADER_WORKER_SET
from bidikv_operator.names import Role
from bidikv_operator.resolved import Resolved
from bidikv_operator.rollout.plan import EngineSet
from bidikv_operator.status.pods import read_readiness

Object = Mapping[str, Any]
Labels = dict[str, str]

LEADER_WORKER_SET_NAME_LIMIT: Final = 45
"""A LeaderWorkerSet makes a StatefulSet for each replica's workers, ``<name>-<index>``. Its pods carry a label of that
name and a hash of ten characters, and a label holds 63."""
LEADER_WORKER_SET_LABEL: Final = "leaderworkerset.sigs.k8s.io/name"
"""On its pods."""
OVERDUE: Final = timedelta(seconds=60)
"""A pod that is still there so long after its grace period has no kubelet that would end it: it holds nothing."""


def find_engine_set(resolved: Resolved, role: Role) -> ChildRef:
    """The current set of an engine role."""
    suffix = f"{role}-{resolved.identity.group}"
    if resolved.engine(role).nodes == 1:
        return ChildRef(DEPLOYMENT, names.child_name(resolved.name, suffix))
    return ChildRef(LEADER_WORKER_SET, names.child_name(resolved.name, suffix, LEADER_WORKER_SET_NAME_LIMIT))


def find_lost_sets(owner: str, children: Mapping[ChildRef, Object], pods: Iterable[Object]) -> dict[ChildRef, Labels]:
    """Sets that are not known and may exist, as pods of theirs run; each with the labels by which it would be known.

    A set that loses the label of its owner is gone for the watch, which selects by it; its pods are not.
    """
    known = {
        (names.find_engine_role(obj), _find_group(obj))
        for ref, obj in children.items()
        if ref.kind in (DEPLOYMENT, LEADER_WORKER_SET)
    }
    found: dict[ChildRef, Labels] = {}
    for pod in pods:
        role, group, metadata = names.find_engine_role(pod), _find_group(pod), pod["metadata"]
        if role is None or (role, group) in known or metadata.get("deletionTimestamp"):
            continue
        spanning = metadata["labels"].get(LEADER_WORKER_SET_LABEL)
        # A set of before there were groups is named by its role alone.
        name = spanning or names.child_name(owner, f"{role}-{group}" if group else role)
        labels = {names.LABEL_OWNER: owner, names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_ROLE: role}
        ref = ChildRef(LEADER_WORKER_SET if spanning else DEPLOYMENT, name)
        found[ref] = labels | ({names.LABEL_GROUP: group} if group else {})
    return found


def read_sets(
    children: Mapping[ChildRef, Object],
    pods: Iterable[Object],
    *,
    current: Mapping[ChildRef, str] | None,
    now: datetime,
    deadline: timedelta | None = None,
) -> tuple[EngineSet, ...]:
    """All sets that exist, current ones first.

    Args:
        current: the current set of each role, and the input of its newest template; None: all that exist are.
        now: to tell pods that no kubelet ends, and sets that are late.
        deadline: of progress, for current sets whose own controller has none; None: they are never late.
    """
    pods = list(pods)
    counted = _count_pods(pods, now)
    found = [
        _read_set(ref, obj, role, counted, current=current)
        for ref, obj in children.items()
        if ref.kind in (DEPLOYMENT, LEADER_WORKER_SET)
        and (role := names.find_engine_role(obj)) is not None
        and not obj["metadata"].get("deletionTimestamp")
    ]
    if deadline is not None:
        found = [_judge_progress(each, children, pods, deadline, now) for each in found]
    order = names.ENGINE_ROLES
    return tuple(sorted(found, key=lambda each: (not each.is_current, order.index(each.role), each.ref.name)))


def find_current(resolved: Resolved) -> dict[ChildRef, str]:
    """The current set of each role, and the input of its newest template."""
    return {find_engine_set(resolved, role): resolved.identity.input_of(role) for role in names.ENGINE_ROLES}


def find_input(obj: Object) -> str | None:
    """What the template of a set or revision was built from."""
    found: str | None = (obj["metadata"].get("annotations") or {}).get(names.ANNOTATION_INPUT)
    return found


def find_pods(pods: Iterable[Object], found: EngineSet) -> list[Object]:
    """The pods of a set, workers of a replica that spans nodes left out."""
    return [pod for pod in pods if names.find_engine_role(pod) == found.role and _find_group(pod) == found.group]


def _read_set(
    ref: ChildRef,
    obj: Object,
    role: Role,
    counted: Mapping[tuple[Role, str], tuple[int, int]],
    *,
    current: Mapping[ChildRef, str] | None,
) -> EngineSet:
    status, group = obj.get("status") or {}, _find_group(obj)
    live, leaving = counted.get((role, group), (0, 0))
    replicas = obj["spec"].get("replicas", 1)
    updated, ready = status.get("updatedReplicas", 0), status.get("readyReplicas", 0)
    generation = obj["metadata"].get("generation", 0)
    # Not in every release of LeaderWorkerSet.
    seen = status.get("observedGeneration", 0 if ref.kind == DEPLOYMENT else generation)
    return EngineSet(
        ref=ref,
        role=role,
        group=group,
        is_current=current is None or ref in current,
        is_newest=current is None or current.get(ref) == find_input(obj),
        replicas=replicas,
        live=live,
        leaving=leaving,
        ready=ready,
        updated=updated,
        has_outdated=status.get("replicas", 0) > updated,
        is_seen=seen >= generation,
        is_rolled_out=seen >= generation and ready >= replicas and status.get("replicas", 0) == updated == replicas,
        is_late=any(
            condition["type"] == "Progressing" and condition.get("reason") == "ProgressDeadlineExceeded"
            for condition in status.get("conditions") or []
        ),
        is_paused=ref.kind == DEPLOYMENT and bool(obj["spec"].get("paused")),
    )


def _judge_progress(
    found: EngineSet, children: Mapping[ChildRef, Object], pods: Iterable[Object], deadline: timedelta, now: datetime
) -> EngineSet:
    """The set with its lateness, where that is not for its own controller to tell.

    A LeaderWorkerSet's Progressing is True from the loss of its completeness until it is complete again, however much
    happens in between. So what counts is the latest of that, of the making of its template, and of a replica's becoming
    ready. That a pod is made is no progress: those of a replica that crashes are made anew each time.
    """
    if found.ref.kind != LEADER_WORKER_SET or not found.is_current or found.is_rolled_out or not found.is_seen:
        return found
    obj = children[found.ref]
    conditions = {one["type"]: one for one in (obj.get("status") or {}).get("conditions") or []}
    if conditions.get("Progressing", {}).get("status", "True") != "True":
        return found  # what it was asked for has changed, and its controller has not seen that yet
    under_way = [one for name in ("Progressing", "UpdateInProgress") if (one := conditions.get(name)) is not None]
    made = [obj, *(one for ref, one in children.items() if ref.kind == CONTROLLER_REVISION and _is_template(one, obj))]
    times = [
        *(one["metadata"].get("creationTimestamp") for one in made),
        *(one.get("lastTransitionTime") for one in under_way if one["status"] == "True"),
        *(one.since for one in map(read_readiness, find_pods(pods, found)) if one.is_ready),
    ]
    last = max((_parse_time(text) for text in times if text), default=None)
    if last is None:
        return found
    return replace(found, late_at=last + deadline, is_late=now >= last + deadline)


def _is_template(revision: Object, obj: Object) -> bool:
    """Whether a revision holds the template of a set."""
    return names.find_engine_role(revision) == names.find_engine_role(obj) and find_input(revision) == find_input(obj)


def _count_pods(pods: Iterable[Object], now: datetime) -> dict[tuple[Role, str], tuple[int, int]]:
    """Live and leaving pods by role and group."""
    counted: dict[tuple[Role, str], tuple[int, int]] = {}
    for pod in pods:
        role = names.find_engine_role(pod)
        if role is None or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        key = (role, _find_group(pod))
        live, leaving = counted.get(key, (0, 0))
        deadline = pod["metadata"].get("deletionTimestamp")
        if not deadline:
            live += 1
        elif now <= _parse_time(deadline) + OVERDUE:
            leaving += 1
        counted[key] = (live, leaving)
    return counted


def _parse_time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(UTC)


def _find_group(obj: Object) -> str:
    return str((obj["metadata"].get("labels") or {}).get(names.LABEL_GROUP, ""))
