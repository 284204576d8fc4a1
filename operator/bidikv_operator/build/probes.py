"""Probes of engines and routers."""

from __future__ import annotations

from typing import Final

from bidikv_operator.build.meta import Manifest

STARTUP_SECONDS: Final = 3600
"""A large model downloads and loads for many minutes; a pod that is not up after an hour restarts."""
PERIOD_SECONDS: Final = 10


def build_probe(
    path: str, *, failures: int, period: int = PERIOD_SECONDS, timeout: int = 5, scheme: str | None = None
) -> Manifest:
    """A probe of the port named ``http``. ``scheme`` None is HTTP; with HTTPS the kubelet checks no certificate."""
    get: Manifest = {"path": path, "port": "http"}
    if scheme is not None:
        get["scheme"] = scheme
    return {"httpGet": get, "periodSeconds": period, "timeoutSeconds": timeout, "failureThreshold": failures}


def build_engine_probes() -> Manifest:
    """vLLM answers /health only once the model is loaded. Liveness is slow on purpose: a long prefill may hold the
    process for seconds."""
    return {
        "startupProbe": build_probe("/health", failures=STARTUP_SECONDS // PERIOD_SECONDS),
        "readinessProbe": build_probe("/health", failures=3),
        "livenessProbe": build_probe("/health", failures=6, timeout=10),
    }


def build_router_probes(scheme: str | None) -> Manifest:
    """/ready turns false as soon as the router is told to stop; /health does not."""
    return {
        "startupProbe": build_probe("/health", failures=30, period=1, scheme=scheme),
        "readinessProbe": build_probe("/ready", failures=2, period=2, scheme=scheme),
        "livenessProbe": build_probe("/health", failures=6, timeout=10, scheme=scheme),
    }
