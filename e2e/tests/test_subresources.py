"""The resource as kubectl shows it: the status and scale subresources, columns, explanations.

These store a resource, in a namespace of their own.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from bidikv_operator import names
from e2e.kubectl import Kubectl, KubectlError, Manifest, eventually
from e2e.tests.schema_rows import REMOVED, changed
from e2e.tests.schema_walk import FIELDS
from e2e.tests.test_schema import manifest

pytestmark = pytest.mark.cluster

NOWHERE = {"spec": {"nodeSelector": {"serving.bidikv.io/no-such-node": "true"}}}
STORED = manifest(
    "stored",
    {
        "model": {"source": {"path": "/models/tiny"}},
        "image": "docker.io/bidikv/absent:1",
        "fabric": {"type": "TCP"},
        "prefill": {"replicas": 0, "gpusPerPod": 0, "podTemplate": NOWHERE},
        "decode": {"replicas": 2, "gpusPerPod": 0, "podTemplate": NOWHERE},
        "router": {"replicas": 0},
    },
)
"""A resource whose pods never run, in case an operator serves the cluster."""
GOOD_CONDITION = {
    "type": "Ready",
    "status": "True",
    "observedGeneration": 1,
    "lastTransitionTime": "2026-01-01T00:00:00Z",
    "reason": "AllReady",
    "message": "Everything is ready.",
}
GOOD_STATUS: Manifest = {
    "observedGeneration": 2**53,
    "conditions": [GOOD_CONDITION],
    "endpoint": "http://stored.default.svc:8000/v1",
    "prefill": {"replicas": 1, "readyReplicas": 1, "updatedReplicas": 1, "selector": "a=b"},
    "decode": {"replicas": 2**31 - 1, "readyReplicas": 0, "updatedReplicas": 0, "selector": "a=b"},
    "router": {"replicas": 2, "readyReplicas": 2, "updatedReplicas": 2, "selector": "a=b"},
}
BAD_STATUS: list[tuple[dict[str, Any], str]] = [
    ({"conditions.0.status": "Perhaps"}, "status.conditions[0].status: Unsupported value"),
    ({"conditions.0.reason": "not a word"}, "status.conditions[0].reason"),
    ({"conditions.0.reason": REMOVED}, "status.conditions[0].reason: Required value"),
    ({"conditions.0.lastTransitionTime": "yesterday"}, "status.conditions[0].lastTransitionTime"),
    ({"conditions": [GOOD_CONDITION, GOOD_CONDITION]}, "status.conditions[1]: Duplicate value"),
    ({"observedGeneration": -1}, "status.observedGeneration"),
    ({"decode.replicas": 2**31}, "status.decode.replicas"),
]


def test_status_and_scale(namespace: Kubectl, crd: None) -> None:
    namespace.apply(STORED)

    def patch_status(status: Manifest) -> Manifest:
        arguments = ("--subresource=status", "--type=merge", "--dry-run=server", "-o", "json")
        patch = json.dumps({"status": status, "spec": {"image": "other"}})
        answer: Manifest = json.loads(namespace.run("patch", names.SHORT_NAME, "stored", *arguments, "-p", patch))
        return answer

    written = patch_status(GOOD_STATUS)
    assert {key: written["status"][key] for key in GOOD_STATUS} == GOOD_STATUS
    assert written["spec"]["image"] == STORED["spec"]["image"], "/status must not change the spec"
    for changes, words in BAD_STATUS:
        with pytest.raises(KubectlError, match=re.escape(words)):
            patch_status(changed(GOOD_STATUS, changes))

    path = f"/apis/{names.API_VERSION}/namespaces/{namespace.namespace}/{names.PLURAL}/stored/scale"
    assert json.loads(namespace.run("get", "--raw", path))["spec"]["replicas"] == 2
    namespace.run("scale", names.SHORT_NAME, "stored", "--replicas=3")
    scaled = namespace.get(names.SHORT_NAME, "stored") or {}
    assert scaled["spec"]["decode"]["replicas"] == 3


def test_scale_of_a_resource_that_leaves_its_replicas_unset(namespace: Kubectl, crd: None) -> None:
    """A HorizontalPodAutoscaler reads /scale first, so it needs the field; ``kubectl scale`` writes it."""
    namespace.apply(changed(STORED, {"spec.decode": {"podTemplate": NOWHERE}}))
    path = f"/apis/{names.API_VERSION}/namespaces/{namespace.namespace}/{names.PLURAL}/stored/scale"
    with pytest.raises(KubectlError, match=r"\.spec\.decode\.replicas\W* does not exist"):
        namespace.run("get", "--raw", path)
    namespace.run("scale", names.SHORT_NAME, "stored", "--replicas=1")
    assert json.loads(namespace.run("get", "--raw", path))["spec"]["replicas"] == 1


def test_kubectl_shows_columns_and_explains_fields(namespace: Kubectl, crd: None) -> None:
    namespace.apply(STORED)
    header = namespace.run("get", names.SHORT_NAME, "stored", "-o", "wide").splitlines()[0].split()
    assert header == ["NAME", "READY", "REASON", "PREFILL", "DECODE", "ROUTER", "AGE", "FABRIC", "VERIFIED", "IMAGE",
                      "ENDPOINT", "MESSAGE"]  # fmt: skip
    assert "stored" in namespace.run("get", names.CATEGORY)
    explained = eventually(
        lambda: explain(namespace, f"{names.SHORT_NAME}.spec.prefill.extraArgs"), "the OpenAPI document", timeout=60
    )
    assert FIELDS["prefill.extraArgs"]["description"] in " ".join(explained.split())


def explain(cluster: Kubectl, path: str) -> str | None:
    """``kubectl explain``, or None while the API server has not published the schema yet."""
    try:
        return cluster.run("explain", path)
    except KubectlError:
        return None
