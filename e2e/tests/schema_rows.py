"""What ``test_schema.py`` knows of the API in words: resources to start from, samples of every pattern, and one refused
(where it says something of its own, accepted) row per CEL rule.

Bounds, types, requirements, enums and patterns are walked from the CRD (``schema_walk.py``).
"""

from __future__ import annotations

import copy
from typing import Any, Final

from bidikv_operator.api.v1alpha1 import OWNED_FLAGS
from e2e.kubectl import Manifest

REMOVED: Final = object()
"""As a value in changes: the field is taken away."""


def changed(base: Manifest, changes: dict[str, Any]) -> Manifest:
    """A copy of the spec ``base`` with values set or removed at dotted paths (``prefill.env.0.name``)."""
    spec = copy.deepcopy(base)
    for path, value in changes.items():
        *parents, last = path.split(".")
        node: Any = spec
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        if value is REMOVED:
            node.pop(last, None)
        elif isinstance(node, list):
            node[int(last)] = value
        else:
            node[last] = value
    return spec


# --- resources to start from ------------------------------------------------------------------------------------------

TEMPLATE: Manifest = {
    "metadata": {"labels": {"key0": "a"}, "annotations": {"key0": "b"}},
    "spec": {"nodeSelector": {"pool": "gpu"}, "containers": [{"name": "engine", "resources": {}}]},
}
SCHEDULING: Manifest = {
    "nodeSelector": {"key0": "v"},
    "tolerations": [
        {"key": "gpu", "operator": "Equal", "value": "h200", "effect": "NoExecute", "tolerationSeconds": 60},
    ],
    "priorityClassName": "serving",
    "schedulerName": "gpu-scheduler",
}
ENGINE: Manifest = {
    "replicas": 2,
    "dataParallelSize": 2,
    "expertParallel": "Enabled",
    "resources": {"cpu": 8, "memory": "64Gi"},
    "extraArgs": ["--dtype", "float32"],
    "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
    "scheduling": {**SCHEDULING, "topologyKey": "example.com/rack"},
    "podTemplate": TEMPLATE,
}
BASE: Manifest = {
    "model": {
        "source": {"path": "/models/tiny"},
        "servedName": "tiny",
        "maxLength": 4096,
        "loraAdapters": [
            {"name": "sql", "source": {"path": "/adapters/sql"}},
        ],
        "maxLoraRank": 16,
    },
    "image": "vllm/vllm-openai:v0.32.0",
    "imagePullPolicy": "IfNotPresent",
    "imagePullSecrets": ["registry"],
    "runtime": {"image": "registry.example.com/bidikv/runtime:v1", "restart": "2026-11-30"},
    "fabric": {
        "type": "TCP",
        "devices": "ResourceClaim",
        "deviceClasses": {"gpu": "gpu.nvidia.com"},
        "verification": {"minimumGigabitsPerSecond": 10, "gate": "Ready"},
    },
    "kvReuse": {
        "mode": "Bidirectional",
        "retention": {"policy": "SessionAware", "budgetPercent": 60, "idleSeconds": 60},
    },
    "prefill": {**ENGINE, "tensorParallelSize": 2, "pipelineParallelSize": 1},
    "decode": {**ENGINE, "gpusPerPod": 2, "pipelineParallelSize": 1},
    "router": {
        "replicas": 2,
        "resources": {"cpu": "500m", "memory": "1Gi"},
        "scheduling": SCHEDULING,
        "localLimitTokens": 512,
        "missingPrefill": "Decode",
        "continueStreams": "Enabled",
        "tenantIsolation": "Enabled",
        "tlsSecretName": "tls",
        "accessLog": "Enabled",
        "tracing": {"endpoint": "http://collector:4318/v1/traces", "samplePercent": 10},
        "debug": "Enabled",
        "limits": {
            "maximumConcurrentRequests": 100,
            "maximumQueuedTurns": 100,
            "queueSeconds": 60,
            "maximumPrefillsPerEngine": 64,
            "maximumBodyBytes": 1024,
            "maximumBufferedBytes": 2**40,
            "prefillSilenceSeconds": 60,
            "decodeFirstByteSeconds": 60,
            "decodeSilenceSeconds": 60,
        },
        "service": {"type": "LoadBalancer", "annotations": {"key0": "v"}},
        "podTemplate": TEMPLATE,
    },
    "autoscaling": {
        "mode": "External",
        "objectives": {"timeToFirstTokenP90Milliseconds": 500, "interTokenLatencyP90Milliseconds": 30},
        "prefill": {"minReplicas": 0, "maxReplicas": 1024},
        "decode": {"minReplicas": 0, "maxReplicas": 1024},
    },
    "monitoring": {"podMonitor": "Enabled", "intervalSeconds": 15, "labels": {"key0": "v"}},
    "updateStrategy": {"maxSurge": 1, "maxUnavailable": 1, "progressDeadlineSeconds": 600, "drainSeconds": 60},
    "security": {
        "networkPolicy": "Enabled",
        "metricsFrom": {"namespaceLabels": {"key0": "v"}},
        "podSecurity": "Restricted",
        "peerToken": {"rotationDays": 30, "rotation": "2026-11-30"},
    },
    "healing": {"mode": "Enabled", "maximumPerHour": 4, "unreachableSeconds": 60},
    "paused": False,
}
"""A resource that sets nearly everything; the other ``BASES`` hold the rest, which excludes some of it."""

