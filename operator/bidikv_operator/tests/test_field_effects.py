"""Every field of the spec does something: for each, two resources and what a user then sees differently.

The fields are walked from the CRD; one without a row here fails. Most effects are in the children. They are built with
the same identity for both resources, or a hash of the spec would differ whatever the field does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bidikv_operator import names
from bidikv_operator.api.crd import build_crd
from bidikv_operator.build import build_all
from bidikv_operator.cache import ChildRef
from bidikv_operator.healing import decide_healing
from bidikv_operator.kinds import DEPLOYMENT
from bidikv_operator.peer_token import TokenState, TokenTerms, compute_digest, plan_token
from bidikv_operator.resolved import Resolved
from bidikv_operator.rollout.plan import EngineSet, Rollout
from bidikv_operator.rollout.revision import Identity, compute_group
from bidikv_operator.state import Applied, Observed
from bidikv_operator.status.compute import compute_status
from bidikv_operator.tests.engine_samples import make_facts, make_pod, make_report
from bidikv_operator.tests.samples import RUNTIME_IMAGE, make_resource
from bidikv_operator.validate import Rejected, validate
from bidikv_runtime.contract import TransportReport

Object = dict[str, Any]
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
GROUP = "g"
SPEC = build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]


def walk_leaves(node: Object, path: str = "") -> Iterator[str]:
    """Fields that hold a value of their own: scalars, maps, lists of scalars, open objects."""
    if "properties" in node:
        for name, child in node["properties"].items():
            yield from walk_leaves(child, f"{path}.{name}" if path else name)
    elif node.get("type") == "array" and "properties" in node["items"]:
        yield from walk_leaves(node["items"], f"{path}[]")
    else:
        yield path


# --- what a user sees -------------------------------------------------------------------------------------------------


def flatten(value: Any, path: str = "") -> Iterator[str]:
    """One line per scalar, as ``spec.containers.engine.image=x``; a list of words is one line."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for number, item in enumerate(value):
            yield from flatten(item, f"{path}.{item.get('name', number)}")
    elif isinstance(value, list):
        yield f"{path}={' '.join(map(str, value))}"
    elif path.endswith("env.BIDIKV_ROUTER_CONFIG.value"):
        yield from flatten(json.loads(value), path)
    else:
        yield f"{path}={value}"


def see_children(resolved: Resolved) -> dict[str, str]:
    """By kind and name."""
    constant = replace(resolved, identity=Identity(GROUP, "p", "d"))
    return {
        f"{kind.kind} {manifest['metadata']['name']}": "\n".join(flatten(manifest))
        for kind, manifest in build_all(constant)
    }


def see_status(resource: Object, resolved: Resolved) -> str:
    """Everything runs; the engines read KV over TCP at 8 Gbit/s."""
    transport = TransportReport(backend="UCX", provider="tcp", read_bytes=1 << 30, bandwidth=1e9)
    ready: Object = {"replicas": 1, "live": 1, "ready": 1, "updated": 1, "is_rolled_out": True}
    sets = tuple(
        EngineSet(ref=ChildRef(DEPLOYMENT, f"chat-{role}-g"), role=role, group=GROUP, is_current=True, **ready)
        for role in names.ENGINE_ROLES
    )
    counts = {"replicas": 2, "readyReplicas": 2, "updatedReplicas": 2, "observedGeneration": 1}
    router = {"metadata": {"generation": 1}, "spec": {"replicas": 2}, "status": counts}
    children = {ChildRef(DEPLOYMENT, "chat-router"): router}
    engines = tuple(make_facts(role, role, make_report(transport=transport)) for role in names.ENGINE_ROLES)
    observed = Observed(resource=resource, children=children, pods=(), engines=engines)
    rollout = Rollout(sets=sets, group=GROUP, wanted=dict.fromkeys(names.ENGINE_ROLES, 1), is_settled=True)
    status = compute_status(observed, resolved, Applied(children=children), rollout, None, now="2026-01-02T03:04:05Z")
    return "\n".join(f"{found['type']}={found['status']} {found['reason']}" for found in status["conditions"])


