"""What validation fills in: every field of a resource that sets all of them, and the default of every other one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.utils.quantity import parse_quantity

from bidikv_operator.api.crd import build_crd
from bidikv_operator.resolved import (
    Resolved,
    ResolvedAdapter,
    ResolvedHealing,
    ResolvedMonitoring,
    ResolvedObjectives,
    ResolvedRetention,
    ResolvedScaling,
    ResolvedSecurity,
    ResolvedUpdates,
    Resources,
    Scheduling,
)
from bidikv_operator.tests.samples import RUNTIME_IMAGE, make_resource, resolve
from bidikv_operator.validate import validate
from bidikv_operator.validate.labels import is_label_key
from bidikv_operator.validate.quantity import canonical_cpu, canonical_memory

Object = dict[str, Any]
SPEC = build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]

FULL: Object = {
    "model": {
        "source": {"huggingFace": {"repository": "org/model", "revision": "abc", "tokenSecretName": "hub"}},
        "servedName": "big",
        "maxLength": 1000,
        "loraAdapters": [
            {"name": "sql", "source": {"persistentVolumeClaim": {"claimName": "adapters", "path": "sql/v1/"}}},
            {"name": "law", "source": {"path": "/adapters/law"}},
        ],
        "maxLoraRank": 32,
        "cache": {"persistentVolumeClaimName": "downloads"},
    },
    "imagePullPolicy": "Always",
    "imagePullSecrets": ["registry"],
    "runtime": {"image": "registry.example/own:v2", "restart": "now"},
    "fabric": {
        "type": "EFA",
        "instanceType": "p5en.48xlarge",
        "devices": "ResourceClaim",
        "deviceClasses": {"gpu": "gpus", "efa": "efas"},
        "privileged": "Enabled",
        "hugePagesMebibytes": 0,
        "verification": {"minimumGigabitsPerSecond": 100, "gate": "Ready"},
    },
    "kvReuse": {"mode": "OneWay", "retention": {"policy": "SessionAware", "budgetPercent": 0, "idleSeconds": 30}},
    "prefill": {
        "replicas": 1,
        "tensorParallelSize": 2,
        "dataParallelSize": 2,
        "expertParallel": "Enabled",
        "resources": {"cpu": "2000m", "memory": "2048Mi"},
        "scheduling": {
            "nodeSelector": {"pool": "a"},
            "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0}],
            "priorityClassName": "high",
            "schedulerName": "own",
            "topologyKey": "example.com/rack",
        },
    },
    "decode": {"replicas": 9, "tensorParallelSize": 16, "nodesPerReplica": 4},
    "router": {
        "replicas": 0,
        "resources": {"cpu": 2},
        "scheduling": {"schedulerName": "own"},
        "localLimitTokens": 0,
        "missingPrefill": "Fail",
        "continueStreams": "Enabled",
        "tenantIsolation": "Enabled",
        "tlsSecretName": "tls",
        "accessLog": "Enabled",
        "tracing": {"endpoint": "http://c", "samplePercent": 0},
        "debug": "Enabled",
        "limits": {
            "maximumConcurrentRequests": 1,
            "maximumQueuedTurns": 2,
            "queueSeconds": 3,
            "maximumPrefillsPerEngine": 4,
            "maximumBodyBytes": 5000,
            "maximumBufferedBytes": 6000,
            "prefillSilenceSeconds": 7,
            "decodeFirstByteSeconds": 8,
            "decodeSilenceSeconds": 9,
        },
        "service": {"type": "NodePort", "annotations": {"a": "b"}},
    },
    "autoscaling": {
        "mode": "External",
        "objectives": {"timeToFirstTokenP90Milliseconds": 500, "interTokenLatencyP90Milliseconds": 30},
        "prefill": {"minReplicas": 2, "maxReplicas": 6},
        "decode": {"maxReplicas": 4},
    },
    "monitoring": {"podMonitor": "Enabled", "intervalSeconds": 15, "labels": {"a": "b"}},
    "updateStrategy": {
        "maxSurge": "25%",
        "maxUnavailable": 0,
        "progressDeadlineSeconds": 100,
        "drainSeconds": 0,
    },
    "security": {
        "networkPolicy": "Disabled",
        "metricsFrom": {"namespaceLabels": {"a": "b"}},
        "podSecurity": "Unrestricted",
        "peerToken": {"rotationDays": 30, "rotation": "x"},
    },
    "healing": {"mode": "Disabled", "maximumPerHour": 1, "unreachableSeconds": 30},
    "paused": True,
}


@pytest.fixture(scope="module")
def full() -> Resolved:
    found = validate(make_resource(**FULL), runtime_image=RUNTIME_IMAGE, operator_namespace="ops")
    assert isinstance(found, Resolved), found
    return found


def test_whole(full: Resolved) -> None:
    assert full.image_pull_policy == "Always"
    assert full.image_pull_secrets == ("registry",)
    assert full.runtime_image == "registry.example/own:v2"
    assert full.reuse == "OneWay"
    assert full.paused
    assert full.operator_namespace == "ops"


def test_model(full: Resolved) -> None:
    assert full.model.argument == "org/model"
    assert (full.model.revision, full.model.token_secret_name) == ("abc", "hub")
    assert (full.model.served_name, full.model.max_length, full.model.max_lora_rank) == ("big", 1000, 32)
    assert full.model.cache_claim_name == "downloads"
    assert full.model.adapters == (
        ResolvedAdapter(name="sql", path="/var/lib/bidikv/adapters/adapters/sql/v1", claim_name="adapters"),
        ResolvedAdapter(name="law", path="/adapters/law"),
    )


def test_fabric(full: Resolved) -> None:
    fabric = full.fabric
    assert (fabric.devices, fabric.gpu_device_class, fabric.efa_device_class) == ("ResourceClaim", "gpus", "efas")
    assert (fabric.privileged, fabric.huge_pages_mebibytes) == (True, 0)
    assert (fabric.minimum_gigabits_per_second, fabric.gates_ready) == (100, True)


def test_engines(full: Resolved) -> None:
    prefill, decode = full.prefill, full.decode
    assert (prefill.tensor_parallel_size, prefill.data_parallel_size, prefill.gpus, prefill.interfaces) == (2, 2, 4, 8)
    assert (prefill.expert_parallel, decode.expert_parallel) == (True, False)
    assert prefill.resources == Resources(cpu="2", memory="2Gi")
    assert prefill.scheduling == Scheduling(
        node_selector={"pool": "a"},
        tolerations=({"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0},),
        priority_class_name="high",
        scheduler_name="own",
        topology_key="example.com/rack",
    )
    assert (decode.tensor_parallel_size, decode.nodes, decode.gpus, decode.interfaces) == (16, 4, 4, 8)


def test_router(full: Resolved) -> None:
    router = full.router
    assert (router.replicas, router.resources, router.scheduling) == (
        0,
        Resources(cpu="2"),
        Scheduling(scheduler_name="own"),
    )
    assert (router.local_limit_tokens, router.missing_prefill) == (0, "Fail")
    assert all((router.continue_streams, router.isolate_tenants, router.access_log, router.debug))
    assert (router.tls_secret_name, router.trace_endpoint, router.trace_percent) == ("tls", "http://c", 0)
    assert (router.service_type, router.service_annotations) == ("NodePort", {"a": "b"})
    assert router.limits == {
        "max-in-flight": 1,
        "max-queued": 2,
        "queue-seconds": 3,
        "max-prefills-per-engine": 4,
        "max-body-bytes": 5000,
        "max-buffered-bytes": 6000,
        "prefill-seconds": 7,
        "decode-first-byte-seconds": 8,
        "decode-idle-seconds": 9,
    }


def test_everything_else(full: Resolved) -> None:
    assert full.retention == ResolvedRetention(policy="SessionAware", budget_percent=0, idle_seconds=30)
    assert full.monitoring == ResolvedMonitoring(pod_monitor=True, interval_seconds=15, labels={"a": "b"})
    assert full.updates == ResolvedUpdates(
        max_surge="25%", max_unavailable=0, progress_deadline_seconds=100, drain_seconds=0
    )
    assert full.security == ResolvedSecurity(
        network_policy=False,
        metrics_namespace_labels={"a": "b"},
        restricted=False,
        token_rotation_days=30,
        token_rotation="x",
    )
    assert full.healing == ResolvedHealing(enabled=False, per_hour=1, unreachable_seconds=30)


def test_scaling_keeps_replicas_within_bounds_and_tells_what_was_asked(full: Resolved) -> None:
    assert full.scaling == ResolvedScaling(
        mode="External",
        objectives=ResolvedObjectives(time_to_first_token_milliseconds=500, inter_token_latency_milliseconds=30),
        asked={"prefill": 1, "decode": 9},
        minimum={"prefill": 2, "decode": 1},
        maximum={"prefill": 6, "decode": 4},
    )
    assert (full.prefill.replicas, full.decode.replicas) == (2, 4)


@pytest.mark.parametrize(
    ("autoscaling", "replicas"),
    [
        (None, 9),
        ({"mode": "Disabled", "decode": {"maxReplicas": 4}}, 9),
        ({"mode": "External"}, 9),
        ({"mode": "External", "prefill": {"maxReplicas": 4}}, 9),
        ({"mode": "External", "decode": {"maxReplicas": 0}}, 0),
        ({"mode": "External", "decode": {"minReplicas": 12, "maxReplicas": 12}}, 12),
    ],
)
def test_bounds_hold_where_something_else_scales(autoscaling: Object | None, replicas: int) -> None:
    resource = make_resource(decode={"replicas": 9})
    if autoscaling is not None:
        resource["spec"]["autoscaling"] = autoscaling
    assert resolve(resource).decode.replicas == replicas


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            yield from leaves(getattr(value, item.name), f"{path}.{item.name}")
    else:
        yield path, value


def test_every_value_differs_from_its_default(full: Resolved) -> None:
    """``FULL`` sets everything: what stayed as in a resource that sets nothing would have been forgotten here."""
    smallest = dict(leaves(resolve(make_resource())))
    same = {path for path, value in leaves(full) if value == smallest[path]}
    assert same == {
        *(".namespace", ".name", ".uid", ".image"),
        *(".model.claim_name", ".prefill.nodes", ".decode.data_parallel_size", ".decode.expert_parallel"),
        *(".prefill.extra_args", ".prefill.env", ".prefill.pod_template"),
        *(".decode.extra_args", ".decode.env", ".decode.pod_template", ".decode.resources.cpu"),
        *(".decode.resources.memory", ".router.resources.memory", ".router.pod_template"),
        *(f".decode.scheduling.{name}" for name in ("node_selector", "tolerations", "priority_class_name")),
        *(f".decode.scheduling.{name}" for name in ("scheduler_name", "topology_key")),
        *(f".router.scheduling.{name}" for name in ("node_selector", "tolerations", "priority_class_name")),
        ".router.scheduling.topology_key",
    }


def said_defaults(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Fields whose description ends a clause with a number or word ``when unset``."""
    for name, child in node.get("properties", {}).items():
        said = re.search(r"(\w+)(?: MiB)? when unset", child.get("description", ""))
        if said:
            yield f"{path}{name}", said[1]
        yield from said_defaults(child, f"{path}{name}.")


