"""LeaderWorkerSet for tests: its definition and a controller, on clusters that have neither.

The definition declares the fields of leaderworkerset.x-k8s.io/v1 that the operator writes, with upstream's defaults, so
that an API server defaults and refuses as with the real one; pod templates may hold anything. The controller is told
when to act and does in one step what the real one does over several objects: it makes the pods of each replica, with
the labels by which others tell them apart, replaces outdated replicas one by one, and counts. It makes no StatefulSets,
and pods are ready when it says so.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from bidikv_operator.kinds import LEADER_WORKER_SET
from e2e.kubectl import Kubectl, KubectlError, Manifest

SET_LABEL: Final = "leaderworkerset.sigs.k8s.io/name"
REPLICA_LABEL: Final = "leaderworkerset.sigs.k8s.io/group-index"
WORKER_LABEL: Final = "leaderworkerset.sigs.k8s.io/worker-index"
REVISION_LABEL: Final = "leaderworkerset.sigs.k8s.io/template-revision-hash"

_ANYTHING: Final[Manifest] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_COUNT: Final[Manifest] = {"type": "integer", "format": "int32"}
_SHARE: Final[Manifest] = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}


def _object(**properties: Manifest) -> Manifest:
    return {"type": "object", "properties": properties}


def build_definition() -> Manifest:
    """The CustomResourceDefinition."""
    template = _object(
        metadata=_object(
            labels={"type": "object", "additionalProperties": {"type": "string"}},
            annotations={"type": "object", "additionalProperties": {"type": "string"}},
        ),
        spec=_ANYTHING,
    )
    spec = _object(
        replicas={**_COUNT, "default": 1},
        leaderWorkerTemplate={
            **_object(
                leaderTemplate=template,
                workerTemplate=template,
                size={**_COUNT, "default": 1},
                restartPolicy={
                    "type": "string",
                    "default": "RecreateGroupOnPodRestart",
                    "enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"],
                },
            ),
            "required": ["workerTemplate"],
        },
        rolloutStrategy={
            **_object(
                type={"type": "string", "default": "RollingUpdate", "enum": ["RollingUpdate"]},
                rollingUpdateConfiguration=_object(
                    partition={**_COUNT, "default": 0},
                    maxUnavailable={**_SHARE, "default": 1},
                    maxSurge={**_SHARE, "default": 0},
                ),
            ),
            "required": ["type"],
        },
        startupPolicy={"type": "string", "default": "LeaderCreated", "enum": ["LeaderCreated", "LeaderReady"]},
    )
    status = _object(
        conditions={"type": "array", "items": _ANYTHING},
        readyReplicas=_COUNT,
        updatedReplicas=_COUNT,
        replicas=_COUNT,
        hpaPodSelector={"type": "string"},
        observedGeneration={"type": "integer", "format": "int64"},
    )
    schema = {**_object(spec={**spec, "required": ["leaderWorkerTemplate"]}, status=status)}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{LEADER_WORKER_SET.plural}.{LEADER_WORKER_SET.group}",
            # The API server protects its own domains from being taken by accident.
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": LEADER_WORKER_SET.group,
            "scope": "Namespaced",
            "names": {
                "kind": LEADER_WORKER_SET.kind,
                "plural": LEADER_WORKER_SET.plural,
                "singular": LEADER_WORKER_SET.kind.lower(),
                "shortNames": ["lws"],
            },
            "versions": [
                {
                    "name": LEADER_WORKER_SET.version,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": {"status": {}},
                }
            ],
        },
    }


@dataclass
class LeaderWorkerSetController:
    """Acts on one namespace when ``step`` is called."""

    kubectl: Kubectl
    broken: set[str] = field(default_factory=set)
    """Images whose engines never get ready."""

    def step(self) -> None:
        """One round: make, replace and delete pods, and tell the counts."""
        pods: dict[str, dict[int, list[Manifest]]] = defaultdict(lambda: defaultdict(list))
        for pod in self.kubectl.find("pods", SET_LABEL):
            labels = pod["metadata"]["labels"]
            pods[labels[SET_LABEL]][int(labels[REPLICA_LABEL])].append(pod)
        sets = self.kubectl.find(LEADER_WORKER_SET.plural)
        for gone in pods.keys() - {found["metadata"]["name"] for found in sets}:
            for members in pods[gone].values():
                self._delete(members)
        for found in sets:
            self._control(found, pods[found["metadata"]["name"]])

    def _control(self, found: Manifest, replicas: dict[int, list[Manifest]]) -> None:
        spec = found["spec"]
        revision = _compute_revision(spec["leaderWorkerTemplate"])
        self._tell(found, replicas, revision)
        for index in [index for index in replicas if index >= spec["replicas"]]:
            self._delete(replicas.pop(index))
        outdated = [index for index, pods in replicas.items() if _revision_of(pods) != revision]
        if outdated and all(_is_ready(pod) for pods in replicas.values() for pod in pods):
            self._delete(replicas.pop(max(outdated)))
        for pod in [pod for pods in replicas.values() for pod in pods]:
            if not _is_ready(pod) and not self.broken & {item["image"] for item in pod["spec"]["containers"]}:
                self._make_ready(pod)
        missing = [index for index in range(spec["replicas"]) if index not in replicas]
        if missing:
            items = [pod for index in missing for pod in _build_pods(found, index, revision)]
            listed = {"apiVersion": "v1", "kind": "List", "items": items}
            self.kubectl.run("create", "-f", "-", stdin=json.dumps(listed))

    def _delete(self, pods: list[Manifest]) -> None:
        names = [pod["metadata"]["name"] for pod in pods]
        self.kubectl.run("delete", "pods", *names, "--grace-period=0", "--force", "--ignore-not-found")

    def _make_ready(self, pod: Manifest) -> None:
        container = {
            "name": pod["spec"]["containers"][0]["name"],
            "image": pod["spec"]["containers"][0]["image"],
            "imageID": "",
            "restartCount": 0,
            "ready": True,
            "started": True,
            "state": {"running": {}},
        }
        conditions = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "ContainersReady", "Ready")]
        self._patch_status("pod", pod, {"phase": "Running", "conditions": conditions, "containerStatuses": [container]})

    def _tell(self, found: Manifest, replicas: dict[int, list[Manifest]], revision: str) -> None:
        status = {
            "replicas": len(replicas),
            "readyReplicas": sum(all(_is_ready(pod) for pod in pods) for pods in replicas.values()),
            "updatedReplicas": sum(_revision_of(pods) == revision for pods in replicas.values()),
            "observedGeneration": found["metadata"]["generation"],
        }
        if status != found.get("status"):
            self._patch_status(LEADER_WORKER_SET.plural, found, status)

    def _patch_status(self, kind: str, obj: Manifest, status: Manifest) -> None:
        patch = json.dumps({"status": status})
        name = obj["metadata"]["name"]
        try:
            self.kubectl.run("patch", kind, name, "--subresource=status", "--type=merge", "-p", patch)
        except KubectlError as error:
            if "NotFound" not in str(error):  # else it was deleted since it was listed
                raise


def _build_pods(found: Manifest, index: int, revision: str) -> list[Manifest]:
    """The pods of one replica, the leader first."""
    template, name = found["spec"]["leaderWorkerTemplate"], found["metadata"]["name"]
    owner = {
        "apiVersion": LEADER_WORKER_SET.api_version,
        "kind": LEADER_WORKER_SET.kind,
        "name": name,
        "uid": found["metadata"]["uid"],
        "controller": True,
    }
    pods = []
    for worker in range(template["size"]):
        source = template["workerTemplate"] if worker else template.get("leaderTemplate", template["workerTemplate"])
        metadata = source.get("metadata", {})
        labels = {
            **metadata.get("labels", {}),
            SET_LABEL: name,
            REPLICA_LABEL: str(index),
            WORKER_LABEL: str(worker),
            REVISION_LABEL: revision,
        }
        pod_name = f"{name}-{index}-{worker}" if worker else f"{name}-{index}"
        head = {**metadata, "name": pod_name, "labels": labels, "ownerReferences": [owner]}
        pods.append({"apiVersion": "v1", "kind": "Pod", "metadata": head, "spec": source["spec"]})
    return pods


def _compute_revision(template: Manifest) -> str:
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


def _revision_of(pods: list[Manifest]) -> str:
    return str(pods[0]["metadata"]["labels"][REVISION_LABEL])


def _is_ready(pod: Manifest) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
