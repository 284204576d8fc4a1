"""The router's protocols without sockets: fed by hand, so that every cut between segments is exactly the one drawn."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.router.http.client import ClientConnection, Request
from bidikv_runtime.router.http.deadlines import Deadlines
from bidikv_runtime.router.http.http1 import ResponseHead, build_local_response
from bidikv_runtime.router.http.pool import UpstreamPool
from bidikv_runtime.router.http.server import Server
from bidikv_runtime.router.http.upstream import ConnectionLost, UpstreamConnection
from bidikv_runtime.router.limits import Limits


class FakeTransport:
    """What the protocols need of a transport, and nothing behind it."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closing = False
        self.reading = True
        self._socket = socket.socket()

    def get_extra_info(self, name: str) -> Any:
        return self._socket

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, pieces: Iterable[bytes]) -> None:
        self.written += b"".join(pieces)

    def get_write_buffer_size(self) -> int:
        return 0

    def write_eof(self) -> None:
        pass

    def can_write_eof(self) -> bool:
        return True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True
        self._socket.close()

    abort = close


def cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """``data`` in segments that end at ``cuts``."""
    ends = sorted({c % (len(data) + 1) for c in cuts} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False) if end > start]


def feed(connection: ClientConnection, segment: bytes) -> None:
    """What a loop does with a BufferedProtocol."""
    while segment:
        buffer = connection.get_buffer(-1)
        taken = min(len(buffer), len(segment))
        buffer[:taken] = segment[:taken]
        connection.buffer_updated(taken)
        del buffer  # loops hold it until here: nothing may resize what is behind it in between
        segment = segment[taken:]


@dataclass
class Served:
    """What became of a client's bytes."""

    requests: list[Request] = field(default_factory=list)
    written: bytes = b""
    closing: bool = False


async def receive(limits: Limits, segments: Sequence[bytes]) -> Served:
    """Feed ``segments`` to a server that answers every request with 200."""
    served = Served()

    async def application(request: Request, client: ClientConnection) -> None:
        served.requests.append(Request(request.head, bytes(request.body), request.received_at))
        client.write(build_local_response(200, b"", close=client.will_close))

    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop)
    server = Server(loop, application, limits, deadlines, lambda error: None)
    connection, transport = ClientConnection(server), FakeTransport()
    connection.connection_made(cast(asyncio.Transport, transport))
    for segment in segments:
        if transport.closing:
            break
        feed(connection, segment)
        for _ in range(10):
            await asyncio.sleep(0)  # let the application's tasks run
    served.closing = transport.closing
    transport.close()
    connection.connection_lost(None)
    deadlines.close()
    assert server.buffered == 0
    assert not server.connections
    served.written = bytes(transport.written)
    return served


@dataclass
class Relayed:
    """What became of an engine's bytes."""

    head: ResponseHead | None = None
    body: bytes = b""
    complete: bool = False
    kept: bool = False
    """The connection went back to the pool."""


async def exchange(segments: Sequence[bytes], *, decoded: bool, end: bool, early: bool = True) -> Relayed:
    """Feed ``segments`` to an exchange; ``end``: then close; ``early``: relay as soon as the head is there."""
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop)
    pool = UpstreamPool(loop, Limits(), deadlines)
    connection, transport = UpstreamConnection(pool, Endpoint("a", 1, 2)), FakeTransport()
    connection.connection_made(cast(asyncio.Transport, transport))
    relayed, body = Relayed(), bytearray()
    may_relay = asyncio.Event()

    async def talk() -> None:
        relayed.head = await connection.send(b"", [], first_byte_seconds=60, idle_seconds=60)
        if not early:
            await may_relay.wait()
        await connection.relay(body.extend, decoded=decoded)
        relayed.complete = True

    task = asyncio.create_task(talk())
    await asyncio.sleep(0)
    for segment in segments:
        if not transport.closing:
            connection.data_received(segment)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    if end:
        connection.connection_lost(None)
    may_relay.set()
    for _ in range(3):
        await asyncio.sleep(0)
    if not task.done():
        connection.connection_lost(ConnectionResetError())
    with contextlib.suppress(ConnectionLost):
        await task
    connection.release()
    relayed.kept = connection.idle
    transport.close()
    deadlines.close()
    relayed.body = bytes(body)
    return relayed
