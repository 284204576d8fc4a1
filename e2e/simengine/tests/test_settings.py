"""What a simulated engine takes from its command line and environment, the operator's above all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bidikv_operator.build.engine import build_engine_args
from bidikv_operator.tests import samples
from bidikv_runtime import contract
from e2e.simengine.settings import UsageError, parse_engine, parse_length, parse_simulation

TRANSFER = contract.kv_transfer_config(fabric="TCP")
SHARING = {"PYTHONHASHSEED": "0"}


def arguments(**changes: Any) -> list[str]:
    transfer = json.dumps(TRANSFER | changes)
    return ["--prefix-caching-hash-algo", contract.HASH_ALGORITHM, "--kv-transfer-config", transfer]


def test_the_operators_command_line_is_understood() -> None:
    resolved = samples.resolve(samples.TCP)
    environment = {"PYTHONHASHSEED": "0", contract.ENV_LOOKUP_HOST: "10.1.2.3", "BIDIKV_SIM_BLOCKS": "1000"}
    engine, ignored = parse_engine(build_engine_args(resolved, resolved.prefill), environment)
    assert ignored == []
    assert engine.served_names == ("small",)
    assert (engine.host, engine.port, engine.maximum_length, engine.blocks) == ("0.0.0.0", 8000, 8192, 1000)
    assert engine.middleware == (contract.ENGINE_MIDDLEWARE,)
    assert engine.shutdown_seconds == 600
    assert engine.connector is not None
    assert (engine.connector.lookup_host, engine.connector.lookup_port) == ("10.1.2.3", contract.LOOKUP_PORT)
    assert engine.connector.state_port == contract.STATE_PORT
    resolved = samples.resolve(samples.EFA)
    engine, ignored = parse_engine(build_engine_args(resolved, resolved.decode), environment)
    assert ignored == []
    assert (engine.tensor_parallel_size, engine.backend, engine.revision) == (4, "LIBFABRIC", "abc123")


def test_flags_that_mean_nothing_here_are_ignored_with_their_values() -> None:
    engine, ignored = parse_engine(
        ["org/model", "--gpu-memory-utilization", "0.9", "--enforce-eager", "--max-num-seqs=7", "--port-range", "1"], {}
    )
    assert engine.model == "org/model"
    assert engine.served_names == ("org/model",)
    assert engine.step_requests == 7
    assert engine.port == contract.ENGINE_PORT
    assert ignored == ["--gpu-memory-utilization", "0.9", "--enforce-eager", "--port-range", "1"]


@pytest.mark.parametrize(
    ("given", "environment", "remedy"),
    [
        (arguments(kv_role="kv_consumer"), SHARING, "kv_both"),
        (arguments(kv_load_failure_policy="fail"), SHARING, "recompute"),
        (arguments(kv_connector_module_path="other"), SHARING, contract.CONNECTOR_MODULE),
        (arguments(kv_connector_extra_config={"bidikv_wrong": 1}), SHARING, "bidikv_wrong"),
        (arguments(), {}, "PYTHONHASHSEED"),
        (arguments()[2:], SHARING, contract.HASH_ALGORITHM),
        ([*arguments(), "--no-enable-prefix-caching"], SHARING, "--no-enable-prefix-caching"),
        (["--num-gpu-blocks-override", "1"], {}, "KV blocks"),
        ([], {"BIDIKV_SIM_BLOKS": "1"}, "BIDIKV_SIM_BLOCKS"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence_that_names_it(
    given: list[str], environment: dict[str, str], remedy: str
) -> None:
    with pytest.raises(UsageError, match=remedy):
        parse_engine(given, environment)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STEP_SECONDS", "-1"),
        ("STEP_SECONDS", "nan"),
        ("BLOCKS", "many"),
        ("BLOCKS", "1.5"),
        ("PREFILL_TOKENS_PER_SECOND", "0"),
    ],
)
def test_wrong_variables_are_refused(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"BIDIKV_SIM_{name}"):
        parse_simulation({f"BIDIKV_SIM_{name}": value})


@pytest.mark.parametrize(("text", "tokens"), [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5K", 1536)])
def test_lengths_are_written_as_for_vllm(text: str, tokens: int) -> None:
    assert parse_length(text) == tokens
