"""EFA pods on P5en-like nodes: what they ask for is counted by the real scheduler. Their image need not exist."""

from __future__ import annotations

from typing import Any

import pytest

from bidikv_operator import names
from e2e.kubectl import Kubectl, eventually

pytestmark = pytest.mark.cluster

NAME = "qwen"
LACKING_HERE = {"hugepages-2Mi": "0"}
"""The test machine has no huge pages to give away, and two cores."""


def resource(*, decode_replicas: int, override: dict[str, Any] | None) -> dict[str, Any]:
    role: dict[str, Any] = {"replicas": 1, "tensorParallelSize": 4}
    if override is not None:
        role["podTemplate"] = {"spec": {"containers": [{"name": names.ENGINE_CONTAINER, "resources": override}]}}
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": NAME},
        "spec": {
            "model": {"source": {"huggingFace": {"repository": "Qwen/Qwen3-32B"}}},
            "image": "vllm/vllm-openai:v0.32.0",
            "fabric": {"type": "EFA", "instanceType": "p5en.48xlarge"},
            "prefill": role,
            "decode": role | {"replicas": decode_replicas},
            "router": {"replicas": 0},
        },
    }


def condition_with(kubectl: Kubectl, kind: str, words: str) -> str:
    """The condition's sentence, once it contains ``words``."""

    def look() -> str | None:
        message = kubectl.condition(names.SHORT_NAME, NAME, kind).get("message", "")
        return message if words in message else None

    return eventually(look, f"{kind} to say {words!r}", timeout=90)


def test_half_of_an_instance_gets_half_of_its_interfaces_and_no_pod_more_than_there_is(
    namespace: Kubectl, operator: None
) -> None:
    """Prefill and one decode pod fill one node (8 GPUs, 16 interfaces); the second decode pod is told why not."""
    override = {"limits": LACKING_HERE, "requests": LACKING_HERE | {"cpu": "10m"}}
    namespace.apply(resource(decode_replicas=2, override=override))

    def placed() -> list[dict[str, Any]] | None:
        pods = [pod for pod in namespace.find("pods") if pod["spec"].get("nodeName")]
        return pods if len(pods) == 2 else None

    pods = eventually(placed, "two engine pods to be scheduled", timeout=90)
    sentence = condition_with(namespace, names.DECODE_READY, "Insufficient nvidia.com/gpu")
    assert "Insufficient vpc.amazonaws.com/efa" in sentence
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 1, "EFA does not cross zones"
    for pod in pods:
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        assert (limits["nvidia.com/gpu"], limits["vpc.amazonaws.com/efa"]) == ("4", "8")


def test_a_node_without_huge_pages_is_named_as_the_reason(namespace: Kubectl, operator: None) -> None:
    namespace.apply(resource(decode_replicas=1, override=None))
    condition_with(namespace, names.PREFILL_READY, "Insufficient hugepages-2Mi")
    ready = namespace.condition(names.SHORT_NAME, NAME, names.READY)
    assert (ready["status"], ready["reason"]) == ("False", "Unschedulable")