def test_what_descriptions_say_of_unset_fields_is_so() -> None:
    """The numbers; ``router.limits`` and ``kvReuse.retention`` are the router's and connector's own."""
    resolved = resolve(make_resource(fabric={"type": "EFA", "interfacesPerPod": 1}, autoscaling={"mode": "External"}))
    said = {path: int(word) for path, word in said_defaults(SPEC) if word.isdigit()}
    own = {path for path in said if path.startswith(("router.limits.", "kvReuse.retention."))}
    engines = {
        f"{role}.{name}": value
        for role, engine in (("prefill", resolved.prefill), ("decode", resolved.decode))
        for name, value in (
            ("replicas", engine.replicas),
            ("tensorParallelSize", engine.tensor_parallel_size),
            ("dataParallelSize", engine.data_parallel_size),
            ("nodesPerReplica", engine.nodes),
        )
    }
    assert {path: value for path, value in said.items() if path not in own} == engines | {
        "model.maxLoraRank": 16,  # vLLM's
        "fabric.hugePagesMebibytes": resolved.fabric.huge_pages_mebibytes,
        "router.replicas": resolved.router.replicas,
        "router.localLimitTokens": resolved.router.local_limit_tokens,
        "router.tracing.samplePercent": resolved.router.trace_percent,
        "monitoring.intervalSeconds": resolved.monitoring.interval_seconds,
        "updateStrategy.maxSurge": resolved.updates.max_surge,
        "updateStrategy.maxUnavailable": resolved.updates.max_unavailable,
        "updateStrategy.progressDeadlineSeconds": resolved.updates.progress_deadline_seconds,
        "updateStrategy.drainSeconds": resolved.updates.drain_seconds,
        "healing.maximumPerHour": resolved.healing.per_hour,
        "healing.unreachableSeconds": resolved.healing.unreachable_seconds,
    }


