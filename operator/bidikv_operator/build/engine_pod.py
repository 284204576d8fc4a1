"""Pod templates of engines: of a whole engine, or of the first pod of one that spans nodes and of its workers.

Nothing is written that the API server would only fill in by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bidikv_operator import names
from bidikv_operator.build import engine
from bidikv_operator.build.devices import add_claims, build_engine_resources, compute_shared_memory
from bidikv_operator.build.merge import merge_override
from bidikv_operator.build.meta import Manifest, build_labels, build_selector, engine_account_name, token_secret_name
from bidikv_operator.build.placement import build_engine_placement, build_spread
from bidikv_operator.build.probes import build_engine_probes
from bidikv_operator.build.security import (
    HOME_DIR,
    build_engine_container_security,
    build_engine_pod_security,
    build_unprivileged_container_security,
    has_own_user,
)
from bidikv_operator.build.shutdown import MARGIN_SECONDS, build_engine_hook, compute_engine_grace
from bidikv_operator.resolved import Resolved, ResolvedEngine
from bidikv_runtime import contract

CONNECTOR_VOLUME: Final = "connector"
SHARED_MEMORY_VOLUME: Final = "shared-memory"
HUGE_PAGES_VOLUME: Final = "huge-pages"
MODEL_VOLUME: Final = "model"
HUB_VOLUME: Final = "hub"
HOME_VOLUME: Final = "home"
TOKEN_VOLUME: Final = "peer-token"
SERVING_FIELDS: Final = ("ports", "lifecycle", "startupProbe", "readinessProbe", "livenessProbe")
"""Of the engine's container; a worker has none of them, and an override for the engine means none of its own."""


def build_engine_template(resolved: Resolved, role: names.Role, *, labels: Mapping[str, str] | None = None) -> Manifest:
    """Pod template of ``prefill`` or ``decode``: with ``nodes`` of 1 the whole engine, else its first pod.

    Args:
        labels: further ones, as ``LABEL_GROUP``.
    """
    settings = resolved.engine(role)
    container = _build_container(resolved, settings, is_worker=False)
    container["ports"] = _build_ports(settings)
    container |= build_engine_probes()
    container["lifecycle"] = {"preStop": build_engine_hook(resolved, settings)}
    template = _build_template(resolved, role, settings, container, build_labels(resolved, role))
    template["spec"]["terminationGracePeriodSeconds"] = compute_engine_grace(resolved)
    template["spec"]["topologySpreadConstraints"] = build_spread(build_selector(resolved, role))
    return _finish(template, settings.pod_template, labels)


def build_worker_template(resolved: Resolved, role: names.Role, *, labels: Mapping[str, str] | None = None) -> Manifest:
    """Pod template of the other pods of a replica that spans nodes (LeaderWorkerSet's ``workerTemplate``).

    They serve no port and end at once: the first pod, which serves, is gone before LeaderWorkerSet removes them. A
    worker that is lost by itself ends the whole replica.
    """
    settings = resolved.engine(role)
    own = {**build_labels(resolved, role), names.LABEL_ROLE: names.WORKER_LABELS[role]}
    template = _build_template(resolved, role, settings, _build_container(resolved, settings, is_worker=True), own)
    template["spec"]["terminationGracePeriodSeconds"] = MARGIN_SECONDS
    return _finish(template, _without_serving(settings.pod_template), labels)


def _finish(template: Manifest, override: Mapping[str, Any], labels: Mapping[str, str] | None) -> Manifest:
    merged: Manifest = merge_override(template, override)
    if labels:
        merged["metadata"] = {**merged["metadata"], "labels": {**merged["metadata"]["labels"], **labels}}
    return merged


def _without_serving(override: Mapping[str, Any]) -> Mapping[str, Any]:
    spec = override.get("spec") or {}
    if not spec.get("containers"):
        return override
    containers = [
        {key: value for key, value in container.items() if key not in SERVING_FIELDS}
        if container.get("name") == names.ENGINE_CONTAINER
        else container
        for container in spec["containers"]
    ]
    return {**override, "spec": {**spec, "containers": containers}}


def _build_template(
    resolved: Resolved, role: names.Role, settings: ResolvedEngine, container: Manifest, labels: Mapping[str, str]
) -> Manifest:
    spec: Manifest = {
        "serviceAccountName": engine_account_name(resolved),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # The kernel ignores SIGTERM for the first process of a process namespace until that has a handler, which vLLM
        # has only after its imports: a pod deleted while it starts would live on for its whole grace period. In a
        # namespace that the pod shares, the first process is the pause container's.
        "shareProcessNamespace": True,
        "initContainers": [_build_installer(resolved)],
        "containers": [container],
        "volumes": _build_volumes(resolved, settings),
        **build_engine_placement(resolved, role, settings),
    }
    if security := build_engine_pod_security(resolved):
        spec["securityContext"] = security
    if resolved.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in resolved.image_pull_secrets]
    template: Manifest = {"metadata": {"labels": dict(labels)}, "spec": spec}
    add_claims(template, resolved, settings)
    return template


