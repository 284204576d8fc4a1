"""The operator on a real cluster: creates, repairs, tells, rests, hands over, and leaves nothing behind.

The operator runs as a subprocess that serves the test's own namespace. Pods need not run here: engines and router ask
for a node that does not exist, so that nothing is pulled and the status is quiet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bidikv_operator.rollout.revision import compute_identity
from bidikv_runtime import contract
from e2e.cluster.paths import find_external_kubeconfig, find_paths
from e2e.install import image_references
from e2e.kubectl import Kubectl, Manifest, eventually
from e2e.operator_process import RECONCILES, WRITES, OperatorProcess
from e2e.small_resource import build_small_resource

pytestmark = pytest.mark.cluster

WAIT = 60.0
CHILDREN = (
    "serviceaccounts,roles,rolebindings,services,networkpolicies,controllerrevisions,deployments,poddisruptionbudgets"
)
NOWHERE: Manifest = {"spec": {"nodeSelector": {"example.com/nowhere": "true"}}}


def make_resource(**changes: Any) -> Manifest:
    roles: Manifest = {
        "prefill": {"replicas": 2, "gpusPerPod": 0, "podTemplate": NOWHERE},
        "decode": {"gpusPerPod": 0, "podTemplate": NOWHERE},
        "router": {"replicas": 2, "podTemplate": NOWHERE},
    }
    return build_small_resource(**{**roles, **changes})


IDENTITY = compute_identity(make_resource()["spec"])
PREFILL = f"chat-prefill-{IDENTITY.group}"
DECODE = f"chat-decode-{IDENTITY.group}"
EXPECTED = {
    f"ControllerRevision/chat-decode-{IDENTITY.decode_input}",
    f"ControllerRevision/chat-prefill-{IDENTITY.prefill_input}",
    f"Deployment/{DECODE}",
    f"Deployment/{PREFILL}",
    "Deployment/chat-router",
    "NetworkPolicy/chat-engine",
    "NetworkPolicy/chat-router",
    "PodDisruptionBudget/chat-prefill",
    "PodDisruptionBudget/chat-router",
    "Role/chat-router",
    "RoleBinding/chat-router",
    "Service/chat",
    "Service/chat-decode",
    "Service/chat-prefill",
    "ServiceAccount/chat-engine",
    "ServiceAccount/chat-router",
}


@dataclass
class World:
    """A namespace with the CRD, and operators started for it."""

    kubectl: Kubectl
    folder: Path
    started: list[OperatorProcess]

    def operator(self, identity: str = "one", **settings: str) -> OperatorProcess:
        image = image_references()["runtime"]
        process = OperatorProcess(self.kubectl, identity, image, self.folder, settings)
        self.started.append(process)
        return process.start()

    def children(self) -> dict[str, Manifest]:
        found = self.kubectl.find(CHILDREN, "serving.bidikv.io/owner=chat")
        return {f"{item['kind']}/{item['metadata']['name']}": item for item in found}

    def has_exactly(self, expected: set[str]) -> bool:
        """Revisions of earlier specs are kept for a while."""
        found = set(self.children())
        return expected <= found and all(name.startswith("ControllerRevision/") for name in found - expected)

    def contents(self) -> dict[str, Manifest]:
        """The children without what controllers write of them, which may come late."""
        theirs = {"resourceVersion", "annotations"}
        return {
            name: {key: value for key, value in child.items() if key != "status"}
            | {"metadata": {key: value for key, value in child["metadata"].items() if key not in theirs}}
            for name, child in self.children().items()
        }

    def count_replicas(self, role: str) -> int:
        """As the status tells it."""
        found = self.kubectl.get("bidikvinference", "chat")
        assert found is not None
        count: int = found["status"][role]["replicas"]
        return count

    def child(self, name: str) -> Manifest:
        kind, _, rest = name.partition("/")
        found = self.kubectl.get(kind, rest)
        assert found is not None, name
        return found

    def router_config(self) -> dict[str, Any]:
        """What the routers of the template are told."""
        [container] = self.child("Deployment/chat-router")["spec"]["template"]["spec"]["containers"]
        [text] = [item["value"] for item in container["env"] if item["name"] == contract.ENV_ROUTER_CONFIG]
        found: dict[str, Any] = json.loads(text)
        return found

    def condition(self, name: str) -> dict[str, str]:
        return self.kubectl.condition("bidikvinference", "chat", name)

    def wait_for_condition(self, name: str, status: str, reason: str) -> dict[str, str]:
        return self.started[-1].await_condition("chat", name, status, reason)

    def wait_until_settled(self) -> None:
        """All children exist and the status tells the lasting reason: no node."""
        eventually(lambda: self.has_exactly(EXPECTED), "all children", WAIT)
        eventually(lambda: self.count_judged_pods() == 5, "the scheduler's word on every pod", WAIT)
        for name in ("PrefillReady", "DecodeReady", "RouterReady"):
            self.wait_for_condition(name, "False", "Unschedulable")

    def count_judged_pods(self) -> int:
        """Of which the scheduler has said that no node takes them."""
        found = [item for pod in self.kubectl.find("pods") for item in pod["status"].get("conditions", [])]
        return sum((item["type"], item["status"]) == ("PodScheduled", "False") for item in found)


@pytest.fixture
def world(namespace: Kubectl, crd: None, tmp_path: Path, no_other_operator: None) -> Iterator[World]:
    found = World(namespace, tmp_path, [])
    yield found
    for process in found.started:
        process.kill()


class Audit:
    """The writes of operators in one namespace since a moment, as the API server saw them; leases aside."""

    def __init__(self, kubectl: Kubectl) -> None:
        if find_external_kubeconfig(find_paths()) is not None:
            pytest.skip("the audit log of another cluster cannot be read")
        self._namespace = kubectl.namespace
        self._log = find_paths().audit_log
        self._start = self._log.stat().st_size

    def writes(self) -> list[str]:
        with self._log.open("rb") as log:
            log.seek(self._start)
            entries = [json.loads(line) for line in log.read().splitlines() if line.endswith(b"}")]
        return [
            f"{entry['verb']} {entry['objectRef']['resource']} {entry['objectRef'].get('name', '')}"
            for entry in entries
            if entry["userAgent"].startswith("bidikv-operator")
            and entry.get("objectRef", {}).get("namespace") == self._namespace
            and entry["objectRef"]["resource"] != "leases"
        ]


def test_creates_all_children_and_says_what_is_missing(world: World) -> None:
    world.kubectl.apply(make_resource())
    world.operator()
    world.wait_until_settled()
    resource = world.kubectl.get("bidikvinference", "chat")
    assert resource is not None
    for name, child in world.children().items():
        (owner,) = child["metadata"]["ownerReferences"]
        assert owner["uid"] == resource["metadata"]["uid"], name
        assert owner["controller"]
        assert owner["blockOwnerDeletion"]
    assert "finalizers" not in resource["metadata"]
    assert "annotations" not in resource["metadata"], "the operator writes nothing but the status"
    status = resource["status"]
    assert status["observedGeneration"] == resource["metadata"]["generation"]
    assert [condition["type"] for condition in status["conditions"]] == [
        "Accepted",
        "PrefillReady",
        "DecodeReady",
        "RouterReady",
        "TransportVerified",
        "Scaling",
        "Progressing",
        "Degraded",
        "Ready",
    ]
    assert world.condition("Accepted")["status"] == "True"
    prefill = world.condition("PrefillReady")
    assert prefill["message"].startswith("0 of 2 prefill pods are ready; no node takes a pod; of ")
    assert world.condition("Ready")["status"] == "False"
    assert world.condition("Progressing")["status"] == "True"
    assert status["endpoint"] == f"http://chat.{world.kubectl.namespace}.svc:8000/v1"
    eventually(lambda: world.count_replicas("prefill") == 2, "both pods to be counted", WAIT)
    pods = world.kubectl.find("pods", status["prefill"]["selector"])
    assert len(pods) == 2
    events = eventually(
        lambda: [e for e in world.kubectl.find("events") if e["reason"] == "Unschedulable"], "an Event", WAIT
    )
    assert {event["involvedObject"]["kind"] for event in events} == {"BidiKVInference"}


def test_writes_nothing_at_rest(world: World) -> None:
    world.kubectl.apply(make_resource())
    operator = world.operator()
    world.wait_until_settled()
    operator.await_rest("chat")
    audit, metric = Audit(world.kubectl), operator.metric(WRITES)
    for _ in range(3):
        operator.await_reconcile("chat")
    assert operator.metric(WRITES) == metric
    assert audit.writes() == []
    # Neither does a process that starts with an empty memory.
    assert operator.terminate() == 0
    second = world.operator("two")
    eventually(lambda: second.metric(RECONCILES) > 0, "a first reconcile", WAIT)
    second.await_reconcile("chat")
    assert second.metric(WRITES) == 0
    assert audit.writes() == []


def test_the_audit_sees_a_write(world: World) -> None:
    """The test above can fail."""
    world.kubectl.apply(make_resource())
    world.operator()
    world.wait_until_settled()
    audit = Audit(world.kubectl)
    world.kubectl.run("delete", "service", "chat-decode")
    eventually(lambda: "patch services chat-decode" in audit.writes(), "the repair in the audit log", WAIT)


def test_repairs_what_others_change(world: World) -> None:
    world.kubectl.apply(make_resource())
    world.operator()
    world.wait_until_settled()

    before = world.child("Service/chat")["metadata"]["uid"]
    world.kubectl.run("delete", "service", "chat")
    eventually(lambda: world.kubectl.get("service", "chat"), "the Service to come back", WAIT)
    assert world.child("Service/chat")["metadata"]["uid"] != before

    world.kubectl.run("set", "image", f"deployment/{DECODE}", "engine=other.example/x:v9")
    world.kubectl.run("scale", f"deployment/{PREFILL}", "--replicas=5")
    world.kubectl.run("label", "serviceaccount", "chat-engine", "serving.bidikv.io/owner-")
    world.kubectl.run("patch", "role", "chat-router", "--type=json", "-p", '[{"op":"remove","path":"/rules"}]')

    def repaired() -> bool:
        containers = world.child(f"Deployment/{DECODE}")["spec"]["template"]["spec"]["containers"]
        labels = world.child("ServiceAccount/chat-engine")["metadata"]["labels"]
        return (
            containers[0]["image"] == "engine.example/none:v1"
            and world.child(f"Deployment/{PREFILL}")["spec"]["replicas"] == 2
            and labels.get("serving.bidikv.io/owner") == "chat"
            and bool(world.child("Role/chat-router").get("rules"))
        )

    eventually(repaired, "all repairs", WAIT)
    # What others add beside the operator's fields stays.
    world.kubectl.run("annotate", "service", "chat", "example.com/theirs=1")
    world.kubectl.run("delete", "poddisruptionbudget", "chat-router")
    eventually(lambda: world.kubectl.get("poddisruptionbudget", "chat-router"), "the budget", WAIT)
    assert world.child("Service/chat")["metadata"]["annotations"]["example.com/theirs"] == "1"


def test_a_paused_child_is_told_and_left_paused(world: World) -> None:
    world.kubectl.apply(make_resource())
    operator = world.operator()
    world.wait_until_settled()
    told = "kubectl rollout resume deployment/chat-router"
    world.kubectl.run("rollout", "pause", "deployment/chat-router")
    eventually(lambda: told in world.condition("Progressing")["message"], "the pause to be told", WAIT)
    operator.await_reconcile("chat")
    assert world.child("Deployment/chat-router")["spec"]["paused"] is True
    world.kubectl.run("rollout", "resume", "deployment/chat-router")
    eventually(lambda: told not in world.condition("Progressing")["message"], "the pause to be forgotten", WAIT)


def test_changes_of_the_resource_are_carried_out(world: World) -> None:
    world.kubectl.apply(make_resource())
    world.operator()
    world.wait_until_settled()
    assert world.router_config()["reuse"] == "Bidirectional"
    changed = make_resource(
        kvReuse={"mode": "OneWay"}, prefill={"replicas": 1, "gpusPerPod": 0, "podTemplate": NOWHERE}
    )
    world.kubectl.apply(changed)
    # One pod of a role needs no budget any more; what the templates are built from has changed, the group has not.
    identity = compute_identity(changed["spec"])
    assert identity.group == IDENTITY.group
    now = {f"ControllerRevision/chat-{role}-{identity.input_of(role)}" for role in ("prefill", "decode")}
    expected = (EXPECTED | now) - {"PodDisruptionBudget/chat-prefill"}
    eventually(lambda: world.has_exactly(expected), "the orphan to go", WAIT)
    eventually(lambda: world.router_config()["reuse"] == "OneWay", "the routers' other configuration", WAIT)
    world.kubectl.run("scale", "bidikvinference", "chat", "--replicas=3")
    eventually(lambda: world.child(f"Deployment/{DECODE}")["spec"]["replicas"] == 3, "the scale of decode", WAIT)
    eventually(lambda: world.count_replicas("decode") == 3, "three pods to be counted", WAIT)


def test_an_invalid_change_is_told_and_changes_nothing(world: World) -> None:
    world.kubectl.apply(make_resource())
    operator = world.operator()
    world.wait_until_settled()
    before = world.contents()
    bad = {"spec": {"containers": [{"name": "engine", "args": ["--port", "1"]}]}}
    world.kubectl.apply(make_resource(decode={"gpusPerPod": 0, "podTemplate": bad}))
    accepted = world.wait_for_condition("Accepted", "False", "Invalid")
    assert accepted["message"] == (
        "spec.decode.podTemplate.spec.containers[engine].args: the operator writes the arguments; use extraArgs instead"
    )
    assert world.condition("Ready")["reason"] == "Invalid"
    operator.await_reconcile("chat")
    assert world.contents() == before
    world.kubectl.apply(make_resource())
    world.wait_for_condition("Accepted", "True", "Valid")


def test_what_the_api_server_refuses_is_told(world: World) -> None:
    broken = {"spec": {"containers": [{"name": "engine", "volumeMounts": [{"name": "none", "mountPath": "/none"}]}]}}
    world.kubectl.apply(make_resource(decode={"gpusPerPod": 0, "podTemplate": broken}))
    world.operator()
    progressing = world.wait_for_condition("Progressing", "False", "ApplyFailed")
    assert f"Deployment {DECODE}" in progressing["message"]
    assert "volumeMounts" in progressing["message"]
    assert "Deployment/chat-router" in world.children(), "the others are in place"
    unknown = {"spec": {"noSuchField": 1}}
    world.kubectl.apply(make_resource(decode={"gpusPerPod": 0, "podTemplate": unknown}))
    eventually(lambda: "noSuchField" in world.condition("Progressing")["message"], "the unknown field named", WAIT)
    world.kubectl.apply(make_resource())
    world.wait_until_settled()


def test_a_foreign_object_is_left_alone(world: World) -> None:
    theirs = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "chat-engine", "annotations": {"example.com/theirs": "1"}},
    }
    world.kubectl.apply(theirs)
    world.kubectl.apply(make_resource())
    world.operator()
    progressing = world.wait_for_condition("Progressing", "False", "NameTaken")
    assert progressing["message"].startswith("ServiceAccount chat-engine: exists and belongs to something else")
    found = world.child("ServiceAccount/chat-engine")
    assert (found["metadata"].get("labels"), "automountServiceAccountToken" in found) == (None, False)
    world.kubectl.run("delete", "serviceaccount", "chat-engine")
    world.wait_until_settled()


def test_a_pod_that_is_deleted_while_it_starts_ends(world: World) -> None:
    """With so little CPU the router imports for many seconds, in which it has no handler for SIGTERM yet."""
    idle = {"replicas": 0, "gpusPerPod": 0}
    cpu = {"requests": {"cpu": "50m"}, "limits": {"cpu": "50m"}}
    router = {"replicas": 1, "podTemplate": {"spec": {"containers": [{"name": "router", "resources": cpu}]}}}
    world.kubectl.apply(make_resource(prefill=idle, decode=idle, router=router))
    world.operator()

    def is_running() -> bool:
        states = [state for pod in world.kubectl.find("pods") for state in pod["status"].get("containerStatuses", [])]
        return any("running" in state["state"] for state in states)

    eventually(is_running, "the router's container to run", WAIT, every=0.1)
    (pod,) = world.kubectl.find("pods")
    world.kubectl.run("delete", "bidikvinference", "chat")
    eventually(lambda: not world.kubectl.find("pods"), "the pod to go", 3 * WAIT)
    assert pod["spec"]["terminationGracePeriodSeconds"] > 4 * WAIT, "it did not just wait for the kubelet's SIGKILL"


def test_image_troubles_are_told(world: World) -> None:
    """``imagePullPolicy: Never`` of an image that no node has: a sentence is made of it, and nothing is pulled."""
    never = {
        "spec": {
            "initContainers": [{"name": "install-connector", "imagePullPolicy": "Never"}],
            "containers": [{"name": "engine", "imagePullPolicy": "Never"}],
        }
    }
    world.kubectl.apply(make_resource(decode={"gpusPerPod": 0, "podTemplate": never}))
    world.operator()
    decode = world.wait_for_condition("DecodeReady", "False", "ImagePullFailed")
    assert decode["message"] == (
        "0 of 1 decode pod is ready; image engine.example/none:v1 of container engine is not on the node and "
        "spec.imagePullPolicy is Never; load it there or allow pulling"
    )


def test_deletion_leaves_nothing(world: World) -> None:
    world.kubectl.apply(make_resource())
    world.operator()
    world.wait_until_settled()
    world.kubectl.run("delete", "bidikvinference", "chat", "--wait=true")
    eventually(lambda: not world.children(), "all children to go", WAIT)
    eventually(lambda: not world.kubectl.find("pods"), "all pods to go", WAIT)
    # And again under the same name, at once.
    world.kubectl.apply(make_resource())
    world.wait_until_settled()
    world.kubectl.run("delete", "bidikvinference", "chat", "--wait=true")
    world.kubectl.apply(make_resource())
    world.wait_until_settled()
    resource = world.kubectl.get("bidikvinference", "chat")
    assert resource is not None
    owners = {child["metadata"]["ownerReferences"][0]["uid"] for child in world.children().values()}
    assert owners == {resource["metadata"]["uid"]}


def test_deletion_needs_no_operator(world: World) -> None:
    world.kubectl.apply(make_resource())
    operator = world.operator()
    world.wait_until_settled()
    assert operator.terminate() == 0
    world.kubectl.run("delete", "bidikvinference", "chat", "--cascade=foreground", "--wait=true", timeout=WAIT)
    eventually(lambda: not world.children(), "all children to go", WAIT)


def test_starts_with_many_objects(world: World) -> None:
    """kopf handles no event before it has indexed every listed object; that must not depend on their number."""
    labels = {"serving.bidikv.io/owner": "another"}
    many = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": f"filler-{number}", "labels": labels}}
        for number in range(250)
    ]
    world.kubectl.apply(*many)
    world.kubectl.apply(make_resource())
    world.operator()
    world.wait_until_settled()


def test_several_resources_in_one_namespace(world: World) -> None:
    operator = world.operator()
    manifests = []
    for number in range(5):
        manifest = make_resource()
        manifest["metadata"] = {"name": f"chat-{number}"}
        manifests.append(manifest)
    world.kubectl.apply(*manifests)

    def all_told() -> bool:
        found = world.kubectl.find("bidikvinferences")
        reasons = [
            condition["reason"]
            for item in found
            for condition in item.get("status", {}).get("conditions", [])
            if condition["type"] == "RouterReady"
        ]
        return reasons == ["Unschedulable"] * 5

    eventually(all_told, "five resources told", WAIT)
    assert len(world.kubectl.find("deployments")) == 15
    assert operator.page("healthz") == (200, "ok\n")
    line = 'bidikv_operator_resources{ready="False"} 5.0'
    eventually(lambda: line in operator.page("metrics")[1].splitlines(), "all of them in the metrics", WAIT)
