"""The clients' side: listens, holds what all connections share, and drains.

What one connection does is in ``client.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from bidikv_runtime.router.api.errors import ApiError
from bidikv_runtime.router.http.bodies import BodyMemory
from bidikv_runtime.router.http.client import ClientConnection, Request
from bidikv_runtime.router.http.deadlines import Deadlines
from bidikv_runtime.router.http.sockets import watch_peer
from bidikv_runtime.router.http.tls import Certificate
from bidikv_runtime.router.limits import Limits

__all__ = ["Application", "ClientConnection", "Request", "Server"]

_SCRATCH_BYTES: Final = 256 * 1024
_BACKLOG: Final = 2048
_HANDSHAKE_SECONDS: Final = 10.0
_GOODBYE_SECONDS: Final = 5.0
"""How long TLS waits for the client's half of the goodbye."""

Application = Callable[[Request, ClientConnection], Awaitable[None]]
"""Serves one request: it must write a whole response, raise ApiError before the first byte, or abort the connection."""


class Server:
    """Listens, and holds what all connections share."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        application: Application,
        limits: Limits,
        deadlines: Deadlines,
        on_refusal: Callable[[ApiError], None],
    ) -> None:
        self.loop = loop
        self.application = application
        self.limits = limits
        self.on_refusal = on_refusal
        self.scratch = bytearray(_SCRATCH_BYTES)
        """Receive buffer of all connections: the loop calls ``buffer_updated`` before it asks for another buffer."""
        self.memory = BodyMemory()
        self.connections: set[ClientConnection] = set()
        self.buffered = 0
        """Bytes of request bodies held."""
        self.draining = False
        self._deadlines = deadlines
        self._listener: asyncio.Server | None = None

    async def listen(self, host: str, port: int, certificate: Certificate | None = None) -> int:
        """Start to accept; returns the port (for port 0, the one that was chosen).

        Args:
            host: address to listen on.
            port: TCP port.
            certificate: serve HTTPS with it; whoever calls lets it follow changes.

        Raises:
            OSError: the address cannot be used.
        """
        self._listener = await self.loop.create_server(
            lambda: ClientConnection(self),
            host,
            port,
            backlog=_BACKLOG,
            start_serving=False,
            ssl=certificate.context if certificate is not None else None,
            ssl_handshake_timeout=_HANDSHAKE_SECONDS if certificate is not None else None,
            ssl_shutdown_timeout=_GOODBYE_SECONDS if certificate is not None else None,
        )
        for listening in self._listener.sockets:
            watch_peer(listening, reads_promptly=False)  # accepted sockets inherit it: no system call each
        await self._listener.start_serving()
        chosen: int = self._listener.sockets[0].getsockname()[1]
        return chosen

    def admit(self, connection: ClientConnection) -> bool:
        """Take in a new connection, unless there are too many."""
        if len(self.connections) >= self.limits.max_connections:
            return False
        self.connections.add(connection)
        self._deadlines.watch(connection)
        return True

    def forget(self, connection: ClientConnection) -> None:
        """The connection is gone."""
        self.connections.discard(connection)
        self._deadlines.forget(connection)

    async def drain(self, delay: float, grace: float) -> bool:
        """Finish: announce the end on every response, accept for ``delay`` seconds, then wait for the rest.

        Returns:
            Whether all requests finished within ``grace`` seconds; those that did not are cut off.
        """
        self.draining = True
        await asyncio.sleep(delay)
        if self._listener is not None:
            self._listener.close()
        deadline = self.loop.time() + grace
        while True:
            for connection in list(self.connections):
                connection.close_if_idle()
            if not self.connections or self.loop.time() >= deadline:
                break
            await asyncio.sleep(0.05)
        clean = not self.connections
        await self.close()
        return clean

    async def close(self) -> None:
        """Stop at once."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)  # let connection_lost run
        self._deadlines.close()