def _build_installer(resolved: Resolved) -> Manifest:
    return {
        "name": names.INSTALL_CONTAINER,
        "image": resolved.runtime_image,
        **build_pull_policy(resolved),
        "command": ["python3", "-m", "bidikv_runtime.install", contract.CONNECTOR_INSTALL_DIR],
        "volumeMounts": [{"name": CONNECTOR_VOLUME, "mountPath": contract.CONNECTOR_INSTALL_DIR}],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": build_unprivileged_container_security(own_user=True),
    }


def build_pull_policy(resolved: Resolved) -> Manifest:
    """``imagePullPolicy`` of every container whose image the resource chooses; nothing leaves it to Kubernetes."""
    return {} if resolved.image_pull_policy is None else {"imagePullPolicy": resolved.image_pull_policy}


def _build_container(resolved: Resolved, settings: ResolvedEngine, *, is_worker: bool) -> Manifest:
    container: Manifest = {
        "name": names.ENGINE_CONTAINER,
        "image": resolved.image,
        **build_pull_policy(resolved),
        "command": list(engine.HEADLESS_SERVER if is_worker else engine.SERVER),
        "args": engine.build_engine_args(resolved, settings, is_worker=is_worker),
        "env": engine.build_engine_env(resolved, settings),
        "volumeMounts": _build_mounts(resolved),
        # The engine's last words, where it wrote none for this purpose: the status tells them.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if security := build_engine_container_security(resolved):
        container["securityContext"] = security
    if resources := build_engine_resources(resolved, settings):
        container["resources"] = resources
    return container


def _build_ports(settings: ResolvedEngine) -> list[Manifest]:
    """Each data-parallel rank has a side channel, a lookup and a state port of its own, counting up."""
    ports: list[tuple[str, int]] = [("http", contract.ENGINE_PORT)]
    for name, first in (
        ("side-channel", contract.SIDE_CHANNEL_PORT),
        ("lookup", contract.LOOKUP_PORT),
        ("state", contract.STATE_PORT),
    ):
        ports += [(f"{name}-{rank}" if rank else name, first + rank) for rank in range(settings.data_parallel_size)]
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports]


def _list_claims(resolved: Resolved) -> list[str]:
    """Adapters' claims, each once, in the order of their first use."""
    return list(dict.fromkeys(adapter.claim_name for adapter in resolved.model.adapters if adapter.claim_name))


def _build_mounts(resolved: Resolved) -> list[Manifest]:
    mounts: list[Manifest] = [
        {"name": CONNECTOR_VOLUME, "mountPath": contract.CONNECTOR_INSTALL_DIR, "readOnly": True},
        {"name": TOKEN_VOLUME, "mountPath": contract.TOKEN_DIR, "readOnly": True},
        {"name": SHARED_MEMORY_VOLUME, "mountPath": "/dev/shm"},
    ]
    if _has_huge_pages(resolved):
        mounts.append({"name": HUGE_PAGES_VOLUME, "mountPath": "/dev/hugepages"})
    if has_own_user(resolved):
        mounts.append({"name": HOME_VOLUME, "mountPath": HOME_DIR})
    if resolved.model.cache_claim_name:
        mounts.append({"name": HUB_VOLUME, "mountPath": engine.HUB_CACHE_DIR})
    if resolved.model.claim_name:
        mounts.append({"name": MODEL_VOLUME, "mountPath": engine.MODEL_DIR, "readOnly": True})
    return mounts + [
        {"name": f"claim-{index}", "mountPath": f"{engine.ADAPTERS_DIR}/{claim}", "readOnly": True}
        for index, claim in enumerate(_list_claims(resolved))
    ]


def _build_volumes(resolved: Resolved, settings: ResolvedEngine) -> list[Manifest]:
    volumes: list[Manifest] = [
        {"name": CONNECTOR_VOLUME, "emptyDir": {}},
        build_token_volume(resolved),
        {
            "name": SHARED_MEMORY_VOLUME,
            "emptyDir": {"medium": "Memory", "sizeLimit": compute_shared_memory(settings)},
        },
    ]
    if _has_huge_pages(resolved):
        volumes.append({"name": HUGE_PAGES_VOLUME, "emptyDir": {"medium": "HugePages-2Mi"}})
    if has_own_user(resolved):
        volumes.append({"name": HOME_VOLUME, "emptyDir": {}})
    if resolved.model.cache_claim_name:
        volumes.append({"name": HUB_VOLUME, "persistentVolumeClaim": {"claimName": resolved.model.cache_claim_name}})
    claims = [(MODEL_VOLUME, resolved.model.claim_name)] if resolved.model.claim_name else []
    claims += [(f"claim-{index}", claim) for index, claim in enumerate(_list_claims(resolved))]
    return volumes + [
        {"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}} for name, claim in claims
    ]


def build_token_volume(resolved: Resolved) -> Manifest:
    """The peers' tokens. Not optional: without them no engine would know whom it answers."""
    return {"name": TOKEN_VOLUME, "secret": {"secretName": token_secret_name(resolved)}}


def _has_huge_pages(resolved: Resolved) -> bool:
    return resolved.fabric.type == "EFA" and resolved.fabric.huge_pages_mebibytes > 0
