"""The resource's status from what was observed and applied. Pure.

Ready is the summary: the resource is accepted and every role has all its replicas ready. Progressing is True while
the operator or the cluster works towards that and False when it is reached or when it needs a person; its reason
tells which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bidikv_operator import names
from bidikv_operator.build import ROLES
from bidikv_operator.cache import ChildRef
from bidikv_operator.kinds import DEPLOYMENT
from bidikv_operator.resolved import Resolved
from bidikv_operator.state import Applied, Failure, Observed
from bidikv_operator.status.conditions import Condition, build_conditions
from bidikv_operator.status.pods import Trouble, find_trouble
from bidikv_operator.validate import Rejected
from bidikv_runtime import contract

MESSAGE_LIMIT: Final = 2048


def compute_status(observed: Observed, checked: Resolved | Rejected, applied: Applied, *, now: str) -> dict[str, Any]:
    """The whole ``status`` in API form."""
    metadata = observed.resource["metadata"]
    name, namespace = metadata["name"], metadata["namespace"]
    deployments = {role: _find_deployment(applied, name, role) for role in ROLES}
    accepted = _compute_accepted(checked)
    roles = [_compute_role(role, deployments[role], _pods_of(observed, role)) for role in ROLES]
    progressing = _compute_progressing(checked, applied, deployments, roles)
    conditions = [accepted, *roles, progressing, _compute_ready(accepted, applied, roles)]
    previous = (observed.resource.get("status") or {}).get("conditions") or []
    generation = metadata["generation"]
    return {
        "observedGeneration": generation,
        "conditions": build_conditions(conditions, previous, generation=generation, now=now),
        "endpoint": f"http://{name}.{namespace}.svc:{contract.ROUTER_PORT}/v1",
        **{role: _compute_counts(name, role, deployments[role]) for role in ROLES},
    }


def _find_deployment(applied: Applied, owner: str, role: names.Role) -> Mapping[str, Any] | None:
    return applied.children.get(ChildRef(DEPLOYMENT, names.child_name(owner, role)))


def _pods_of(observed: Observed, role: names.Role) -> list[dict[str, Any]]:
    return [pod for pod in observed.pods if (pod["metadata"].get("labels") or {}).get(names.LABEL_ROLE) == role]


def _compute_counts(owner: str, role: names.Role, deployment: Mapping[str, Any] | None) -> dict[str, Any]:
    status = (deployment or {}).get("status") or {}
    return {
        "replicas": status.get("replicas", 0),
        "readyReplicas": status.get("readyReplicas", 0),
        "updatedReplicas": status.get("updatedReplicas", 0),
        "selector": f"{names.LABEL_OWNER}={owner},{names.LABEL_ROLE}={role}",
    }


def _compute_accepted(checked: Resolved | Rejected) -> Condition:
    if isinstance(checked, Rejected):
        return Condition(names.ACCEPTED, "False", names.REASON_INVALID, str(checked)[:MESSAGE_LIMIT])
    return Condition(names.ACCEPTED, "True", names.REASON_VALID, "the resource is valid")


def _compute_role(role: names.Role, deployment: Mapping[str, Any] | None, pods: list[dict[str, Any]]) -> Condition:
    name = names.ROLE_CONDITIONS[role]
    if deployment is None:
        return Condition(name, "Unknown", names.REASON_NOT_CREATED, f"there is no Deployment for {role} yet")
    wanted = deployment["spec"].get("replicas", 1)
    if wanted == 0:
        message = f"no {role} pod is asked for, so nothing can be served; set spec.{role}.replicas to at least 1"
        return Condition(name, "False", names.REASON_SCALED_TO_ZERO, message)
    status = deployment.get("status") or {}
    ready = status.get("readyReplicas", 0)
    counted = f"{ready} of {wanted} {role} {'pod is' if wanted == 1 else 'pods are'} ready"
    # Ready pods serve, of whatever template: a rollout is Progressing's to tell. Asking here whether the Deployment's
    # controller has seen the new spec made Ready flicker for milliseconds at every change.
    if ready >= wanted:
        return Condition(name, "True", names.REASON_ALL_READY, counted)
    trouble = find_trouble(pods) or _find_creation_trouble(status)
    if trouble is not None:
        return Condition(name, "False", trouble.reason, f"{counted}: {trouble.message}"[:MESSAGE_LIMIT])
    return Condition(name, "False", names.REASON_STARTING, f"{counted}; the rest is starting")


def _is_seen(deployment: Mapping[str, Any]) -> bool:
    """Whether the Deployment's own status is about its present spec."""
    seen = (deployment.get("status") or {}).get("observedGeneration", 0)
    return bool(seen >= deployment["metadata"].get("generation", 0))


