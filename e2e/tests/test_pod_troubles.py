"""Pods in trouble on a real cluster: what scheduler and kubelet say of them, and what the status makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from bidikv_operator.status.pods import diagnose_pod
from bidikv_operator.status.scheduling import compute_needs
from e2e.install import image_references
from e2e.kubectl import Kubectl, Manifest, eventually

pytestmark = pytest.mark.cluster

WAIT = 120.0
PYTHON = "python3"
PREFIX = "chat-prefill-5d8c"
"""As of a ReplicaSet: nothing that is told may have it."""


def make_pod(name: str, *command: str, spec: Manifest | None = None, **container: Any) -> Manifest:
    """A pod of one container, which ends at once when it is deleted."""
    main = {"name": "engine", "imagePullPolicy": "IfNotPresent", "terminationMessagePolicy": "FallbackToLogsOnError"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{PREFIX}-{name}"},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "containers": [main | {"image": image_references()["runtime"], "command": list(command)} | container],
            **(spec or {}),
        },
    }


def volume(**source: Any) -> Manifest:
    return {"volumes": [{"name": "model", **source}]}


def make_pods() -> dict[str, tuple[Manifest, str, str]]:
    """Pods by name, each with the reason and some words of what is told of it."""
    write = "import os; os.write(os.open('/dev/termination-log', os.O_WRONLY), b'ValueError: last words'); exit(3)"
    affinity = {
        "podAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"no": "such-pod"}}}
            ]
        }
    }
    secret = {"secretKeyRef": {"name": "hub", "key": "token"}}
    # Beyond what a node of any size has.
    efa = {"limits": {"nvidia.com/gpu": "1", "vpc.amazonaws.com/efa": "999"}}
    told = (
        (make_pod("unreachable", image="registry.invalid/absent:1"), "ImagePullFailed", "cannot be reached"),
        (
            make_pod("never", image="registry.invalid/absent:1", imagePullPolicy="Never"),
            "ImagePullFailed",
            "imagePullPolicy is Never",
        ),
        (
            make_pod("secret", PYTHON, env=[{"name": "HF_TOKEN", "valueFrom": secret}]),
            "ContainerConfigError",
            'secret "hub" not found; create that Secret',
        ),
        (make_pod("crash", PYTHON, "-c", "raise ValueError('boom')"), "ContainerCrashing", "ValueError: boom"),
        # As engines run: by a user of their own.
        (
            make_pod("words", PYTHON, "-c", write, securityContext={"runAsUser": 65532, "runAsNonRoot": True}),
            "ContainerCrashing",
            "exit code 3: ValueError: last words",
        ),
        (make_pod("clean", PYTHON, "-c", "pass"), "ContainerCrashing", "keeps ending without an error"),
        (
            make_pod("memory", PYTHON, "-c", "b'1' * (1 << 28)", resources={"limits": {"memory": "64Mi"}}),
            "OutOfMemory",
            "ran out of memory",
        ),
        (
            make_pod("efa", PYTHON, resources=efa),
            "Unschedulable",
            "a pod needs 1 nvidia.com/gpu, 999 vpc.amazonaws.com/efa; of ",
        ),
        (
            make_pod("selector", PYTHON, spec={"nodeSelector": {"no-such": "node"}}),
            "Unschedulable",
            "without the labels that it selects (no-such=node)",
        ),
        (make_pod("affinity", PYTHON, spec={"affinity": affinity}), "Unschedulable", "in another zone"),
        (
            make_pod("claim", PYTHON, spec=volume(persistentVolumeClaim={"claimName": "absent"})),
            "Unschedulable",
            "PersistentVolumeClaim absent does not exist",
        ),
    )
    return {pod["metadata"]["name"]: (pod, reason, words) for pod, reason, words in told}


def test_what_is_told_of_pods_in_trouble(namespace: Kubectl) -> None:
    pods = make_pods()
    eventually(lambda: namespace.get("serviceaccount", "default"), "the namespace's account", WAIT)
    namespace.apply(*(pod for pod, _, _ in pods.values()))
    told: dict[str, str] = {}

    def all_told() -> bool:
        for live in namespace.find("pods"):
            trouble = diagnose_pod(live, compute_needs(live["spec"]))
            told[live["metadata"]["name"]] = f"{trouble.reason}: {trouble.message}" if trouble else "nothing"
        return all(
            told.get(name, "").startswith(f"{reason}: ") and words in told[name]
            for name, (_, reason, words) in pods.items()
        )

    try:
        eventually(all_told, "every pod's trouble named", WAIT)
    except TimeoutError:
        pytest.fail("\n".join(f"{name}: {words}" for name, words in sorted(told.items())))
    assert PREFIX not in str(list(told.values()))
