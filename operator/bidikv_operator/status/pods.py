"""What keeps pods of a role from being ready, in one reason and one sentence. Pure.

Containers in trouble alternate between states (pulling and backing off, running and crashed). The reason given here is
equal in all phases of one trouble, or the status would be written at every turn. Pod names are left out for the same
reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from bidikv_operator import names

PULL_REASONS: Final = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "RegistryUnavailable",
)
CONFIG_REASONS: Final = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
RANDOM_ID: Final = re.compile(r"\b[0-9a-f]{12,}\b|\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
"""Ids of containers and uids of pods in the container runtime's words: new at every attempt."""


@dataclass(frozen=True)
class Trouble:
    reason: str
    message: str


SEVERITY: Final = (
    names.REASON_IMAGE_PULL_FAILED,
    names.REASON_CONTAINER_CONFIG,
    names.REASON_OUT_OF_MEMORY,
    names.REASON_CRASHING,
    names.REASON_UNSCHEDULABLE,
)
"""From what a user must repair to what may pass by itself; the first that some pod has is told."""


def find_trouble(pods: Iterable[Mapping[str, Any]]) -> Trouble | None:
    """The worst trouble among the pods that are not ready."""
    troubles = [trouble for pod in pods if (trouble := diagnose_pod(pod)) is not None]
    # Among equals the smallest text, so that the choice does not depend on the order of pods.
    return min(troubles, key=lambda trouble: (SEVERITY.index(trouble.reason), trouble.message), default=None)


def diagnose_pod(pod: Mapping[str, Any]) -> Trouble | None:
    """None for a pod that is ready, leaving, or on its way without a mishap."""
    if pod["metadata"].get("deletionTimestamp"):
        return None
    status = pod.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    if conditions.get("Ready", {}).get("status") == "True":
        return None
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        message = scheduled.get("message", "no node fits")
        return Trouble(names.REASON_UNSCHEDULABLE, f"a pod cannot be scheduled: {message}")
    containers = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    name = pod["metadata"]["name"]
    return next((trouble for state in containers if (trouble := _diagnose_container(state, name)) is not None), None)


def _diagnose_container(container: Mapping[str, Any], pod_name: str) -> Trouble | None:
    name, image = container["name"], container.get("image", "")
    state = container.get("state") or {}
    waiting = state.get("waiting") or {}
    reason = waiting.get("reason", "")
    if reason in PULL_REASONS:
        return Trouble(
            names.REASON_IMAGE_PULL_FAILED,
            f"image {image} of container {name} cannot be pulled; check its name and spec.imagePullSecrets",
        )
    if reason in CONFIG_REASONS:
        words = RANDOM_ID.sub("...", waiting.get("message", reason).replace(pod_name, "..."))
        return Trouble(names.REASON_CONTAINER_CONFIG, f"container {name} cannot be started: {words}")
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
    if container.get("ready") or not ended or ended.get("exitCode") == 0:
        return None
    if ended.get("reason") == "OOMKilled":
        return Trouble(
            names.REASON_OUT_OF_MEMORY,
            f"container {name} ran out of memory and was killed; raise its memory limit in podTemplate",
        )
    return Trouble(
        names.REASON_CRASHING,
        f"container {name} ended with exit code {ended.get('exitCode')}; read why with kubectl logs --previous "
        f"--container {name}",
    )
