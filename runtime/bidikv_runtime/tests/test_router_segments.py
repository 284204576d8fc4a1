"""TCP has no messages: however bytes are cut into segments, both sides of the router see the same thing.

No sockets here: the protocols are fed by hand, so that every cut is exactly the one that was drawn.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.router.http.deadlines import Deadlines
from bidikv_runtime.router.http.http1 import build_local_response
from bidikv_runtime.router.http.server import ClientConnection, Request, Server
from bidikv_runtime.router.http.upstream import ConnectionLost, UpstreamConnection, UpstreamPool
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


def encode(body: bytes, chunks: Sequence[int] | None) -> bytes:
    """A request with ``body``: with its length, or in chunks that end at ``chunks``."""
    head = b"POST /x HTTP/1.1\r\nhost: a\r\n"
    if chunks is None:
        return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    encoded = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in cut(body, chunks))
    return head + b"transfer-encoding: chunked\r\n\r\n" + encoded + b"0\r\n\r\n"


cuts = st.lists(st.integers(0, 10_000), max_size=12)
bodies = st.binary(max_size=200) | st.builds(lambda n: b"\r\n\r\n" * n, st.integers(0, 60))


async def receive(limits: Limits, segments: Sequence[bytes]) -> tuple[list[bytes], bytes]:
    """Bodies that reach the application, and what is written to the client."""
    seen: list[bytes] = []

    async def application(request: Request, client: ClientConnection) -> None:
        seen.append(bytes(request.body))
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
    transport.close()
    connection.connection_lost(None)
    deadlines.close()
    assert server.buffered == 0
    assert not server.connections
    return seen, bytes(transport.written)


@given(st.lists(st.tuples(bodies, st.none() | cuts), min_size=1, max_size=4), cuts)
def test_requests_arrive_whole_and_in_order(requests: list[tuple[bytes, list[int] | None]], where: list[int]) -> None:
    # A chunked request may end the connection if more came in the same segment: it is only drawn as the last one.
    requests = [(body, None) for body, _ in requests[:-1]] + requests[-1:]
    data = b"".join(encode(body, chunks) for body, chunks in requests)
    seen, written = asyncio.run(receive(Limits(), cut(data, where)))
    assert seen == [body for body, _ in requests]
    assert written.count(b"HTTP/1.1 200 OK") == len(requests)


@given(bodies, st.none() | cuts, cuts)
def test_limits_hold_in_any_segmentation(body: bytes, chunks: list[int] | None, where: list[int]) -> None:
    seen, written = asyncio.run(receive(Limits(max_body_bytes=100), cut(encode(body, chunks), where)))
    if len(body) > 100:
        assert seen == []
        assert written.startswith((b"HTTP/1.1 413 ", b"HTTP/1.1 400 "))
    elif chunks is None:
        assert seen == [body]


@given(st.binary(max_size=300), cuts)
def test_garbage_never_breaks_the_server(data: bytes, where: list[int]) -> None:
    seen, written = asyncio.run(receive(Limits(), cut(data, where)))
    assert seen == []
    assert written == b"" or written.startswith(b"HTTP/1.1 ")


def test_a_body_larger_than_its_first_allocation() -> None:
    body = bytes(range(256)) * 16_384  # 4 MiB
    seen, _ = asyncio.run(receive(Limits(), cut(encode(body, None), range(0, 5_000_000, 200_003))))
    assert seen == [body]


async def exchange(segments: Sequence[bytes], *, decode: bool, end: bool) -> tuple[bytes, bool, bool]:
    """What is relayed of a response, whether it was complete, and whether the connection is kept."""
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop)
    pool = UpstreamPool(loop, Limits(), deadlines)
    connection, transport = UpstreamConnection(pool, Endpoint("a", 1, 2)), FakeTransport()
    connection.connection_made(cast(asyncio.Transport, transport))
    relayed = bytearray()
    sink: Callable[[bytes], None] = relayed.extend
    complete = False

    async def talk() -> None:
        nonlocal complete
        await connection.send(b"", [], first_byte_seconds=60, idle_seconds=60)
        await connection.relay(sink, decoded=decode)
        complete = True

    task = asyncio.create_task(talk())
    await asyncio.sleep(0)
    for segment in segments:
        if not transport.closing:
            connection.data_received(segment)
        await asyncio.sleep(0)
    if end:
        connection.connection_lost(None)
    try:
        async with asyncio.timeout(5):
            await task
    except ConnectionLost:
        pass
    connection.release()
    kept = connection.idle
    transport.close()
    deadlines.close()
    return bytes(relayed), complete, kept


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: x\r\n"


@given(bodies, st.none() | cuts, cuts, st.booleans(), st.booleans())
def test_answers_are_relayed_as_sent(
    body: bytes, chunks: list[int] | None, where: list[int], decode: bool, interim: bool
) -> None:
    if chunks is None:
        head, raw = HEAD + b"content-length: %d\r\n\r\n" % len(body), body
    else:
        head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
        raw = encode(body, chunks).partition(b"\r\n\r\n")[2]
    data = (b"HTTP/1.1 100 Continue\r\n\r\n" if interim else b"") + head + raw
    relayed, complete, kept = asyncio.run(exchange(cut(data, where), decode=decode, end=False))
    assert (complete, kept) == (True, True)
    assert relayed == (body if decode else raw)


@given(bodies, st.none() | cuts, cuts, st.integers(1, 50))
def test_a_truncated_answer_is_never_complete(
    body: bytes, chunks: list[int] | None, where: list[int], missing: int
) -> None:
    data = encode(body, chunks).replace(b"POST /x HTTP/1.1\r\nhost: a", b"HTTP/1.1 200 OK\r\nx: y", 1)
    data = data[:-missing]
    _, complete, kept = asyncio.run(exchange(cut(data, where), decode=False, end=True))
    assert (complete, kept) == (False, False)


@given(st.binary(max_size=300), cuts)
def test_garbage_is_no_answer(data: bytes, where: list[int]) -> None:
    relayed, complete, kept = asyncio.run(exchange(cut(data, where), decode=False, end=True))
    assert (relayed, complete, kept) == (b"", False, False)


@pytest.mark.parametrize("end", [True])
def test_an_answer_without_framing_ends_with_its_connection(end: bool) -> None:
    relayed, complete, kept = asyncio.run(exchange([HEAD + b"\r\n", b"some", b"thing"], decode=False, end=end))
    assert (relayed, complete, kept) == (b"something", True, False)
