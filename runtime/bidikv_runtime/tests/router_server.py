"""The clients' side of the router alone, over real sockets, with an application of the test's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from bidikv_runtime.router.api.errors import ApiError
from bidikv_runtime.router.http.client import ClientConnection, Request
from bidikv_runtime.router.http.deadlines import Deadlines
from bidikv_runtime.router.http.http1 import build_local_response
from bidikv_runtime.router.http.server import Application, Server
from bidikv_runtime.router.http.tls import Certificate
from bidikv_runtime.router.limits import Limits


async def echo(request: Request, client: ClientConnection) -> None:
    """Answer with the request's body."""
    client.write(build_local_response(200, bytes(request.body), close=client.will_close))


class Waiting:
    """An application that answers nobody and tells who came and who left."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.left = asyncio.Event()

    async def serve(self, request: Request, client: ClientConnection) -> None:
        self.arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()


@dataclass
class Running:
    """A server and where it listens."""

    server: Server
    port: int
    refused: list[ApiError] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection, closed at the end of the test at the latest."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer


@contextlib.asynccontextmanager
async def running_server(
    application: Application = echo, limits: Limits | None = None, certificate: Certificate | None = None
) -> AsyncIterator[Running]:
    """A listening server."""
    loop = asyncio.get_running_loop()
    refused: list[ApiError] = []
    server = Server(loop, application, limits or Limits(), Deadlines(loop), refused.append)
    running = Running(server, await server.listen("127.0.0.1", 0, certificate), refused)
    try:
        yield running
    finally:
        for writer in running.writers:
            writer.transport.abort()
        await server.close()
