"""Run the router: ``bidikv-router``, configured by the variable BIDIKV_ROUTER_CONFIG or a file (``--config``).

Without a cluster, ``--static-prefill`` and ``--static-decode`` name the engines and a configuration is optional.

On SIGTERM the router becomes unready, goes on accepting while Endpoints catch up, finishes its running requests and
exits with status 0. The pod's ``terminationGracePeriodSeconds`` must exceed ``--drain-delay-seconds`` +
``--drain-grace-seconds``.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bidikv_runtime.collector import spare_collector
from bidikv_runtime.contract import ENV_ROUTER_CONFIG, ROUTER_PORT, RouterConfig
from bidikv_runtime.router.choice.endpoints import Pools, parse_static
from bidikv_runtime.router.config import add_config_arguments, choose_config, override_config
from bidikv_runtime.router.control.discovery import ApiServer, EndpointWatch
from bidikv_runtime.router.control.token_file import TokenFile
from bidikv_runtime.router.limits import Limits, add_limit_arguments, build_limits
from bidikv_runtime.router.wiring import Router

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


async def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; the exit status."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    router = Router(settings.config, settings.limits, TokenFile.from_environment(os.environ))
    watches = router.start_control()
    if settings.static is not None:
        router.take_pools(settings.static)
    else:
        watch = EndpointWatch(ApiServer.in_cluster(), settings.config, router.take_pools)
        watches.append(loop.create_task(watch.run(), name="watch of EndpointSlices"))
    for task in watches:
        # None ever ends by itself: if one does, a router that knows less and less must not live on.
        task.add_done_callback(lambda _: stopped.set())
    # Measured without: collections took 15-20 % of the CPU and paused all streams for 30-75 ms whenever they looked
    # through the 60,000 objects that imports leave behind.
    spare_collector()
    port = await router.listen(settings.host, settings.port)
    logger.info("Listening on %s:%d", settings.host, port)
    await stopped.wait()
    if ended := next((task for task in watches if task.done()), None):
        logger.error("The %s ended: %r", ended.get_name(), ended.exception())
        await router.close()
        return EXIT_UNDRAINED
    logger.info("Draining")
    clean = await router.drain()
    logger.info("Stopped, %s", "all requests were finished" if clean else "some requests were cut off")
    return 0 if clean else EXIT_UNDRAINED


def parse_settings(arguments: Sequence[str] | None) -> Settings:
    """Read the command line and the configuration.

    Raises:
        ValueError: something is missing or wrong; the text is one sentence.
        SystemExit: argparse's usage errors.
    """
    parser = argparse.ArgumentParser(prog="bidikv-router", description="Routes turns to prefill and decode engines.")
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"JSON; default: what {ENV_ROUTER_CONFIG} holds")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=ROUTER_PORT, help="default: %(default)s")
    parser.add_argument(
        "--static-prefill", metavar="HOST:PORT[@LOOKUP_PORT[@STATE_PORT]],...", help="prefill engines; no cluster"
    )
    parser.add_argument(
        "--static-decode", metavar="HOST:PORT[@LOOKUP_PORT[@STATE_PORT]],...", help="decode engines; no cluster"
    )
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    add_config_arguments(parser)
    add_limit_arguments(parser)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=given.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    is_static = given.static_prefill is not None or given.static_decode is not None
    config = override_config(choose_config(given.config, os.environ, is_static=is_static), given)
    static = None
    if is_static:
        static = Pools(
            parse_static(given.static_prefill or "", config.lookup_port, config.state_port, config.prefill_ranks),
            parse_static(given.static_decode or "", config.lookup_port, config.state_port, config.decode_ranks),
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
