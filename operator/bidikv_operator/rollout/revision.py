"""What an engine's revision is: two hashes over what the user wrote. Pure; standard library only.

- The *group* covers what the exchange of KV depends on, in either role: another one means that old and new engines must
  not be paired, so both roles get new sets of pods, in lockstep (``plan.py``).
- The *input* of a role covers everything that its pod template is built from. The template is stored under it
  (``build/revision.py``) and used until the input changes, so that an operator with other builders or another default
  image restarts no engine.

Invariants, which tests with literal hashes guard: unset and empty fields do not enter, so a field that a later version
adds changes no existing hash; what is not known to be harmless counts. The hashes are names of objects in users'
clusters: a change of this module that moves one restarts every engine there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

GROUP_LENGTH: Final = 8
INPUT_LENGTH: Final = 10

HARMLESS_FLAGS: Final = frozenset(
    {
        "--aggregate-engine-logging",
        "--allow-credentials",
        "--allowed-headers",
        "--allowed-methods",
        "--allowed-origins",
        "--api-key",
        "--api-server-count",
        "--async-scheduling",
        "--chat-template",
        "--chat-template-content-format",
        "--collect-detailed-traces",
        "--compilation-config",
        "--cudagraph-capture-sizes",
        "--default-chat-template-kwargs",
        "--disable-access-log-for-endpoints",
        "--disable-custom-all-reduce",
        "--disable-fastapi-docs",
        "--disable-log-stats",
        "--disable-uvicorn-access-log",
        "--distributed-executor-backend",
        "--download-dir",
        "--enable-auto-tool-choice",
        "--enable-chunked-prefill",
        "--enable-expert-parallel",
        "--enable-force-include-usage",
        "--enable-log-deltas",
        "--enable-log-outputs",
        "--enable-log-requests",
        "--enable-prompt-tokens-details",
        "--enable-request-id-headers",
        "--enable-server-load-tracking",
        "--enforce-eager",
        "--generation-config",
        "--gpu-memory-utilization",
        "--h11-max-header-count",
        "--h11-max-incomplete-event-size",
        "--kv-cache-memory-bytes",
        "--kv-cache-metrics",
        "--kv-cache-metrics-sample",
        "--log-config-file",
        "--log-error-stack",
        "--log-level",
        "--long-prefill-token-threshold",
        "--max-cpu-loras",
        "--max-cudagraph-capture-size",
        "--max-log-len",
        "--max-logprobs",
        "--max-loras",
        "--max-num-batched-tokens",
        "--max-num-queued-reqs",
        "--max-num-queued-tokens",
        "--max-num-seqs",
        "--num-gpu-blocks-override",
        "--optimization-level",
        "--otlp-traces-endpoint",
        "--override-generation-config",
        "--reasoning-parser",
        "--renderer-num-workers",
        "--response-role",
        "--root-path",
        "--scheduling-policy",
        "--show-hidden-metrics-for-version",
        "--sse-keep-alive-interval",
        "--stream-interval",
        "--tool-call-parser",
        "--use-tqdm-on-load",
        "--uvicorn-log-level",
    }
)
"""vLLM flags that change neither the content nor the layout of KV: capacity, scheduling, logs, the HTTP side."""

HARMLESS_ENV: Final = frozenset(
    {
        "FI_LOG_LEVEL",
        "HF_HUB_DOWNLOAD_TIMEOUT",
        "HF_HUB_ENABLE_HF_TRANSFER",
        "NCCL_DEBUG",
        "NIXL_LOG_LEVEL",
        "OMP_NUM_THREADS",
        "PYTHONUNBUFFERED",
        "TZ",
        "UCX_LOG_LEVEL",
        "VLLM_LOGGING_COLOR",
        "VLLM_LOGGING_LEVEL",
        "VLLM_LOG_STATS_INTERVAL",
        "VLLM_SERVER_DEV_MODE",
    }
)

ROLES: Final = ("prefill", "decode")
NOT_OF_TEMPLATES: Final = frozenset(
    {*ROLES, "router", "autoscaling", "monitoring", "updateStrategy", "security", "healing", "paused"}
)
"""Parts of the spec that engines' templates do not depend on as a whole; ``compute_input`` adds what they do."""


@dataclass(frozen=True)
class Identity:
    """Names of what a spec asks for."""

    group: str
    prefill_input: str
    decode_input: str

    def input_of(self, role: str) -> str:
        return self.prefill_input if role == "prefill" else self.decode_input


