"""What the router is told, in a variable of its pod: so that what a pod runs with is what its template says."""

from __future__ import annotations

from typing import Final

from bidikv_operator import names
from bidikv_operator.build.meta import role_name
from bidikv_operator.resolved import Resolved
from bidikv_runtime import contract

TLS_DIR: Final = "/etc/bidikv-tls"
"""Where the Secret of type ``kubernetes.io/tls`` is mounted."""


def build_router_config(resolved: Resolved) -> contract.RouterConfig:
    router = resolved.router
    return contract.RouterConfig(
        namespace=resolved.namespace,
        prefill_service=role_name(resolved, names.PREFILL),
        decode_service=role_name(resolved, names.DECODE),
        served_model_name=resolved.model.served_name,
        reuse=resolved.reuse,
        prefill_ranks=resolved.prefill.data_parallel_size,
        decode_ranks=resolved.decode.data_parallel_size,
        ttft_objective_seconds=_seconds(resolved.scaling.objectives.time_to_first_token_milliseconds),
        itl_objective_seconds=_seconds(resolved.scaling.objectives.inter_token_latency_milliseconds),
        local_limit_tokens=router.local_limit_tokens,
        missing_prefill=router.missing_prefill,
        continue_streams=router.continue_streams,
        cache_salt_by_tenant=router.isolate_tenants,
        tls_dir=TLS_DIR if router.tls_secret_name is not None else "",
        access_log=router.access_log,
        trace_endpoint=router.trace_endpoint,
        trace_ratio=router.trace_percent / 100,
        debug=router.debug,
    )


def _seconds(milliseconds: int | None) -> float:
    """0 is the router's word for no objective."""
    return 0.0 if milliseconds is None else milliseconds / 1000
