"""Pod templates: the pods of engines and router, and how a ``podTemplate`` override merges into them.

Merge rules, from the top of the override down:

- objects merge key by key; a null removes the key;
- ``containers`` and ``initContainers`` merge by ``name``: an item of a known name merges into it, a new one is
  appended;
- ``volumes``, ``env`` and ``ports`` merge by ``name`` and ``volumeMounts`` by ``mountPath``, but an item of a known
  name replaces the whole item: half of one volume source and half of another is no volume;
- everything else (other lists, scalars) replaces.

Nothing is written that the API server would only fill in by itself; what is written is in canonical form (``5Gi``, not
``5120Mi``), so that the live object compares equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bidikv_operator import names
from bidikv_operator.build import engine
from bidikv_operator.build.meta import (
    Manifest,
    build_labels,
    build_selector,
    config_name,
    engine_account_name,
    role_name,
)
from bidikv_operator.fabric import EFA_HUGE_PAGES, EFA_RESOURCE, GPU_RESOURCE, HUGE_PAGES_RESOURCE
from bidikv_operator.resolved import Resolved, ResolvedEngine
from bidikv_runtime import contract

CONNECTOR_VOLUME: Final = "connector"
SHARED_MEMORY_VOLUME: Final = "shared-memory"
HUGE_PAGES_VOLUME: Final = "huge-pages"
MODEL_VOLUME: Final = "model"
CONFIG_VOLUME: Final = "config"
SHARED_MEMORY_LIMIT: Final = "16Gi"
"""Upper bound of /dev/shm (tensor-parallel message queues, NCCL); reserves nothing."""

STARTUP_SECONDS: Final = 3600
"""A large model downloads and loads for many minutes; a pod that is not up after an hour restarts."""
PROBE_PERIOD_SECONDS: Final = 10
ENGINE_LEAVE_SECONDS: Final = 10
"""Between leaving the EndpointSlices and SIGTERM: until every router has seen that the engine leaves."""
ROUTER_LEAVE_SECONDS: Final = 5
"""The same for a router, which waits by itself after SIGTERM."""
GRACE_MARGIN_SECONDS: Final = 30
"""For the process to end after its last request, before the kubelet kills it."""
UNPRIVILEGED_USER: Final = 65532

MERGE_INTO: Final = {"containers": "name", "initContainers": "name"}
MERGE_WHOLE: Final = {"volumes": "name", "env": "name", "ports": "name", "volumeMounts": "mountPath"}


def merge_override(base: Any, override: Any, field: str = "") -> Any:
    """``override`` merged into ``base`` by the rules above; neither argument is changed."""
    if isinstance(base, Mapping) and isinstance(override, Mapping):
        merged = dict(base)
        for key, value in override.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = merge_override(base.get(key), value, key)
        return merged
    if isinstance(override, Mapping):
        return merge_override({}, override, field)
    key_of_item = MERGE_INTO.get(field) or MERGE_WHOLE.get(field)
    if key_of_item is not None and isinstance(override, list) and _are_named(override, key_of_item):
        return _merge_named(base if isinstance(base, list) else [], override, key_of_item, into=field in MERGE_INTO)
    return override


def _are_named(items: list[Any], key: str) -> bool:
    return all(isinstance(item, Mapping) and key in item for item in items)


def _merge_named(base: list[Any], override: list[Any], key: str, *, into: bool) -> list[Any]:
    known = {item[key] for item in base}
    changed = {item[key]: item for item in override}
    merged = [
        item if item[key] not in changed else merge_override(item if into else {}, changed[item[key]]) for item in base
    ]
    return merged + [merge_override({}, item) for name, item in changed.items() if name not in known]


def build_engine_template(resolved: Resolved, role: names.Role) -> Manifest:
    """Pod template of ``prefill`` or ``decode``."""
    settings = resolved.prefill if role == names.PREFILL else resolved.decode
    spec: Manifest = {
        "serviceAccountName": engine_account_name(resolved),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # The kernel ignores SIGTERM for the first process of a process namespace until that has a handler, which vLLM
        # has only after its imports: a pod deleted while it starts would live on for its whole grace period. In a
        # namespace that the pod shares, the first process is the pause container's.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": ENGINE_LEAVE_SECONDS + engine.DRAIN_SECONDS + GRACE_MARGIN_SECONDS,
        "initContainers": [_build_installer(resolved)],
        "containers": [_build_engine_container(resolved, role, settings)],
        "volumes": _build_engine_volumes(resolved),
        "topologySpreadConstraints": [_build_spread(build_selector(resolved, role))],
    }
    if resolved.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in resolved.image_pull_secrets]
    if settings.gpus:
        spec["tolerations"] = [{"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}]
    if resolved.fabric.instance_type:
        spec["nodeSelector"] = {"node.kubernetes.io/instance-type": resolved.fabric.instance_type}
    if resolved.fabric.type == "EFA":
        spec["affinity"] = {"podAffinity": _build_same_zone(resolved)}
    template: Manifest = {"metadata": {"labels": build_labels(resolved, role)}, "spec": spec}
    return _override(template, settings.pod_template)


def build_router_template(resolved: Resolved, config_hash: str) -> Manifest:
    """Pod template of the router; ``config_hash`` rolls it when its configuration changes."""
    spec: Manifest = {
        "serviceAccountName": role_name(resolved, names.ROUTER),
        "enableServiceLinks": False,
        "shareProcessNamespace": True,  # as for engines
        "terminationGracePeriodSeconds": ROUTER_LEAVE_SECONDS + engine.DRAIN_SECONDS + GRACE_MARGIN_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UNPRIVILEGED_USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_build_router_container(resolved)],
        "volumes": [{"name": CONFIG_VOLUME, "configMap": {"name": config_name(resolved)}}],
        "topologySpreadConstraints": [_build_spread(build_selector(resolved, names.ROUTER))],
    }
    if resolved.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in resolved.image_pull_secrets]
    template: Manifest = {
        "metadata": {
            "labels": build_labels(resolved, names.ROUTER),
            "annotations": {names.ANNOTATION_CONFIG_HASH: config_hash},
        },
        "spec": spec,
    }
    return _override(template, resolved.router.pod_template)


def _override(template: Manifest, override: Mapping[str, Any]) -> Manifest:
    merged: Manifest = merge_override(template, override)
    return merged


def _build_installer(resolved: Resolved) -> Manifest:
    return {
        "name": names.INSTALL_CONTAINER,
        "image": resolved.runtime_image,
        "command": ["python3", "-m", "bidikv_runtime.install", contract.CONNECTOR_INSTALL_DIR],
        "volumeMounts": [{"name": CONNECTOR_VOLUME, "mountPath": contract.CONNECTOR_INSTALL_DIR}],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UNPRIVILEGED_USER,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _build_engine_container(resolved: Resolved, role: names.Role, settings: ResolvedEngine) -> Manifest:
    container: Manifest = {
        "name": names.ENGINE_CONTAINER,
        "image": resolved.image,
        "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"],
        "args": engine.build_engine_args(resolved, settings),
        "env": engine.build_engine_env(resolved, settings),
        "ports": [
            {"name": "http", "containerPort": contract.ENGINE_PORT, "protocol": "TCP"},
            {"name": "side-channel", "containerPort": contract.SIDE_CHANNEL_PORT, "protocol": "TCP"},
            {"name": "lookup", "containerPort": contract.LOOKUP_PORT, "protocol": "TCP"},
            {"name": "state", "containerPort": contract.STATE_PORT, "protocol": "TCP"},
        ],
        "volumeMounts": [
            {"name": CONNECTOR_VOLUME, "mountPath": contract.CONNECTOR_INSTALL_DIR, "readOnly": True},
            {"name": SHARED_MEMORY_VOLUME, "mountPath": "/dev/shm"},
        ],
        # vLLM answers /health only once the model is loaded. Liveness is slow on purpose: a long prefill may hold the
        # process for seconds.
        "startupProbe": _build_probe("/health", failures=STARTUP_SECONDS // PROBE_PERIOD_SECONDS),
        "readinessProbe": _build_probe("/health", failures=3),
        "livenessProbe": _build_probe("/health", failures=6, timeout=10),
        "lifecycle": {"preStop": {"sleep": {"seconds": ENGINE_LEAVE_SECONDS}}},
    }
    if resolved.model.claim_name:
        container["volumeMounts"].append({"name": MODEL_VOLUME, "mountPath": engine.MODEL_DIR, "readOnly": True})
    requests: dict[str, str] = {}
    if settings.gpus:
        requests[GPU_RESOURCE] = str(settings.gpus)
    limits = dict(requests)
    if resolved.fabric.type == "EFA":
        limits |= {EFA_RESOURCE: str(settings.interfaces), HUGE_PAGES_RESOURCE: EFA_HUGE_PAGES}
        # Kubernetes refuses huge pages in a pod that requests neither CPU nor memory; raise it in podTemplate.
        requests = {**limits, "cpu": "1"}
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}  # pins memory for RDMA
        container["volumeMounts"].append({"name": HUGE_PAGES_VOLUME, "mountPath": "/dev/hugepages"})
    if limits:
        container["resources"] = {"requests": requests, "limits": limits}
    return container


def _build_engine_volumes(resolved: Resolved) -> list[Manifest]:
    volumes: list[Manifest] = [
        {"name": CONNECTOR_VOLUME, "emptyDir": {}},
        {"name": SHARED_MEMORY_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY_LIMIT}},
    ]
    if resolved.fabric.type == "EFA":
        volumes.append({"name": HUGE_PAGES_VOLUME, "emptyDir": {"medium": "HugePages-2Mi"}})
    if resolved.model.claim_name:
        claim = {"claimName": resolved.model.claim_name, "readOnly": True}
        volumes.append({"name": MODEL_VOLUME, "persistentVolumeClaim": claim})
    return volumes


def _build_router_container(resolved: Resolved) -> Manifest:
    return {
        "name": names.ROUTER_CONTAINER,
        "image": resolved.runtime_image,
        # No args, so that a podTemplate may give the router's other options there.
        "command": [
            *("python3", "-m", "bidikv_runtime.router"),
            f"--drain-delay-seconds={ROUTER_LEAVE_SECONDS}",
            f"--drain-grace-seconds={engine.DRAIN_SECONDS}",
        ],
        "ports": [{"name": "http", "containerPort": contract.ROUTER_PORT, "protocol": "TCP"}],
        "volumeMounts": [{"name": CONFIG_VOLUME, "mountPath": contract.ROUTER_CONFIG_DIR, "readOnly": True}],
        "resources": {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "startupProbe": _build_probe("/health", failures=30, period=1),
        "readinessProbe": _build_probe("/ready", failures=2, period=2),
        "livenessProbe": _build_probe("/health", failures=6, timeout=10),
        "securityContext": {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _build_probe(path: str, *, failures: int, period: int = PROBE_PERIOD_SECONDS, timeout: int = 5) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


def _build_spread(selector: dict[str, str]) -> Manifest:
    """Over nodes where there are enough: a preference, as a small cluster must still be able to start."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector},
    }


def _build_same_zone(resolved: Resolved) -> Manifest:
    """All engines of one resource in one zone: EFA traffic cannot leave it. The first pod chooses the zone."""
    return {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {
                "topologyKey": "topology.kubernetes.io/zone",
                "labelSelector": {
                    "matchLabels": {names.LABEL_OWNER: resolved.name},
                    "matchExpressions": [
                        {"key": names.LABEL_ROLE, "operator": "In", "values": [names.PREFILL, names.DECODE]}
                    ],
                },
            }
        ]
    }
