"""Exchanges with engines: what whoever relays them can choose and observe; and small questions."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import pytest

from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.router.http import upstream
from bidikv_runtime.router.http.deadlines import Deadlines
from bidikv_runtime.router.http.fetch import Socket, fetch
from bidikv_runtime.router.http.http1 import ResponseHead, build_chunk
from bidikv_runtime.router.http.pool import UpstreamPool
from bidikv_runtime.router.http.upstream import (
    AnswerTimedOut,
    ConnectFailed,
    ConnectionLost,
    UpstreamConnection,
    UpstreamError,
)
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.tests.router_engine import Exchange, MockEngine, answer_with, hang, running_engines
from bidikv_runtime.tests.router_wire import FakeTransport

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ENDLESS = b"HTTP/1.1 200 OK\r\n\r\n"


class Wire:
    """A connection without a network, at times of the test's."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.deadlines = Deadlines(loop)
        self.pool = UpstreamPool(loop, Limits(), self.deadlines)
        self.connection = UpstreamConnection(self.pool, Endpoint("a", 1, 2))
        self.transport = FakeTransport()
        self.connection.connection_made(cast(asyncio.Transport, self.transport))
        self.relayed: list[bytes] = []
        self.now = 100.0

    async def send(self) -> asyncio.Task[ResponseHead]:
        task = asyncio.create_task(self.connection.send(b"", [], first_byte_seconds=10, idle_seconds=5))
        await asyncio.sleep(0)
        return task

    async def relay(self, *, decoded: bool = False, prefix: bytes = b"") -> asyncio.Task[None]:
        task = asyncio.create_task(self.connection.relay(self.relayed.append, decoded=decoded, prefix=prefix))
        await asyncio.sleep(0)
        return task

    def receive(self, data: bytes, at: float) -> None:
        self.now = at
        self.connection.data_received(data)


@pytest.fixture
async def wire(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Wire]:
    made = Wire()
    monkeypatch.setattr(upstream, "monotonic", lambda: made.now)
    yield made
    made.transport.close()
    made.deadlines.close()


# --- what is observed ---


