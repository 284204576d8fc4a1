"""Where a rollout stands, from what is there after a pass. Pure; sentences without names and numbers that tick."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from bidikv_operator import names
from bidikv_operator.cache import ChildRef
from bidikv_operator.resolved import Resolved
from bidikv_operator.rollout.plan import EngineSet, Rollout
from bidikv_operator.rollout.scale import compute_targets
from bidikv_operator.rollout.sets import find_current, find_pods, read_sets
from bidikv_operator.status.pods import find_trouble

Object = Mapping[str, Any]


def describe_rollout(
    resolved: Resolved | None, children: Mapping[ChildRef, Object], pods: tuple[Object, ...], now: datetime
) -> Rollout:
    """``resolved`` is None while the resource is invalid: then nothing is rolled out and every set is current."""
    if resolved is None:
        sets = read_sets(children, pods, current=None, now=now)
        wanted = {role: sum(found.replicas for found in sets if found.role == role) for role in names.ENGINE_ROLES}
        return Rollout(sets=sets, wanted=wanted)
    refs = find_current(resolved)
    deadline = timedelta(seconds=resolved.updates.progress_deadline_seconds)
    sets = read_sets(children, pods, current=refs, now=now, deadline=deadline)
    targets = compute_targets(resolved)
    current = [found for found in sets if found.is_current]
    others = [found for found in sets if not found.is_current]
    is_settled = (
        {found.ref for found in current} == refs.keys()
        and not any(found.is_replaced for found in sets)
        and all(found.is_rolled_out and found.replicas == targets[found.role].wanted for found in current)
    )
    is_failed = not is_settled and _has_failed(sets, pods)
    return Rollout(
        sets=sets,
        group=resolved.identity.group,
        wanted={role: target.wanted for role, target in targets.items()},
        is_settled=is_settled,
        is_failed=is_failed,
        message=_explain(resolved, others, is_settled=is_settled, is_failed=is_failed),
    )


def _has_failed(sets: Iterable[EngineSet], pods: tuple[Object, ...]) -> bool:
    """Whether the newest engines do not come up where something else ran before them, or take too long."""
    is_replacing = any(found.is_replaced for found in sets)
    for found in sets:
        if not found.is_current or found.is_rolled_out:
            continue
        trouble = find_trouble(find_pods(pods, found))
        if found.is_late or (is_replacing and trouble is not None and trouble.is_fault):
            return True
    return False


def _explain(resolved: Resolved, others: Iterable[EngineSet], *, is_settled: bool, is_failed: bool) -> str:
    if is_settled:
        return "all engines are of the newest template"
    if is_failed:
        return (
            "the newest engines do not come up; what is left of the earlier ones keeps serving; correct the resource, "
            "or set it back to what it was before"
        )
    if any(found.replicas for found in others):
        single = [role for role, target in compute_targets(resolved).items() if target.wanted + target.surge == 1]
        gap = (
            f"; {' and '.join(single)} will be away for as long as an engine takes to start, as there is one replica "
            "and updateStrategy.maxSurge is 0"
        )
        return f"engines that cannot exchange KV with the earlier ones take their place{gap if single else ''}"
    if any(found.live or found.leaving for found in others):
        return "the newest engines serve; earlier ones are stopping"
    return "engines are being brought up"
