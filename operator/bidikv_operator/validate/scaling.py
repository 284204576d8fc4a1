"""``spec.autoscaling``: the bounds of the engine roles' replicas."""

from __future__ import annotations

from collections.abc import Mapping

from bidikv_operator import resolved
from bidikv_operator.api.scaling import Autoscaling, Objectives, ReplicaBounds
from bidikv_operator.validate.problem import Problem, Problems


def resolve_scaling(given: Autoscaling | None, asked: Mapping[str, int]) -> tuple[resolved.ResolvedScaling, Problems]:
    """What autoscaling says about the replicas that the spec asks for, by engine role."""
    if given is None:
        return resolved.ResolvedScaling(asked=asked), []
    bounds = {
        role: bound for role, bound in (("prefill", given.prefill), ("decode", given.decode)) if bound is not None
    }
    problems = [
        Problem(
            f"spec.autoscaling.{role}.minReplicas",
            f"{_minimum(bound)} is greater than maxReplicas {bound.max_replicas}; raise maxReplicas",
        )
        for role, bound in bounds.items()
        if _minimum(bound) > bound.max_replicas
    ]
    active = bounds if given.mode == "External" else {}
    objectives = given.objectives or Objectives()
    scaling = resolved.ResolvedScaling(
        mode=given.mode,
        objectives=resolved.ResolvedObjectives(
            time_to_first_token_milliseconds=objectives.time_to_first_token_p90_milliseconds,
            inter_token_latency_milliseconds=objectives.inter_token_latency_p90_milliseconds,
        ),
        asked=asked,
        minimum={role: _minimum(bound) for role, bound in active.items()},
        maximum={role: bound.max_replicas for role, bound in active.items()},
    )
    return scaling, problems


def _minimum(bound: ReplicaBounds) -> int:
    return min(1, bound.max_replicas) if bound.min_replicas is None else bound.min_replicas


def clamp_replicas(scaling: resolved.ResolvedScaling, role: str, replicas: int) -> int:
    """``replicas`` within the role's bounds, where it has some."""
    return min(max(replicas, scaling.minimum.get(role, 0)), scaling.maximum.get(role, replicas))