async def test_pieces_and_gaps_are_kept(wire: Wire) -> None:
    head = await wire.send()
    wire.receive(CHUNKED, 101.0)
    await head
    done = await wire.relay()
    assert (wire.connection.pieces, math.isnan(wire.connection.first_at)) == (0, True)
    for at in (102.0, 102.25, 103.0, 103.5):
        wire.receive(build_chunk(b"data: x\n\n"), at)
    wire.receive(b"0\r\n\r\n", 103.75)
    await done
    observed = wire.connection
    assert (observed.pieces, observed.first_at, observed.last_at, observed.longest_gap) == (5, 102.0, 103.75, 0.75)
    assert b"".join(wire.relayed) == build_chunk(b"data: x\n\n") * 4 + b"0\r\n\r\n"

    wire.connection.release()
    head = await wire.send()  # the next exchange starts anew
    wire.receive(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", 200.0)
    await head
    await (await wire.relay())
    assert (observed.pieces, observed.first_at, observed.longest_gap) == (1, 200.0, 0.0)


@pytest.mark.parametrize(
    ("answer", "decoded", "expected"),
    [
        (CHUNKED, False, [b"HEAD"]),
        (CHUNKED + b"2\r\nab\r\n", False, [b"HEAD2\r\nab\r\n"]),
        (CHUNKED + b"2\r\nab\r\n", True, [b"HEADab"]),
        (CHUNKED + b"2\r", True, [b"HEAD"]),  # something came, but nothing of the body
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab", False, [b"HEADab"]),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False, [b"HEAD"]),
    ],
)
async def test_a_head_goes_out_with_what_is_already_there(
    wire: Wire, answer: bytes, decoded: bool, expected: list[bytes]
) -> None:
    head = await wire.send()
    wire.receive(answer, 101.0)
    await head
    task = await wire.relay(decoded=decoded, prefix=b"HEAD")
    assert wire.relayed == expected
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("answer", "decoded", "chunk", "event"),
    [
        (CHUNKED, False, True, True),
        (CHUNKED + b"7\r\nab\ncd\n\n\r\n", False, True, True),
        (CHUNKED + b"6\r\nab\r\n\r\n\r\n", False, True, True),
        (CHUNKED + b"6\r\nab\ncd\n\r\n", False, True, False),  # the event's next line is still to come
        (CHUNKED + b"2\r\nab\r\n", False, True, False),
        (CHUNKED + b"2\r\na\n", False, False, False),
        (CHUNKED + b"2\r\na\n\r\n3\r\n", False, False, False),
        (CHUNKED + b"2\r\na\n\r\n3", False, False, False),
        (CHUNKED + b"4\r\n\r\n\r\n", False, False, False),  # a body that looks like framing
        (CHUNKED + b"3\r\na\n\n", True, False, True),
        (CHUNKED + b"3\r\na\nb\r\n", True, False, False),
        (ENDLESS + b"a\n\n", False, False, True),
        (ENDLESS + b"a\n", False, False, False),
        (ENDLESS + b"a", False, False, False),
        (ENDLESS, False, False, True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n", False, False, False),  # nothing may be added to a length
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\na\n", False, False, False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\na\n\n", True, False, True),  # relayed in the router's framing
    ],
)
async def test_where_something_may_be_added(wire: Wire, answer: bytes, decoded: bool, chunk: bool, event: bool) -> None:
    head = await wire.send()
    wire.receive(answer, 101.0)
    await head
    task = await wire.relay(decoded=decoded)
    assert (wire.connection.at_chunk_boundary, wire.connection.at_event_end) == (chunk, event)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_body_that_nobody_relays_is_held_within_bounds(wire: Wire) -> None:
    head = await wire.send()
    wire.receive(CHUNKED, 101.0)
    await head
    piece = build_chunk(bytes(65536))
    for count in itertools.count(1):
        wire.receive(piece, 101.0)
        if not wire.transport.reading:
            break
        assert count < 10
    done = await wire.relay()
    assert wire.transport.reading
    wire.receive(b"0\r\n\r\n", 102.0)
    await done
    assert b"".join(wire.relayed) == piece * count + b"0\r\n\r\n"


async def test_the_sink_can_change_after_the_first_piece(wire: Wire) -> None:
    later: list[bytes] = []

    def first(data: bytes) -> None:
        wire.relayed.append(data)
        wire.connection.replace_sink(later.append)

    head = await wire.send()
    wire.receive(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\na", 101.0)
    await head
    task = asyncio.create_task(wire.connection.relay(first))
    await asyncio.sleep(0)
    wire.receive(b"b", 101.0)
    wire.receive(b"c", 101.0)
    await task
    assert (wire.relayed, later) == ([b"a"], [b"b", b"c"])


# --- limits ---


async def test_each_limit_has_its_own_text(wire: Wire) -> None:
    head = await wire.send()
    assert wire.connection.deadline == 110.0
    wire.connection.on_deadline()
    with pytest.raises(AnswerTimedOut, match=r"^the engine sent no head within 10 s$"):
        await head


@pytest.mark.parametrize(
    ("paused", "text"),
    [(False, "^the engine was silent for 5 s within its answer$"), (True, "^the client took nothing for 5 s$")],
)
async def test_silence_within_an_answer(wire: Wire, paused: bool, text: str) -> None:
    head = await wire.send()
    wire.receive(CHUNKED, 101.0)
    await head
    done = await wire.relay()
    wire.receive(b"1\r\na\r\n", 104.0)
    if paused:
        wire.connection.pause()
    assert wire.connection.deadline == 106.0  # pieces do not move it: that would cost more than looking again
    wire.now = 106.0
    wire.connection.on_deadline()
    assert (wire.connection.deadline, done.done()) == (109.0, False)
    wire.now = 109.0
    wire.connection.on_deadline()
    with pytest.raises(AnswerTimedOut, match=text):
        await done


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 \x00OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\na",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 0x1\r\n\r\na",
        b"\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000,
    ],
)
async def test_heads_that_are_no_answer(wire: Wire, answer: bytes) -> None:
    head = await wire.send()
    wire.receive(answer, 101.0)
    with pytest.raises(ConnectionLost, match=r"not HTTP/1\.1"):
        await head
    assert wire.transport.closing


