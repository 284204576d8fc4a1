"""What a plan changes in sets that exist: replicas, and before that which pods a scale-down should take. Pure.

Sets of other groups than the current one are only ever resized: their templates stay what they were, whatever the
operator would build today.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bidikv_operator import names
from bidikv_operator.cache import ChildRef
from bidikv_operator.engines.value import compute_session_value
from bidikv_operator.kinds import DEPLOYMENT
from bidikv_operator.names import Role
from bidikv_operator.resolved import Resolved
from bidikv_operator.rollout.plan import EngineSet, Target, compute_target, may_take_newest, plan_replicas
from bidikv_operator.rollout.sets import find_current, find_engine_set, find_input, find_pods, read_sets
from bidikv_operator.state import EngineFacts, Observed
from bidikv_runtime.contract import EngineReport

Object = Mapping[str, Any]


@dataclass(frozen=True)
class PodCost:
    """A pod's annotation by which Kubernetes chooses what a scale-down removes."""

    pod: str
    uid: str
    cost: int


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """What engines' sets should become in this pass."""

    replicas: Mapping[ChildRef, int]
    """Of the current set of each role."""
    inputs: Mapping[Role, str]
    """Which template the current set of each role should have: not yet the newest one, if it has to wait."""
    others: Mapping[ChildRef, int]
    """Of sets that are to become empty and still have pods; they must not be deleted before they are."""
    costs: tuple[PodCost, ...] = ()
    """To be written before any set shrinks."""


def plan_scaling(resolved: Resolved, observed: Observed, now: datetime) -> Scaling:
    """The next step of whatever rollout or scaling is due; equal to what is when nothing is."""
    current = find_current(resolved)
    sets = list(read_sets(observed.children, observed.pods, current=current, now=now))
    existing = {found.ref for found in sets}
    for role in names.ENGINE_ROLES:
        ref = find_engine_set(resolved, role)
        if ref not in existing:
            group = resolved.identity.group
            sets.append(EngineSet(ref=ref, role=role, group=group, is_current=True, replicas=0))
    targets = compute_targets(resolved)
    planned = plan_replicas(sets, targets)
    if any(ref.kind in observed.missing_kinds for ref in current):  # nothing would take their place
        planned |= {found.ref: found.replicas for found in sets if not found.is_current}
    return Scaling(
        replicas={ref: planned[ref] for ref in current},
        inputs={role: _choose_input(resolved, observed, sets, role, targets) for role in names.ENGINE_ROLES},
        others={
            found.ref: planned[found.ref]
            for found in sets
            if not found.is_current and (found.replicas or found.live or found.leaving)
        },
        costs=plan_costs(sets, planned, observed.pods, observed.engines),
    )


def _choose_input(
    resolved: Resolved, observed: Observed, sets: Iterable[EngineSet], role: Role, targets: Mapping[Role, Target]
) -> str:
    newest = resolved.identity.input_of(role)
    if may_take_newest(sets, role, targets):
        return newest
    return find_input(observed.children[find_engine_set(resolved, role)]) or newest


def compute_targets(resolved: Resolved) -> dict[Role, Target]:
    updates, wanted = resolved.updates, {role: resolved.engine(role).replicas for role in names.ENGINE_ROLES}
    return {role: compute_target(count, updates.max_surge, updates.max_unavailable) for role, count in wanted.items()}


def plan_costs(
    sets: Iterable[EngineSet],
    planned: Mapping[ChildRef, int],
    pods: Sequence[Object],
    engines: Iterable[EngineFacts],
) -> tuple[PodCost, ...]:
    """Costs that differ from what the pods carry, for the sets of which some pods go and some stay.

    A LeaderWorkerSet removes its last replicas, whatever they hold.
    """
    reports: dict[str, list[EngineReport]] = defaultdict(list)
    for facts in engines:
        if facts.report is not None:
            reports[facts.uid].append(facts.report)
    costs = []
    for found in sets:
        if found.ref.kind != DEPLOYMENT or not 0 < planned[found.ref] < found.replicas:
            continue
        for pod in find_pods(pods, found):
            metadata = pod["metadata"]
            cost = compute_session_value(reports[metadata["uid"]])
            written = (metadata.get("annotations") or {}).get(names.ANNOTATION_DELETION_COST, "0")
            if written != str(cost) and not metadata.get("deletionTimestamp"):
                costs.append(PodCost(metadata["name"], metadata["uid"], cost))
    return tuple(costs)
