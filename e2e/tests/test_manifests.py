"""What the operator builds, before a real API server: every golden manifest is admitted as it is, without an unknown
field, and pods meet the pod security standard that they claim. Nothing is stored but ServiceAccounts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from bidikv_operator import kinds
from bidikv_operator.drift import is_unchanged
from e2e.install import ROOT
from e2e.kubectl import Kubectl, KubectlError

pytestmark = pytest.mark.cluster

GOLDEN = ROOT / "operator" / "bidikv_operator" / "tests" / "golden"
DRY_RUN = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "--field-manager=test", "--filename=-")
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
Object = dict[str, Any]


def read(case: str) -> list[Object]:
    paths: list[Path] = sorted((GOLDEN / case).glob("*.yaml"))
    assert paths, f"no golden file of {case}"
    return [yaml.safe_load(path.read_text()) for path in paths]


def localise(manifest: Object, namespace: str) -> Object:
    """The same object in a namespace that exists; its owner does not."""
    metadata = {key: value for key, value in manifest["metadata"].items() if key != "ownerReferences"}
    return {**manifest, "metadata": {**metadata, "namespace": namespace}}


def list_optional_served(cluster: Kubectl) -> set[str]:
    return {
        kind.kind
        for kind in kinds.OPTIONAL_KINDS
        if f"{kind.plural}.{kind.group}"
        in cluster.run("api-resources", f"--api-group={kind.group}", "--output=name").split()
    }


@pytest.fixture(scope="module")
def served(cluster: Kubectl) -> set[str]:
    return list_optional_served(cluster)


@pytest.mark.parametrize("case", CASES)
def test_the_api_server_admits_every_manifest(namespace: Kubectl, served: set[str], case: str) -> None:
    optional = {kind.kind for kind in kinds.OPTIONAL_KINDS} - served
    assert namespace.namespace is not None
    manifests = [localise(item, namespace.namespace) for item in read(case) if item["kind"] not in optional]
    # In JSON: to YAML's readers, a hash such as 2465203e99 is a string or a number.
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
    answer = namespace.run(*DRY_RUN, "--output=json", stdin=text)
    admitted = {(item["kind"], item["metadata"]["name"]): item for item in json.loads(answer)["items"]}
    for manifest in manifests:
        live = admitted[manifest["kind"], manifest["metadata"]["name"]]
        # Not in the server's own form, a value would cost an apply at each restart of the operator.
        assert is_unchanged(manifest, live, None), manifest["metadata"]["name"]


def test_a_field_that_does_not_exist_would_be_noticed(namespace: Kubectl) -> None:
    (service,) = (item for item in read("tcp") if item["kind"] == "Service" and item["metadata"]["name"] == "chat")
    assert namespace.namespace is not None
    wrong = localise(service, namespace.namespace)
    wrong["spec"]["noSuchField"] = 1
    with pytest.raises(KubectlError, match="noSuchField"):
        namespace.run(*DRY_RUN, stdin=json.dumps(wrong))


def build_pods(case: str, namespace: str) -> dict[str, Object]:
    """A pod of each template, by role, without what users added to it."""
    pods = {}
    for item in read(case):
        if item["kind"] == "Deployment":
            template = item["spec"]["template"]
            role = template["metadata"]["labels"]["serving.bidikv.io/role"]
            template["spec"]["containers"] = [
                container for container in template["spec"]["containers"] if container["name"] in ("engine", "router")
            ]
            metadata = {**template["metadata"], "name": role, "namespace": namespace}
            pods[role] = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    return pods


@pytest.mark.parametrize(("case", "refused"), [("tcp", set()), ("efa", {"prefill", "decode"})])
def test_pod_security_admits_all_but_what_pins_memory(namespace: Kubectl, case: str, refused: set[str]) -> None:
    name = namespace.namespace
    assert name is not None
    namespace.apply(*(localise(item, name) for item in read(case) if item["kind"] == "ServiceAccount"))
    namespace.run("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    pods = build_pods(case, name)
    assert refused < set(pods)
    for role, pod in pods.items():
        create = ("create", "--dry-run=server", "--filename=-")
        if role in refused:
            with pytest.raises(KubectlError, match=r"(?s)violates PodSecurity \"restricted:latest\".*IPC_LOCK"):
                namespace.run(*create, stdin=json.dumps(pod))
        else:
            namespace.run(*create, stdin=json.dumps(pod))
