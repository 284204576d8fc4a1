"""The command line and environment of vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from bidikv_operator.build import engine
from bidikv_operator.build.engine import build_engine_args, build_engine_env
from bidikv_operator.resolved import Resolved, ResolvedAdapter, ResolvedRetention
from bidikv_operator.tests.samples import EFA, TCP, resolve
from bidikv_runtime import contract


def with_decode(resolved: Resolved, **changes: Any) -> Resolved:
    return replace(resolved, decode=replace(resolved.decode, **changes))


def args_of(resolved: Resolved, *, is_worker: bool = False) -> list[str]:
    return build_engine_args(resolved, resolved.decode, is_worker=is_worker)


def value_of(args: list[str], flag: str) -> str:
    assert args.count(flag) == 1
    return args[args.index(flag) + 1]


def env_of(resolved: Resolved) -> dict[str, Any]:
    entries = build_engine_env(resolved, resolved.decode)
    assert len({entry["name"] for entry in entries}) == len(entries)
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}


def adapters(count: int) -> tuple[ResolvedAdapter, ...]:
    return tuple(ResolvedAdapter(name=f"a{index}", path=f"/adapters/{index}") for index in range(count))


NEW_FLAGS = ("--enable-lora", "--data-parallel-size", "--enable-expert-parallel", "--nnodes", "--headless")


def test_what_is_not_asked_for_adds_no_flag() -> None:
    args = args_of(resolve(TCP))
    assert not [flag for flag in NEW_FLAGS if flag in args]
    extra = json.loads(value_of(args, "--kv-transfer-config"))["kv_connector_extra_config"]
    assert not [key for key in extra if "retention" in key]


def test_parallelism() -> None:
    resolved = with_decode(resolve(EFA), tensor_parallel_size=2, data_parallel_size=4, expert_parallel=True)
    args = args_of(resolved)
    assert value_of(args, "--tensor-parallel-size") == "2"
    assert value_of(args, "--data-parallel-size") == "4"
    assert "--enable-expert-parallel" in args


def test_pods_of_one_replica_differ_in_their_rank_only() -> None:
    resolved = with_decode(resolve(EFA), tensor_parallel_size=16, nodes=2)
    first, worker = args_of(resolved), args_of(resolved, is_worker=True)
    assert (value_of(first, "--node-rank"), value_of(worker, "--node-rank")) == ("0", "$(LWS_WORKER_INDEX)")
    assert [(one, other) for one, other in zip(first, worker, strict=True) if one != other] == [
        ("0", "$(LWS_WORKER_INDEX)")
    ]
    assert value_of(first, "--nnodes") == "2"
    assert value_of(first, "--master-addr") == "$(LWS_LEADER_ADDRESS)"
    assert env_of(resolved)["VLLM_HOST_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert "VLLM_HOST_IP" not in env_of(resolve(EFA))


@pytest.mark.parametrize(("count", "batch", "cpu"), [(1, "1", None), (8, "8", None), (9, "8", "9")])
def test_adapters(count: int, batch: str, cpu: str | None) -> None:
    resolved = resolve(TCP)
    resolved = replace(resolved, model=replace(resolved.model, adapters=adapters(count), max_lora_rank=64))
    args = args_of(resolved)
    assert "--enable-lora" in args
    assert value_of(args, "--max-loras") == batch
    assert ("--max-cpu-loras" in args) is (cpu is not None)
    assert cpu is None or value_of(args, "--max-cpu-loras") == cpu
    assert value_of(args, "--max-lora-rank") == "64"
    first = args.index("--lora-modules") + 1
    modules = [json.loads(word) for word in args[first : first + count]]
    assert modules == [{"name": f"a{index}", "path": f"/adapters/{index}"} for index in range(count)]
    assert args[first + count].startswith("--")


@pytest.mark.parametrize(
    ("retention", "expected"),
    [
        (ResolvedRetention(), {}),
        (ResolvedRetention(policy="LRU"), {"bidikv_retention": "LRU"}),
        (
            ResolvedRetention(policy="SessionAware", budget_percent=30, idle_seconds=60),
            {
                "bidikv_retention": "SessionAware",
                "bidikv_retention_budget_percent": 30,
                "bidikv_retention_idle_seconds": 60,
            },
        ),
    ],
)
def test_retention_reaches_the_connector(retention: ResolvedRetention, expected: dict[str, Any]) -> None:
    config = json.loads(value_of(args_of(replace(resolve(TCP), retention=retention)), "--kv-transfer-config"))
    assert config == contract.kv_transfer_config(fabric="TCP", options=expected)


def test_the_user_s_arguments_come_last() -> None:
    resolved = with_decode(resolve(TCP), extra_args=("--dtype", "float32"))
    assert args_of(resolved)[-2:] == ["--dtype", "float32"]


def test_tokens_are_read_from_the_mounted_secret() -> None:
    assert env_of(resolve(TCP))[contract.ENV_TOKEN_FILE] == f"{contract.TOKEN_DIR}/{contract.TOKEN_KEY}"


def test_downloads_are_kept_on_the_claim() -> None:
    resolved = resolve(EFA)
    assert "HF_HOME" not in env_of(resolved)
    resolved = replace(resolved, model=replace(resolved.model, cache_claim_name="cache"))
    assert env_of(resolved)["HF_HOME"] == engine.HUB_CACHE_DIR


def test_the_user_s_variable_wins_over_a_derived_one() -> None:
    resolved = with_decode(resolve(TCP), env=(("HOME", "/elsewhere"), ("EMPTY", "")))
    env = env_of(resolved)
    assert env["HOME"] == "/elsewhere"
    assert env["USER"] == "bidikv"
    assert env["EMPTY"] is None, "the API server drops an empty value"