def _find_creation_trouble(status: Mapping[str, Any]) -> Trouble | None:
    """Pods that were never created: quotas, admission, a missing ServiceAccount."""
    for condition in status.get("conditions") or []:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return Trouble(names.REASON_POD_CREATION_FAILED, f"pods cannot be created: {condition.get('message', '')}")
    return None


def _compute_progressing(
    checked: Resolved | Rejected,
    applied: Applied,
    deployments: Mapping[names.Role, Mapping[str, Any] | None],
    roles: list[Condition],
) -> Condition:
    if isinstance(checked, Rejected):
        message = "nothing is changed while the resource is invalid; correct it as Accepted says"
        return Condition(names.PROGRESSING, "False", names.REASON_INVALID, message)
    if applied.failures:
        return Condition(names.PROGRESSING, "False", *_explain_failures(applied.failures))
    if applied.waiting:
        listed = ", ".join(sorted(str(ref) for ref in applied.waiting))
        message = f"waiting for the deletion of earlier objects of the same name: {listed}"
        return Condition(names.PROGRESSING, "True", names.REASON_WAITING_FOR_DELETION, message[:MESSAGE_LIMIT])
    late = [role for role, deployment in deployments.items() if deployment is not None and _is_stalled(deployment)]
    if late:
        message = f"the rollout of {', '.join(late)} made no progress within its deadline; see the role's condition"
        return Condition(names.PROGRESSING, "False", names.REASON_STALLED, message)
    rolling = [role for role, deployment in deployments.items() if deployment is None or not _is_rolled_out(deployment)]
    if rolling:
        return Condition(
            names.PROGRESSING, "True", names.REASON_ROLLING_OUT, f"pods of {', '.join(rolling)} are being brought up"
        )
    return Condition(names.PROGRESSING, "False", names.REASON_ROLLED_OUT, "all pods are of the newest template")


def _explain_failures(failures: tuple[Failure, ...]) -> tuple[str, str]:
    text = "; ".join(sorted(str(failure) for failure in failures))
    return failures[0].reason, text[:MESSAGE_LIMIT]


def _is_stalled(deployment: Mapping[str, Any]) -> bool:
    return any(
        condition["type"] == "Progressing" and condition.get("reason") == "ProgressDeadlineExceeded"
        for condition in (deployment.get("status") or {}).get("conditions") or []
    )


def _is_rolled_out(deployment: Mapping[str, Any]) -> bool:
    """As ``kubectl rollout status`` decides it."""
    wanted, status = deployment["spec"].get("replicas", 1), deployment.get("status") or {}
    return bool(
        _is_seen(deployment)
        and status.get("updatedReplicas", 0) >= wanted
        and status.get("replicas", 0) <= status.get("updatedReplicas", 0)
        and status.get("readyReplicas", 0) >= wanted
    )


def _compute_ready(accepted: Condition, applied: Applied, roles: list[Condition]) -> Condition:
    # A child that could only not be changed still serves; without one of its children the resource does not.
    missing = tuple(
        failure
        for failure in applied.failures
        if failure.reason == names.REASON_NAME_TAKEN or failure.ref not in applied.children
    )
    if missing and accepted.status == "True":
        return Condition(names.READY, "False", *_explain_failures(missing))
    for condition in (accepted, *roles):
        if condition.status != "True":
            return Condition(names.READY, "False", condition.reason, condition.message)
    return Condition(names.READY, "True", names.REASON_READY, "all pods are ready and the endpoint serves")
