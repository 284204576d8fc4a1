"""Idle connections to engines, kept for the next exchange.

Invariant: they are closed before the engine closes them (uvicorn: after 5 s). If it was faster anyhow, the request did
not reach it: whoever sent it sends it again once, on a fresh connection (``ConnectionLost.stale``).
"""

from __future__ import annotations

import asyncio
import math
from time import monotonic

from bidikv_runtime.router.http.deadlines import Deadlines
from bidikv_runtime.router.http.upstream import ConnectFailed, Origin, UpstreamConnection
from bidikv_runtime.router.limits import Limits


class UpstreamPool:
    """Idle connections per engine, newest first."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: Limits, deadlines: Deadlines) -> None:
        self.loop = loop
        self.limits = limits
        self.deadlines = deadlines
        self._idle: dict[str, list[UpstreamConnection]] = {}

    async def acquire(self, endpoint: Origin, *, fresh: bool = False) -> UpstreamConnection:
        """A connection to ``endpoint``: an idle one, unless ``fresh``, else a new one.

        Raises:
            ConnectFailed: refused, unreachable, or not within the limit.
        """
        idle = self._idle.get(endpoint.address)
        while idle and not fresh:
            connection = idle.pop()
            connection.idle = False
            if not connection.lost and connection.deadline > monotonic():
                connection.deadline = math.inf
                return connection
            connection.abort()
        made = UpstreamConnection(self, endpoint)
        try:
            async with asyncio.timeout(self.limits.connect_seconds):
                await self.loop.create_connection(lambda: made, endpoint.host, endpoint.port)
        except BaseException as error:
            # uvloop tells a connection that was made but not awaited any more nothing of its end.
            self.deadlines.forget(made)
            if isinstance(error, TimeoutError):
                raise ConnectFailed(f"it accepted no connection within {self.limits.connect_seconds:g} s") from error
            if isinstance(error, OSError):
                raise ConnectFailed(f"no connection ({error.strerror or 'the name is unknown'})") from error
            raise
        return made

    def put(self, connection: UpstreamConnection) -> None:
        """Keep ``connection`` for the next exchange, within the bound."""
        idle = self._idle.setdefault(connection.endpoint.address, [])
        if len(idle) >= self.limits.max_idle_per_engine:
            connection.abort()
            return
        connection.idle = True
        connection.deadline = monotonic() + self.limits.upstream_idle_seconds
        idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """The connection is gone."""
        self.deadlines.forget(connection)
        idle = self._idle.get(connection.endpoint.address)
        if idle is not None:
            if connection in idle:
                idle.remove(connection)
            if not idle:
                del self._idle[connection.endpoint.address]

    def close(self) -> None:
        """Close all idle connections."""
        for idle in list(self._idle.values()):
            for connection in list(idle):
                connection.abort()
