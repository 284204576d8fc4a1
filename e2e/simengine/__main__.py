"""Run a simulated engine: ``python -m e2e.simengine`` with vLLM's arguments.

The order of things is vLLM's: the port is bound at once and listens when the engine is ready; after SIGTERM the engine
finishes what it has within ``--shutdown-timeout`` while new requests end at once as aborted, then the server stops.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Final

import uvicorn
import uvloop

from bidikv_runtime.connector.lookup_server import LookupPortError
from bidikv_runtime.connector.state import StatePortError
from bidikv_runtime.connector.tokens import TokenFileError
from e2e.simengine.asgi import Application
from e2e.simengine.engine import EngineCore
from e2e.simengine.faults import FaultError, Faults, fail_start, parse_faults
from e2e.simengine.metrics import Metrics
from e2e.simengine.server import Server
from e2e.simengine.settings import Engine, UsageError, parse_engine

logger = logging.getLogger("simengine")

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_TERMINATED: Final = 128 + signal.SIGTERM
"""Ended by a signal while it started."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet.

    Raises:
        OSError: the address is taken, or none of this machine's.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
    return bound


def load_middleware(application: Application, names: Sequence[str]) -> Application:
    """Wrap the application as vLLM does with ``--middleware``."""
    for name in names:
        module, _, attribute = name.rpartition(".")
        application = getattr(importlib.import_module(module), attribute)(application)
    return application


class Port:
    """uvicorn on one port, without its loop that wakes up ten times a second: fifty engines share two cores."""

    def __init__(self, application: Application, bound: socket.socket) -> None:
        self._bound, self._address = bound, bound.getsockname()[:2]
        config = uvicorn.Config(application, log_config=None, log_level="warning", access_log=False, lifespan="off")
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._server.server_state.default_headers = [(b"server", b"uvicorn")]
        self._changes = asyncio.Lock()
        self._listens = False

    async def set_listening(self, listen: bool) -> None:
        """Take connections, or refuse them from now on; those that there are end."""
        async with self._changes:
            if listen and not self._listens:
                await self._server.startup(sockets=[self._bound])
            elif not listen and self._listens:
                for listener in self._server.servers:
                    listener.close()
                for connection in list(self._server.server_state.connections):
                    connection.transport.abort()
                self._bound = bind(*self._address)  # others keep off; it does not listen yet
            self._listens = listen

    async def close(self) -> None:
        """Stop listening and finish what is under way."""
        async with self._changes:
            if self._listens:
                self._listens = False
                await self._server.shutdown()
            self._bound.close()


async def run(engine: Engine, bound: socket.socket) -> int:
    """Serve until SIGTERM or SIGINT; the exit status."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    faults = Faults(parse_faults(engine.simulation.faults))
    control: Port | None = None
    if engine.simulation.control_port:
        control = Port(faults, bind(engine.host, engine.simulation.control_port))
        await control.set_listening(True)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    starting = loop.create_task(faults.wait_for_start(engine.simulation.start_seconds))
    starting.add_done_callback(lambda _: stopped.set())
    await stopped.wait()
    if not starting.done():
        return EXIT_TERMINATED
    stopped.clear()
    if faults.now.start:
        fail_start(faults.now.start, engine.model)
    core = EngineCore(engine, faults, Metrics(engine.served_names[0], connector=engine.connector is not None))
    port = Port(load_middleware(Server(engine, core, faults), engine.middleware), bound)
    changes: set[asyncio.Task[None]] = set()

    def apply_refusal(refuse: bool) -> None:
        task = loop.create_task(port.set_listening(not refuse))
        changes.add(task)
        task.add_done_callback(changes.discard)

    faults.on_refuse = apply_refusal
    apply_refusal(faults.now.refuse)
    steps = loop.create_task(core.run(), name="steps")
    steps.add_done_callback(lambda _: stopped.set())
    logger.info("A simulated engine listens on %s:%d", engine.host, engine.port)
    await stopped.wait()
    if steps.done():
        logger.error("The engine core ended: %r", steps.exception())
        return EXIT_FAILED
    logger.info("Draining for at most %g s", engine.shutdown_seconds)
    await core.drain(engine.shutdown_seconds)
    faults.on_refuse = lambda refuse: None
    await port.close()
    steps.cancel()
    core.close()
    if control is not None:
        await control.close()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    logging.basicConfig(level=os.environ.get("VLLM_LOGGING_LEVEL", "INFO"), format="%(levelname)s %(name)s %(message)s")
    try:
        engine, ignored = parse_engine(sys.argv[1:] if arguments is None else arguments, os.environ)
        if ignored:
            logger.info("Arguments that mean nothing here: %s", " ".join(ignored))
        if engine.blocks * engine.block_size <= engine.maximum_length:
            raise UsageError(
                f"{engine.blocks} blocks of {engine.block_size} tokens are too few for one request of the model's max "
                f"seq len ({engine.maximum_length}): set a smaller --max-model-len or more blocks"
            )
        return uvloop.run(run(engine, bind(engine.host, engine.port)))
    except (UsageError, FaultError, TokenFileError, LookupPortError, StatePortError) as error:
        print(f"simengine: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        print(f"simengine: the port cannot be opened: {error}", file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