def see_healing(resource: Object, resolved: Resolved) -> str:
    """One of two decode engines is called unreachable for 100 s; three were deleted within the hour."""
    roles: dict[str, names.Role] = {"p1": "prefill", "d1": "decode", "d2": "decode"}
    lately = [{"role": "decode", "time": (NOW - timedelta(minutes=30)).strftime("%Y-%m-%dT%H:%M:%SZ")}] * 3
    observed = Observed(
        resource=resource | {"status": {"healing": {"recycled": lately}}},
        children={},
        pods=tuple(make_pod(name, role) for name, role in roles.items()),
        engines=tuple(
            make_facts(
                name,
                role,
                make_report(),
                pod=name,
                uid=f"uid-{name}",
                unreachable_seconds=100.0 if name == "d2" else 0.0,
            )
            for name, role in roles.items()
        ),
    )
    healing = decide_healing(observed, resolved, is_rolling=False, now=NOW)
    return f"deletes={' '.join(one.pod for one in healing.recycle)}\nsays={healing.message}"


def see_token(resolved: Resolved) -> str:
    """The peers' token is 40 days old and nobody has asked for another one."""
    state = TokenState(("old",), "Settled", NOW - timedelta(days=40), compute_digest(""))
    security = resolved.security
    terms = TokenTerms(days=security.token_rotation_days, rotation=security.token_rotation, propagation_seconds=180.0)
    return f"tokens={' '.join(plan_token(state, terms, NOW, lambda: 'new').tokens)}"


def see(spec: Object) -> dict[str, str]:
    """Everything that follows from a spec, by where it is seen."""
    resource = make_resource(spec)
    resolved = validate(resource, runtime_image=RUNTIME_IMAGE)
    if isinstance(resolved, Rejected):
        return {"Accepted": str(resolved)}
    return {
        **see_children(resolved),
        "Accepted": "",
        "group": compute_group(spec),
        "status": see_status(resource, resolved),
        "healing": see_healing(resource, resolved),
        "token": see_token(resolved),
    }


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effect:
    """What setting a field changes."""

    after: Object
    """Dotted path -> value, over the smallest resource."""
    where: str
    shows: str
    """What is seen there after, and not before."""
    before: Object = field(default_factory=dict)


PREFILL, DECODE, ROUTER = "Deployment chat-prefill-g", "Deployment chat-decode-g", "Deployment chat-router"
CONFIG, SERVICE, MONITOR = "Deployment chat-router", "Service chat", "PodMonitor chat-engine"
HUB = {"model.source": {"huggingFace": {"repository": "org/big"}}}
ADAPTER = {"model.loraAdapters": [{"name": "law", "source": {"path": "/law"}}]}
CLAIM_ADAPTER = {"claimName": "adapters", "path": "sql"}
EFA = {"fabric": {"type": "EFA", "interfacesPerPod": 1}}
CLAIMS = {"fabric": {"type": "EFA", "interfacesPerPod": 1, "devices": "ResourceClaim"}}
EXTERNAL = {"autoscaling": {"mode": "External"}}
MONITORED = {"monitoring.podMonitor": "Enabled"}
ENGINE = "spec.template.spec.containers.engine"
POD = "spec.template.spec"


def hub(**fields: str) -> Object:
    return {"model.source": {"huggingFace": {"repository": "org/big", **fields}}}


