"""What a simulated engine is told: vLLM's command line, the connector's settings, and ``BIDIKV_SIM_*`` variables.

The command line is the operator's for a real engine. Flags that mean nothing here are named in the log and ignored:
the operator's users may pass any of vLLM's hundreds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from bidikv_runtime import contract
from bidikv_runtime.connector.settings import Settings as ConnectorSettings
from bidikv_runtime.connector.settings import SettingsError, parse_settings

PREFIX: Final = "BIDIKV_SIM_"
LOOPBACK: Final = "127.0.0.1"


class UsageError(ValueError):
    """The command line or the environment cannot be used."""


def _variable(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Simulation:
    """Each field is the variable ``BIDIKV_SIM_`` and its name in capitals. The defaults are fast, not a real GPU's."""

    start_seconds: float = _variable(0.2, "from the start to the first answer; vLLM loads its model meanwhile")
    prefill_tokens_per_second: float = _variable(50_000.0, "how fast prompts are computed")
    step_seconds: float = _variable(0.002, "of every step of the engine, whatever it computes")
    decode_seconds: float = _variable(0.0001, "of a step, for each request in it that generates")
    blocks: int = _variable(4096, "of the KV cache, unless --num-gpu-blocks-override says so")
    token_bytes: int = _variable(65_536, "of KV of one token")
    read_bytes_per_second: float = _variable(5e9, "at which KV is read from another engine")
    read_seconds: float = _variable(0.002, "of every read, before its first byte")
    backend: str = _variable("", "that NIXL would have loaded; unset: the configured one")
    provider: str = _variable("", "of the backend; unset: the one it should have, efa for LIBFABRIC and tcp else")
    answer_tokens: int = _variable(48, "mean length of answers that no limit ends")
    vllm_version: str = _variable("0.32.0", "that /version tells, a part of the compatibility")
    control_port: int = _variable(0, "of the faults' HTTP port; 0 for none")
    faults: str = _variable("", "the first faults, as the JSON object that the control port takes")


@dataclass(frozen=True)
class Engine:
    """One simulated engine."""

    model: str
    served_names: tuple[str, ...]
    revision: str
    dtype: str
    host: str
    port: int
    tensor_parallel_size: int
    block_size: int
    blocks: int
    maximum_length: int
    """Tokens of prompt and answer."""
    step_tokens: int
    """Most tokens of one step."""
    step_requests: int
    """Most requests of one step."""
    shutdown_seconds: float
    middleware: tuple[str, ...]
    tells_cached: bool
    """``--enable-prompt-tokens-details``."""
    hash_seed: str
    connector: ConnectorSettings | None
    """None without ``--kv-transfer-config``: an engine that shares no KV."""
    backend: str
    """NIXL's, as the connector's configuration names it."""
    side_channel_host: str
    side_channel_port: int
    simulation: Simulation


def parse_simulation(environment: Mapping[str, str]) -> Simulation:
    """The variables.

    Raises:
        UsageError: one sentence that names the variable and the remedy.
    """
    known = {PREFIX + item.name.upper(): item for item in fields(Simulation)}
    if unknown := sorted(name for name in environment if name.startswith(PREFIX) and name not in known):
        raise UsageError(f"{unknown[0]} is unknown: use one of {', '.join(sorted(known))}")
    values: dict[str, Any] = {}
    for name, item in known.items():
        if (text := environment.get(name)) is None:
            continue
        kind: Callable[[str], Any] = type(item.default)
        try:
            value = kind(text)
        except ValueError:
            raise UsageError(f"{name} is {text!r}: set it to a number") from None
        if not isinstance(value, str) and not 0 <= value < float("inf"):
            raise UsageError(f"{name} is {text!r}: set it to a number of at least 0")
        values[item.name] = value
    for name in ("prefill_tokens_per_second", "read_bytes_per_second"):
        if values.get(name) == 0:
            raise UsageError(f"{PREFIX}{name.upper()} is 0: set it to a number above 0")
    return Simulation(**values)


