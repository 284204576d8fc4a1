"""A fault-injecting stand-in for a vLLM engine, over real sockets on loopback.

It records what reached it and how each exchange ended, so that a test can tell "the router closed the leg" from "the
leg finished". Behaviour is a coroutine per engine, replaced by the test that needs a fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from bidikv_runtime.router.choice.endpoints import Endpoint

WAIT_SECONDS = 10.0
"""Deadline of every wait in tests; never a measured expectation."""


@dataclass
class Exchange:
    """One request that an engine received."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    connection: int
    """Which of the engine's connections carried it, counted from 0."""
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    closed_by_router: asyncio.Event = field(default_factory=asyncio.Event)
    """The router closed the connection while the answer was under way."""
    finished: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def send_json(self, status: int, value: Any, *headers: str) -> None:
        body = json.dumps(value).encode()
        lines = [f"HTTP/1.1 {status} Whatever", "content-type: application/json", f"content-length: {len(body)}"]
        await self.send("\r\n".join([*lines, *headers, "", ""]).encode() + body)

    async def send_stream_head(self, *headers: str) -> None:
        lines = ["HTTP/1.1 200 OK", "content-type: text/event-stream; charset=utf-8", "transfer-encoding: chunked"]
        await self.send("\r\n".join([*lines, *headers, "", ""]).encode())

    async def send_chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def wait_closed_by_router(self) -> None:
        """Block until the router closes the connection."""
        await asyncio.wait_for(self.closed_by_router.wait(), WAIT_SECONDS)


Behaviour = Callable[[Exchange], Awaitable[None]]


async def answer(exchange: Exchange) -> None:
    """What a healthy engine does: a stream of three events, or one JSON document."""
    if exchange.body and exchange.json.get("stream"):
        await exchange.send_stream_head("x-engine: yes")
        for index in range(3):
            await exchange.send_chunk(b'data: {"n": %d}\n\n' % index)
        await exchange.send_chunk(b"data: [DONE]\n\n")
        await exchange.send(b"0\r\n\r\n")
    else:
        await exchange.send_json(200, {"object": "answer", "kv_transfer_params": None}, "x-engine: yes")


async def hang(exchange: Exchange) -> None:
    """Never answer."""
    await exchange.wait_closed_by_router()


def answer_with(status: int, value: Any, *headers: str) -> Behaviour:
    """Answer every request with one JSON document."""

    async def behave(exchange: Exchange) -> None:
        await exchange.send_json(status, value, *headers)

    return behave


class MockEngine:
    """One engine on loopback."""

    def __init__(self, lookup_port: int = 5700) -> None:
        self.behave: Behaviour = answer
        self.exchanges: list[Exchange] = []
        self.connections = 0
        self.lookup_port = lookup_port
        self.port = 0
        self._arrived = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("127.0.0.1", self.port, self.lookup_port)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Die: stop accepting and reset every connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.drop_connections()

    def drop_connections(self) -> None:
        """Close all connections, as an engine does to idle ones."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def wait_for_exchange(self, count: int = 1) -> Exchange:
        """The ``count``-th request, as soon as it is there."""
        async with self._arrived:
            await asyncio.wait_for(self._arrived.wait_for(lambda: len(self.exchanges) >= count), WAIT_SECONDS)
        return self.exchanges[count - 1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections = self.connections, self.connections + 1
        self._writers.add(writer)
        try:
            while (exchange := await self._receive(reader, writer, number)) is not None:
                self.exchanges.append(exchange)
                async with self._arrived:
                    self._arrived.notify_all()
                watcher = asyncio.ensure_future(_watch_close(exchange))
                try:
                    await self.behave(exchange)
                    exchange.finished = True
                except (ConnectionError, RuntimeError):
                    # Writing noticed the end before the watcher did (uvloop has an error of its own for that).
                    if not writer.transport.is_closing():
                        raise
                    exchange.closed_by_router.set()
                watcher.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watcher
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _receive(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> Exchange | None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError:
            return None
        line, *fields = head.split("\r\n")[:-2]
        method, target, _ = line.split(" ")
        headers = [(name, value.strip()) for name, _, value in (entry.partition(":") for entry in fields)]
        length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
        body = await reader.readexactly(length)
        return Exchange(method, target, headers, body, number, reader, writer)


async def _watch_close(exchange: Exchange) -> None:
    # The router sends nothing while it awaits an answer, so that the only thing that can come is the end.
    with contextlib.suppress(ConnectionError):
        await exchange.reader.read(1)
    exchange.closed_by_router.set()


@contextlib.asynccontextmanager
async def running_engines(count: int) -> AsyncIterator[list[MockEngine]]:
    """``count`` engines with different lookup ports."""
    engines = [MockEngine(lookup_port=5700 + index) for index in range(count)]
    try:
        for engine in engines:
            await engine.start()
        yield engines
    finally:
        for engine in engines:
            await engine.stop()
