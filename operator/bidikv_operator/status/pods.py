"""What keeps pods of a role from being ready, in one reason and one sentence. Pure.

Containers in trouble alternate between states (pulling and backing off, running and crashed). The reason given here is
equal in all phases of one trouble, or the status would be written at every turn. Pod names are left out for the same
reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from bidikv_operator import names
from bidikv_operator.status.last_words import find_cause
from bidikv_operator.status.scheduling import Needs, explain_unschedulable, lacks_resources

Object = Mapping[str, Any]

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
NAMED_POD: Final = re.compile(r'\bpods? "[^"]*"')
CONTAINER_IN_POD: Final = re.compile(r"container \S+ in pod \S+")

CLEAN_ENDS: Final = 2
"""An engine that ended so often without an error is in a loop; once may be a restart by its probes."""

PULL_DENIED: Final = re.compile(r"401|403|unauthorized|denied|authentication required|no basic auth", re.IGNORECASE)
PULL_NOT_FOUND: Final = re.compile(r"not found|manifest unknown|404", re.IGNORECASE)
PULL_UNREACHABLE: Final = re.compile(
    r"dial tcp|no such host|i/o timeout|connection refused|deadline exceeded|TLS handshake|certificate|"
    r"registry is unavailable",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Trouble:
    reason: str
    message: str

    @property
    def is_fault(self) -> bool:
        """Whether a person should look at it now. What lacks a node may get one (an autoscaler, a stopping pod)."""
        return self.reason not in PATIENT_REASONS


PATIENT_REASONS: Final = frozenset({names.REASON_UNSCHEDULABLE, names.REASON_WAITING_FOR_LEAVING_PODS})
SEVERITY: Final = (
    names.REASON_PULL_DENIED,
    names.REASON_IMAGE_PULL_FAILED,
    names.REASON_CONTAINER_CONFIG,
    names.REASON_ACCESS_DENIED,
    names.REASON_MODEL_NOT_FOUND,
    names.REASON_OUT_OF_MEMORY,
    names.REASON_CRASHING,
    names.REASON_HUB_UNREACHABLE,
    names.REASON_NOT_ANSWERING,
    names.REASON_EVICTED,
    names.REASON_UNSCHEDULABLE,
    names.REASON_WAITING_FOR_LEAVING_PODS,
)
"""From what a user must repair to what may pass by itself; the first that some pod has is told."""


@dataclass(frozen=True)
class Readiness:
    """A pod's condition Ready."""

    is_ready: bool = False
    since: str = ""
    """When it became so, in the words of the API, whose times compare as text; empty when that is not told."""


def read_readiness(pod: Object) -> Readiness:
    """Not ready when nothing is told. A pod that is being deleted may be ready still."""
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition["type"] == "Ready":
            return Readiness(condition["status"] == "True", condition.get("lastTransitionTime") or "")
    return Readiness()


def find_trouble(pods: Iterable[Object], needs: Needs | None = None) -> Trouble | None:
    """The worst trouble among the pods that are not ready.

    Args:
        pods: of one role.
        needs: what one of them asks a node for.
    """
    pods = list(pods)
    leaving = sum(1 for pod in pods if pod["metadata"].get("deletionTimestamp"))
    needs = needs or Needs()
    troubles = [trouble for pod in pods if (trouble := diagnose_pod(pod, needs, leaving=leaving)) is not None]
    # Among equals the smallest text, so that the choice does not depend on the order of pods.
    return min(troubles, key=lambda trouble: (SEVERITY.index(trouble.reason), trouble.message), default=None)


def diagnose_pod(pod: Object, needs: Needs, *, leaving: int = 0) -> Trouble | None:
    """None for a pod that is ready, leaving, or on its way without a mishap.

    Args:
        leaving: pods of the same role that are being deleted: what they hold will be free.
    """
    if pod["metadata"].get("deletionTimestamp"):
        return None
    readiness = read_readiness(pod)
    if readiness.is_ready:
        return None
    status = pod.get("status") or {}
    conditions = _by_type(status)
    if status.get("phase") == "Failed":
        return _diagnose_failed(status, conditions)
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        message = scheduled.get("message", "")
        if leaving and lacks_resources(message):
            waited_for = "one stopping pod" if leaving == 1 else f"{leaving} stopping pods"
            words = f"a pod waits for {waited_for} of the role to free what it needs"
            return Trouble(names.REASON_WAITING_FOR_LEAVING_PODS, words)
        return Trouble(names.REASON_UNSCHEDULABLE, explain_unschedulable(message, needs))
    name = pod["metadata"]["name"]
    for state in status.get("initContainerStatuses") or ():
        trouble = _diagnose_container(state, name, readiness)
        if trouble is not None:
            return trouble
    for state in status.get("containerStatuses") or ():
        trouble = _diagnose_container(state, name, readiness)
        if trouble is not None:
            return trouble
    return None


def describe_stages(pods: Iterable[Object]) -> str:
    """What pods that are neither ready nor in trouble are doing, as ``2 load the model, 1 is not scheduled``."""
    stages: Counter[tuple[str, str]] = Counter()
    for pod in pods:
        if not read_readiness(pod).is_ready:
            stages[_choose_stage(pod)] += 1
    return ", ".join(f"{count} {one if count == 1 else many}" for (one, many), count in sorted(stages.items()))