def parse_engine(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[Engine, list[str]]:
    """The engine, and the arguments that mean nothing here.

    Raises:
        UsageError: one sentence.
        SystemExit: argparse's usage errors, with vLLM's status 2.
    """
    # No abbreviations: vLLM has hundreds of flags, and --port-something is none of ours.
    parser = argparse.ArgumentParser(prog="simengine", allow_abbrev=False)
    parser.add_argument("--model", default="simulated")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--revision", default="None")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=contract.ENGINE_PORT)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-gpu-blocks-override", type=int)
    parser.add_argument("--max-model-len", type=parse_length, default=32_768)
    parser.add_argument("--max-num-batched-tokens", type=parse_length, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--shutdown-timeout", type=float, default=0)
    parser.add_argument("--prefix-caching-hash-algo", default="sha256")
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--enable-prompt-tokens-details", action="store_true")
    parser.add_argument("--kv-transfer-config", type=json.loads)
    parser.add_argument("--middleware", action="append", default=[])
    # As vllm serve takes it. Elsewhere a word without a flag is the value of one that is ignored.
    tag = [*arguments[:1]] if arguments and not arguments[0].startswith("-") else []
    given, ignored = parser.parse_known_args(arguments[len(tag) :])
    simulation = parse_simulation(environment)
    model = tag[0] if tag else given.model
    side_channel_host = environment.get("VLLM_NIXL_SIDE_CHANNEL_HOST", LOOPBACK)
    connector, backend = None, "UCX"
    if given.kv_transfer_config is not None:
        _check_transfer(given, environment)
        extra = given.kv_transfer_config.get("kv_connector_extra_config", {})
        backend = extra.get("backends", [backend])[0]
        try:
            connector = parse_settings(extra, environment, side_channel_host)
        except SettingsError as error:
            raise UsageError(str(error)) from None
    blocks = given.num_gpu_blocks_override or simulation.blocks
    for name, number in (("--block-size", given.block_size), ("KV blocks", blocks - 1)):
        if number < 1:
            raise UsageError(f"there are too few {name}: set a larger number")
    engine = Engine(
        model=model,
        served_names=tuple(given.served_model_name or [model]),
        revision=given.revision,
        dtype=given.dtype,
        host=given.host,
        port=given.port,
        tensor_parallel_size=given.tensor_parallel_size,
        block_size=given.block_size,
        blocks=blocks,
        maximum_length=given.max_model_len,
        step_tokens=given.max_num_batched_tokens,
        step_requests=given.max_num_seqs,
        shutdown_seconds=given.shutdown_timeout,
        middleware=tuple(given.middleware),
        tells_cached=given.enable_prompt_tokens_details,
        hash_seed=environment.get("PYTHONHASHSEED", "vllm-none-hash"),
        connector=connector,
        backend=backend,
        side_channel_host=side_channel_host,
        side_channel_port=int(environment.get("VLLM_NIXL_SIDE_CHANNEL_PORT", contract.SIDE_CHANNEL_PORT)),
        simulation=simulation,
    )
    return engine, ignored


def parse_length(text: str) -> int:
    """A number of tokens as vLLM takes it: ``1k`` is 1000, ``1K`` is 1024."""
    scale = {"k": 1000, "m": 10**6, "K": 1024, "M": 2**20}.get(text[-1:], 0)
    return int(float(text[:-1]) * scale) if scale else int(text)


def _check_transfer(given: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """What the connector refuses of a real engine (``compatibility.validate_engine``), as far as it exists here."""
    transfer: Mapping[str, Any] = given.kv_transfer_config
    if transfer.get("kv_connector_module_path") != contract.CONNECTOR_MODULE:
        raise UsageError(f"kv_connector_module_path is no {contract.CONNECTOR_MODULE}: set it in --kv-transfer-config")
    if not given.enable_prefix_caching:
        raise UsageError("prefix caching is off: remove --no-enable-prefix-caching")
    if given.prefix_caching_hash_algo != contract.HASH_ALGORITHM:
        raise UsageError(f"set --prefix-caching-hash-algo to {contract.HASH_ALGORITHM}")
    if not environment.get("PYTHONHASHSEED", "").isdigit():
        raise UsageError(f"PYTHONHASHSEED is not a number: set it to {contract.HASH_SEED}")
    for key, value in (("kv_role", "kv_both"), ("kv_load_failure_policy", "recompute")):
        if transfer.get(key) != value:
            raise UsageError(f"{key} is {transfer.get(key)!r}: set it to {value!r} in --kv-transfer-config")
