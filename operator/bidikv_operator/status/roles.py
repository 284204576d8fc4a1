"""One role as the status sees it: its sets and pods, how many serve, and what keeps the others from it. Pure.

A role is ready while it has at least ``floor`` ready pods: all that are wanted, less what a rollout may take down
(``updateStrategy.maxUnavailable``), and never less than one. So a rollout, or the loss of one engine of many, is told
by Progressing and Degraded and leaves the role ready. A Deployment's own condition Available means the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from bidikv_operator import names
from bidikv_operator.cache import ChildRef
from bidikv_operator.kinds import DEPLOYMENT, LEADER_WORKER_SET
from bidikv_operator.resolved import ResolvedUpdates
from bidikv_operator.rollout.plan import EngineSet, Rollout, compute_target
from bidikv_operator.state import Applied, Observed
from bidikv_operator.status.conditions import Condition
from bidikv_operator.status.pods import NAMED_POD, Trouble, describe_stages, find_trouble, read_readiness
from bidikv_operator.status.scheduling import compute_needs

Object = Mapping[str, Any]

ROUTER_UNAVAILABLE: Final = 1
"""Of several routers one may be away; they share no state that would be lost."""


@dataclass(frozen=True)
class RoleView:
    role: names.Role
    wanted: int
    floor: int
    ready: int
    live: int
    updated: int
    is_created: bool
    is_rolled_out: bool
    """All wanted pods are ready and of the newest template, and no others are left."""
    is_replacing: bool
    """Pods of an earlier template or group are still there."""
    is_late: bool
    """A set that is to grow has made no progress within its deadline."""
    paused: tuple[str, ...]
    """Names of its Deployments that somebody paused."""
    is_held: bool
    """A pause keeps the newest template from pods that should have it."""
    trouble: Trouble | None
    stages: str
    """What pods that are not ready and not in trouble are doing; empty when there are none."""

    @property
    def is_complete(self) -> bool:
        return self.ready >= self.wanted

    @property
    def counted(self) -> str:
        return f"{self.ready} of {self.wanted} {self.role} {'pod is' if self.wanted == 1 else 'pods are'} ready"

    @property
    def pause(self) -> str:
        """What a pause means, with the way out of it; empty when nothing is paused."""
        return "; ".join(
            f"Deployment {name} is paused, so its pods keep the template that they have; "
            f"kubectl rollout resume deployment/{name} lets them follow"
            for name in self.paused
        )

    @property
    def is_halted(self) -> bool:
        """Whether a pause keeps its pods from being made at all."""
        return self.is_held and not self.stages

    @property
    def fault(self) -> Trouble | None:
        """What a person should look at: nothing that is still within its time."""
        if self.is_complete or self.wanted == 0 or self.trouble is None:
            return None
        return self.trouble if self.trouble.is_fault or self.is_late else None


def view_engines(
    role: names.Role, rollout: Rollout, observed: Observed, applied: Applied, updates: ResolvedUpdates
) -> RoleView:
    """An engine role: the sum over its sets, of whatever group."""
    sets = rollout.of_role(role)
    current = [found for found in sets if found.is_current]
    wanted = rollout.wanted.get(role, sum(found.replicas for found in current))
    ready = sum(found.ready for found in sets)
    live = sum(found.live for found in sets)
    updated = sum(found.updated for found in current)
    pods = _pods_of(observed, role)
    pod_spec, refs = find_pod_spec(applied, current), [found.ref for found in sets]
    return RoleView(
        role=role,
        wanted=wanted,
        floor=compute_target(wanted, updates.max_surge, updates.max_unavailable).lowest,
        ready=ready,
        live=live,
        updated=updated,
        is_created=bool(sets),
        is_rolled_out=bool(current)
        and all(found.is_rolled_out and found.is_newest for found in current)
        and ready >= wanted
        and not any(found.replicas or found.live or found.leaving for found in sets if not found.is_current),
        is_replacing=any(
            not found.is_newest or _is_replacing(applied.children.get(found.ref) or {}) for found in current
        )
        or any(found.replicas or found.live or found.leaving for found in sets if not found.is_current),
        is_late=any(found.is_late for found in current),
        paused=tuple(sorted(found.ref.name for found in current if found.is_paused)),
        is_held=any(found.is_held for found in current),
        trouble=find_trouble(_leave_out_outgoing(pods, sets), compute_needs(pod_spec))
        or _find_creation_trouble(applied, refs),
        stages=describe_stages(pods),
    )


def view_router(observed: Observed, applied: Applied, engines: Collection[RoleView], *, wanted: int | None) -> RoleView:
    """The router's Deployment. A router says itself that it is not ready while a role has no ready engine.

    Args:
        engines: both engine roles.
        wanted: None: what the Deployment itself says.
    """
    name = names.child_name(observed.resource["metadata"]["name"], names.ROUTER)
    ref = ChildRef(DEPLOYMENT, name)
    deployment = applied.children.get(ref) or {}
    status = deployment.get("status") or {}
    if wanted is None:
        wanted = deployment.get("spec", {}).get("replicas", 1)
    ready, live, updated = (status.get(key, 0) for key in ("readyReplicas", "replicas", "updatedReplicas"))
    is_seen = status.get("observedGeneration", 0) >= deployment.get("metadata", {}).get("generation", 0)
    is_paused = bool((deployment.get("spec") or {}).get("paused"))
    pods = _pods_of(observed, names.ROUTER)
    needs = compute_needs((deployment.get("spec") or {}).get("template", {}).get("spec", {}))
    trouble, stages = find_trouble(pods, needs), describe_stages(pods)
    has_engines = all(view.ready for view in engines)
    if trouble is None or trouble.reason == names.REASON_NOT_ANSWERING:
        if not has_engines:
            trouble, stages = None, "a router is ready once engines of both roles are"
        elif not _has_failed_with_engines(observed, pods):
            trouble = None
    return RoleView(
        role=names.ROUTER,
        wanted=wanted,
        floor=compute_target(wanted, 0, ROUTER_UNAVAILABLE).lowest,
        ready=ready,
        live=live,
        updated=updated,
        is_created=bool(deployment),
        is_rolled_out=bool(deployment and is_seen and updated >= wanted and live <= updated and ready >= wanted),
        is_replacing=_is_replacing(deployment),
        is_late=_is_late(status) and has_engines,
        paused=(name,) if is_paused else (),
        is_held=bool(is_paused and is_seen and wanted and (_is_replacing(deployment) or not updated)),
        trouble=trouble or _find_creation_trouble(applied, [ref]),
        stages=stages,
    )


def _has_failed_with_engines(observed: Observed, routers: list[dict[str, Any]]) -> bool:
    """Whether some router ceased to be ready after engines of both roles were.

    Else it ceased for want of engines, and has not been probed again since they came.
    """
    engines = [[read_readiness(pod) for pod in _pods_of(observed, role)] for role in names.ENGINE_ROLES]
    came = max(min((one.since for one in found if one.is_ready and one.since), default="") for found in engines)
    return any(one.since > came for one in map(read_readiness, routers) if not one.is_ready)


def compute_role_condition(view: RoleView) -> Condition:
    """``PrefillReady``, ``DecodeReady`` or ``RouterReady``."""
    name = names.ROLE_CONDITIONS[view.role]
    if not view.is_created:
        return Condition(name, "Unknown", names.REASON_NOT_CREATED, f"nothing makes {view.role} pods yet")
    if view.wanted == 0:
        message = (
            f"no {view.role} pod is asked for, so nothing can be served; set spec.{view.role}.replicas to at least 1"
        )
        return Condition(name, "False", names.REASON_SCALED_TO_ZERO, message)
    # Ready pods serve, of whatever template: a rollout is Progressing's to tell. Asking here whether the controllers
    # have seen the new spec made Ready flicker for milliseconds at every change.
    if view.is_complete:
        return Condition(name, "True", names.REASON_ALL_READY, view.counted)
    explained = explain_missing(view)
    if view.ready >= view.floor:
        return Condition(name, "True", names.REASON_ENOUGH_READY, f"{view.counted}, enough to serve; {explained}")
    reason = names.REASON_STARTING
    if view.trouble is not None:
        reason = view.trouble.reason
    elif view.is_halted:
        reason = names.REASON_DEPLOYMENT_PAUSED
    elif view.is_late:
        reason = names.REASON_STALLED
    return Condition(name, "False", reason, f"{view.counted}; {explained}")


def explain_missing(view: RoleView) -> str:
    """Why fewer pods are ready than wanted, without counting them."""
    if view.trouble is not None:
        return view.trouble.message
    if view.is_halted:
        return view.pause
    if view.is_late:
        doing = view.stages or "none was created"
        return (
            f"the others made no progress within their deadline ({doing}); kubectl describe pod "
            f"-l {names.LABEL_ROLE}={view.role} tells what they wait for"
        )
    return view.stages or "the others are being created"


def find_pod_spec(applied: Applied, sets: list[EngineSet]) -> Object:
    """Of the largest pods that the sets make: where a replica is several pods, all ask for the same."""
    for found in sets:
        spec = (applied.children.get(found.ref) or {}).get("spec") or {}
        if found.ref.kind == LEADER_WORKER_SET:
            template = (spec.get("leaderWorkerTemplate") or {}).get("workerTemplate") or {}
        else:
            template = spec.get("template") or {}
        return template.get("spec") or {}
    return {}


def _pods_of(observed: Observed, role: names.Role) -> list[dict[str, Any]]:
    """Of the role, workers of its multi-node replicas included: what keeps one of them down keeps the replica down."""
    labels = (role, names.WORKER_LABELS.get(role))
    return [pod for pod in observed.pods if (pod["metadata"].get("labels") or {}).get(names.LABEL_ROLE) in labels]


def _leave_out_outgoing(pods: list[dict[str, Any]], sets: tuple[EngineSet, ...]) -> list[dict[str, Any]]:
    """Without pods that the rollout is to take away: what ails those of a failed group ends with them.

    Those that are stopping stay: others may wait for what they hold. While nothing is rolled out (paused), all count.
    """
    groups = {found.group for found in sets if found.is_current}
    if not groups:
        return pods
    return [
        pod
        for pod in pods
        if pod["metadata"].get("deletionTimestamp") or pod["metadata"]["labels"].get(names.LABEL_GROUP, "") in groups
    ]


def _find_creation_trouble(applied: Applied, refs: list[ChildRef]) -> Trouble | None:
    """Pods that were never created: quotas, admission, a missing ServiceAccount."""
    for ref in refs:
        for condition in ((applied.children.get(ref) or {}).get("status") or {}).get("conditions") or []:
            if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
                words = NAMED_POD.sub("a pod", condition.get("message", ""))
                return Trouble(names.REASON_POD_CREATION_FAILED, f"pods cannot be created: {words}")
    return None


def _is_replacing(child: Object) -> bool:
    """Whether a set itself says so: its pods, counted elsewhere, are known at another moment than its status."""
    status = child.get("status") or {}
    return bool(status.get("replicas", 0) > status.get("updatedReplicas", 0))


def _is_late(status: Object) -> bool:
    return any(
        condition["type"] == "Progressing" and condition.get("reason") == "ProgressDeadlineExceeded"
        for condition in status.get("conditions") or []
    )
