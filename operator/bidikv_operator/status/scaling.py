"""The condition Scaling: who decides on the number of engines, and whether the bounds hold it back. Pure."""

from __future__ import annotations

from bidikv_operator import names
from bidikv_operator.resolved import Resolved
from bidikv_operator.status.conditions import Condition


def compute_scaling(checked: Resolved | None) -> Condition:
    """True while something else than a person writes replicas; the reason tells of the bounds.

    Args:
        checked: None while the resource is invalid.
    """
    if checked is None:
        message = "replicas are not changed while the resource is invalid"
        return Condition(names.SCALING, "Unknown", names.REASON_INVALID, message)
    scaling = checked.scaling
    if scaling.mode == "Disabled":
        message = "replicas are what the spec says; spec.autoscaling lets something else write them within bounds"
        return Condition(names.SCALING, "False", names.REASON_DISABLED, message)
    held = [told for role in names.ENGINE_ROLES if (told := _explain_bound(checked, role)) is not None]
    if not held:
        within = ", ".join(
            f"{role} {scaling.minimum[role]} to {scaling.maximum[role]}"
            for role in names.ENGINE_ROLES
            if role in scaling.minimum and role in scaling.maximum
        )
        message = f"replicas are as asked, within their bounds{f' ({within})' if within else ''}"
        return Condition(names.SCALING, "True", names.REASON_WITHIN_BOUNDS, message)
    reasons = [reason for reason, _ in held]
    reason = names.REASON_AT_MAXIMUM if names.REASON_AT_MAXIMUM in reasons else names.REASON_AT_MINIMUM
    return Condition(names.SCALING, "True", reason, "; ".join(message for _, message in held))


def _explain_bound(checked: Resolved, role: names.Role) -> tuple[str, str] | None:
    scaling = checked.scaling
    asked, lowest, highest = (of.get(role) for of in (scaling.asked, scaling.minimum, scaling.maximum))
    if asked is None:
        return None
    if highest is not None and asked > highest:
        return names.REASON_AT_MAXIMUM, (
            f"spec.{role}.replicas asks for {asked}, spec.autoscaling.{role}.maxReplicas allows {highest}: raise it if "
            "there are accelerators for more"
        )
    if lowest is not None and asked < lowest:
        return names.REASON_AT_MINIMUM, (
            f"spec.{role}.replicas asks for {asked}, spec.autoscaling.{role}.minReplicas keeps {lowest}: lower it if "
            "fewer suffice"
        )
    return None
