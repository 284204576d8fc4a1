"""Which engines may exchange KV, and which engines the connector supports at all.

A block hash covers tokens, adapters, multimodal items and salts, but neither the model nor how its KV is laid out. So
every lookup carries a digest of these, and a source answers only its equal. The tensor parallel size is apart: vLLM's
NIXL connector maps KV between some unequal sizes. The NIXL handshake compares some of all this again, in asserts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final

from bidikv_runtime import contract
from bidikv_runtime.connector import wire

SUPPORTED_VLLM: Final = ("0.32", "0.33")
"""The connector builds on internals of vLLM (scheduler, block pool, NIXL connector); minor versions change them."""
SUPPORTED_SPECS: Final = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
"""Classes of vLLM's v1/kv_cache_interface.py, by exact name: some that derive from them break what a block hash says
(RSWASpec frees blocks in the middle, SinkFullAttentionSpec adds sinks, HiddenStateCacheSpec holds no KV). The others of
0.32 and 0.33 keep no block for every token (sliding windows, chunked local attention, circular buffers, Mamba states),
have no hash of their own content (encoder-only and cross attention) or live in two pools (HiSparse)."""
UNIFORM_SPECS: Final = "UniformTypeKVCacheSpecs"
"""One group whose layers differ in size only; it is what its layers are."""
MAXIMUM_DIFFERENCES: Final = 20
"""Named in an explanation: what the other side says of itself may be anything, and goes into the log."""
TENSOR_PARALLEL_SIZE: Final = "tensor_parallel_size"


class UnsupportedEngineError(RuntimeError):
    """This engine's configuration cannot run the protocol."""


@dataclass(frozen=True)
class Compatibility:
    """Everything in which a reader and its source must be equal. All values as text."""

    model: str
    revision: str
    model_config: str
    """Digest of the model's own configuration: two checkpoints at one path are likely to differ in it."""
    dtype: str
    kv_cache_dtype: str
    quantization: str
    block_size: str
    hash_block_size: str
    """Tokens per block hash, which may be fewer than per block."""
    hash_algorithm: str
    hash_seed: str
    attention: str
    """``MLA``, or ``MHA`` for attention with heads of its own for keys and values, grouped or not."""
    kv_heads: str
    """Of all ranks together."""
    head_size: str
    layers: str
    kv_layout: str
    """vLLM's name for the order of layers, blocks, heads and tokens in memory, for example LBHNC."""
    drafts: str
    """The draft model whose KV lies in the same blocks, or ``none``."""
    vllm: str
    weights: str = "loaded"
    """As loaded at the start, or the name of those that have taken their place (``weights.watch_weights``)."""

    def digest(self) -> bytes:
        """Equal for equal values; 16 bytes."""
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()[:16]

    def describe(self) -> dict[str, str]:
        return asdict(self)

    def explain(self, other: Mapping[str, str]) -> str:
        """In what the source ``other`` differs from this engine, as the end of a sentence."""
        mine = asdict(self)
        differences = [
            f"{name if name in mine else repr(name)} is {_shorten(mine.get(name))} here and "
            f"{_shorten(other.get(name))} there"
            for name in sorted(mine.keys() | other.keys())
            if mine.get(name) != other.get(name)
        ][:MAXIMUM_DIFFERENCES]
        return "; ".join(differences) or "nothing that this version compares"


def _shorten(value: str | None) -> str:
    return "absent" if value is None else repr(value[:200])


def explain_parallelism(both: Compatibility, reader: int, source: int) -> str | None:
    """Why a reader cannot read from a source that is ``both`` too, by their tensor parallel sizes; None if it can.

    The rules are those that vLLM asserts at the handshake (``_validate_remote_agent_handshake``).
    """
    sizes = f"tensor parallel sizes are {reader} at the reader and {source} at the source"
    if reader == source:
        return None
    if max(reader, source) % min(reader, source):
        return f"{sizes}: one must divide the other"
    if both.attention == "MLA":
        return None  # every rank holds all of it
    if not both.kv_layout.endswith("HNC"):
        return f"{sizes}, and the KV cache layout is {both.kv_layout}: heads can only be split in LBHNC and BLHNC"
    if source > reader and source > int(both.kv_heads):
        return (
            f"{sizes}, and the model has {both.kv_heads} KV heads: a reader with fewer ranks needs a source with no "
            "more ranks than heads"
        )
    return None


def describe_source(compatibility: Compatibility, tensor_parallel_size: int) -> dict[str, str]:
    """What a source says of itself when it refuses."""
    return compatibility.describe() | {TENSOR_PARALLEL_SIZE: str(tensor_parallel_size)}


def explain_refusal(own: Compatibility, tensor_parallel_size: int, refused: wire.Refused) -> str:
    """Why a source refused this engine, as the end of a sentence."""
    if refused.version != wire.VERSION:
        return f"it speaks version {refused.version} of the protocol and this engine {wire.VERSION}"
    other = dict(refused.compatibility)
    size = other.pop(TENSOR_PARALLEL_SIZE, "")
    if other == own.describe() and size.isdecimal() and int(size) > 0:
        reason = explain_parallelism(own, tensor_parallel_size, int(size))
        if reason is not None:
            return reason
    return own.explain(other)