def compute_identity(spec: Mapping[str, Any]) -> Identity:
    """The hashes of a spec in API form, as the user wrote it."""
    return Identity(compute_group(spec), compute_input(spec, "prefill"), compute_input(spec, "decode"))


def compute_group(spec: Mapping[str, Any]) -> str:
    """``GROUP_LENGTH`` hex digits. Equal means: made to exchange KV; engines then check each other all the same.

    Out of it stay the tensor parallel size (unequal sizes pair), adapters (block hashes cover them) and everything
    that only one pod feels.
    """
    model, fabric = _at(spec, "model", "source"), _at(spec, "fabric", "type")
    if isinstance(model, Mapping) and isinstance(model.get("huggingFace"), Mapping):
        hub = {key: value for key, value in model["huggingFace"].items() if key != "tokenSecretName"}
        model = {**model, "huggingFace": hub}
    return _hash(
        {
            "image": spec.get("image"),
            "runtime": spec.get("runtime"),
            "source": model,
            "fabric": fabric,
            **{role: _describe_role(spec.get(role) or {}) for role in ROLES},
        },
        GROUP_LENGTH,
    )


def compute_input(spec: Mapping[str, Any], role: str) -> str:
    """``INPUT_LENGTH`` hex digits over all that the pod template of an engine role is built from."""
    own = {key: value for key, value in (spec.get(role) or {}).items() if key != "replicas"}
    fabric = {key: value for key, value in (spec.get("fabric") or {}).items() if key != "verification"}
    rest = {key: value for key, value in spec.items() if key not in NOT_OF_TEMPLATES}
    return _hash(
        {
            **rest,
            "fabric": fabric,
            "kvReuse": {"retention": _at(spec, "kvReuse", "retention")},  # the mode is the router's alone
            "role": role,
            "engine": own,
            "drainSeconds": _at(spec, "updateStrategy", "drainSeconds"),
            "podSecurity": _at(spec, "security", "podSecurity"),
        },
        INPUT_LENGTH,
    )


def choose_telling_arguments(arguments: Iterable[str]) -> list[str]:
    """``arguments`` without the harmless flags and their values, in vLLM's spelling with dashes."""
    telling: list[str] = []
    is_harmless = False
    for argument in arguments:
        if argument.startswith("--") or (argument.startswith("-") and argument[1:2].isalpha()):  # not -1, a value
            flag, separator, value = argument.partition("=")
            flag = flag.replace("_", "-")
            name = flag.split(".", 1)[0]
            is_harmless = name in HARMLESS_FLAGS or name.replace("--no-", "--", 1) in HARMLESS_FLAGS
            argument = f"{flag}{separator}{value}"
        if not is_harmless:
            telling.append(argument)
    return telling


def _describe_role(engine: Mapping[str, Any]) -> dict[str, Any]:
    """What KV depends on in one role. The number of nodes is in it only because it changes the kind of the set."""
    nodes = engine.get("nodesPerReplica")
    return {
        "args": choose_telling_arguments(engine.get("extraArgs") or ()),
        "env": _describe_env(engine.get("env")),
        "container": _describe_container(_at(engine, "podTemplate", "spec", "containers")),
        "nodes": nodes if nodes != 1 else None,
    }


def _describe_container(containers: Any) -> dict[str, Any]:
    """Of an override: what replaces the engine's program. Damaged overrides are ``validate``'s to refuse."""
    for container in containers if isinstance(containers, list) else ():
        if isinstance(container, Mapping) and container.get("name") == "engine":
            return {
                "image": container.get("image"),
                "command": container.get("command"),
                "env": _describe_env(container.get("env")),
            }
    return {}


def _describe_env(entries: Any) -> list[Any]:
    """Sorted by name: their order says nothing."""
    named = [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
    telling = [dict(entry) for entry in named if entry.get("name") not in HARMLESS_ENV]
    return sorted(telling, key=lambda entry: str(entry.get("name")))


def _at(value: Any, *path: str) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _drop_empty(value: Any) -> Any:
    """Without absent and empty parts, so that ``{}``, ``[]`` and an unset field are the same."""
    if isinstance(value, Mapping):
        kept = {key: _drop_empty(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item is not None and item != {} and item != []}
    if isinstance(value, list | tuple):
        return [_drop_empty(item) for item in value]
    return value


def _hash(value: Any, length: int) -> str:
    text = json.dumps(_drop_empty(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]
