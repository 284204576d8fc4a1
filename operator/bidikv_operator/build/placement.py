"""On which nodes pods may run, and how they spread.

- EFA engines of one resource share a zone (required): EFA traffic cannot leave it. The first pod chooses the zone, as
  it satisfies the term by itself. ``topologyKey`` demands the same of another domain, on any fabric.
- The pods of a role spread over nodes, and prefill keeps away from decode (both preferred): a node that is lost then
  takes few of one role, and a small cluster can still start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from bidikv_operator import names
from bidikv_operator.build.meta import Manifest
from bidikv_operator.fabric import GPU_RESOURCE, INSTANCE_TYPES
from bidikv_operator.resolved import Resolved, ResolvedEngine, Scheduling

HOSTNAME: Final = "kubernetes.io/hostname"
ZONE: Final = "topology.kubernetes.io/zone"
APART_WEIGHT: Final = 50
"""Of 100: a tie-breaker, below what users give to their own terms by default."""


def build_placement(scheduling: Scheduling, node_selector: dict[str, str], tolerations: list[Any]) -> Manifest:
    """Fields of a pod's spec: the operator's own, then the resource's, which win where they name the same label."""
    spec: Manifest = {}
    if selector := {**node_selector, **scheduling.node_selector}:
        spec["nodeSelector"] = selector
    if tolerated := [*tolerations, *(dict(toleration) for toleration in scheduling.tolerations)]:
        spec["tolerations"] = tolerated
    if scheduling.priority_class_name is not None:
        spec["priorityClassName"] = scheduling.priority_class_name
    if scheduling.scheduler_name is not None:
        spec["schedulerName"] = scheduling.scheduler_name
    return spec


def build_engine_placement(resolved: Resolved, role: names.Role, settings: ResolvedEngine) -> Manifest:
    """Fields of an engine's pod spec."""
    node_selector: dict[str, str] = {}
    if resolved.fabric.instance_type:
        node_selector["node.kubernetes.io/instance-type"] = resolved.fabric.instance_type
        instance = INSTANCE_TYPES.get(resolved.fabric.instance_type)
        if instance is not None and instance.architecture != "amd64":
            node_selector["kubernetes.io/arch"] = instance.architecture
    tolerations = [{"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}] if settings.gpus else []
    spec = build_placement(settings.scheduling, node_selector, tolerations)
    spec["affinity"] = _build_engine_affinity(resolved, role, settings)
    return spec


def build_spread(selector: dict[str, str]) -> list[Manifest]:
    """Over nodes where there are enough: a preference, as a small cluster must still be able to start."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": HOSTNAME,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": selector},
        }
    ]


def _build_engine_affinity(resolved: Resolved, role: names.Role, settings: ResolvedEngine) -> Manifest:
    other: names.Role = names.DECODE if role == names.PREFILL else names.PREFILL
    apart = {
        "weight": APART_WEIGHT,
        "podAffinityTerm": {"topologyKey": HOSTNAME, "labelSelector": _select_engines(resolved, (other,))},
    }
    affinity: Manifest = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [apart]}}
    domains = [ZONE] if resolved.fabric.type == "EFA" else []
    if settings.scheduling.topology_key is not None and settings.scheduling.topology_key not in domains:
        domains.append(settings.scheduling.topology_key)
    if domains:
        together = [
            {"topologyKey": domain, "labelSelector": _select_engines(resolved, names.ENGINE_ROLES)}
            for domain in domains
        ]
        affinity["podAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": together}
    return affinity


def _select_engines(resolved: Resolved, roles: Sequence[names.Role]) -> Manifest:
    return {
        "matchLabels": {names.LABEL_OWNER: resolved.name},
        "matchExpressions": [{"key": names.LABEL_ROLE, "operator": "In", "values": list_engine_labels(roles)}],
    }


def list_engine_labels(roles: Sequence[names.Role] = names.ENGINE_ROLES) -> list[str]:
    """Values of ``LABEL_ROLE`` on all pods of these engine roles. Workers are listed whether there are any or not: a
    role's template must not change with the other role."""
    return [*roles, *(names.WORKER_LABELS[role] for role in roles)]