HUB: Manifest = {
    "source": {"huggingFace": {"repository": "Qwen/Qwen3-32B", "revision": "main", "tokenSecretName": "hub"}},
    "cache": {"persistentVolumeClaimName": "downloads"},
}
CLAIM: Manifest = {
    "source": {"persistentVolumeClaim": {"claimName": "models", "path": "qwen3"}},
    "loraAdapters": [
        {"name": "sql", "source": {"persistentVolumeClaim": {"claimName": "adapters", "path": "sql"}}},
    ],
}
EFA: Manifest = {
    "type": "EFA",
    "interfacesPerPod": 4,
    "devices": "ResourceClaim",
    "deviceClasses": {"efa": "efa.networking.k8s.aws"},
    "privileged": "Enabled",
    "hugePagesMebibytes": 5120,
}
BASES: Final = (
    BASE,
    changed(BASE, {"model": HUB, "fabric": {"type": "EFA", "instanceType": "p5en.48xlarge"}}),
    changed(BASE, {"model": CLAIM, "fabric": EFA}),
    changed(BASE, {"prefill": {"gpusPerPod": 1}, "decode": {"tensorParallelSize": 1}}),
    changed(
        BASE,
        {
            "prefill": {"tensorParallelSize": 64, "nodesPerReplica": 8},
            "decode": {"tensorParallelSize": 64, "nodesPerReplica": 8},
        },
    ),
)

# --- samples of patterns ----------------------------------------------------------------------------------------------

SAMPLES: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$": (("a.b-1.com",), ("Hub", "a..b", "a b")),
    r"^[A-Za-z0-9][-A-Za-z0-9_./:]*$": (("org/My_model:v1.2",), ("-a", "a b", "a=b", "a,b")),
    r"^([1-9][0-9]{0,3}|(0|[1-9][0-9]{0,3})\.[0-9]{0,2}[1-9]|[1-9][0-9]{0,6}m)$": (
        ("8", "0.5", "1500m", "1024.125"),
        ("0", "0m", "0.0", "4 CPUs", "-1", "1e3"),
    ),
    r"^[1-9][0-9]{0,8}(Mi|Gi|Ti|M|G|T)$": (("64Gi", "123456789Mi", "1T"), ("64", "0Gi", "1.5Gi", "64GB", "1Ki")),
    r"^[A-Za-z_][A-Za-z0-9_]*$": (("_A", "b2"), ("1A", "A-B")),
    r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$": (("", "v1.2_a-b"), ("-a", "a ", "a/b")),
    r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$": (
        ("example.com/Rack_1", f"{'a' * 253}/{'b' * 63}"),
        ("a/", "A/b", "a/b/c", "-a", "a" * 64),
    ),
    r"^https?://[^\s]+$": (("https://[::1]:4318/v1",), ("collector:4318", "http://a b")),
    r"^(0|[1-9][0-9]?|100)%$": (("0%", "25%", "100%"), ("1", "101%", "05%", "%", "1.5%")),
}
"""Pattern -> words that it takes and words that it does not; every field with the pattern is tried with all of them."""

