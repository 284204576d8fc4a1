"""A TCP relay in front of an engine: shows what the engine is sent, and breaks its streams where a test wants it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from e2e.engine.local import HOST

_EVENT: Final = b"data: "
_INTO_EVENT: Final = 20
"""Bytes of the event in which the relay breaks off."""


@dataclass
class Breakage:
    """Shared by the relays of several engines: the first stream that gets so far breaks, and no other one."""

    after_events: int
    broken: Relay | None = None
    """The relay that broke; it has closed its port, as an engine that died."""


class Relay:
    """Of one engine."""

    def __init__(self, target: int, breakage: Breakage | None) -> None:
        self.port = 0
        self.requests = bytearray()
        """All bytes that went to the engine."""
        self._target = target
        self._breakage = breakage
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Refuse connections and break the ones that there are."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine_reader, engine_writer = await asyncio.open_connection(HOST, self._target)
        self._writers |= {writer, engine_writer}
        try:
            await asyncio.gather(self._pass_requests(reader, engine_writer), self._pass_answers(engine_reader, writer))
        except ConnectionError:
            pass
        finally:
            self._writers -= {writer, engine_writer}
            writer.transport.abort()
            engine_writer.transport.abort()

    async def _pass_requests(self, reader: asyncio.StreamReader, engine: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.requests += data
            engine.write(data)
            await engine.drain()
        engine.transport.abort()  # the router left

    async def _pass_answers(self, engine: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen, breakage = 0, self._breakage
        while data := await engine.read(65536):
            events = data.count(_EVENT)
            if breakage is not None and breakage.broken is None and seen + events > breakage.after_events:
                start = -1
                for _ in range(breakage.after_events - seen + 1):
                    start = data.index(_EVENT, start + 1)
                writer.write(data[: start + _INTO_EVENT])
                await writer.drain()
                breakage.broken = self
                self.close()
                return
            seen += events
            writer.write(data)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def running_relay(target: int, breakage: Breakage | None = None) -> AsyncIterator[Relay]:
    """A relay to the port ``target``, closed at the end."""
    relay = Relay(target, breakage)
    await relay.listen()
    try:
        yield relay
    finally:
        relay.close()