@pytest.mark.parametrize(
    ("source", "argument", "claim"),
    [
        ({"path": "/m"}, "/m", None),
        ({"persistentVolumeClaim": {"claimName": "c", "path": "a/b/"}}, "/var/lib/bidikv/model/a/b", "c"),
        ({"huggingFace": {"repository": "a/b"}}, "a/b", None),
    ],
)
def test_sources(source: Object, argument: str, claim: str | None) -> None:
    model = resolve(make_resource(model={"source": source})).model
    assert (model.argument, model.claim_name) == (argument, claim)


def value_of(quantity: int | str) -> Decimal:
    """As Kubernetes' own client reads it."""
    return Decimal(parse_quantity(str(quantity)))  # type: ignore[no-untyped-call]


CPUS = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 9_999_999).map(lambda milli: f"{milli}m"),
    st.integers(1, 4_096_999).map(lambda milli: f"{milli // 1000}.{milli % 1000:03d}".rstrip("0").rstrip(".")),
)


@given(CPUS)
def test_cpus_keep_their_value_in_one_form(cpu: int | str) -> None:
    form = canonical_cpu(cpu)
    assert value_of(form) == value_of(cpu)
    assert re.fullmatch(r"[1-9][0-9]*[mk]?", form)
    assert not form.endswith(("000", "000m"))