def effects_of_model() -> Iterator[tuple[str, Effect]]:
    source = "model.source"
    yield f"{source}.huggingFace.repository", Effect(HUB, PREFILL, "--model org/big ")
    yield f"{source}.huggingFace.revision", Effect(hub(revision="abc"), DECODE, "--revision abc ", HUB)
    yield (
        f"{source}.huggingFace.tokenSecretName",
        Effect(hub(tokenSecretName="hub"), DECODE, "env.HF_TOKEN.valueFrom.secretKeyRef.name=hub", HUB),
    )
    claim = {source: {"persistentVolumeClaim": {"claimName": "models", "path": "qwen"}}}
    yield (
        f"{source}.persistentVolumeClaim.claimName",
        Effect(claim, PREFILL, f"{POD}.volumes.model.persistentVolumeClaim.claimName=models"),
    )
    yield f"{source}.persistentVolumeClaim.path", Effect(claim, PREFILL, "--model /var/lib/bidikv/model/qwen ")
    yield f"{source}.path", Effect({source: {"path": "/other"}}, PREFILL, "--model /other ")
    yield "model.servedName", Effect({"model.servedName": "small"}, CONFIG, "served_model_name=small")
    yield "model.maxLength", Effect({"model.maxLength": 4096}, DECODE, "--max-model-len 4096 ")
    adapters = "model.loraAdapters"
    sql = {adapters: [{"name": "sql", "source": {"path": "/law"}}]}
    yield f"{adapters}[].name", Effect(sql, PREFILL, "sql", ADAPTER)
    yield (
        f"{adapters}[].source.path",
        Effect({adapters: [{"name": "law", "source": {"path": "/tax"}}]}, PREFILL, "/tax", ADAPTER),
    )
    volume = {adapters: [{"name": "law", "source": {"persistentVolumeClaim": CLAIM_ADAPTER}}]}
    yield (
        f"{adapters}[].source.persistentVolumeClaim.claimName",
        Effect(volume, DECODE, "persistentVolumeClaim.claimName=adapters", ADAPTER),
    )
    yield (
        f"{adapters}[].source.persistentVolumeClaim.path",
        Effect(volume, DECODE, "/var/lib/bidikv/adapters/adapters/sql", ADAPTER),
    )
    yield "model.maxLoraRank", Effect({**ADAPTER, "model.maxLoraRank": 64}, PREFILL, "--max-lora-rank 64 ", ADAPTER)
    yield (
        "model.cache.persistentVolumeClaimName",
        Effect(
            {**HUB, "model.cache.persistentVolumeClaimName": "downloads"},
            PREFILL,
            "persistentVolumeClaim.claimName=downloads",
            HUB,
        ),
    )


def effects_of_images() -> Iterator[tuple[str, Effect]]:
    yield "image", Effect({"image": "own/vllm:1"}, PREFILL, f"{ENGINE}.image=own/vllm:1")
    yield "imagePullPolicy", Effect({"imagePullPolicy": "Always"}, ROUTER, "containers.router.imagePullPolicy=Always")
    yield "imagePullSecrets", Effect({"imagePullSecrets": ["reg"]}, DECODE, f"{POD}.imagePullSecrets.reg.name=reg")
    yield "runtime.image", Effect({"runtime.image": "own/runtime:1"}, ROUTER, "containers.router.image=own/runtime:1")
    yield "runtime.restart", Effect({"runtime.restart": "now"}, "group", "")


def effects_of_fabric() -> Iterator[tuple[str, Effect]]:
    resources = f"{ENGINE}.resources.limits"
    yield "fabric.type", Effect(EFA, PREFILL, '"LIBFABRIC"')
    yield (
        "fabric.instanceType",
        Effect(
            {"fabric": {"type": "EFA", "instanceType": "p5en.48xlarge"}},
            PREFILL,
            f"{POD}.nodeSelector.node.kubernetes.io/instance-type=p5en.48xlarge",
            EFA,
        ),
    )
    yield (
        "fabric.interfacesPerPod",
        Effect({"fabric": {"type": "EFA", "interfacesPerPod": 4}}, DECODE, f"{resources}.vpc.amazonaws.com/efa=4", EFA),
    )
    yield "fabric.devices", Effect(CLAIMS, DECODE, f"{POD}.resourceClaims", EFA)
    yield (
        "fabric.deviceClasses.gpu",
        Effect({**CLAIMS, "fabric.deviceClasses": {"gpu": "acme.gpu"}}, "*", "acme.gpu", CLAIMS),
    )
    yield (
        "fabric.deviceClasses.efa",
        Effect({**CLAIMS, "fabric.deviceClasses": {"efa": "acme.efa"}}, "*", "acme.efa", CLAIMS),
    )
    yield (
        "fabric.privileged",
        Effect({**EFA, "fabric.privileged": "Enabled"}, PREFILL, f"{ENGINE}.securityContext.privileged=True", EFA),
    )
    yield (
        "fabric.hugePagesMebibytes",
        Effect({**EFA, "fabric.hugePagesMebibytes": 2048}, PREFILL, f"{resources}.hugepages-2Mi=2Gi", EFA),
    )
    slow = {"fabric.verification.minimumGigabitsPerSecond": 100}
    yield (
        "fabric.verification.minimumGigabitsPerSecond",
        Effect(slow, "status", f"{names.TRANSPORT_VERIFIED}=False {names.REASON_BELOW_FLOOR}"),
    )
    yield (
        "fabric.verification.gate",
        Effect({**slow, "fabric.verification.gate": "Ready"}, "status", f"{names.READY}=False", slow),
    )


