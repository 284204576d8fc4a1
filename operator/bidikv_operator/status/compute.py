"""The resource's status from what was observed, planned and applied. Pure.

Every pass gives all of ``names.CONDITION_TYPES``, whatever happened, and equal facts give equal bytes: a status is
written only when it says something new. What the conditions mean stands in ``roles.py`` and ``summary.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from bidikv_operator import names
from bidikv_operator.resolved import Resolved, ResolvedUpdates
from bidikv_operator.rollout.plan import Rollout
from bidikv_operator.state import Applied, Observed
from bidikv_operator.status.conditions import Condition, build_conditions
from bidikv_operator.status.reuse import compute_reuse
from bidikv_operator.status.roles import RoleView, compute_role_condition, find_pod_spec, view_engines, view_router
from bidikv_operator.status.scaling import compute_scaling
from bidikv_operator.status.summary import Picture, compute_degraded, compute_progressing, compute_ready
from bidikv_operator.status.transport import compute_transport, compute_transport_facts, find_condition
from bidikv_operator.validate import Rejected
from bidikv_runtime import contract


class HealingVerdict(Protocol):
    """What healing has to tell (``healing.py``)."""

    @property
    def reason(self) -> str | None: ...
    @property
    def message(self) -> str: ...
    @property
    def recycled(self) -> Sequence[Mapping[str, str]]:
        """What of its past belongs into the status."""


def compute_status(
    observed: Observed,
    checked: Resolved | Rejected,
    applied: Applied,
    rollout: Rollout,
    healing: HealingVerdict | None = None,
    *,
    now: str,
) -> dict[str, Any]:
    """The whole ``status`` in API form.

    Args:
        rollout: where the engines stand after this pass.
        healing: None when nothing was decided.
        now: RFC 3339 time with a precision of seconds.
    """
    metadata = observed.resource["metadata"]
    previous = observed.resource.get("status") or {}
    resolved = checked if isinstance(checked, Resolved) else None
    updates = resolved.updates if resolved is not None else ResolvedUpdates()
    views: dict[names.Role, RoleView] = {
        role: view_engines(role, rollout, observed, applied, updates) for role in names.ENGINE_ROLES
    }
    wanted = resolved.router.replicas if resolved is not None else None
    views[names.ROUTER] = view_router(observed, applied, tuple(views.values()), wanted=wanted)
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
        **{role: _compute_counts(metadata["name"], view, rollout) for role, view in views.items()},
        **_compute_facts(observed, resolved, applied, rollout, healing),
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


def _compute_counts(owner: str, view: RoleView, rollout: Rollout) -> dict[str, Any]:
    counts = {
        "replicas": view.live,
        "readyReplicas": view.ready,
        "updatedReplicas": view.updated,
        "selector": f"{names.LABEL_OWNER}={owner},{names.LABEL_ROLE}={view.role}",
    }
    current = next((found.group for found in rollout.of_role(view.role) if found.is_current), "")
    return {**counts, "group": current} if current else counts


def _compute_facts(
    observed: Observed,
    checked: Resolved | None,
    applied: Applied,
    rollout: Rollout,
    healing: HealingVerdict | None,
) -> dict[str, Any]:
    """What else is known; what is not, is left out."""
    previous = observed.resource.get("status") or {}
    facts = {
        "runtimeImage": _find_runtime_image(applied, rollout),
        "kvReuse": previous.get("kvReuse"),
        "transport": previous.get("transport"),
        "healing": _compute_healing(healing, previous),
    }
    if checked is not None:  # else it may not even be known how many ranks to ask
        facts["kvReuse"] = compute_reuse(observed.engines, previous.get("kvReuse"))
        facts["transport"] = compute_transport_facts(observed.engines, previous.get("transport"))
    return {name: value for name, value in facts.items() if value}


def _compute_healing(healing: HealingVerdict | None, previous: Mapping[str, Any]) -> Any:
    if healing is None:
        return previous.get("healing")
    return {"recycled": [dict(record) for record in healing.recycled]} if healing.recycled else None


def _find_runtime_image(applied: Applied, rollout: Rollout) -> str | None:
    """Of the connector that the current engines run, which a newer operator leaves as it is."""
    for role in names.ENGINE_ROLES:
        current = [found for found in rollout.of_role(role) if found.is_current]
        for container in find_pod_spec(applied, current).get("initContainers") or []:
            if container["name"] == names.INSTALL_CONTAINER:
                return str(container["image"])
    return None