@given(st.integers(1, 999_999_999), st.sampled_from(["Mi", "Gi", "Ti", "M", "G", "T"]))
def test_memory_keeps_its_value_in_one_form(number: int, unit: str) -> None:
    form = canonical_memory(f"{number}{unit}")
    assert value_of(form) == value_of(f"{number}{unit}")
    step = 1024 if unit.endswith("i") else 1000
    assert int(form.rstrip("MGTPi")) % step or form[-1 if step == 1000 else -2] == "P"


@pytest.mark.parametrize(
    ("given", "form"),
    [("0.5", "500m"), ("2000m", "2"), (4, "4"), ("1.25", "1250m"), (2000, "2k"), (1500, "1500"), ("1m", "1m")],
)
def test_cpu_forms(given: int | str, form: str) -> None:
    assert canonical_cpu(given) == form


@pytest.mark.parametrize(
    ("given", "form"), [("1024Mi", "1Gi"), ("1536Mi", "1536Mi"), ("2000M", "2G"), ("64Gi", "64Gi"), ("5120Mi", "5Gi")]
)
def test_memory_forms(given: str, form: str) -> None:
    assert canonical_memory(given) == form


@pytest.mark.parametrize(
    ("key", "taken"),
    [
        ("a", True),
        ("example.com/Rack_1", True),
        ("a" * 63, True),
        (f"{'a' * 253}/b", True),
        ("a" * 64, False),
        (f"{'a' * 254}/b", False),
        ("", False),
        ("/a", False),
        ("a/", False),
        ("A/b", False),
        ("a..b/c", False),
        ("a b", False),
        ("-a", False),
    ],
)
def test_label_keys(key: str, taken: bool) -> None:
    assert is_label_key(key) == taken
