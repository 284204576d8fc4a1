"""What the API says about the nodes, and whether that is what was asked for. Pure but for the waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from e2e.cluster.progress import ClusterError

POLL_SECONDS: Final = 0.2


@dataclass(frozen=True)
class NodeState:
    """What the API says about one node."""

    name: str
    ready: bool
    reason: str
    zone: str
    instance_type: str
    allocatable: dict[str, str]


def parse_node_states(listing: Any) -> list[NodeState]:
    """Nodes of a ``kubectl get nodes --output=json``, by name."""
    states = []
    for item in listing["items"]:
        conditions = {condition["type"]: condition for condition in item["status"].get("conditions", [])}
        ready = conditions.get("Ready", {"status": "Unknown", "message": "the kubelet has not reported yet"})
        labels = item["metadata"].get("labels", {})
        states.append(
            NodeState(
                name=item["metadata"]["name"],
                ready=ready["status"] == "True",
                reason=ready.get("message", ""),
                zone=labels.get("topology.kubernetes.io/zone", ""),
                instance_type=labels.get("node.kubernetes.io/instance-type", ""),
                allocatable=item["status"].get("allocatable", {}),
            )
        )
    return sorted(states, key=lambda state: state.name)


def find_problem(states: Sequence[NodeState], expected: Sequence[str], devices: dict[str, int]) -> str | None:
    """Why the nodes are not all there, ready and offering ``devices``; None when they are."""
    by_name = {state.name: state for state in states}
    for name in expected:
        state = by_name.get(name)
        if state is None:
            return f"node {name} has not registered"
        if not state.ready:
            return f"node {name} is not Ready: {state.reason}"
        for resource, count in devices.items():
            if state.allocatable.get(resource) != str(count):
                return f"node {name} offers {state.allocatable.get(resource, '0')} {resource} instead of {count}"
    unexpected = sorted(set(by_name) - set(expected))
    return f"node {unexpected[0]} is not one of this cluster" if unexpected else None


def wait_until_fine(observe: Callable[[], str | None], *, limit_seconds: float) -> None:
    """Poll ``observe`` until it names no problem; ``ClusterError`` with the last problem at the limit."""
    deadline = time.monotonic() + limit_seconds
    while (problem := observe()) is not None:
        if time.monotonic() > deadline:
            raise ClusterError(f"after {limit_seconds:.0f} s: {problem}")
        time.sleep(POLL_SECONDS)
