"""Engines that must not exchange KV do not, and engines that cannot run the protocol do not start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bidikv_runtime import contract
from bidikv_runtime.connector.compatibility import (
    Compatibility,
    UnsupportedEngineError,
    compute_compatibility,
    validate_engine,
)

ENVIRONMENT = {"PYTHONHASHSEED": "0"}


def config(**changes: Any) -> Any:
    """The parts of vLLM's configuration that matter; ``part__field=value`` changes one."""
    parts: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": "org/model",
            "revision": "main",
            "dtype": "torch.bfloat16",
            "quantization": None,
            "hf_config": SimpleNamespace(to_dict=lambda: {"layers": 8}),
        },
        "cache_config": {
            "cache_dtype": "auto",
            "block_size": 16,
            "enable_prefix_caching": True,
            "prefix_caching_hash_algo": contract.HASH_ALGORITHM,
        },
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
        },
        "kv_transfer_config": {
            "kv_load_failure_policy": "recompute",
            "kv_role": "kv_both",
            "kv_buffer_device": "cuda",
        },
    }
    for name, value in changes.items():
        part, field = name.split("__")
        parts[part][field] = value
    return SimpleNamespace(**{part: SimpleNamespace(**fields) for part, fields in parts.items()})


def compatibility(environment: dict[str, str] = ENVIRONMENT, vllm: str = "0.32.0", **changes: Any) -> Compatibility:
    return compute_compatibility(config(**changes), vllm, environment)


def test_equal_engines_are_compatible() -> None:
    assert compatibility().digest() == compatibility().digest()
    assert len(compatibility().digest()) == 16


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (compatibility(model_config__model="org/other"), "model"),
        (compatibility(model_config__revision="v2"), "revision"),
        (compatibility(model_config__hf_config=SimpleNamespace(to_dict=lambda: {"layers": 9})), "model_config"),
        (compatibility(model_config__dtype="torch.float16"), "dtype"),
        (compatibility(model_config__quantization="fp8"), "quantization"),
        (compatibility(cache_config__cache_dtype="fp8"), "kv_cache_dtype"),
        (compatibility(cache_config__block_size=32), "block_size"),
        (compatibility(cache_config__prefix_caching_hash_algo="sha256"), "hash_algorithm"),
        (compatibility({"PYTHONHASHSEED": "1"}), "hash_seed"),
        (compatibility(parallel_config__tensor_parallel_size=2), "tensor_parallel_size"),
        (compatibility(vllm="0.32.1"), "vllm"),
    ],
)
def test_each_difference_counts_and_is_named(other: Compatibility, field: str) -> None:
    mine = compatibility()
    assert mine.digest() != other.digest()
    explanation = mine.explain(other.describe())
    assert explanation.startswith(f"{field} is ")
    assert ";" not in explanation


def test_fields_that_only_one_side_knows_are_named() -> None:
    assert "new is 'absent' here and 'x' there" in compatibility().explain(compatibility().describe() | {"new": "x"})


@pytest.mark.parametrize("vllm", ["0.32.0", "0.32.7", "0.32.0+cu130"])
@pytest.mark.parametrize("spec", ["FullAttentionSpec", "MLAAttentionSpec"])
def test_supported_engines_start(vllm: str, spec: str) -> None:
    validate_engine(config(), vllm, ENVIRONMENT, "cuda", [spec])


def test_cpu_engines_buffer_on_the_cpu() -> None:
    validate_engine(
        config(kv_transfer_config__kv_buffer_device="cpu"), "0.32.0", ENVIRONMENT, "cpu", ["FullAttentionSpec"]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vllm": "0.33.0"}, "vLLM is 0.33.0: this connector supports 0.32.x"),
        ({"vllm": "0.3.2"}, "vLLM is 0.3.2"),
        ({"cache_config__enable_prefix_caching": False}, "--enable-prefix-caching"),
        ({"cache_config__prefix_caching_hash_algo": "xxhash"}, "--prefix-caching-hash-algo sha256_cbor"),
        ({"environment": {}}, "PYTHONHASHSEED=0"),
        ({"environment": {"PYTHONHASHSEED": "random"}}, "PYTHONHASHSEED is not set to a number"),
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, "set it to 'recompute'"),
        ({"kv_transfer_config__kv_role": "kv_producer"}, "set it to 'kv_both'"),
        ({"kv_transfer_config__kv_buffer_device": "cpu"}, "kv_buffer_device is 'cpu': remove it"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallel size is 2: set it to 1"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode context parallel size is 2"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill context parallel size is 2"),
        ({"specs": ["FullAttentionSpec", "SlidingWindowSpec"]}, "2 KV cache groups"),
        ({"specs": ["MambaSpec"]}, "is a MambaSpec: only full attention"),
        ({"specs": []}, "0 KV cache groups"),
    ],
)
def test_engines_that_cannot_run_the_protocol_are_refused(changes: dict[str, Any], message: str) -> None:
    vllm = changes.pop("vllm", "0.32.0")
    environment = changes.pop("environment", ENVIRONMENT)
    specs = changes.pop("specs", ["FullAttentionSpec"])
    with pytest.raises(UnsupportedEngineError, match=message):
        validate_engine(config(**changes), vllm, environment, "cuda", specs)
