"""The product's connector in an engine with multi-head latent attention on CPU, with its prefix cache on.

vLLM 0.32 switches the prefix cache off for such models on CPUs without AMX, because its reference kernel computes no
prompt that has cached tokens before it, and the connector refuses such an engine. Loaded by its
``kv_connector_module_path``, this one switches the cache on again, so that KV is read. What the engine then answers is
not to be trusted (measured: log-probabilities off by 0.37 after a hit in its own cache), hence ``KvDigests``.
"""

from __future__ import annotations

import hashlib
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from bidikv_runtime.connector import connector


class NixlConnector(connector.NixlConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        # The scheduler makes its connector before its KV cache manager.
        vllm_config.cache_config.enable_prefix_caching = True
        super().__init__(vllm_config, role, kv_cache_config)


class KvDigests:
    """Mixed into vLLM's worker by ``--worker-extension-cls``."""

    def kv_digests(self) -> list[str]:
        """Digest of each block that holds anything, over all layers, of this rank."""
        worker = get_kv_transfer_group().connector_worker
        caches = [cache for _, cache in sorted(worker.device_kv_caches.items())]
        blocks = [[cache[block].contiguous() for cache in caches] for block in range(caches[0].shape[0])]
        return [
            hashlib.sha256(b"".join(layer.numpy().tobytes() for layer in layers)).hexdigest()
            for layers in blocks
            if all(bool(layer.any()) for layer in layers)
        ]
