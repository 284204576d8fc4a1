"""Arguments and environment of vLLM's server. One role's engine differs from the other's in nothing that KV depends on.

Flags are those of vLLM 0.32 (``engine/arg_utils.py``).
"""

from __future__ import annotations

import json
from typing import Any, Final

from bidikv_operator.fabric import EFA_ENV, TCP_ENV
from bidikv_operator.resolved import Resolved, ResolvedEngine
from bidikv_runtime import contract

DRAIN_SECONDS: Final = 600
"""A stopping engine or router lets running requests finish for so long."""
MODEL_DIR: Final = "/var/lib/bidikv/model"
"""Where a model's PersistentVolumeClaim is mounted."""


def build_engine_args(resolved: Resolved, settings: ResolvedEngine) -> list[str]:
    """vLLM's command line; the user's ``extraArgs`` come last, so that they win where they may."""
    model = resolved.model
    args = ["--model", model.argument, "--served-model-name", model.served_name]
    if model.revision:
        args += ["--revision", model.revision]
    if model.max_length is not None:
        args += ["--max-model-len", str(model.max_length)]
    transfer = contract.kv_transfer_config(fabric=resolved.fabric.type)
    return [
        *args,
        *("--host", "0.0.0.0"),
        *("--port", str(contract.ENGINE_PORT)),
        *("--tensor-parallel-size", str(settings.tensor_parallel_size)),
        *("--shutdown-timeout", str(DRAIN_SECONDS)),
        "--enable-prefix-caching",
        *("--prefix-caching-hash-algo", contract.HASH_ALGORITHM),
        *("--kv-transfer-config", json.dumps(transfer, sort_keys=True)),
        *("--middleware", contract.ENGINE_MIDDLEWARE),  # in both roles; vLLM adds up the flag's values
        *settings.extra_args,
    ]


def build_engine_env(resolved: Resolved, settings: ResolvedEngine) -> list[dict[str, Any]]:
    """Environment of the engine container, one entry per name.

    The user's variables replace the operator's of the same name, except PYTHONPATH, where the connector's folder goes
    first, and the owned ones, which ``validate.py`` refuses. An image's own PYTHONPATH is replaced: Kubernetes cannot
    append to it.
    """
    user = dict(settings.env)
    path = [contract.CONNECTOR_INSTALL_DIR, user.pop("PYTHONPATH", "")]
    pod_ip = {"fieldRef": {"fieldPath": "status.podIP"}}
    entries: dict[str, dict[str, Any]] = {
        "PYTHONPATH": {"value": ":".join(part for part in path if part)},
        "PYTHONHASHSEED": {"value": contract.HASH_SEED},
        "VLLM_NIXL_SIDE_CHANNEL_HOST": {"valueFrom": pod_ip},
        "VLLM_NIXL_SIDE_CHANNEL_PORT": {"value": str(contract.SIDE_CHANNEL_PORT)},
        contract.ENV_LOOKUP_HOST: {"valueFrom": pod_ip},
    }
    for name, value in (EFA_ENV if resolved.fabric.type == "EFA" else TCP_ENV).items():
        entries[name] = {"value": value}
    if resolved.model.token_secret_name:
        secret = {"name": resolved.model.token_secret_name, "key": "token"}
        entries["HF_TOKEN"] = {"valueFrom": {"secretKeyRef": secret}}
    for name, value in user.items():
        # The API server drops an empty value; writing it would look like drift for ever.
        entries[name] = {"value": value} if value else {}
    return [{"name": name, **entry} for name, entry in entries.items()]
