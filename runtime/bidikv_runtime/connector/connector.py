"""The class that vLLM loads: upstream's NIXL connector with our scheduler and worker sides.

It must be called ``NixlConnector``: vLLM 0.32 decides several things by that name (config/vllm.py, platforms/cpu.py).
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector

from bidikv_runtime.connector.metadata import WorkerReport
from bidikv_runtime.connector.scheduler import VerifiedReadScheduler
from bidikv_runtime.connector.settings import parse_settings
from bidikv_runtime.connector.stats import VerifiedReadMetrics, VerifiedReadStats
from bidikv_runtime.connector.worker import VerifiedReadWorker


class NixlConnector(NixlPullConnector):  # type: ignore[misc]
    """Verified one-sided reads in both directions."""

    scheduler_class: ClassVar[type[VerifiedReadScheduler]] = VerifiedReadScheduler
    worker_class: ClassVar[type[VerifiedReadWorker]] = VerifiedReadWorker

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.connector_scheduler: Any
        self.connector_worker: Any
        # Past NixlPullConnector's own constructor: it would build upstream's sides, with a NIXL agent of its own.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings = parse_settings(extra_config, os.environ, envs.VLLM_NIXL_SIDE_CHANNEL_HOST)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = self.scheduler_class(vllm_config, self.engine_id, kv_cache_config, settings)
        else:
            self.connector_worker = self.worker_class(vllm_config, self.engine_id, kv_cache_config, settings)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: whatever is not published is computed by its reader."""
        return False

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.connector_scheduler.bind_block_pool(gpu_block_pool)

    def reset_cache(self) -> bool:
        """Part of vLLM's cache reset: nothing that was published stays readable."""
        if self.connector_scheduler is not None:
            self.connector_scheduler.clear_publications()
        return True

    def build_connector_worker_meta(self) -> WorkerReport | None:
        report: WorkerReport | None = self.connector_worker.build_connector_worker_meta()
        return report

    def get_kv_connector_stats(self) -> VerifiedReadStats | None:
        if self.connector_scheduler is not None:
            scheduled: VerifiedReadStats | None = self.connector_scheduler.get_kv_connector_stats()
            return scheduled
        read: VerifiedReadStats | None = self.connector_worker.get_kv_connector_stats()
        return read

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> VerifiedReadStats:
        return VerifiedReadStats() if data is None else VerifiedReadStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> VerifiedReadMetrics:
        return VerifiedReadMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
