"""The router's configuration file, in a ConfigMap."""

from __future__ import annotations

import hashlib

from bidikv_operator import names
from bidikv_operator.build.meta import Manifest, build_object, config_name, role_name
from bidikv_operator.kinds import CONFIG_MAP
from bidikv_operator.resolved import Resolved
from bidikv_runtime import contract


def build_router_config(resolved: Resolved) -> contract.RouterConfig:
    return contract.RouterConfig(
        namespace=resolved.namespace,
        prefill_service=role_name(resolved, names.PREFILL),
        decode_service=role_name(resolved, names.DECODE),
        served_model_name=resolved.model.served_name,
        reuse=resolved.reuse,
    )


def build_router_configmap(resolved: Resolved) -> Manifest:
    configmap = build_object(CONFIG_MAP, resolved, config_name(resolved), names.ROUTER)
    configmap["data"] = {contract.ROUTER_CONFIG_FILE: build_router_config(resolved).to_json()}
    return configmap


def compute_config_hash(resolved: Resolved) -> str:
    """16 hex digits of the file's SHA-256."""
    return hashlib.sha256(build_router_config(resolved).to_json().encode()).hexdigest()[:16]