def effects_of_reuse() -> Iterator[tuple[str, Effect]]:
    yield "kvReuse.mode", Effect({"kvReuse.mode": "OneWay"}, CONFIG, "reuse=OneWay")
    for name, value, shows in (
        ("policy", "LRU", '"bidikv_retention": "LRU"'),
        ("budgetPercent", 30, '"bidikv_retention_budget_percent": 30'),
        ("idleSeconds", 90, '"bidikv_retention_idle_seconds": 90'),
    ):
        spec = {"kvReuse": {"mode": "Bidirectional", "retention": {name: value}}}
        yield f"kvReuse.retention.{name}", Effect(spec, DECODE, shows)


def effects_of_pods(role: str, child: str) -> Iterator[tuple[str, Effect]]:
    """What all roles have."""
    container = f"{POD}.containers.{'router' if role == 'router' else 'engine'}"
    yield f"{role}.replicas", Effect({f"{role}.replicas": 5}, child, "spec.replicas=5")
    cpu, memory = f"{role}.resources.cpu", f"{role}.resources.memory"
    yield cpu, Effect({cpu: "1.5"}, child, f"{container}.resources.requests.cpu=1500m")
    yield memory, Effect({memory: "3072Mi"}, child, f"{container}.resources.limits.memory=3Gi")
    scheduling = f"{role}.scheduling"
    yield f"{scheduling}.nodeSelector", Effect({f"{scheduling}.nodeSelector": {"a": "b"}}, child, "nodeSelector.a=b")
    for name, shown in (("priorityClassName", "priorityClassName"), ("schedulerName", "schedulerName")):
        yield f"{scheduling}.{name}", Effect({f"{scheduling}.{name}": "own"}, child, f"{POD}.{shown}=own")
    taint: Object = {"key": "team"}
    number = 0 if role == "router" else 1  # engines tolerate the taint of GPUs, too
    for name, value in (
        ("key", "team"),
        ("operator", "Exists"),
        ("value", "chat"),
        ("effect", "NoExecute"),
        ("tolerationSeconds", 7),
    ):
        other: Object = {"effect": "NoExecute"} if name == "tolerationSeconds" else {}
        yield (
            f"{scheduling}.tolerations[].{name}",
            Effect(
                {f"{scheduling}.tolerations": [{**taint, **other, name: value}]},
                child,
                f"{POD}.tolerations.{number}.{name}={value}",
                {} if name == "key" else {f"{scheduling}.tolerations": [{**taint, **other}]},
            ),
        )
    template = f"{role}.podTemplate"
    for part in ("labels", "annotations"):
        yield (
            f"{template}.metadata.{part}",
            Effect({template: {"metadata": {part: {"a": "b"}}}}, child, f"spec.template.metadata.{part}.a=b"),
        )
    yield f"{template}.spec", Effect({template: {"spec": {"hostname": "own"}}}, child, f"{POD}.hostname=own")


def effects_of_engines(role: str, child: str) -> Iterator[tuple[str, Effect]]:
    yield from effects_of_pods(role, child)
    for name, value, shows in (
        ("tensorParallelSize", 4, "--tensor-parallel-size 4 "),
        ("dataParallelSize", 2, "--data-parallel-size 2 "),
        ("expertParallel", "Enabled", "--enable-expert-parallel "),
        ("gpusPerPod", 3, f"{ENGINE}.resources.limits.nvidia.com/gpu=3"),
        ("extraArgs", ["--seed", "7"], "--seed 7"),
    ):
        yield f"{role}.{name}", Effect({f"{role}.{name}": value}, child, shows)
    # A field whose only other value is refused: it is there to say what to use instead.
    yield f"{role}.pipelineParallelSize", Effect({f"{role}.pipelineParallelSize": 2}, "Accepted", "tensorParallelSize")
    nodes = {f"{role}.tensorParallelSize": 4, f"{role}.nodesPerReplica": 2}
    yield f"{role}.nodesPerReplica", Effect(nodes, f"LeaderWorkerSet chat-{role}-g", "leaderWorkerTemplate.size=2")
    yield f"{role}.env[].name", Effect({f"{role}.env": [{"name": "OWN", "value": "1"}]}, child, ".env.OWN.name=OWN")
    yield f"{role}.env[].value", Effect({f"{role}.env": [{"name": "OWN", "value": "1"}]}, child, ".env.OWN.value=1")
    yield (
        f"{role}.scheduling.topologyKey",
        Effect({f"{role}.scheduling.topologyKey": "example.com/rack"}, child, "topologyKey=example.com/rack"),
    )