@pytest.mark.parametrize("tail", [b"\r\n", b"\n", b"\r", b"x", b"HTTP/1.1 200 OK\r\n"])
@pytest.mark.parametrize("at_once", [True, False])
async def test_bytes_behind_an_answer_end_the_connection(wire: Wire, tail: bytes, at_once: bool) -> None:
    head = await wire.send()
    wire.receive(CHUNKED, 101.0)
    await head
    done = await wire.relay()
    if at_once:
        wire.receive(b"1\r\na\r\n0\r\n\r\n" + tail, 101.0)
        with pytest.raises(ConnectionLost):
            await done
    else:
        wire.receive(b"1\r\na\r\n0\r\n\r\n", 101.0)
        await done
        wire.receive(tail, 101.0)
    assert wire.transport.closing
    wire.connection.release()
    assert not wire.connection.idle


# --- small questions ---


@contextlib.asynccontextmanager
async def asking() -> AsyncIterator[tuple[MockEngine, Callable[..., Awaitable[bytes]]]]:
    """An engine, and a question to it that returns the body."""
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop)
    pool = UpstreamPool(loop, Limits(), deadlines)
    async with running_engines(1) as [engine]:

        async def ask(target: str = "/x", seconds: float = 5.0, limit: int = 1000) -> bytes:
            origin = Socket("127.0.0.1", engine.port)
            answer = await fetch(pool, origin, target, seconds=seconds, limit=limit, headers=[("x-a", "b")])
            assert (answer.status, answer.fields[b"x-engine"]) == (200, b"yes")
            return answer.body

        yield engine, ask
        pool.close()
    deadlines.close()


async def test_questions_share_a_kept_connection() -> None:
    async with asking() as (engine, ask):
        for _ in range(3):
            assert await ask("/models?x=y") == b'{"object": "answer", "kv_transfer_params": null}'
        assert engine.connections == 1
        exchange = engine.exchanges[0]
        assert (exchange.method, exchange.target, exchange.header("x-a")) == ("GET", "/models?x=y", "b")
        assert exchange.header("host") == f"127.0.0.1:{engine.port}"


async def test_a_question_survives_a_connection_that_was_just_closed() -> None:
    async with asking() as (engine, ask):
        await ask()

        async def close_the_first(exchange: Exchange) -> None:
            if exchange.connection == 0:
                exchange.writer.transport.abort()
            else:
                await exchange.send_json(200, "second", "x-engine: yes")

        engine.behave = close_the_first
        assert await ask() == b'"second"'


async def test_an_answer_above_the_limit_is_not_taken() -> None:
    async with asking() as (engine, ask):
        engine.behave = answer_with(200, "x" * 2000, "x-engine: yes")
        with pytest.raises(UpstreamError, match=r"^the answer is larger than 1000 bytes$"):
            await ask()

        async def flood(exchange: Exchange) -> None:
            await exchange.send_stream_head("x-engine: yes")
            while True:
                await exchange.send_chunk(bytes(65536))

        engine.behave = flood
        with pytest.raises(UpstreamError, match=r"^the answer is larger than 1000 bytes$"):
            await ask()


async def test_questions_have_a_deadline() -> None:
    async with asking() as (engine, ask):
        engine.behave = hang
        with pytest.raises(AnswerTimedOut, match=r"GET /x within 0\.05 s"):
            await ask(seconds=0.05)
        await engine.exchanges[0].wait_closed_by_router()


async def test_nobody_there_is_told_apart() -> None:
    async with asking() as (engine, ask):
        await engine.stop()
        with pytest.raises(ConnectFailed, match="no connection"):
            await ask()


def test_addresses_of_other_ports() -> None:
    assert [Socket("10.0.0.1", 5800).address, Socket("fd00::1", 5800).address] == ["10.0.0.1:5800", "[fd00::1]:5800"]
