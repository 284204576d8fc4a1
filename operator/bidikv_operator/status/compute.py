"""The resource's status from what was observed, planned and applied. Pure.

Every pass gives all of ``names.CONDITION_TYPES``, whatever happened, and equal facts give equal bytes: a status is
written only when it says something new. What the conditions mean stands in ``roles.py`` and ``summary.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from bidikv_operator import names
from bidikv_operator.cache import ChildRef
from bidikv_operator.kinds import DEPLOYMENT
from bidikv_operator.resolved import Resolved, ResolvedUpdates
from bidikv_operator.rollout.plan import EngineSet, Rollout
from bidikv_operator.state import Applied, Observed
from bidikv_operator.status.conditions import Condition, build_conditions
from bidikv_operator.status.roles import RoleView, compute_role_condition, view_engines, view_router
from bidikv_operator.status.scaling import compute_scaling
from bidikv_operator.status.summary import Picture, compute_degraded, compute_progressing, compute_ready
from bidikv_operator.status.transport import compute_transport, find_condition
from bidikv_operator.validate import Rejected
from bidikv_runtime import contract


class HealingVerdict(Protocol):
    """What healing has to tell (``healing.py``)."""

    @property
    def reason(self) -> str | None: ...
    @property
    def message(self) -> str: ...


def compute_status(
    observed: Observed,
    checked: Resolved | Rejected,
    applied: Applied,
    rollout: Rollout | None = None,
    healing: HealingVerdict | None = None,
    *,
    now: str,
) -> dict[str, Any]:
    """The whole ``status`` in API form.

    Args:
        rollout: where the engines stand; None: every set that exists is current.
        healing: None when nothing was decided.
        now: RFC 3339 time with a precision of seconds.
    """
    metadata = observed.resource["metadata"]
    previous = observed.resource.get("status") or {}
    resolved = checked if isinstance(checked, Resolved) else None
    rollout = rollout if rollout is not None else _take_all_as_current(applied)
    unavailable = (resolved.updates if resolved else ResolvedUpdates()).max_unavailable
    views: dict[names.Role, RoleView] = {
        role: view_engines(role, rollout, observed, applied, max_unavailable=unavailable) for role in names.ENGINE_ROLES
    }
    views[names.ROUTER] = view_router(observed, applied, wanted=resolved.router.replicas if resolved else None)
    accepted = _compute_accepted(checked)
    roles = tuple(compute_role_condition(view) for view in views.values())
    transport = _compute_transport(observed, resolved)
    picture = Picture(
        accepted=accepted,
        checked=resolved,
        applied=applied,
        rollout=rollout,
        views=views,
        roles=roles,
        transport=transport,
        missing_kinds=observed.missing_kinds,
        healing_reason=healing.reason if healing is not None else None,
        healing_message=healing.message if healing is not None else "",
    )
    conditions = (
        accepted,
        *roles,
        transport,
        compute_scaling(resolved),
        compute_progressing(picture),
        compute_degraded(picture),
        compute_ready(picture),
    )
    generation = metadata["generation"]
    return {
        "observedGeneration": generation,
        "conditions": build_conditions(conditions, previous.get("conditions") or [], generation=generation, now=now),
        "endpoint": _compute_endpoint(observed, resolved),
        **{role: _compute_counts(metadata["name"], view) for role, view in views.items()},
    }


def _compute_accepted(checked: Resolved | Rejected) -> Condition:
    if isinstance(checked, Rejected):
        return Condition(names.ACCEPTED, "False", names.REASON_INVALID, str(checked))
    return Condition(names.ACCEPTED, "True", names.REASON_VALID, "the resource is valid")


def _compute_transport(observed: Observed, checked: Resolved | None) -> Condition:
    previous = find_condition(observed.resource.get("status") or {})
    if checked is not None:
        return compute_transport(observed.engines, checked.fabric, previous)
    if previous is not None:
        return Condition(names.TRANSPORT_VERIFIED, previous["status"], previous["reason"], previous["message"])
    message = "which fabric to compare with is not known while the resource is invalid"
    return Condition(names.TRANSPORT_VERIFIED, "Unknown", names.REASON_INVALID, message)


def _compute_endpoint(observed: Observed, checked: Resolved | None) -> str:
    metadata = observed.resource["metadata"]
    if checked is None:  # what runs keeps running, as it was
        before = (observed.resource.get("status") or {}).get("endpoint")
        if before:
            return str(before)
    scheme = "https" if checked is not None and checked.router.tls_secret_name else "http"
    return f"{scheme}://{metadata['name']}.{metadata['namespace']}.svc:{contract.ROUTER_PORT}/v1"


def _compute_counts(owner: str, view: RoleView) -> dict[str, Any]:
    return {
        "replicas": view.live,
        "readyReplicas": view.ready,
        "updatedReplicas": view.updated,
        "selector": f"{names.LABEL_OWNER}={owner},{names.LABEL_ROLE}={view.role}",
    }


def _take_all_as_current(applied: Applied) -> Rollout:
    sets = []
    for ref, obj in applied.children.items():
        role = (obj["metadata"].get("labels") or {}).get(names.LABEL_ROLE)
        if ref.kind == DEPLOYMENT and role in names.ENGINE_ROLES:
            sets.append(_describe_deployment(ref, role, obj))
    return Rollout(sets=tuple(sets), wanted={found.role: found.replicas for found in sets})


def _describe_deployment(ref: ChildRef, role: names.Role, obj: Mapping[str, Any]) -> EngineSet:
    status, wanted = obj.get("status") or {}, obj["spec"].get("replicas", 1)
    live, updated, ready = (status.get(key, 0) for key in ("replicas", "updatedReplicas", "readyReplicas"))
    is_seen = status.get("observedGeneration", 0) >= obj["metadata"].get("generation", 0)
    return EngineSet(
        ref=ref,
        role=role,
        group="",
        is_current=True,
        replicas=wanted,
        live=live,
        ready=ready,
        updated=updated,
        is_rolled_out=is_seen and updated >= wanted and live <= updated and ready >= wanted,
        is_late=any(
            condition["type"] == "Progressing" and condition.get("reason") == "ProgressDeadlineExceeded"
            for condition in status.get("conditions") or []
        ),
    )
