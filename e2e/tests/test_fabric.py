"""EFA pods on P5en-like nodes: what they ask for is counted by the real scheduler. Their image need not exist.

The operator runs as a subprocess that serves the test's own namespace.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bidikv_operator import names
from e2e.install import image_references
from e2e.kubectl import Kubectl, eventually
from e2e.operator_process import OperatorProcess

pytestmark = pytest.mark.cluster

NAME = "qwen"
WAIT = 120.0
Object = dict[str, Any]


def resource(fabric: Object, tensor_parallel: int, decode_replicas: int) -> Object:
    """The machine has two cores, which its nodes share: pods ask for little of them."""
    role: Object = {"replicas": 1, "tensorParallelSize": tensor_parallel, "resources": {"cpu": "10m"}}
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": NAME},
        "spec": {
            "model": {"source": {"huggingFace": {"repository": "Qwen/Qwen3-32B"}}},
            "image": "vllm/vllm-openai:v0.32.0",
            "fabric": {"type": "EFA", "instanceType": "p5en.48xlarge", **fabric},
            "prefill": role,
            "decode": role | {"replicas": decode_replicas},
            "router": {"replicas": 0},
        },
    }


@pytest.fixture
def served(namespace: Kubectl, crd: None, tmp_path: Path) -> Iterator[Kubectl]:
    """A namespace that an operator serves."""
    operator = OperatorProcess(namespace, "one", image_references()["runtime"], tmp_path)
    operator.start()
    yield namespace
    operator.kill()


def condition_with(kubectl: Kubectl, kind: str, *words: str) -> str:
    """The condition's sentence, once it contains all of ``words``."""

    def look() -> str | None:
        message = kubectl.condition(names.SHORT_NAME, NAME, kind).get("message", "")
        return message if all(word in message for word in words) else None

    try:
        return eventually(look, "a condition", timeout=WAIT)
    except TimeoutError:
        raise AssertionError(f"{kind} says {kubectl.condition(names.SHORT_NAME, NAME, kind)}, not {words}") from None


def wait_for_placed(kubectl: Kubectl, count: int) -> list[Object]:
    def look() -> list[Object] | None:
        pods = [pod for pod in kubectl.find("pods") if pod["spec"].get("nodeName")]
        return pods if len(pods) == count else None

    return eventually(look, f"{count} engine pods to be placed", timeout=WAIT)


def test_half_of_an_instance_gets_half_of_its_interfaces_and_no_pod_more_than_there_is(served: Kubectl) -> None:
    """Prefill and one decode pod fill one node (8 GPUs, 16 interfaces); the second decode pod is told why not."""
    served.apply(resource({"hugePagesMebibytes": 0}, tensor_parallel=4, decode_replicas=2))
    pods = wait_for_placed(served, 2)
    sentence = condition_with(served, names.DECODE_READY, "nvidia.com/gpu", "vpc.amazonaws.com/efa")
    assert "4 nvidia.com/gpu, 8 vpc.amazonaws.com/efa" in sentence
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 1, "EFA does not cross zones"
    for pod in pods:
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        assert (limits["nvidia.com/gpu"], limits["vpc.amazonaws.com/efa"]) == ("4", "8")


def test_whole_instances_in_two_zones_are_no_pair(served: Kubectl) -> None:
    """Each node has room for one pod of 8 GPUs and 16 interfaces, but the nodes are in different zones."""
    served.apply(resource({"hugePagesMebibytes": 0}, tensor_parallel=8, decode_replicas=1))
    (pod,) = wait_for_placed(served, 1)
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["vpc.amazonaws.com/efa"]) == ("8", "16")
    placed = pod["metadata"]["labels"][names.LABEL_ROLE]
    waiting = names.DECODE_READY if placed == names.PREFILL else names.PREFILL_READY
    condition_with(served, waiting, "8 nvidia.com/gpu", "16 vpc.amazonaws.com/efa")


def test_a_node_without_huge_pages_is_named_as_the_reason(served: Kubectl) -> None:
    served.apply(resource({}, tensor_parallel=4, decode_replicas=1))
    condition_with(served, names.PREFILL_READY, "hugepages-2Mi")
    ready = served.condition(names.SHORT_NAME, NAME, names.READY)
    assert (ready["status"], ready["reason"]) == ("False", names.REASON_UNSCHEDULABLE)