# --- what other fields must be for a value ----------------------------------------------------------------------------

BESIDE: Final[dict[tuple[str, Any], dict[str, Any]]] = {
    ("fabric.type", "EFA"): {"fabric.instanceType": "p5en.48xlarge"},
    ("fabric.devices", "DevicePlugin"): {"fabric.deviceClasses": REMOVED},
    ("kvReuse.retention.policy", "LRU"): {
        "kvReuse.retention.budgetPercent": REMOVED,
        "kvReuse.retention.idleSeconds": REMOVED,
    },
    ("decode.dataParallelSize", 16): {"decode.gpusPerPod": 16},
    ("updateStrategy.maxUnavailable", 0): {"updateStrategy.maxSurge": 1},
    **{
        (f"{role}.scheduling.tolerations.0.operator", "Exists"): {f"{role}.scheduling.tolerations.0.value": REMOVED}
        for role in ("prefill", "decode", "router")
    },
    **{
        (f"{role}.scheduling.tolerations.0.effect", effect): {
            f"{role}.scheduling.tolerations.0.tolerationSeconds": REMOVED
        }
        for role in ("prefill", "decode", "router")
        for effect in ("NoSchedule", "PreferNoSchedule")
    },
}
"""Changes with which a value passes that a rule refuses otherwise."""

ONE_STAGE = "pipelineParallelSize must be 1, engines exchange the KV of one stage: use tensorParallelSize"
ONLY_REFUSED: Final[dict[tuple[str, Any], str]] = {
    (f"{role}.pipelineParallelSize", 64): ONE_STAGE for role in ("prefill", "decode")
}
"""Values within their bounds that a rule refuses all the same, so that the answer is a sentence."""

# --- rules ------------------------------------------------------------------------------------------------------------

SOURCE = "source needs exactly one of huggingFace, persistentVolumeClaim and path: set one, remove the others"
ADAPTER_SOURCE = "source needs exactly one of persistentVolumeClaim and path: set one, remove the other"
ABSOLUTE = "path must be absolute: start it with '/'"
INSIDE = "path must be relative and stay inside the volume: remove the leading '/' and every '..'"
REFERENCE = "image must be an image reference such as vllm/vllm-openai:v0.32.0: remove white space and 'https://'"
CACHE = "cache keeps downloads from the hub: remove it, or use source.huggingFace"
RANK_ALONE = "maxLoraRank belongs to loraAdapters: remove it, or set loraAdapters"
RANK = "maxLoraRank must be one of 1, 8, 16, 32, 64, 128, 256, 320, 512: choose the next larger one"
SAME_NAME = "loraAdapters has an adapter with the name of the model itself: choose another name for it"
INTERFACES = "type EFA needs instanceType or interfacesPerPod: set one, it says how many EFA interfaces a pod gets"
CLASSES = "deviceClasses belongs to devices ResourceClaim: remove it, or set devices to ResourceClaim"
EFA_CLASS = "deviceClasses names a class of EFA interfaces: remove its efa, or set type to EFA"
EVEN = "hugePagesMebibytes must be even, a huge page has 2 MiB: choose the next even number"
SIZES = "prefill and decode have values of tensorParallelSize of which neither divides the other"
GPUS = "gpusPerPod is smaller than the ranks of a pod"
NODES = "nodesPerReplica does not divide tensorParallelSize: choose a number of nodes that does"
ONE_POD = "dataParallelSize over several nodes is not supported, ranks of one replica share a pod"
FLAG = "extraArgs names a flag that belongs to the operator: remove it and use the resource's own fields"
NO_KEY = "key is missing: set it, or set operator to Exists to tolerate every taint"
NO_VALUE = "value belongs to operator Equal: remove it"
NO_SECONDS = "tolerationSeconds belongs to effect NoExecute: remove it, or set effect to NoExecute"
BODY = "maximumBodyBytes is larger than maximumBufferedBytes (536870912 when unset)"
BOUNDS = "minReplicas is greater than maxReplicas: raise maxReplicas or choose a smaller minReplicas"
STUCK = "maxUnavailable and maxSurge (0 when unset) are both 0, so that no pod could ever be replaced"


