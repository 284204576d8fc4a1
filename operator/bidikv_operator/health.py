"""What the process says about itself: /healthz, /readyz and /metrics.

Live means: no part has died silently. A process that is not live is restarted by the kubelet, relists everything and
starts afresh. Ready means: started and not stopping; a candidate that waits for the lease is live and ready.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aiohttp import web
from prometheus_client import generate_latest

from bidikv_operator.metrics import Metrics

OLDEST_KEY_LIMIT_SECONDS: Final = 600.0
WATCH_AGE_LIMIT_SECONDS: Final = 900.0
"""Every watch is re-opened after ``watch.SERVER_TIMEOUT_SECONDS`` at the latest; three times that is no coincidence."""
LEASE_IDLE_LIMIT_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Pulse:
    """The signs of life at one moment."""

    is_leader: bool
    queue_fault: str | None
    oldest_key_seconds: float
    watch_age_seconds: float
    lease_idle_seconds: float
    is_stopping: bool


def find_faults(pulse: Pulse) -> list[str]:
    """Why the process should be restarted; empty when it is well."""
    faults = []
    if pulse.queue_fault is not None:
        faults.append(pulse.queue_fault)
    if pulse.oldest_key_seconds > OLDEST_KEY_LIMIT_SECONDS:
        faults.append(f"a resource has waited {pulse.oldest_key_seconds:.0f} s for a worker")
    if pulse.is_leader and pulse.watch_age_seconds > WATCH_AGE_LIMIT_SECONDS:
        faults.append(f"a watch has not been renewed for {pulse.watch_age_seconds:.0f} s")
    if pulse.lease_idle_seconds > LEASE_IDLE_LIMIT_SECONDS:
        faults.append(f"the lease has not been attended to for {pulse.lease_idle_seconds:.0f} s")
    return faults


class HealthServer:
    """Serves the three pages from the operator's own event loop: a blocked loop fails the probe by itself."""

    def __init__(self, read_pulse: Callable[[], Pulse], refresh_metrics: Callable[[], None], metrics: Metrics) -> None:
        self._read_pulse = read_pulse
        self._refresh_metrics = refresh_metrics
        self._metrics = metrics
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (asked for, or chosen by the system for 0).

        Raises:
            OSError: the address is taken.
        """
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._serve_metrics)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, host or None, port).start()
        address = self._runner.addresses[0]
        return int(address[1])

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, request: web.Request) -> web.Response:
        faults = find_faults(self._read_pulse())
        return web.Response(status=500 if faults else 200, text="\n".join(faults or ["ok"]) + "\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        pulse = self._read_pulse()
        if pulse.is_stopping:
            return web.Response(status=503, text="stopping\n")
        return web.Response(text="ok, leading\n" if pulse.is_leader else "ok, waiting for the lease\n")

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        self._refresh_metrics()
        payload = generate_latest(self._metrics.registry)
        return web.Response(body=payload, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
