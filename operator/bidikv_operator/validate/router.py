"""``spec.router``."""

from __future__ import annotations

from typing import Final

from bidikv_operator import names, resolved
from bidikv_operator.api.router import RouterLimits, RouterService, RouterSpec
from bidikv_operator.validate.labels import check_label_keys, check_owned_keys
from bidikv_operator.validate.pods import resolve_resources, resolve_scheduling
from bidikv_operator.validate.podtemplate import check_pod_template
from bidikv_operator.validate.problem import Problem, Problems
from bidikv_runtime import contract

DEFAULT_REPLICAS: Final = 2
DEFAULT_LOCAL_LIMIT_TOKENS: Final = 512
LIMIT_FLAGS: Final = {
    "maximum_concurrent_requests": "max-in-flight",
    "maximum_queued_turns": "max-queued",
    "queue_seconds": "queue-seconds",
    "maximum_prefills_per_engine": "max-prefills-per-engine",
    "maximum_body_bytes": "max-body-bytes",
    "maximum_buffered_bytes": "max-buffered-bytes",
    "prefill_silence_seconds": "prefill-seconds",
    "decode_first_byte_seconds": "decode-first-byte-seconds",
    "decode_silence_seconds": "decode-idle-seconds",
}
"""Field of ``RouterLimits`` -> flag of the router (its ``limits.py``), without ``--``."""
OWNED_ENV: Final = (contract.ENV_ROUTER_CONFIG, contract.ENV_TOKEN_FILE)
BUFFERED_BYTES: Final = 512 * 1024 * 1024
"""The router's own default of ``max-buffered-bytes``."""


def resolve_router(given: RouterSpec) -> tuple[resolved.ResolvedRouter, Problems]:
    field = "spec.router"
    template = given.pod_template or {}
    problems = check_pod_template(f"{field}.podTemplate", template, names.ROUTER_CONTAINER, owned_env=OWNED_ENV)
    scheduling, found = resolve_scheduling(f"{field}.scheduling", given.scheduling)
    problems += found
    limits, found = _resolve_limits(f"{field}.limits", given.limits or RouterLimits())
    problems += found
    service = given.service or RouterService()
    annotations = service.annotations or {}
    problems += check_label_keys(f"{field}.service.annotations", annotations)
    problems += check_owned_keys(f"{field}.service.annotations", annotations)
    percent = None if given.tracing is None else given.tracing.sample_percent
    local_limit = given.local_limit_tokens
    router = resolved.ResolvedRouter(
        replicas=DEFAULT_REPLICAS if given.replicas is None else given.replicas,
        pod_template=template,
        resources=resolve_resources(given.resources),
        scheduling=scheduling,
        local_limit_tokens=DEFAULT_LOCAL_LIMIT_TOKENS if local_limit is None else local_limit,
        missing_prefill=given.missing_prefill or "Decode",
        continue_streams=given.continue_streams == "Enabled",
        isolate_tenants=given.tenant_isolation == "Enabled",
        tls_secret_name=given.tls_secret_name,
        access_log=given.access_log == "Enabled",
        trace_endpoint="" if given.tracing is None else given.tracing.endpoint,
        trace_percent=100 if percent is None else percent,
        debug=given.debug == "Enabled",
        limits=limits,
        service_type=service.type or "ClusterIP",
        service_annotations=annotations,
    )
    return router, problems


def _resolve_limits(field: str, given: RouterLimits) -> tuple[dict[str, int], Problems]:
    limits = {flag: value for name, flag in LIMIT_FLAGS.items() if (value := getattr(given, name)) is not None}
    buffered = limits.get("max-buffered-bytes", BUFFERED_BYTES)
    if limits.get("max-body-bytes", 0) <= buffered:
        return limits, []
    return limits, [
        Problem(
            f"{field}.maximumBodyBytes",
            f"such a body could never be read, as maximumBufferedBytes is {buffered}; raise that",
        )
    ]
