"""What is refused, and with which words."""

from __future__ import annotations

from typing import Any

import pytest

from bidikv_operator.fabric import INSTANCE_TYPES, compute_interfaces
from bidikv_operator.resolved import Resolved
from bidikv_operator.tests.samples import RUNTIME_IMAGE, make_resource
from bidikv_operator.validate import Rejected, find_owned_flag, validate

Object = dict[str, Any]
EFA = {"type": "EFA", "instanceType": "p5en.48xlarge"}


ROUTER_WITH_CONFIG = {"name": "router", "env": [{"name": "BIDIKV_ROUTER_CONFIG", "value": "{}"}]}


def problems_of(resource: Object) -> dict[str, str]:
    checked = validate(resource, runtime_image=RUNTIME_IMAGE)
    if isinstance(checked, Resolved):
        return {}
    assert isinstance(checked, Rejected)
    return {problem.field: problem.message for problem in checked.problems}


def container(**fields: Any) -> Object:
    return {"podTemplate": {"spec": {"containers": [{"name": "engine", **fields}]}}}


REFUSED: dict[str, tuple[Object, str, str]] = {
    "name with a dot": ({"name": "a.b"}, "metadata.name", "cannot be the name of a Service"),
    "name with a digit first": ({"name": "1a"}, "metadata.name", "cannot be the name of a Service"),
    "name too long": ({"name": "a" * 64}, "metadata.name", "at most 63"),
    "no model": ({"spec": {"image": "i", "fabric": {"type": "TCP"}}}, "spec.model", "Field required"),
    "no source": ({"model": {"source": {}}}, "spec.model.source", "exactly one"),
    "two sources": (
        {"model": {"source": {"path": "/a", "huggingFace": {"repository": "a/b"}}}},
        "spec.model.source",
        "exactly one",
    ),
    "path that leaves the volume": (
        {"model": {"source": {"persistentVolumeClaim": {"claimName": "c", "path": "a/../../b"}}}},
        "spec.model.source.persistentVolumeClaim.path",
        "leaves the volume",
    ),
    "EFA without figures": ({"fabric": {"type": "EFA"}}, "spec.fabric", "instanceType or interfacesPerPod"),
    "more GPUs than the instance has": (
        {"fabric": EFA, "prefill": {"tensorParallelSize": 16}},
        "spec.prefill.gpusPerPod",
        "which has 8",
    ),
    "more interfaces than the instance has": (
        {"fabric": {**EFA, "interfacesPerPod": 17}},
        "spec.fabric.interfacesPerPod",
        "which has 16",
    ),
    "more shards than GPUs": (
        {"decode": {"tensorParallelSize": 8, "gpusPerPod": 4}},
        "spec.decode.gpusPerPod",
        "cannot hold the 8 ranks of a pod",
    ),
    "adapter named like the resource": (
        {"model": {"source": {"path": "/m"}, "loraAdapters": [{"name": "chat", "source": {"path": "/a"}}]}},
        "spec.model.loraAdapters[chat]",
        "the model's own name",
    ),
    "adapter twice": (
        {"model": {"source": {"path": "/m"}, "loraAdapters": [{"name": "a", "source": {"path": "/a"}}] * 2}},
        "spec.model.loraAdapters[a]",
        "given twice",
    ),
    "GPUs of a node with several of them": (
        {"fabric": EFA, "decode": {"tensorParallelSize": 64, "nodesPerReplica": 4}},
        "spec.decode.gpusPerPod",
        "16 GPUs do not fit",
    ),
    "node label that none can be": (
        {"prefill": {"scheduling": {"nodeSelector": {"a b": "c"}}}},
        "spec.prefill.scheduling.nodeSelector",
        "no key that Kubernetes takes",
    ),
    "annotation of the operator": (
        {"router": {"service": {"annotations": {"serving.bidikv.io/applied-hash": "0"}}}},
        "spec.router.service.annotations",
        "belongs to the operator",
    ),
    "annotation that none can be": (
        {"router": {"service": {"annotations": {"/a": "0"}}}},
        "spec.router.service.annotations",
        "no key that Kubernetes takes",
    ),
    "label of the operator on the monitor": (
        {"monitoring": {"labels": {"app.kubernetes.io/managed-by": "me"}}},
        "spec.monitoring.labels",
        "belongs to the operator",
    ),
    "namespace label that none can be": (
        {"security": {"metricsFrom": {"namespaceLabels": {"a": "b", "-": ""}}}},
        "spec.security.metricsFrom.namespaceLabels",
        "no key that Kubernetes takes",
    ),
    "template label that is no text": (
        {"prefill": {"podTemplate": {"metadata": {"labels": {"a": 1}}}}},
        "spec.prefill.podTemplate.metadata.labels",
        "quote it",
    ),
    "token file": (
        {"decode": {"env": [{"name": "BIDIKV_TOKEN_FILE", "value": "/x"}]}},
        "spec.decode.env",
        "BIDIKV_TOKEN_FILE is set by the operator",
    ),
    "owned flag": ({"prefill": {"extraArgs": ["--port=1"]}}, "spec.prefill.extraArgs", "--port means --port"),
    "owned variable": (
        {"decode": {"env": [{"name": "PYTHONHASHSEED", "value": "1"}]}},
        "spec.decode.env",
        "PYTHONHASHSEED is set by the operator",
    ),
    "variable twice": (
        {"decode": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}},
        "spec.decode.env",
        "given twice",
    ),
    "owned variable in the template": (
        {"prefill": container(env=[{"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "value": "x"}])},
        "spec.prefill.podTemplate.spec.containers[engine].env",
        "set by the operator",
    ),
    "path variable in the template": (
        {"prefill": container(env=[{"name": "PYTHONPATH", "value": "x"}])},
        "spec.prefill.podTemplate.spec.containers[engine].env",
        "PYTHONPATH",
    ),
    "arguments in the template": (
        {"prefill": container(args=["--x"])},
        "spec.prefill.podTemplate.spec.containers[engine].args",
        "use extraArgs",
    ),
    "environment of a wrong shape": (
        {"prefill": container(env={"A": "1"})},
        "spec.prefill.podTemplate.spec.containers[engine].env",
        "list of objects",
    ),
    "unknown part of the template": (
        {"prefill": {"podTemplate": {"status": {}}}},
        "spec.prefill.podTemplate.status",
        "only metadata and spec",
    ),
    "template name": (
        {"prefill": {"podTemplate": {"metadata": {"name": "x"}}}},
        "spec.prefill.podTemplate.metadata.name",
        "only labels and annotations",
    ),
    "selector label": (
        {"router": {"podTemplate": {"metadata": {"labels": {"serving.bidikv.io/role": "decode"}}}}},
        "spec.router.podTemplate.metadata.labels",
        "belongs to the operator",
    ),
    "template spec of a wrong shape": (
        {"prefill": {"podTemplate": {"spec": []}}},
        "spec.prefill.podTemplate.spec",
        "must be an object",
    ),
    "containers of a wrong shape": (
        {"router": {"podTemplate": {"spec": {"containers": {"name": "x"}}}}},
        "spec.router.podTemplate.spec.containers",
        "list of objects with a name",
    ),
    "the router's configuration": (
        {"router": {"podTemplate": {"spec": {"containers": [ROUTER_WITH_CONFIG]}}}},
        "spec.router.podTemplate.spec.containers[router].env",
        "BIDIKV_ROUTER_CONFIG is set by the operator; remove it",
    ),
    "a container twice": (
        {"router": {"podTemplate": {"spec": {"containers": [{"name": "x"}, {"name": "x"}]}}}},
        "spec.router.podTemplate.spec.containers",
        "given twice",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    changes, field, words = REFUSED[case]
    found = problems_of(make_resource(**changes))
    assert field in found, found
    assert words in found[field]


def test_all_problems_are_told_at_once() -> None:
    found = problems_of(make_resource(fabric={"type": "EFA"}, prefill={"extraArgs": ["--host", "x"]}))
    assert set(found) == {"spec.fabric", "spec.prefill.extraArgs"}


def test_unknown_fields_of_a_newer_resource_are_ignored() -> None:
    assert problems_of(make_resource(somethingNew={"a": 1})) == {}


def test_router_arguments_may_be_given_in_its_template() -> None:
    template = {"spec": {"containers": [{"name": "router", "args": ["--log-level", "DEBUG"]}]}}
    assert problems_of(make_resource(router={"podTemplate": template})) == {}


@pytest.mark.parametrize(
    ("arg", "owned"),
    [
        ("--model", "--model"),
        ("--model=x", "--model"),
        ("--max_model_len", "--max-model-len"),
        ("--max-model", "--max-model-len"),
        ("--kv-transfer-config.kv_role", "--kv-transfer-config"),
        ("--kv_transfer_config.kv_role=kv_producer", "--kv-transfer-config"),
        ("-tp", "-tp"),
        ("-t", "-tp"),
        ("-n2", "-n"),
        ("-dc", None),
        ("--enable-lora", "--enable-lora"),
        ("--config=a.yaml", "--config"),
        ("--config-format", None),
        ("--max-loras", None),
        ("-tp=2", "-tp"),
        ("--tensor-parallel-size=2", "--tensor-parallel-size"),
        ("--no-enable-prefix-caching", "--no-enable-prefix-caching"),
        ("--model-impl", None),
        ("--max-num-batched-tokens", None),
        ("--enforce-eager", None),
        ("-O3", None),
        ("--", None),
        ("-", None),
        ("model", None),
        ("8000", None),
        ("-1", None),
    ],
)
def test_owned_flags_in_every_spelling(arg: str, owned: str | None) -> None:
    assert find_owned_flag(arg) == owned


@pytest.mark.parametrize(
    ("instance", "gpus", "interfaces"),
    [
        ("p4d.24xlarge", 8, 4),
        ("p4d.24xlarge", 1, 1),
        ("p4d.24xlarge", 3, 2),
        ("p5.48xlarge", 8, 32),
        ("p5.48xlarge", 4, 16),
        ("p5en.48xlarge", 4, 8),
        ("p5en.48xlarge", 1, 2),
        ("p6-b200.48xlarge", 8, 8),
        ("p6e-gb200.36xlarge", 2, 2),
        ("p5en.48xlarge", 0, 1),
    ],
)
def test_interfaces(instance: str, gpus: int, interfaces: int) -> None:
    assert compute_interfaces(instance, gpus) == interfaces


def test_instance_types_are_those_of_the_schema() -> None:
    from bidikv_operator.api.v1alpha1 import BidiKVInferenceSpec

    schema = str(BidiKVInferenceSpec.model_json_schema())
    for instance in INSTANCE_TYPES:
        assert repr(instance) in schema
