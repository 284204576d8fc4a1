"""Which engines of a resource can be asked for a report, and where. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from bidikv_operator import names
from bidikv_operator.names import Role
from bidikv_runtime import contract

WORKER_INDEX: Final = "leaderworkerset.sigs.k8s.io/worker-index"
"""Of several pods of one replica only the first, 0, runs the scheduler, whose connector reports."""


@dataclass(frozen=True)
class Target:
    """One engine: a data-parallel rank of a pod."""

    pod: str
    uid: str
    role: Role
    host: str
    """The pod's IP, IPv6 in brackets."""
    rank: int = 0
    lookup_port: int = contract.LOOKUP_PORT
    report_port: int = contract.STATE_PORT

    @property
    def address(self) -> str:
        """Its lookup port, as peers name it in reports."""
        return f"{self.host}:{self.lookup_port + self.rank}"

    @property
    def report_address(self) -> str:
        """``host:port`` of its report."""
        return f"{self.host}:{self.report_port + self.rank}"


def choose_targets(pods: Iterable[Mapping[str, Any]], ranks: Mapping[Role, int]) -> tuple[Target, ...]:
    """The engines that run and stay, by role, pod and rank.

    An engine that still starts has no report, and one that is being deleted is no longer the operator's concern.

    Args:
        pods: of one resource, as the API server tells them.
        ranks: data-parallel ranks in each pod of a role.
    """
    targets = [
        Target(pod["metadata"]["name"], pod["metadata"]["uid"], role, _write_host(pod["status"]["podIP"]), rank)
        for pod in pods
        if (role := _find_role(pod)) is not None and _is_started(pod)
        for rank in range(ranks.get(role, 1))
    ]
    return tuple(sorted(targets, key=lambda target: (target.role, target.pod, target.rank)))


def _find_role(pod: Mapping[str, Any]) -> Role | None:
    labels = pod["metadata"].get("labels") or {}
    if labels.get(WORKER_INDEX, "0") != "0":
        return None
    return names.find_engine_role(pod)


def _is_started(pod: Mapping[str, Any]) -> bool:
    status = pod.get("status") or {}
    return bool(
        not pod["metadata"].get("deletionTimestamp")
        and status.get("podIP")
        and any(
            container["name"] == names.ENGINE_CONTAINER and container.get("started")
            for container in status.get("containerStatuses") or []
        )
    )


def _write_host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