def compute_compatibility(config: Any, vllm_version: str, environment: Mapping[str, str]) -> Compatibility:
    """Compatibility of the engine that runs with vLLM's ``config`` (a ``VllmConfig``), its KV cache laid out."""
    model, cache = config.model_config, config.cache_config
    described = json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str)
    return Compatibility(
        model=str(model.model),
        revision=str(model.revision),
        model_config=hashlib.sha256(described.encode()).hexdigest()[:16],
        dtype=str(model.dtype),
        kv_cache_dtype=str(cache.cache_dtype),
        quantization=str(model.quantization),
        block_size=str(cache.block_size),
        hash_block_size=str(cache.hash_block_size),
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        hash_seed=environment.get("PYTHONHASHSEED", ""),
        attention="MLA" if model.use_mla else "MHA",
        kv_heads=str(model.get_total_num_kv_heads()),
        head_size=str(model.get_head_size()),
        layers=str(model.get_total_num_hidden_layers()),
        kv_layout=str(cache.kv_cache_layout),
        drafts=_describe_drafts(config.speculative_config),
        vllm=vllm_version,
    )


def _describe_drafts(speculative: Any) -> str:
    if speculative is None or not speculative.uses_draft_kv_cache():
        return "none"  # n-grams and the like keep no KV
    draft = speculative.draft_model_config
    return f"{speculative.method} {draft.model} {draft.revision}"


def drops_last_block(config: Any) -> bool:
    """Whether the last block of every match is to be left out, as vLLM does with its own prefix hits (``choose_parts``
    says why)."""
    speculative = config.speculative_config
    return speculative is not None and bool(speculative.use_eagle_block_drop())


def validate_engine(
    config: Any,
    vllm_version: str,
    environment: Mapping[str, str],
    device_type: str,
    kv_specs: Sequence[Any],
) -> None:
    """Refuse an engine whose configuration the protocol does not cover.

    Args:
        config: vLLM's ``VllmConfig``.
        vllm_version: version of the running vLLM.
        environment: of the engine process.
        device_type: vLLM's platform, ``cpu`` or ``cuda``.
        kv_specs: the KV cache spec of each cache group.

    Raises:
        UnsupportedEngineError: one sentence that names the setting and the remedy.
    """
    cache, parallel, transfer = config.cache_config, config.parallel_config, config.kv_transfer_config
    if ".".join(vllm_version.split("+")[0].split(".")[:2]) not in SUPPORTED_VLLM:
        raise UnsupportedEngineError(
            f"vLLM is {vllm_version}: this connector supports {' and '.join(SUPPORTED_VLLM)}, use an image of such a "
            "version"
        )
    if not cache.enable_prefix_caching:
        raise UnsupportedEngineError(
            "prefix caching is off: start vLLM with --enable-prefix-caching, KV is found by the cache's block hashes"
        )
    if cache.prefix_caching_hash_algo != contract.HASH_ALGORITHM:
        raise UnsupportedEngineError(
            f"the prefix cache hashes with {cache.prefix_caching_hash_algo!r}: start vLLM with "
            f"--prefix-caching-hash-algo {contract.HASH_ALGORITHM}, whose hashes are equal in every process"
        )
    if not environment.get("PYTHONHASHSEED", "").isdigit():
        raise UnsupportedEngineError(
            f"PYTHONHASHSEED is not set to a number: set PYTHONHASHSEED={contract.HASH_SEED} in the environment of "
            "every engine, vLLM seeds the block hashes with it"
        )
    if transfer.kv_load_failure_policy != "recompute":
        raise UnsupportedEngineError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: set it to 'recompute' at the top level of "
            "--kv-transfer-config, a block that does not validate is recomputed"
        )
    if transfer.kv_role != "kv_both":
        raise UnsupportedEngineError(
            f"kv_role is {transfer.kv_role!r}: set it to 'kv_both' in --kv-transfer-config, every engine reads and is "
            "read"
        )
    if device_type != "cpu" and transfer.kv_buffer_device == "cpu":
        raise UnsupportedEngineError(
            "kv_buffer_device is 'cpu': remove it from --kv-transfer-config, KV is read from the device's own memory"
        )
    for name, size in (
        ("pipeline", parallel.pipeline_parallel_size),
        ("decode context", parallel.decode_context_parallel_size),
        ("prefill context", parallel.prefill_context_parallel_size),
    ):
        if size != 1:
            raise UnsupportedEngineError(
                f"{name} parallel size is {size}: set it to 1, use tensor parallelism to split the model"
            )
    validate_specs(kv_specs)


def validate_specs(kv_specs: Sequence[Any]) -> None:
    """Refuse a KV cache of which a block's hash does not tell the whole content. To be called on both sides: the
    scheduler's configuration shows one layer of a group, the workers' show all.

    Raises:
        UnsupportedEngineError: one sentence that names the layers' kind and the remedy.
    """
    if len(kv_specs) != 1:
        raise UnsupportedEngineError(
            f"the model has {len(kv_specs)} KV cache groups ({', '.join(type(spec).__name__ for spec in kv_specs)}): "
            "only models with one group of full attention are supported, no sliding windows or state-space layers"
        )
    for spec in _iterate_layers(kv_specs[0]):
        kind = type(spec).__name__
        if kind not in SUPPORTED_SPECS:
            raise UnsupportedEngineError(
                f"the model's KV cache is a {kind}: only full attention is supported "
                f"({', '.join(sorted(SUPPORTED_SPECS))}), use another model"
            )
        if spec.non_causal:
            raise UnsupportedEngineError(
                "the model attends to later tokens of the prompt: its KV does not follow from the tokens before it, "
                "use another model"
            )
        if spec.tokens_per_state != 1:
            raise UnsupportedEngineError(
                f"the model's KV cache keeps one state for {spec.tokens_per_state} tokens: only one for each token is "
                "supported, use another model"
            )


def _iterate_layers(spec: Any) -> Iterator[Any]:
    if type(spec).__name__ == UNIFORM_SPECS:
        yield from spec.kv_cache_specs.values()
    else:
        yield spec
