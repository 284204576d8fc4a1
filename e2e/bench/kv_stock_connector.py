"""vLLM's own NIXL connector with two corrections, so that the comparison is about the protocol.

As shipped, each engine's NIXL progress thread spins (0.5-0.7 of a core) and the worker is bound to the last core. On
two cores both make upstream's figures worse than they are on a real machine; a base line must not gain from that. The
corrections are those that the product's connector makes for itself; nothing of the protocol is touched.
"""

from __future__ import annotations

import os
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector
from vllm.distributed.nixl_utils import NixlWrapper

from bidikv_runtime.connector.agent import agent_settings

PROGRESS_DELAY_US: Final = 5000


class NixlConnector(connector.NixlConnector):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        affinity = os.sched_getaffinity(0)
        with agent_settings(NixlWrapper, PROGRESS_DELAY_US):
            super().__init__(vllm_config, role, kv_cache_config)
        os.sched_setaffinity(0, affinity)