def only_efa(field: str) -> str:
    return f"{field} belongs to type EFA: remove it, or set type to EFA"


def only_session_aware(field: str) -> str:
    return f"{field} belongs to policy SessionAware: remove it, or set policy to SessionAware"


VOLUME_PATH = "model.source.persistentVolumeClaim.path"
ADAPTER = "model.loraAdapters.0"
ADAPTER_VOLUME_PATH = f"{ADAPTER}.source.persistentVolumeClaim.path"
Row = tuple[str, dict[str, Any], str, str]
"""Title, changes to the first base that has the first changed field, field, sentence."""


def rows_of_role(role: str) -> list[Row]:
    """The rules of an engine role."""
    tensor, data, nodes = f"{role}.tensorParallelSize", f"{role}.dataParallelSize", f"{role}.nodesPerReplica"
    gpus, args = f"{role}.gpusPerPod", f"{role}.extraArgs"
    return [
        *((f"flag {flag} in {role}", {args: [flag]}, args, FLAG) for flag in OWNED_FLAGS),
        (f"flag with its value in {role}", {args: ["--port=80"]}, args, FLAG),
        (f"flag with underscores in {role}", {args: ["--max_model_len", "1"]}, args, FLAG),
        (f"shortened flag in {role}", {args: ["--max-model", "1"]}, args, FLAG),
        (f"key of a JSON flag in {role}", {args: ["--kv-transfer-config.kv_role", "x"]}, args, FLAG),
        (f"shortened short flag in {role}", {args: ["-t", "2"]}, args, FLAG),
        (f"short flag with its value in {role}", {args: ["-n2"]}, args, FLAG),
        (f"fewer GPUs than shards in {role}", {gpus: 2, tensor: 4}, gpus, GPUS),
        (f"fewer GPUs than ranks in {role}", {gpus: 2, data: 3}, gpus, GPUS),
        (f"fewer GPUs than a node's shards in {role}", {nodes: 4, tensor: 64, gpus: 15}, gpus, GPUS),
        (f"nodes that do not divide in {role}", {nodes: 3}, nodes, NODES),
        (f"ranks over several nodes in {role}", {nodes: 2, data: 2}, data, ONE_POD),
        (f"two stages in {role}", {f"{role}.pipelineParallelSize": 2}, f"{role}.pipelineParallelSize", ONE_STAGE),
    ]


def rows_of_tolerations(role: str) -> list[Row]:
    at = f"{role}.scheduling.tolerations.0"
    return [
        (f"toleration without key in {role}", {f"{at}.key": REMOVED}, at, NO_KEY),
        (f"toleration of any value with one in {role}", {f"{at}.operator": "Exists"}, f"{at}.value", NO_VALUE),
        (f"seconds without effect in {role}", {f"{at}.effect": REMOVED}, f"{at}.tolerationSeconds", NO_SECONDS),
        (f"seconds with another effect in {role}", {f"{at}.effect": "NoSchedule"}, f"{at}.tolerationSeconds",
         NO_SECONDS),
    ]  # fmt: skip


