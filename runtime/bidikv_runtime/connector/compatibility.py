"""Which engines may exchange KV, and which engines the connector supports at all.

A block hash covers tokens, adapters, multimodal items and salts, but neither the model nor how its KV is laid out. So
every lookup carries a digest of these, and a source answers only its equal. The NIXL handshake compares some of them
again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from bidikv_runtime import contract

SUPPORTED_VLLM: Final = "0.32"
"""The connector builds on internals of vLLM (scheduler, block pool, NIXL connector); minor versions change them."""
SUPPORTED_SPECS: Final = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})


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
    hash_algorithm: str
    hash_seed: str
    tensor_parallel_size: str
    vllm: str

    def digest(self) -> bytes:
        """Equal for equal values; 16 bytes."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()[:16]

    def describe(self) -> dict[str, str]:
        return asdict(self)

    def explain(self, other: Mapping[str, str]) -> str:
        """In what the source ``other`` differs from this engine, as the end of a sentence."""
        mine = asdict(self)
        differences = [
            f"{name} is {mine.get(name, 'absent')!r} here and {other.get(name, 'absent')!r} there"
            for name in sorted(mine.keys() | other.keys())
            if mine.get(name) != other.get(name)
        ]
        return "; ".join(differences) or "nothing that this version compares"


def compute_compatibility(config: Any, vllm_version: str, environment: Mapping[str, str]) -> Compatibility:
    """Compatibility of the engine that runs with vLLM's ``config`` (a ``VllmConfig``)."""
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
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        hash_seed=environment.get("PYTHONHASHSEED", ""),
        tensor_parallel_size=str(config.parallel_config.tensor_parallel_size),
        vllm=vllm_version,
    )


def validate_engine(
    config: Any,
    vllm_version: str,
    environment: Mapping[str, str],
    device_type: str,
    kv_specs: Sequence[str],
) -> None:
    """Refuse an engine whose configuration the protocol does not cover.

    Args:
        config: vLLM's ``VllmConfig``.
        vllm_version: version of the running vLLM.
        environment: of the engine process.
        device_type: vLLM's platform, ``cpu`` or ``cuda``.
        kv_specs: class name of the KV cache spec of each cache group.

    Raises:
        UnsupportedEngineError: one sentence that names the setting and the remedy.
    """
    cache, parallel, transfer = config.cache_config, config.parallel_config, config.kv_transfer_config
    if vllm_version.split("+")[0].split(".")[:2] != SUPPORTED_VLLM.split("."):
        raise UnsupportedEngineError(
            f"vLLM is {vllm_version}: this connector supports {SUPPORTED_VLLM}.x, use an image of that version"
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
    if len(kv_specs) != 1:
        raise UnsupportedEngineError(
            f"the model has {len(kv_specs)} KV cache groups ({', '.join(kv_specs)}): only models with one group of "
            "full attention are supported, no sliding windows or state-space layers"
        )
    if kv_specs[0] not in SUPPORTED_SPECS:
        raise UnsupportedEngineError(
            f"the model's KV cache is a {kv_specs[0]}: only full attention is supported "
            f"({', '.join(sorted(SUPPORTED_SPECS))})"
        )
