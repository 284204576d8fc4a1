"""The product's connector in an engine with multi-head latent attention on CPU, with its prefix cache on.

vLLM 0.32 switches the prefix cache off for such models on CPUs without AMX, because its reference kernel computes no
prompt that has cached tokens before it, and the connector refuses such an engine. Loaded by its
``kv_connector_module_path``, this one switches the cache on again. That is right only as long as a request that finds
cached or read tokens has exactly one token left to compute, which is the kernel's decode path.
"""

from __future__ import annotations

from typing import Any

from bidikv_runtime.connector import connector


class NixlConnector(connector.NixlConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        # The scheduler makes its connector before its KV cache manager.
        vllm_config.cache_config.enable_prefix_caching = True
        super().__init__(vllm_config, role, kv_cache_config)
