"""Resources and scheduling of any role's pods."""

from __future__ import annotations

from bidikv_operator import resolved
from bidikv_operator.api import pods
from bidikv_operator.validate.labels import check_label_keys, is_label_key
from bidikv_operator.validate.problem import Problem, Problems
from bidikv_operator.validate.quantity import canonical_cpu, canonical_memory


def resolve_resources(given: pods.PodResources | None) -> resolved.Resources:
    if given is None:
        return resolved.Resources()
    return resolved.Resources(
        cpu=None if given.cpu is None else canonical_cpu(given.cpu),
        memory=None if given.memory is None else canonical_memory(given.memory),
    )


def resolve_scheduling(field: str, given: pods.Scheduling | None) -> tuple[resolved.Scheduling, Problems]:
    if given is None:
        return resolved.Scheduling(), []
    selector = given.node_selector or {}
    problems = check_label_keys(f"{field}.nodeSelector", selector)
    for number, toleration in enumerate(given.tolerations or []):
        problems += _check_toleration(f"{field}.tolerations[{number}]", toleration)
    topology_key = given.topology_key if isinstance(given, pods.EngineScheduling) else None
    if topology_key is not None and not is_label_key(topology_key):
        problems.append(Problem(f"{field}.topologyKey", f"{topology_key!r} is no label of a node; correct it"))
    scheduling = resolved.Scheduling(
        node_selector=selector,
        tolerations=tuple(
            toleration.model_dump(by_alias=True, exclude_none=True) for toleration in given.tolerations or []
        ),
        priority_class_name=given.priority_class_name,
        scheduler_name=given.scheduler_name,
        topology_key=topology_key,
    )
    return scheduling, problems


def _check_toleration(field: str, toleration: pods.Toleration) -> Problems:
    problems = []
    if toleration.key is None and toleration.operator != "Exists":
        problems.append(Problem(f"{field}.key", "is missing; set it, or set operator to Exists"))
    elif toleration.key is not None and not is_label_key(toleration.key):
        problems.append(Problem(f"{field}.key", f"{toleration.key!r} is no key of a taint; correct it"))
    if toleration.value is not None and toleration.operator == "Exists":
        problems.append(Problem(f"{field}.value", "belongs to operator Equal; remove it"))
    if toleration.toleration_seconds is not None and toleration.effect != "NoExecute":
        problems.append(Problem(f"{field}.tolerationSeconds", "belongs to effect NoExecute; remove it"))
    return problems