REFUSED: Final[list[Row]] = [
    ("no source", {"model.source": {}}, "model.source", SOURCE),
    ("two sources", {"model.source.path": "/m", "model.source.huggingFace.repository": "a/b"}, "model.source", SOURCE),
    ("relative path", {"model.source.path": "models"}, "model.source.path", ABSOLUTE),
    ("absolute path in a volume", {VOLUME_PATH: "/qwen3"}, VOLUME_PATH, INSIDE),
    ("path out of a volume", {VOLUME_PATH: "a/../../b"}, VOLUME_PATH, INSIDE),
    ("adapter without source", {f"{ADAPTER}.source": {}}, f"{ADAPTER}.source", ADAPTER_SOURCE),
    ("adapter with two sources", {ADAPTER_VOLUME_PATH: "a", f"{ADAPTER}.source.path": "/a"}, f"{ADAPTER}.source",
     ADAPTER_SOURCE),
    ("adapter with a relative path", {f"{ADAPTER}.source.path": "a"}, f"{ADAPTER}.source.path", ABSOLUTE),
    ("adapter out of its volume", {ADAPTER_VOLUME_PATH: "../a"}, ADAPTER_VOLUME_PATH, INSIDE),
    ("adapter named like the model", {f"{ADAPTER}.name": "tiny"}, "model.loraAdapters", SAME_NAME),
    ("adapter given twice", {"model.loraAdapters": [BASE["model"]["loraAdapters"][0]] * 2}, "model.loraAdapters.1",
     "Duplicate value"),
    ("rank without adapters", {"model.loraAdapters": REMOVED, "model.maxLoraRank": 8}, "model.maxLoraRank",
     RANK_ALONE),
    ("rank that vLLM does not have", {"model.maxLoraRank": 24}, "model.maxLoraRank", RANK),
    ("cache without the hub", {"model.cache.persistentVolumeClaimName": "a", "model.source": {"path": "/m"}},
     "model.cache", CACHE),
    ("image with a scheme", {"image": "https://example.com/vllm:1"}, "image", REFERENCE),
    ("image with white space", {"image": "vllm/vllm-openai:v0.32.0\n"}, "image", REFERENCE),
    ("runtime image with a scheme", {"runtime.image": "https://example.com/r:1"}, "runtime.image", REFERENCE),
    ("pull secret given twice", {"imagePullSecrets": ["a", "a"]}, "imagePullSecrets.1", "Duplicate value"),
    ("EFA without figures", {"fabric.type": "EFA"}, "fabric", INTERFACES),
    ("TCP with an instance type", {"fabric.instanceType": "p5.48xlarge", "fabric.type": "TCP"}, "fabric.instanceType",
     only_efa("instanceType")),
    *((f"TCP with {field}", {f"fabric.{field}": value, "fabric.type": "TCP"}, f"fabric.{field}", only_efa(field))
      for field, value in (("interfacesPerPod", 4), ("privileged", "Disabled"), ("hugePagesMebibytes", 0))),
    ("classes without claims", {"fabric.deviceClasses": {"gpu": "a"}, "fabric.devices": "DevicePlugin"},
     "fabric.deviceClasses", CLASSES),
    ("classes without a word of claims", {"fabric.deviceClasses": {"gpu": "a"}, "fabric.devices": REMOVED},
     "fabric.deviceClasses", CLASSES),
    ("TCP with a class of EFA", {"fabric.deviceClasses.gpu": "a", "fabric.deviceClasses.efa": "b"},
     "fabric.deviceClasses.efa", EFA_CLASS),
    ("half a huge page", {"fabric.hugePagesMebibytes": 5121}, "fabric.hugePagesMebibytes", EVEN),
    *((f"LRU with {field}",
       {f"kvReuse.retention.{field}": 10, "kvReuse.retention.policy": "LRU"}, f"kvReuse.retention.{field}",
       only_session_aware(field)) for field in ("budgetPercent", "idleSeconds")),
    ("sizes that do not divide", {"prefill.tensorParallelSize": 4, "decode": {"tensorParallelSize": 6}}, "", SIZES),
    *rows_of_role("prefill"),
    *rows_of_role("decode"),
    ("variable given twice", {"prefill.env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
     "prefill.env.1", "Duplicate value"),
    ("variable given twice in decode", {"decode.env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
     "decode.env.1", "Duplicate value"),
    *(row for role in ("prefill", "decode", "router") for row in rows_of_tolerations(role)),
    ("body larger than all bodies", {"router.limits": {"maximumBodyBytes": 4096, "maximumBufferedBytes": 2048}},
     "router.limits.maximumBodyBytes", BODY),
    ("body larger than all bodies by default", {"router.limits": {"maximumBodyBytes": 2**30}},
     "router.limits.maximumBodyBytes", BODY),
    *((f"bounds of {role} upside down", {f"autoscaling.{role}": {"minReplicas": 3, "maxReplicas": 2}},
       f"autoscaling.{role}.minReplicas", BOUNDS) for role in ("prefill", "decode")),
    ("no pod may ever be replaced", {"updateStrategy": {"maxUnavailable": 0, "maxSurge": 0}}, "updateStrategy", STUCK),
    ("no pod may ever be replaced, surge unset", {"updateStrategy": {"maxUnavailable": 0}}, "updateStrategy", STUCK),
    ("no pod may ever be replaced, in percent", {"updateStrategy": {"maxUnavailable": "0%", "maxSurge": "0%"}},
     "updateStrategy", STUCK),
]  # fmt: skip
"""For every rule of the CRD, at least one row with its sentence."""

ACCEPTED: Final[list[tuple[str, dict[str, Any]]]] = [
    (
        "only what is required",
        dict.fromkeys(sorted(set(BASE) - {"model", "image", "fabric"}), REMOVED) | {"fabric": {"type": "TCP"}},
    ),
    ("model on the hub", {"model": {"source": {"huggingFace": {"repository": "Qwen/Qwen3-32B"}}}}),
    ("model on a volume", {VOLUME_PATH: "a/b..c/..d"}),
    ("adapter on a volume", {ADAPTER_VOLUME_PATH: "a/b..c/..d"}),
    ("adapter beside a model without a name", {"model.servedName": REMOVED}),
    *((f"rank {rank}", {"model.maxLoraRank": rank}) for rank in (1, 8, 32, 64, 128, 256, 320, 512)),
    ("adapters without rank", {"model.maxLoraRank": REMOVED}),
    ("image by digest", {"image": f"registry.example.com:5000/a/b@sha256:{'0' * 64}"}),
    ("no words on the runtime", {"runtime": {}}),
    ("EFA with both figures", {"fabric.instanceType": "p5en.48xlarge", "fabric.interfacesPerPod": 8}),
    ("claims of EFA with the usual classes", {"fabric.privileged": "Disabled", "fabric.deviceClasses": REMOVED}),
    ("no huge pages", {"fabric.hugePagesMebibytes": 0}),
    ("retention without a policy", {"kvReuse.retention.policy": REMOVED}),
    ("LRU alone", {"kvReuse.retention": {"policy": "LRU"}}),
    ("sizes of which one divides the other", {"prefill.tensorParallelSize": 2, "decode": {"tensorParallelSize": 8}}),
    ("as many GPUs as ranks", {"prefill.tensorParallelSize": 4, "prefill.gpusPerPod": 8}),
    ("more GPUs than ranks", {"prefill.tensorParallelSize": 2, "prefill.gpusPerPod": 6}),
    ("as many GPUs as a node's shards", {"decode.nodesPerReplica": 4, "decode.gpusPerPod": 16}),
    ("engine on CPUs", {"prefill.tensorParallelSize": 4, "prefill.gpusPerPod": 0}),
    ("one node", {"prefill.nodesPerReplica": 1, "prefill.dataParallelSize": 4}),
    ("several nodes", {"prefill.nodesPerReplica": 2, "prefill.dataParallelSize": 1}),
    ("no replica", {"decode.replicas": 0, "prefill.replicas": 0, "router.replicas": 0}),
    ("flags that only look like the operator's", {"prefill.extraArgs": ["--model-impl", "--block-size", "32", "-1"]}),
    ("flag's name as a value", {"prefill.extraArgs": ["--chat-template=--port", "port", "--", "-"]}),
    (
        "flags beside the operator's",
        {"prefill.extraArgs": ["--max-loras", "4", "-O3", "--config-format", "hf", "-asc", "-dc=x"]},
    ),
    ("two variables", {"prefill.env": [{"name": "_A", "value": "1"}, {"name": "B2", "value": ""}]}),
    ("toleration of every taint", {"router.scheduling.tolerations": [{"operator": "Exists"}]}),
    ("toleration of a key", {"decode.scheduling.tolerations": [{"key": "a", "operator": "Exists"}, {"key": "b"}]}),
    ("anything in a pod's spec", {"prefill.podTemplate": {"spec": {"x": [{"y": 1.5}], "tolerations": [{}]}}}),
    ("bodies as large as all bodies", {"router.limits": {"maximumBodyBytes": 2**29}}),
    ("bounds without a least", {"autoscaling.decode": {"maxReplicas": 0}}),
    ("equal bounds", {"autoscaling.decode": {"minReplicas": 2, "maxReplicas": 2}}),
    ("surge instead of unavailability", {"updateStrategy": {"maxUnavailable": 0, "maxSurge": "25%"}}),
    ("unavailability alone", {"updateStrategy": {"maxUnavailable": "25%"}}),
    ("paused", {"paused": True}),
]
