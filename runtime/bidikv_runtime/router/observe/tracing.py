"""Switches tracing on, if OpenTelemetry is installed.

Why apart from ``spans``: OpenTelemetry costs 4 MB of memory and half a second of start, which a router without traces
does not pay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bidikv_runtime.router.config import ConfigError

if TYPE_CHECKING:
    from bidikv_runtime.router.observe.spans import Tracer


def build_tracer(endpoint: str) -> Tracer:
    """What exports to ``endpoint`` (OTLP/HTTP).

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    try:
        from bidikv_runtime.router.observe.spans import Tracer
    except ImportError as error:
        raise ConfigError(
            f"trace_endpoint is set, but {error.name} is not installed; install bidikv[tracing], or leave it empty."
        ) from error
    return Tracer(endpoint)