def effects_of_router() -> Iterator[tuple[str, Effect]]:
    yield from effects_of_pods("router", ROUTER)
    for name, value, shows in (
        ("localLimitTokens", 0, "local_limit_tokens=0"),
        ("missingPrefill", "Fail", "missing_prefill=Fail"),
        ("continueStreams", "Enabled", "continue_streams=True"),
        ("tenantIsolation", "Enabled", "cache_salt_by_tenant=True"),
        ("accessLog", "Enabled", "access_log=True"),
        ("debug", "Enabled", "debug=True"),
    ):
        yield f"router.{name}", Effect({f"router.{name}": value}, CONFIG, f"BIDIKV_ROUTER_CONFIG.value.{shows}")
    yield "router.tlsSecretName", Effect({"router.tlsSecretName": "tls"}, ROUTER, "secret.secretName=tls")
    traced = {"router.tracing.endpoint": "http://collector"}
    yield "router.tracing.endpoint", Effect(traced, CONFIG, "trace_endpoint=http://collector")
    yield (
        "router.tracing.samplePercent",
        Effect({**traced, "router.tracing.samplePercent": 5}, CONFIG, "trace_ratio=0.05", traced),
    )
    for name, flag in (
        ("maximumConcurrentRequests", "max-in-flight"),
        ("maximumQueuedTurns", "max-queued"),
        ("queueSeconds", "queue-seconds"),
        ("maximumPrefillsPerEngine", "max-prefills-per-engine"),
        ("maximumBodyBytes", "max-body-bytes"),
        ("maximumBufferedBytes", "max-buffered-bytes"),
        ("prefillSilenceSeconds", "prefill-seconds"),
        ("decodeFirstByteSeconds", "decode-first-byte-seconds"),
        ("decodeSilenceSeconds", "decode-idle-seconds"),
    ):
        yield f"router.limits.{name}", Effect({f"router.limits.{name}": 7777}, ROUTER, f"--{flag}=7777")
    yield "router.service.type", Effect({"router.service.type": "LoadBalancer"}, SERVICE, "spec.type=LoadBalancer")
    yield (
        "router.service.annotations",
        Effect({"router.service.annotations": {"lb": "internal"}}, SERVICE, "metadata.annotations.lb=internal"),
    )


def effects_of_scaling() -> Iterator[tuple[str, Effect]]:
    yield "autoscaling.mode", Effect(EXTERNAL, "status", f"{names.SCALING}=True")
    for role, child in (("prefill", PREFILL), ("decode", DECODE)):
        low = {**EXTERNAL, f"autoscaling.{role}": {"maxReplicas": 9}}
        high = {**EXTERNAL, f"autoscaling.{role}": {"minReplicas": 4, "maxReplicas": 9}}
        yield f"autoscaling.{role}.minReplicas", Effect(high, child, "spec.replicas=4", low)
        many = {**EXTERNAL, f"{role}.replicas": 8}
        few = {**many, f"autoscaling.{role}": {"maxReplicas": 3}}
        yield f"autoscaling.{role}.maxReplicas", Effect(few, child, "spec.replicas=3", many)
    for name, shows in (
        ("timeToFirstTokenP90Milliseconds", "ttft_objective_seconds=0.5"),
        ("interTokenLatencyP90Milliseconds", "itl_objective_seconds=0.5"),
    ):
        yield (
            f"autoscaling.objectives.{name}",
            Effect({**EXTERNAL, f"autoscaling.objectives.{name}": 500}, CONFIG, shows, EXTERNAL),
        )


