"""PodDisruptionBudgets: node drains take one pod of a role at a time."""

from __future__ import annotations

from bidikv_operator import names
from bidikv_operator.build.meta import Manifest, build_object, build_selector, compute_replicas, role_name
from bidikv_operator.build.placement import list_engine_labels
from bidikv_operator.kinds import POD_DISRUPTION_BUDGET
from bidikv_operator.resolved import Resolved


def build_disruption_budget(resolved: Resolved, role: names.Role) -> Manifest | None:
    """None for fewer than two pods: a budget could then only block the drain or say nothing."""
    if compute_replicas(resolved, role) < 2:
        return None
    budget = build_object(POD_DISRUPTION_BUDGET, resolved, role_name(resolved, role), role)
    selector: Manifest = {"matchLabels": build_selector(resolved, role)}
    if role != names.ROUTER and resolved.engine(role).nodes > 1:
        # A worker that is evicted takes its whole replica along, so it counts as one of the role's pods.
        selector = {
            "matchLabels": {names.LABEL_OWNER: resolved.name},
            "matchExpressions": [
                {"key": names.LABEL_ROLE, "operator": "In", "values": list_engine_labels((role,))},
            ],
        }
    budget["spec"] = {
        "maxUnavailable": 1,
        "selector": selector,
        # A pod that never became ready must not block a drain.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return budget
