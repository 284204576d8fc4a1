"""Arguments and environment of vLLM's server. One role's engine differs from the other's in nothing that KV depends on.

Flags are those of vLLM 0.32 (``engine/arg_utils.py``, ``config/lora.py``).

A replica of several nodes is one engine over several pods: every pod runs the same command line with its own
``--node-rank``, and all but the first with ``--headless``, as they serve no HTTP. LeaderWorkerSet (0.6 or newer)
writes the variables by which they find each other into each pod; the kubelet expands ``$(NAME)`` in arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from bidikv_operator.build.security import build_engine_user_env
from bidikv_operator.build.shutdown import REQUEST_SECONDS
from bidikv_operator.fabric import TCP_ENV, build_efa_env
from bidikv_operator.resolved import Resolved, ResolvedEngine, ResolvedModel
from bidikv_runtime import contract

SERVER: Final = ("python3", "-m", "vllm.entrypoints.openai.api_server")
HEADLESS_SERVER: Final = ("python3", "-m", "vllm.entrypoints.cli.main", "serve", "--headless")
"""The module above reads ``--headless`` and serves HTTP all the same."""
MODEL_DIR: Final = "/var/lib/bidikv/model"
"""Where a model's PersistentVolumeClaim is mounted."""
ADAPTERS_DIR: Final = "/var/lib/bidikv/adapters"
"""Below it, each PersistentVolumeClaim with adapters is mounted read-only under its own name."""
HUB_CACHE_DIR: Final = "/var/lib/bidikv/hub"
"""Where the PersistentVolumeClaim for downloads is mounted."""
MASTER_PORT: Final = 29501
"""Of the first pod of a multi-node replica, for ``torch.distributed``; vLLM's own default."""
ADAPTERS_PER_BATCH: Final = 8
"""At most so many adapters in one batch: each costs GPU memory of its rank in every layer, whether used or not."""


def build_engine_args(resolved: Resolved, settings: ResolvedEngine, *, is_worker: bool = False) -> list[str]:
    """vLLM's command line; the user's ``extraArgs`` come last, so that they win where they may.

    Args:
        is_worker: of the pods of a multi-node replica behind the first one.
    """
    model = resolved.model
    args = ["--model", model.argument, "--served-model-name", model.served_name]
    if model.revision:
        args += ["--revision", model.revision]
    if model.max_length is not None:
        args += ["--max-model-len", str(model.max_length)]
    transfer = contract.kv_transfer_config(fabric=resolved.fabric.type, options=_build_retention(resolved))
    return [
        *args,
        *_build_adapter_args(model),
        *("--host", "0.0.0.0"),
        *("--port", str(contract.ENGINE_PORT)),
        *_build_parallel_args(settings, is_worker=is_worker),
        *("--shutdown-timeout", str(REQUEST_SECONDS)),
        "--enable-prefix-caching",
        *("--prefix-caching-hash-algo", contract.HASH_ALGORITHM),
        *("--kv-transfer-config", json.dumps(transfer, sort_keys=True)),
        *("--middleware", contract.ENGINE_MIDDLEWARE),  # in both roles; vLLM adds up the flag's values
        *settings.extra_args,
    ]


def _build_parallel_args(settings: ResolvedEngine, *, is_worker: bool) -> list[str]:
    args = ["--tensor-parallel-size", str(settings.tensor_parallel_size)]
    if settings.data_parallel_size > 1:
        args += ["--data-parallel-size", str(settings.data_parallel_size)]
    if settings.expert_parallel:
        args.append("--enable-expert-parallel")
    if settings.nodes > 1:
        args += [
            *("--nnodes", str(settings.nodes)),
            *("--node-rank", "$(LWS_WORKER_INDEX)" if is_worker else "0"),
            *("--master-addr", "$(LWS_LEADER_ADDRESS)"),
            *("--master-port", str(MASTER_PORT)),
        ]
    return args


def _build_adapter_args(model: ResolvedModel) -> list[str]:
    if not model.adapters:
        return []
    args = ["--enable-lora", "--max-loras", str(min(len(model.adapters), ADAPTERS_PER_BATCH))]
    if len(model.adapters) > ADAPTERS_PER_BATCH:
        # The others wait in host memory; without this they would be read from disk at each change.
        args += ["--max-cpu-loras", str(len(model.adapters))]
    if model.max_lora_rank is not None:
        args += ["--max-lora-rank", str(model.max_lora_rank)]
    # As JSON: vLLM takes a word with a comma for nothing else, and a path may hold one.
    modules = [json.dumps({"name": adapter.name, "path": adapter.path}) for adapter in model.adapters]
    return [*args, "--lora-modules", *modules]


def _build_retention(resolved: Resolved) -> dict[str, Any]:
    """Keys of the connector's ``settings.py``, of which the resource sets none, some or all."""
    retention = resolved.retention
    options = {
        "bidikv_retention": retention.policy,
        "bidikv_retention_budget_percent": retention.budget_percent,
        "bidikv_retention_idle_seconds": retention.idle_seconds,
    }
    return {key: value for key, value in options.items() if value is not None}


def build_engine_env(resolved: Resolved, settings: ResolvedEngine) -> list[dict[str, Any]]:
    """Environment of the engine container, one entry per name.

    The user's variables replace the operator's of the same name, except PYTHONPATH, where the connector's folder goes
    first, and the owned ones, which ``validate`` refuses. An image's own PYTHONPATH is replaced: Kubernetes cannot
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
        contract.ENV_TOKEN_FILE: {"value": f"{contract.TOKEN_DIR}/{contract.TOKEN_KEY}"},
    }
    if settings.nodes > 1:
        entries["VLLM_HOST_IP"] = {"valueFrom": pod_ip}  # the address that the replica's other pods connect to
    for name, value in {**_build_fabric_env(resolved), **build_engine_user_env(resolved)}.items():
        entries[name] = {"value": value}
    if resolved.model.cache_claim_name:
        entries["HF_HOME"] = {"value": HUB_CACHE_DIR}
    if resolved.model.token_secret_name:
        secret = {"name": resolved.model.token_secret_name, "key": "token"}
        entries["HF_TOKEN"] = {"valueFrom": {"secretKeyRef": secret}}
    for name, value in user.items():
        # The API server drops an empty value; writing it would look like drift for ever.
        entries[name] = {"value": value} if value else {}
    return [{"name": name, **entry} for name, entry in entries.items()]


def _build_fabric_env(resolved: Resolved) -> Mapping[str, str]:
    if resolved.fabric.type == "TCP":
        return TCP_ENV
    return build_efa_env(resolved.fabric.instance_type, resolved.fabric.huge_pages_mebibytes)