def effects_of_operation() -> Iterator[tuple[str, Effect]]:
    yield "monitoring.podMonitor", Effect(MONITORED, MONITOR, "kind=PodMonitor")
    yield (
        "monitoring.intervalSeconds",
        Effect({**MONITORED, "monitoring.intervalSeconds": 7}, MONITOR, "=7s", MONITORED),
    )
    yield (
        "monitoring.labels",
        Effect({**MONITORED, "monitoring.labels": {"a": "b"}}, MONITOR, "metadata.labels.a=b", MONITORED),
    )
    for name, value, shows in (
        ("maxSurge", "25%", "rollingUpdate.maxSurge=25%"),
        ("maxUnavailable", 2, "rollingUpdate.maxUnavailable=2"),
        ("progressDeadlineSeconds", 600, "spec.progressDeadlineSeconds=600"),
        ("drainSeconds", 33, "--seconds 33"),
    ):
        yield f"updateStrategy.{name}", Effect({f"updateStrategy.{name}": value}, DECODE, shows)
    # Unset is Enabled, so it is the other way round: a policy appears where it is not disabled.
    disabled: Object = {"security.networkPolicy": "Disabled"}
    yield "security.networkPolicy", Effect({}, "NetworkPolicy chat-engine", "kind=NetworkPolicy", disabled)
    yield (
        "security.metricsFrom.namespaceLabels",
        Effect(
            {"security.metricsFrom.namespaceLabels": {"team": "metrics"}},
            "NetworkPolicy chat-engine",
            "namespaceSelector.matchLabels.team=metrics",
        ),
    )
    yield (
        "security.podSecurity",
        Effect({}, DECODE, f"{POD}.securityContext.runAsNonRoot=True", {"security.podSecurity": "Unrestricted"}),
    )
    yield "security.peerToken.rotationDays", Effect({"security.peerToken.rotationDays": 30}, "token", "new")
    yield "security.peerToken.rotation", Effect({"security.peerToken.rotation": "now"}, "token", "new")
    yield "healing.mode", Effect({}, "healing", "deletes=d2", {"healing.mode": "Disabled"})
    yield "healing.maximumPerHour", Effect({}, "healing", "deletes=d2", {"healing.maximumPerHour": 3})
    yield "healing.unreachableSeconds", Effect({}, "healing", "deletes=d2", {"healing.unreachableSeconds": 101})
    yield "paused", Effect({"paused": True}, "status", names.REASON_PAUSED)


EFFECTS = dict(
    [
        *effects_of_model(),
        *effects_of_images(),
        *effects_of_fabric(),
        *effects_of_reuse(),
        *effects_of_engines("prefill", PREFILL),
        *effects_of_engines("decode", DECODE),
        *effects_of_router(),
        *effects_of_scaling(),
        *effects_of_operation(),
    ]
)


def make_spec(changes: Object) -> Object:
    spec: Object = make_resource()["spec"]
    for path, value in changes.items():
        *parents, last = path.split(".")
        node = spec
        for part in parents:
            node[part] = node = dict(node.get(part) or {})
        node[last] = value
    return spec


def holds(value: Any, path: list[str]) -> bool:
    if not path:
        return True
    name, is_list = path[0].removesuffix("[]"), path[0].endswith("[]")
    if not isinstance(value, Mapping) or name not in value:
        return False
    children = value[name] if is_list else [value[name]]
    return any(holds(child, path[1:]) for child in children)


def test_every_field_has_a_row_and_every_row_a_field() -> None:
    assert set(EFFECTS) == set(walk_leaves(SPEC))


@pytest.mark.parametrize("path", EFFECTS)
def test_a_field_does_something(path: str) -> None:
    effect = EFFECTS[path]
    specs = [make_spec(effect.before), make_spec(effect.after)]
    assert any(holds(spec, path.split(".")) for spec in specs), "the row does not set the field"
    before, after = (see(spec) for spec in specs)
    if effect.where == "*":
        before, after = ({"*": "\n".join(found.values())} for found in (before, after))
    if effect.where == "group":  # its value is a hash
        assert before["group"] != after["group"]
        return
    assert effect.shows in after[effect.where], after[effect.where]
    assert effect.shows not in before.get(effect.where, ""), "it is seen without the field, too"
