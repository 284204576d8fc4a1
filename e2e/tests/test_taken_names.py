"""Objects of somebody else that have a child's name stay as they are, on a real API server.

The operator sends such a child with a resource version that no object has, and relies on the API server to refuse it
where there is an object and to create it where there is none.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bidikv_operator import names
from e2e.kubectl import Manifest
from e2e.operator_process import OperatorProcess
from e2e.own_api_server import OwnApiServer
from e2e.small_resource import build_small_resource

pytestmark = pytest.mark.cluster

POD_TEMPLATE: Manifest = {
    "metadata": {"labels": {"app": "theirs"}},
    "spec": {"containers": [{"name": "theirs", "image": "theirs.example/app:v1"}]},
}
SELECTOR: Manifest = {"matchLabels": {"app": "theirs"}}
THEIRS: tuple[Manifest, ...] = (
    {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "chat-engine"}},
    {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "chat-router"}, "rules": []},
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "chat-router"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "theirs"},
        "subjects": [],
    },
    {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat"}, "spec": {"ports": [{"port": 1}]}},
    {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "chat-engine"},
        "spec": {"podSelector": SELECTOR},
    },
    {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "chat-router"},
        "spec": {"selector": SELECTOR, "template": POD_TEMPLATE},
    },
    {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "chat-router"},
        "spec": {"selector": SELECTOR, "minAvailable": 1},
    },
)


def test_what_is_not_ours_is_left_alone(own_api_server: OwnApiServer, tmp_path: Path) -> None:
    kubectl = own_api_server.create_namespace("taken-names")
    kubectl.apply(*THEIRS)
    kinds = ",".join(manifest["kind"] for manifest in THEIRS)
    ours = f"{names.LABEL_OWNER}=chat"

    def find_versions() -> dict[tuple[str, str], str]:
        found = [item for item in kubectl.find(kinds) if names.LABEL_OWNER not in item["metadata"].get("labels", {})]
        return {(item["kind"], item["metadata"]["name"]): item["metadata"]["resourceVersion"] for item in found}

    before = find_versions()
    operator = OperatorProcess(kubectl, "one", "runtime.example/none:v1", tmp_path)
    try:
        operator.start()
        kubectl.apply(build_small_resource(router={"replicas": 2}))
        condition = operator.await_condition("chat", names.PROGRESSING, "False", names.REASON_NAME_TAKEN)
    finally:
        operator.kill()
    for manifest in THEIRS:
        assert f"{manifest['kind']} {manifest['metadata']['name']}" in condition["message"]
    assert find_versions() == before
    made = {item["kind"] for item in kubectl.find(kinds, ours)}
    assert {"Service", "ServiceAccount", "NetworkPolicy"} <= made, "what nobody has taken was created"
