"""Pod template of the router."""

from __future__ import annotations

from typing import Final

from bidikv_operator import names
from bidikv_operator.build.devices import with_resources
from bidikv_operator.build.engine_pod import TOKEN_VOLUME, build_pull_policy, build_token_volume
from bidikv_operator.build.merge import merge_override
from bidikv_operator.build.meta import Manifest, build_labels, build_selector, role_name
from bidikv_operator.build.placement import build_placement, build_spread
from bidikv_operator.build.probes import build_router_probes
from bidikv_operator.build.router_config import TLS_DIR, build_router_config
from bidikv_operator.build.security import build_router_pod_security, build_unprivileged_container_security
from bidikv_operator.build.shutdown import REQUEST_SECONDS, ROUTER_GRACE_SECONDS, ROUTER_LEAVE_SECONDS
from bidikv_operator.resolved import Resolved
from bidikv_runtime import contract

TLS_VOLUME: Final = "tls"
RESOURCES: Final = {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
"""512 MiB of request bodies may be held at once (the router's ``--max-buffered-bytes``)."""


def build_router_template(resolved: Resolved) -> Manifest:
    """Pod template of the router; its configuration is a part of it."""
    router = resolved.router
    volumes: list[Manifest] = [build_token_volume(resolved)]
    if router.tls_secret_name is not None:
        volumes.append({"name": TLS_VOLUME, "secret": {"secretName": router.tls_secret_name}})
    spec: Manifest = {
        "serviceAccountName": role_name(resolved, names.ROUTER),
        "enableServiceLinks": False,
        "shareProcessNamespace": True,  # as for engines
        "terminationGracePeriodSeconds": ROUTER_GRACE_SECONDS,
        "securityContext": build_router_pod_security(),
        "containers": [_build_container(resolved)],
        "volumes": volumes,
        "topologySpreadConstraints": build_spread(build_selector(resolved, names.ROUTER)),
        **build_placement(router.scheduling, {}, []),
    }
    if resolved.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in resolved.image_pull_secrets]
    template: Manifest = {
        "metadata": {"labels": build_labels(resolved, names.ROUTER)},
        "spec": spec,
    }
    merged: Manifest = merge_override(template, router.pod_template)
    return merged


def _build_container(resolved: Resolved) -> Manifest:
    router = resolved.router
    mounts: list[Manifest] = [
        {"name": TOKEN_VOLUME, "mountPath": contract.TOKEN_DIR, "readOnly": True},
    ]
    if router.tls_secret_name is not None:
        mounts.append({"name": TLS_VOLUME, "mountPath": TLS_DIR, "readOnly": True})
    return {
        "name": names.ROUTER_CONTAINER,
        "image": resolved.runtime_image,
        **build_pull_policy(resolved),
        # No args, so that a podTemplate may give the router's other options there; they win over these.
        "command": [
            *("python3", "-m", "bidikv_runtime.router"),
            f"--drain-delay-seconds={ROUTER_LEAVE_SECONDS}",
            f"--drain-grace-seconds={REQUEST_SECONDS}",
            *(f"--{flag}={value}" for flag, value in sorted(router.limits.items())),
        ],
        "env": [
            {"name": contract.ENV_ROUTER_CONFIG, "value": build_router_config(resolved).to_json()},
            {"name": contract.ENV_TOKEN_FILE, "value": f"{contract.TOKEN_DIR}/{contract.TOKEN_KEY}"},
        ],
        "ports": [{"name": "http", "containerPort": contract.ROUTER_PORT, "protocol": "TCP"}],
        "volumeMounts": mounts,
        "resources": with_resources(RESOURCES, router.resources),
        **build_router_probes("HTTPS" if router.tls_secret_name is not None else None),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": build_unprivileged_container_security(own_user=False),
    }
