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
    drops_last_block,
    explain_parallelism,
    validate_engine,
)

ENVIRONMENT = {"PYTHONHASHSEED": "0"}
UNSUPPORTED = (
    "ChunkedLocalAttentionSpec",
    "CircularBufferSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "HiSparseHotSpec",
    "HiSparseResidentSpec",
    "HiddenStateCacheSpec",
    "MambaSpec",
    "RSWASpec",
    "SinkFullAttentionSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
)
"""The other kinds of cache that vLLM 0.32 and 0.33 know."""


def config(**changes: Any) -> Any:
    """The parts of vLLM's configuration that matter; ``part__field=value`` changes one."""
    parts: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": "org/model",
            "revision": "main",
            "dtype": "torch.bfloat16",
            "quantization": None,
            "use_mla": False,
            "get_total_num_kv_heads": lambda: 8,
            "get_head_size": lambda: 128,
            "get_total_num_hidden_layers": lambda: 32,
            "hf_config": SimpleNamespace(to_dict=lambda: {"layers": 8}),
        },
        "cache_config": {
            "cache_dtype": "auto",
            "block_size": 16,
            "hash_block_size": 16,
            "kv_cache_layout": "LBHNC",
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
    speculative = changes.pop("speculative", None)
    for name, value in changes.items():
        part, field = name.split("__")
        parts[part][field] = value
    namespaces = {part: SimpleNamespace(**fields) for part, fields in parts.items()}
    return SimpleNamespace(speculative_config=speculative, **namespaces)


def drafting(method: str, model: str = "org/draft", keeps_kv: bool = True, drops: bool = True) -> Any:
    """vLLM's ``SpeculativeConfig``, as far as it matters."""
    return SimpleNamespace(
        method=method,
        draft_model_config=SimpleNamespace(model=model, revision="main"),
        uses_draft_kv_cache=lambda: keeps_kv,
        use_eagle_block_drop=lambda: drops,
    )


def spec(kind: str, **fields: Any) -> Any:
    """A KV cache spec of vLLM: its class name and the fields that matter."""
    return type(kind, (), {"non_causal": False, "tokens_per_state": 1} | fields)()


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
        (compatibility(cache_config__hash_block_size=8), "hash_block_size"),
        (compatibility(cache_config__kv_cache_layout="LBNHC"), "kv_layout"),
        (compatibility(model_config__use_mla=True), "attention"),
        (compatibility(model_config__get_total_num_kv_heads=lambda: 4), "kv_heads"),
        (compatibility(model_config__get_head_size=lambda: 64), "head_size"),
        (compatibility(model_config__get_total_num_hidden_layers=lambda: 31), "layers"),
        (compatibility(speculative=drafting("eagle3")), "drafts"),
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
    assert compatibility().explain(compatibility().describe() | {"new": "x"}) == "'new' is absent here and 'x' there"


def test_an_explanation_is_short_and_on_one_line_whatever_the_other_side_says() -> None:
    said = {f"{n}\nname": "v\n" * 2000 for n in range(64)}
    explanation = compatibility().explain(compatibility().describe() | said)
    assert len(explanation) < 20_000
    assert "\n" not in explanation


def test_the_tensor_parallel_size_may_differ() -> None:
    assert compatibility().digest() == compatibility(parallel_config__tensor_parallel_size=2).digest()


@pytest.mark.parametrize(
    ("reader", "source", "changes", "reason"),
    [
        (4, 4, {}, None),
        (3, 3, {}, None),
        (8, 2, {}, None),
        (2, 8, {}, None),
        (2, 3, {}, "tensor parallel sizes are 2 at the reader and 3 at the source: one must divide the other"),
        (4, 6, {}, "one must divide the other"),
        (2, 1, {"cache_config__kv_cache_layout": "LBNHC"}, "heads can only be split in LBHNC and BLHNC"),
        (2, 1, {"cache_config__kv_cache_layout": "LHBNC"}, "layout is LHBNC"),
        (2, 1, {"cache_config__kv_cache_layout": "BLHNC"}, None),
        (2, 1, {"cache_config__kv_cache_layout": "LBNHC", "model_config__use_mla": True}, None),
        (2, 2, {"cache_config__kv_cache_layout": "LBNHC"}, None),
        (16, 8, {}, None),
        (8, 16, {}, "the model has 8 KV heads: a reader with fewer ranks needs a source with no more ranks than heads"),
        (8, 16, {"model_config__use_mla": True}, None),
    ],
)
def test_tensor_parallel_sizes(reader: int, source: int, changes: dict[str, Any], reason: str | None) -> None:
    explanation = explain_parallelism(compatibility(**changes), reader, source)
    assert explanation == reason if reason is None else explanation is not None and reason in explanation


@pytest.mark.parametrize(
    ("speculative", "drafts", "drops"),
    [
        (None, "none", False),
        (drafting("ngram", keeps_kv=False, drops=False), "none", False),
        (drafting("draft_model", drops=False), "draft_model org/draft main", False),
        (drafting("eagle3"), "eagle3 org/draft main", True),
        (drafting("mtp"), "mtp org/draft main", True),
    ],
)
def test_drafts_count_when_they_keep_kv(speculative: Any, drafts: str, drops: bool) -> None:
    assert compatibility(speculative=speculative).drafts == drafts
    assert drops_last_block(config(speculative=speculative)) is drops


@pytest.mark.parametrize("vllm", ["0.32.0", "0.32.7", "0.32.0+cu130", "0.33.0", "0.33.1+cpu"])
@pytest.mark.parametrize(
    "spec",
    [
        spec("FullAttentionSpec"),
        spec("MLAAttentionSpec"),
        spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": spec("MLAAttentionSpec"), "b": spec("MLAAttentionSpec")}),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_supported_engines_start(vllm: str, spec: Any) -> None:
    validate_engine(config(), vllm, ENVIRONMENT, "cuda", [spec])


def test_cpu_engines_buffer_on_the_cpu() -> None:
    validate_engine(
        config(kv_transfer_config__kv_buffer_device="cpu"), "0.32.0", ENVIRONMENT, "cpu", [spec("FullAttentionSpec")]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vllm": "0.34.0"}, "vLLM is 0.34.0: this connector supports 0.32 and 0.33, use an image of such a version"),
        ({"vllm": "0.3.2"}, "vLLM is 0.3.2"),
        ({"vllm": "0.320.0"}, "vLLM is 0.320.0"),
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
        ({"specs": [spec("FullAttentionSpec"), spec("SlidingWindowSpec")]}, "2 KV cache groups .*, SlidingWindowSpec"),
        ({"specs": []}, "0 KV cache groups"),
        *(({"specs": [spec(kind)]}, f"is a {kind}: only full attention .*, use another model") for kind in UNSUPPORTED),
        (
            {"specs": [spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": spec("RSWASpec")})]},
            "is a RSWASpec: only full attention",
        ),
        ({"specs": [spec("FullAttentionSpec", non_causal=True)]}, "attends to later tokens"),
        ({"specs": [spec("MLAAttentionSpec", tokens_per_state=4)]}, "keeps one state for 4 tokens"),
    ],
)
def test_engines_that_cannot_run_the_protocol_are_refused(changes: dict[str, Any], message: str) -> None:
    vllm = changes.pop("vllm", "0.32.0")
    environment = changes.pop("environment", ENVIRONMENT)
    specs = changes.pop("specs", [spec("FullAttentionSpec")])
    with pytest.raises(UnsupportedEngineError, match=message):
        validate_engine(config(**changes), vllm, environment, "cuda", specs)
