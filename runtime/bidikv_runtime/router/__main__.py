"""Run the router: ``bidikv-router --config /etc/bidikv/router.json``.

Without a cluster, ``--static-prefill`` and ``--static-decode`` name the engines and the configuration file is optional.

On SIGTERM the router becomes unready, goes on accepting while Endpoints catch up, finishes its running requests and
exits with status 0. The pod's ``terminationGracePeriodSeconds`` must exceed ``--drain-delay-seconds`` +
``--drain-grace-seconds``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bidikv_runtime.contract import ROUTER_CONFIG_DIR, ROUTER_CONFIG_FILE, ROUTER_PORT, RouterConfig
from bidikv_runtime.router.choice.endpoints import Pools, parse_static
from bidikv_runtime.router.choice.fleet import Fleet
from bidikv_runtime.router.config import add_config_arguments, load_config, override_config
from bidikv_runtime.router.control.discovery import ApiServer, EndpointWatch
from bidikv_runtime.router.http.deadlines import Deadlines
from bidikv_runtime.router.http.server import Server
from bidikv_runtime.router.http.upstream import UpstreamPool
from bidikv_runtime.router.limits import Limits, add_limit_arguments, build_limits
from bidikv_runtime.router.observe.metrics import RouterMetrics
from bidikv_runtime.router.proxy import Proxy

logger = logging.getLogger(__name__)

EXIT_USAGE = 2
EXIT_UNDRAINED = 1


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    host: str
    port: int
    config: RouterConfig
    limits: Limits
    static: Pools | None
    """Fixed engines; None: watch the cluster."""


class Router:
    """All parts of a router, wired."""

    def __init__(self, config: RouterConfig, limits: Limits) -> None:
        loop = asyncio.get_running_loop()
        self.limits = limits
        self.deadlines = Deadlines(loop)
        self.metrics = RouterMetrics(limits.max_sessions_remembered)
        self.fleet = Fleet(loop.time, limits, config)
        self.pool = UpstreamPool(loop, limits, self.deadlines)
        self.proxy = Proxy(config, limits, self.fleet, self.pool, self.metrics)
        self.server = Server(loop, self.proxy.serve, limits, self.deadlines, self.proxy.refuse)
        self.metrics.buffered_bytes.set_function(lambda: self.server.buffered)

    def take_pools(self, pools: Pools) -> None:
        """Use a new snapshot of the engines."""
        self.fleet.replace(pools)
        self.metrics.observe_pools(pools)

    async def drain(self) -> bool:
        """Finish in order; whether all requests did."""
        self.proxy.draining = True
        clean = await self.server.drain(self.limits.drain_delay_seconds, self.limits.drain_grace_seconds)
        self.pool.close()
        return clean

    async def close(self) -> None:
        """Stop at once."""
        await self.server.close()
        self.pool.close()


async def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; the exit status."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    router = Router(settings.config, settings.limits)
    watch: asyncio.Task[None] | None = None
    if settings.static is not None:
        router.take_pools(settings.static)
    else:
        watch = loop.create_task(
            EndpointWatch(ApiServer.in_cluster(), settings.config, router.take_pools).run(), name="endpoint-watch"
        )
        # The watch never ends by itself: if it does, a router with stale engines must not live on.
        watch.add_done_callback(lambda _: stopped.set())
    port = await router.server.listen(settings.host, settings.port)
    logger.info("Listening on %s:%d", settings.host, port)
    await stopped.wait()
    if watch is not None and watch.done():
        logger.error("The watch of EndpointSlices ended: %s", watch.exception())
        await router.close()
        return EXIT_UNDRAINED
    logger.info("Draining")
    clean = await router.drain()
    if watch is not None:
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
    logger.info("Stopped, %s", "all requests were finished" if clean else "some requests were cut off")
    return 0 if clean else EXIT_UNDRAINED


def parse_settings(arguments: Sequence[str] | None) -> Settings:
    """Read the command line and the configuration file.

    Raises:
        ValueError: something is missing or wrong; the text is one sentence.
        SystemExit: argparse's usage errors.
    """
    parser = argparse.ArgumentParser(prog="bidikv-router", description="Routes turns to prefill and decode engines.")
    parser.add_argument("--config", type=Path, help=f"default: {ROUTER_CONFIG_DIR}/{ROUTER_CONFIG_FILE}")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=ROUTER_PORT, help="default: %(default)s")
    parser.add_argument("--static-prefill", metavar="HOST:PORT[@LOOKUP_PORT],...", help="prefill engines; no cluster")
    parser.add_argument("--static-decode", metavar="HOST:PORT[@LOOKUP_PORT],...", help="decode engines; no cluster")
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    add_config_arguments(parser)
    add_limit_arguments(parser)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=given.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    is_static = given.static_prefill is not None or given.static_decode is not None
    if given.config is None and is_static:
        config = RouterConfig(namespace="", prefill_service="", decode_service="", served_model_name="")
    else:
        config = load_config(given.config or Path(ROUTER_CONFIG_DIR) / ROUTER_CONFIG_FILE)
    config = override_config(config, given)
    static = None
    if is_static:
        static = Pools(
            parse_static(given.static_prefill or "", config.lookup_port, config.state_port),
            parse_static(given.static_decode or "", config.lookup_port, config.state_port),
        )
        if not static.prefill or not static.decode:
            raise ValueError("static mode needs at least one engine in --static-prefill and in --static-decode")
    return Settings(given.host, given.port, config, build_limits(given), static)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``bidikv-router``."""
    try:
        return uvloop.run(run(parse_settings(arguments)))
    except (ValueError, OSError) as error:
        print(f"bidikv-router: {error}", file=sys.stderr)
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
