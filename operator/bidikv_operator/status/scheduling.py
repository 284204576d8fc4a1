"""Why no node takes a pod: the scheduler's message with the numbers of what the pod asks for, and what to do. Pure.

The scheduler counts nodes per reason (``0/3 nodes are available: 2 Insufficient vpc.amazonaws.com/efa, ...``, of
``k8s.io/kubernetes/pkg/scheduler/framework/types.go``: ``FitError``); a node may be counted under several. It never
says what was asked for, which is in the pod template only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bidikv_operator.fabric import EFA_RESOURCE, GPU_RESOURCE, HUGE_PAGES_RESOURCE

ACCELERATORS: Final = (GPU_RESOURCE, EFA_RESOURCE)
COUNTED: Final = re.compile(r"^\d+/(\d+) nodes are available: (.*)$", re.DOTALL)
AFTER_REASONS: Final = re.compile(r"\.(\s.*)?$", re.DOTALL)
"""What preempting other pods would help: nothing, or the scheduler would do it."""
ONE_REASON: Final = re.compile(r"^(\d+) (.*)$", re.DOTALL)
INSUFFICIENT: Final = "Insufficient "
CLAIM_NOT_FOUND: Final = re.compile(r'persistentvolumeclaim "([^"]+)" not found')
UNBOUND_CLAIM: Final = "unbound immediate PersistentVolumeClaims"


@dataclass(frozen=True)
class Needs:
    """What one pod asks a node for."""

    requests: Mapping[str, str] = field(default_factory=dict)
    """Accelerators are added up over containers; of everything else the largest container's words are kept."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    claims: tuple[str, ...] = ()
    """PersistentVolumeClaims."""

    def __str__(self) -> str:
        return ", ".join(f"{amount} {name}" for name, amount in self.requests.items())


def compute_needs(pod_spec: Mapping[str, Any]) -> Needs:
    requests: dict[str, str] = {}
    for container in pod_spec.get("containers") or []:
        resources = container.get("resources") or {}
        for name, amount in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
            if name in ACCELERATORS and name in requests:
                requests[name] = str(int(requests[name]) + int(amount))
            else:
                requests.setdefault(name, str(amount))
    order = {name: place for place, name in enumerate((*ACCELERATORS, HUGE_PAGES_RESOURCE, "cpu", "memory"))}
    volumes = pod_spec.get("volumes") or []
    return Needs(
        requests={name: requests[name] for name in sorted(requests, key=lambda name: (order.get(name, 99), name))},
        node_selector=dict(pod_spec.get("nodeSelector") or {}),
        claims=tuple(
            volume["persistentVolumeClaim"]["claimName"] for volume in volumes if volume.get("persistentVolumeClaim")
        ),
    )


def lacks_resources(message: str) -> bool:
    """Whether some node would take the pod if other pods left it."""
    return INSUFFICIENT in message or "cannot allocate all claims" in message


def explain_unschedulable(message: str, needs: Needs) -> str:
    """A sentence for people: what the pod needs, how many nodes lack what, and the remedy."""
    missing = CLAIM_NOT_FOUND.search(message)
    if missing is not None:
        return f"PersistentVolumeClaim {missing[1]} does not exist; create it in the resource's namespace"
    if UNBOUND_CLAIM in message:
        claims = " or ".join(needs.claims) or "of a pod"
        return (
            f"PersistentVolumeClaim {claims} is not bound to a volume yet; kubectl describe pvc tells what its storage "
            "class waits for"
        )
    counted = COUNTED.match(message)
    if counted is None:
        return f"a pod cannot be scheduled: {message or 'the scheduler gave no reason'}"
    total, listed = counted[1], AFTER_REASONS.sub("", counted[2], count=1)
    told, remedies = [], []
    for reason in re.split(r", (?=\d+ )", listed):
        one = ONE_REASON.match(reason)
        if one is None:
            told.append(reason)
            continue
        words, remedy = _explain_reason(one[2], needs)
        told.append(f"{one[1]} {words}")
        if remedy and remedy not in remedies:
            remedies.append(remedy)
    asked = f"a pod needs {needs}" if needs.requests else "no node takes a pod"
    sentence = f"{asked}; of {total} {'node' if total == '1' else 'nodes'}: {', '.join(told)}"
    return "; ".join((sentence, *remedies[:2]))


def _explain_reason(reason: str, needs: Needs) -> tuple[str, str]:
    if reason.startswith(INSUFFICIENT):
        return _explain_insufficient(reason.removeprefix(INSUFFICIENT))
    for beginning, explain in _KNOWN.items():
        if reason.startswith(beginning):
            return explain(reason.removeprefix(beginning).strip(), needs)
    return f"ruled out ({reason.removeprefix('node(s) ')})", ""


def _explain_insufficient(resource: str) -> tuple[str, str]:
    lack = f"without free {resource}"
    if resource == EFA_RESOURCE:
        return lack, (
            "add nodes with EFA interfaces (and the EFA device plugin), or ask for fewer with "
            "spec.fabric.interfacesPerPod"
        )
    if resource == GPU_RESOURCE:
        return lack, "add GPU nodes (and the NVIDIA device plugin), or lower replicas or tensorParallelSize"
    if resource == HUGE_PAGES_RESOURCE:
        return lack, "reserve 2 MiB huge pages on the nodes, or lower spec.fabric.hugePagesMebibytes"
    return lack, f"add nodes with more {resource}, or lower the role's resources"


def _selector(_: str, needs: Needs) -> tuple[str, str]:
    wanted = ", ".join(f"{key}={value}" for key, value in sorted(needs.node_selector.items()))
    return (
        f"without the labels that it selects{f' ({wanted})' if wanted else ''}",
        "add such nodes, or correct spec.fabric.instanceType and the role's scheduling.nodeSelector",
    )


def _taint(rest: str, _: Needs) -> tuple[str, str]:
    words = rest.removeprefix("(s)").strip()
    return (
        f"with a taint that it does not tolerate{f' {words}' if words else ''}",
        "add a toleration to the role's scheduling.tolerations, or remove the taint",
    )


_KNOWN: Final[dict[str, Callable[[str, Needs], tuple[str, str]]]] = {
    "node(s) didn't match Pod's node affinity/selector": _selector,
    "node(s) had untolerated taint": _taint,
    "node(s) had taint": _taint,
    "node(s) didn't match pod affinity rules": lambda rest, needs: (
        "in another zone (or domain of scheduling.topologyKey) than the other engines of this resource",
        "add nodes in the zone where the others run: their KV cannot leave it",
    ),
    "node(s) didn't match pod anti-affinity rules": lambda rest, needs: (
        "with a pod that it must not share a node with",
        "add nodes, or relax the anti-affinity in podTemplate",
    ),
    "node(s) didn't match pod topology spread constraints": lambda rest, needs: (
        "ruled out by its topology spread constraints",
        "add nodes, or relax the constraints in podTemplate",
    ),
    "node(s) were unschedulable": lambda rest, needs: ("cordoned", "kubectl uncordon them or add nodes"),
    "node(s) had volume node affinity conflict": lambda rest, needs: (
        "that cannot reach its volume, which is bound to another zone or node",
        "use a volume that the nodes of the engines' zone can mount",
    ),
    "Too many pods": lambda rest, needs: ("with as many pods as a node may have", "add nodes"),
    "cannot allocate all claims": lambda rest, needs: (
        "that cannot satisfy its resource claims",
        "add nodes whose DRA drivers offer the devices, or correct spec.fabric.deviceClasses",
    ),
}
