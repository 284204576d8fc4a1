"""All parts of a router, put together."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from time import monotonic

from bidikv_runtime.contract import RouterConfig
from bidikv_runtime.router.choice.endpoints import Pools
from bidikv_runtime.router.choice.fleet import Fleet
from bidikv_runtime.router.control.probes import Prober
from bidikv_runtime.router.control.reports import ReportPoller
from bidikv_runtime.router.control.token_file import TokenFile
from bidikv_runtime.router.http.deadlines import Deadlines
from bidikv_runtime.router.http.pool import UpstreamPool
from bidikv_runtime.router.http.server import Server
from bidikv_runtime.router.http.tls import Certificate
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.router.observe.access_log import AccessLog
from bidikv_runtime.router.observe.debug import RecentSessions, render_engines
from bidikv_runtime.router.observe.metrics import RouterMetrics
from bidikv_runtime.router.observe.tracing import build_tracer
from bidikv_runtime.router.proxy import Observer, Proxy


class Router:
    """One router in this event loop."""

    def __init__(self, config: RouterConfig, limits: Limits, token: TokenFile | None = None) -> None:
        """
        Args:
            config: what the operator asked for.
            limits: bounds.
            token: for engines' reports.

        Raises:
            ValueError: the certificate cannot be used, or a package that an option needs is missing.
        """
        loop = asyncio.get_running_loop()
        self.limits = limits
        self.metrics = RouterMetrics(
            limits.max_sessions_remembered,
            ttft_objective=config.ttft_objective_seconds,
            itl_objective=config.itl_objective_seconds,
        )
        self.fleet = Fleet(monotonic, limits, config)
        deadlines = Deadlines(loop)
        self.pool = UpstreamPool(loop, limits, deadlines)
        self._certificate = Certificate(Path(config.tls_dir)) if config.tls_dir else None
        self._access_log = AccessLog(loop, self.metrics.count_dropped_lines) if config.access_log else None
        self._tracer = build_tracer(config.trace_endpoint) if config.trace_endpoint else None
        self._sessions = RecentSessions() if config.debug else None
        observers: list[Observer] = []
        if self._access_log is not None:
            observers.append(self._access_log.write)
        if self._tracer is not None:
            observers.append(self._tracer.export)
        if self._sessions is not None:
            observers.append(self._sessions.note)
        self.proxy = Proxy(
            config,
            limits,
            self.fleet,
            self.pool,
            self.metrics,
            observers,
            self._render_debug if config.debug else None,
        )
        self.server = Server(loop, self.proxy.serve, limits, deadlines, self.proxy.refuse)
        self.metrics.buffered_bytes.set_function(lambda: self.server.buffered)
        self.metrics.prefill_slots.set_function(lambda: self.proxy.admission.active)
        self.metrics.queued.set_function(lambda: self.proxy.admission.queued)
        self.metrics.read_engines = self.fleet.describe
        self._poller = ReportPoller(self.fleet, self.pool, limits, token or TokenFile(None))
        self._prober = Prober(self.fleet, self.pool, limits)
        self._control: list[asyncio.Task[None]] = []

    def take_pools(self, pools: Pools) -> None:
        """Use a new snapshot of the engines."""
        self.fleet.replace(pools)
        self.proxy.admission.resize(len(pools.ready_prefill or pools.serving_prefill))
        self.metrics.observe_pools(pools)

    def start_control(self) -> list[asyncio.Task[None]]:
        """Begin to follow the engines' reports and health; the tasks never end by themselves."""
        loop = asyncio.get_running_loop()
        self._control = [
            loop.create_task(self._poller.run(), name="polling of reports"),
            loop.create_task(self._prober.run(), name="probing of engines"),
        ]
        return [*self._control]

    async def listen(self, host: str, port: int) -> int:
        """Start to accept; returns the port.

        Raises:
            OSError: the address cannot be used.
        """
        if self._certificate is not None:
            self._certificate.watch(asyncio.get_running_loop())
        return await self.server.listen(host, port, self._certificate)

    async def drain(self) -> bool:
        """Finish in order; whether all requests did."""
        self.proxy.draining = True
        clean = await self.server.drain(self.limits.drain_delay_seconds, self.limits.drain_grace_seconds)
        await self._end()
        return clean

    async def close(self) -> None:
        """Stop at once."""
        await self.server.close()
        await self._end()

    async def _end(self) -> None:
        for task in self._control:
            task.cancel()
        for task in self._control:
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        self.pool.close()
        if self._certificate is not None:
            self._certificate.close()
        if self._access_log is not None:
            await self._access_log.close()
        if self._tracer is not None:
            await self._tracer.close()

    def _render_debug(self, path: bytes) -> bytes:
        if path == b"/debug/engines":
            return render_engines(self.fleet.describe())
        assert self._sessions is not None
        return self._sessions.render(monotonic())