def _choose_stage(pod: Object) -> tuple[str, str]:
    status = pod.get("status") or {}
    if pod["metadata"].get("deletionTimestamp"):
        return ("is stopping", "are stopping")
    if _by_type(status).get("PodScheduled", {}).get("status") != "True":
        return ("is not scheduled yet", "are not scheduled yet")
    if any("running" in (state.get("state") or {}) for state in status.get("containerStatuses") or ()):
        return ("has not answered its probes yet", "have not answered their probes yet")
    return ("gets its images and volumes", "get their images and volumes")


def _by_type(status: Object) -> dict[str, Object]:
    return {condition["type"]: condition for condition in status.get("conditions") or []}


def _diagnose_failed(status: Object, conditions: Mapping[str, Object]) -> Trouble:
    """A pod that will not run again: another one takes its place, if it can."""
    reason = status.get("reason") or conditions.get("DisruptionTarget", {}).get("reason") or "Failed"
    words = CONTAINER_IN_POD.sub("a container", status.get("message") or "").split(". ", 1)[0].rstrip(".")
    # The kubelet's words go on with how much memory or disk each container used at that instant.
    words = RANDOM_ID.sub("...", NAMED_POD.sub("a pod", words)).split(" Container ")[0]
    told = f"{reason}: {words}" if words else reason
    return Trouble(
        names.REASON_EVICTED, f"a pod was ended by its node or the scheduler ({told}); another one replaces it"
    )


def _diagnose_container(container: Object, pod_name: str, readiness: Readiness) -> Trouble | None:
    name = container["name"]
    state = container.get("state") or {}
    waiting = state.get("waiting") or {}
    reason = waiting.get("reason", "")
    if reason in PULL_REASONS:
        return _explain_pull(container, waiting)
    if reason in CONFIG_REASONS:
        words = RANDOM_ID.sub("...", waiting.get("message", reason).replace(pod_name, "..."))
        return Trouble(
            names.REASON_CONTAINER_CONFIG, f"container {name} cannot be started: {words}{_config_remedy(words)}"
        )
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
    if container.get("ready"):
        return None
    if ended and (ended.get("exitCode") != 0 or container.get("restartCount", 0) >= CLEAN_ENDS):
        return _explain_end(name, ended)
    if container.get("started") and _lost_readiness(readiness, state):
        return Trouble(
            names.REASON_NOT_ANSWERING,
            f"container {name} was ready and no longer answers its readiness probe; it is restarted if that goes on",
        )
    return None


def _lost_readiness(readiness: Readiness, state: Object) -> bool:
    """Whether the pod was ready in this life of its container: Ready changed after the container's start.

    Before a pod is ready for the first time, Ready has been False since the pod's creation; a restart makes it False
    before the container starts again.
    """
    started = (state.get("running") or {}).get("startedAt") or ""
    return bool(started and readiness.since > started)


def _explain_pull(container: Object, waiting: Object) -> Trouble:
    image, words = container.get("image", ""), waiting.get("message") or ""
    subject = f"image {image} of container {container['name']}"
    if waiting.get("reason") == "InvalidImageName":
        return Trouble(names.REASON_IMAGE_PULL_FAILED, f"{subject} is no valid image reference; correct it")
    if waiting.get("reason") == "ErrImageNeverPull":
        return Trouble(
            names.REASON_IMAGE_PULL_FAILED,
            f"{subject} is not on the node and spec.imagePullPolicy is Never; load it there or allow pulling",
        )
    return Trouble(*_classify_pull(subject, words))


def _classify_pull(subject: str, words: str) -> tuple[str, str]:
    """By the runtime's words, which ImagePullBackOff repeats since Kubernetes 1.31."""
    if PULL_NOT_FOUND.search(words) and not PULL_DENIED.search(words):
        return names.REASON_IMAGE_PULL_FAILED, f"{subject} does not exist in its registry; correct its name or tag"
    if PULL_DENIED.search(words):
        return (
            names.REASON_PULL_DENIED,
            f"the registry refuses {subject}: name a Secret with its credentials in spec.imagePullSecrets, or correct "
            "the image's name (some registries refuse what does not exist)",
        )
    if PULL_UNREACHABLE.search(words):
        return (
            names.REASON_IMAGE_PULL_FAILED,
            f"the registry of {subject} cannot be reached from the node; check its address, proxy and certificates",
        )
    return (
        names.REASON_IMAGE_PULL_FAILED,
        f"{subject} cannot be pulled; check its name and spec.imagePullSecrets",
    )


def _config_remedy(words: str) -> str:
    if re.search(r'secret "[^"]+" not found', words):
        return "; create that Secret in the resource's namespace"
    if "couldn't find key" in words:
        return "; add that key to it"
    if re.search(r'configmap "[^"]+" not found', words):
        return "; create that ConfigMap in the resource's namespace"
    if "runAsNonRoot" in words or "non-root" in words:
        return "; set spec.security.podSecurity to Unrestricted, or use an image with a numeric user"
    return ""


def _explain_end(name: str, ended: Object) -> Trouble:
    if ended.get("reason") == "OOMKilled":
        return Trouble(
            names.REASON_OUT_OF_MEMORY,
            f"container {name} ran out of memory and was killed; raise its memory (resources.memory of the role)",
        )
    if ended.get("exitCode") == 0:
        told = f"container {name} keeps ending without an error"
    else:
        told = f"container {name} ended with exit code {ended.get('exitCode')}"
    cause = find_cause(ended.get("message") or "")
    if cause is not None:
        return Trouble(cause.reason, f"{told}: {cause.words}; {cause.remedy}")
    return Trouble(names.REASON_CRASHING, f"{told}; read why with kubectl logs --previous --container {name}")
