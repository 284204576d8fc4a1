"""Clients that send too much, too slowly, too early, or do not read: each costs only itself."""

from __future__ import annotations

import asyncio
import contextlib
from typing import cast

import pytest

from bidikv_runtime.router.http.client import ClientConnection, Request
from bidikv_runtime.router.http.deadlines import Deadlines
from bidikv_runtime.router.http.http1 import build_local_response
from bidikv_runtime.router.http.server import Server
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.tests.router_engine import WAIT_SECONDS
from bidikv_runtime.tests.router_rig import read_response
from bidikv_runtime.tests.router_server import Running, Waiting, echo, running_server
from bidikv_runtime.tests.router_wire import FakeTransport, feed

GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: a\r\n"


async def until_gone(running: Running) -> None:
    """Wait until the server has no connection left."""
    async with asyncio.timeout(WAIT_SECONDS):
        while running.server.connections:  # noqa: ASYNC110 -- nothing announces it
            await asyncio.sleep(0.01)


# --- sending ahead ---


async def test_a_client_that_sends_ahead_is_noticed_when_it_leaves() -> None:
    waiting = Waiting()
    async with running_server(waiting.serve) as running, asyncio.timeout(WAIT_SECONDS):
        _, writer = await running.connect()
        writer.write(GET)
        await waiting.arrived.wait()
        writer.write(bytes(8 * 1024 * 1024))  # far more than the sockets hold
        await writer.drain()
        writer.close()
        await waiting.left.wait()


async def test_what_is_sent_ahead_beyond_the_bound_is_dropped_and_ends_the_connection() -> None:
    arrived, go_on, served = asyncio.Event(), asyncio.Event(), 0

    async def answer(request: Request, client: ClientConnection) -> None:
        nonlocal served
        served += 1
        arrived.set()
        await go_on.wait()
        client.write(build_local_response(200, b"first", close=client.will_close))

    async with running_server(answer) as running, asyncio.timeout(WAIT_SECONDS):
        reader, writer = await running.connect()
        writer.write(GET)
        await arrived.wait()
        writer.write(GET * 40_000)  # 1 MB
        await writer.drain()
        while not next(iter(running.server.connections)).will_close:  # noqa: ASYNC110 -- until it has seen enough
            await asyncio.sleep(0.01)
        go_on.set()
        status, headers, body = await read_response(reader)
        assert (status, headers["connection"], body) == (200, "close", b"first")
        assert await reader.read() == b""
        writer.close()
        await until_gone(running)
    assert served == 1


async def test_a_flood_behind_a_request_is_cut_off() -> None:
    waiting = Waiting()
    async with running_server(waiting.serve, Limits(max_body_bytes=1024 * 1024)) as running:
        _, writer = await running.connect()
        writer.write(GET)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(WAIT_SECONDS):
                while not waiting.left.is_set():
                    writer.write(bytes(65536))
                    await writer.drain()
        assert waiting.left.is_set()


async def test_an_application_may_drop_a_client_that_sent_ahead() -> None:
    arrived, go_on, served = asyncio.Event(), asyncio.Event(), 0

    async def drop(request: Request, client: ClientConnection) -> None:
        nonlocal served
        served += 1
        arrived.set()
        await go_on.wait()
        client.abort()

    for ahead in (GET, GET * 40_000):
        async with running_server(drop) as running, asyncio.timeout(WAIT_SECONDS):
            reader, writer = await running.connect()
            writer.write(GET + ahead)
            await arrived.wait()
            go_on.set()
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            await until_gone(running)
        arrived.clear()
        go_on.clear()
    assert served == 2


# --- bodies ---


async def test_announced_bodies_take_nothing_until_they_come() -> None:
    async with running_server(limits=Limits(max_buffered_bytes=64 * 1024 * 1024)) as running:
        for _ in range(16):
            _, idle = await running.connect()
            idle.write(POST + b"content-length: 67108864\r\n\r\n")
        reader, writer = await running.connect()
        writer.write(POST + b"content-length: 100000\r\n\r\n" + bytes(100_000))
        assert (await read_response(reader))[0] == 200
        assert running.server.buffered == 0


@pytest.mark.parametrize("chunked", [False, True])
async def test_the_bound_on_bodies_holds_while_they_come(chunked: bool) -> None:
    async with running_server(limits=Limits(max_buffered_bytes=1_000_000)) as running:
        _, slow = await running.connect()
        slow.write(POST + b"content-length: 1000000\r\n\r\n" + bytes(600_000))
        reader, writer = await running.connect()
        if chunked:
            writer.write(POST + b"transfer-encoding: chunked\r\n\r\n")
        else:
            writer.write(POST + b"content-length: 600000\r\n\r\n")
        async with asyncio.timeout(WAIT_SECONDS):
            while running.server.buffered < 600_000:  # noqa: ASYNC110 -- nothing announces it
                await asyncio.sleep(0.01)
        writer.write(b"927c0\r\n" if chunked else b"")
        writer.write(bytes(600_000))
        status, headers, _ = await read_response(reader)
        assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
        assert running.server.buffered == 600_000
        slow.transport.abort()
        async with asyncio.timeout(WAIT_SECONDS):
            while running.server.buffered:  # noqa: ASYNC110 -- nothing announces it
                await asyncio.sleep(0.01)


async def test_a_body_that_comes_byte_by_byte_is_refused_though_never_silent() -> None:
    async with running_server(limits=Limits(body_seconds=0.3)) as running:
        reader, writer = await running.connect()
        writer.write(POST + b"content-length: 100000\r\n\r\n")

        async def trickle() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"x")
                    await asyncio.sleep(0.01)

        task = asyncio.create_task(trickle())
        assert (await read_response(reader))[0] == 408
        task.cancel()


@pytest.mark.parametrize(
    "framing", [b"1;%b\r\nx\r\n" % (b"e" * 1000) * 100, b"1\r\nx\r\n0\r\n" + b"trailer: x\r\n" * 10_000]
)
async def test_a_chunked_body_that_is_nearly_all_framing_is_refused(framing: bytes) -> None:
    async with running_server() as running:
        reader, writer = await running.connect()
        writer.write(POST + b"transfer-encoding: chunked\r\n\r\n" + framing)
        status, headers, body = await read_response(reader)
        assert (status, headers["connection"]) == (400, "close")
        assert b"nearly all framing" in body


async def test_chunks_of_one_byte_are_allowed() -> None:
    body = bytes(range(256)) * 512
    async with running_server() as running:
        reader, writer = await running.connect()
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        writer.write(POST + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        status, _, received = await read_response(reader)
        assert (status, received) == (200, body)


async def test_only_progress_gives_a_body_more_time() -> None:
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop)
    server = Server(loop, echo, Limits(), deadlines, lambda error: None)
    connection, transport = ClientConnection(server), FakeTransport()
    connection.connection_made(cast(asyncio.Transport, transport))
    feed(connection, POST + b"content-length: 10000000\r\n\r\n")
    given = connection.deadline
    await asyncio.sleep(0.001)
    feed(connection, bytes(200_000))
    assert connection.deadline == given
    feed(connection, bytes(100_000))
    assert connection.deadline > given
    given = connection.deadline
    await asyncio.sleep(0.001)
    feed(connection, bytes(200_000))
    assert connection.deadline == given
    transport.close()
    connection.connection_lost(None)
    deadlines.close()
    assert server.buffered == 0


# --- heads and connections ---


async def test_header_fields_are_counted() -> None:
    async with running_server(limits=Limits(max_header_fields=10)) as running:
        for count, expected in ((9, 200), (10, 431)):
            reader, writer = await running.connect()
            writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * count + b"\r\n")
            assert (await read_response(reader))[0] == expected
            writer.close()


async def test_connections_are_bounded() -> None:
    async with running_server(limits=Limits(max_connections=2)) as running:
        kept = [await running.connect() for _ in range(2)]
        for reader, writer in kept:
            writer.write(GET)
            assert (await read_response(reader))[0] == 200
        reader, _ = await running.connect()
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), WAIT_SECONDS) == b""
        kept[0][1].write(GET)
        assert (await read_response(kept[0][0]))[0] == 200  # those that are there do not notice
        kept[1][1].close()
        async with asyncio.timeout(WAIT_SECONDS):
            while len(running.server.connections) > 1:  # noqa: ASYNC110 -- nothing announces it
                await asyncio.sleep(0.01)
        reader, writer = await running.connect()
        writer.write(GET)
        assert (await read_response(reader))[0] == 200


async def test_many_connections_at_once_are_all_accepted() -> None:
    async with running_server() as running, asyncio.timeout(WAIT_SECONDS):
        for reader, writer in await asyncio.gather(*(running.connect() for _ in range(256))):
            writer.write(GET)
            assert (await read_response(reader))[0] == 200


# --- clients that do not read ---


async def test_no_further_response_is_written_before_the_last_one_is_taken() -> None:
    size, count, served = 4 * 1024 * 1024, 8, 0

    async def answer(request: Request, client: ClientConnection) -> None:
        nonlocal served
        served += 1
        client.write(build_local_response(200, bytes(size)))

    async with running_server(answer) as running:
        reader, writer = await running.connect()
        writer.write(GET * count)
        async with asyncio.timeout(WAIT_SECONDS):
            while not any(connection.stalled for connection in running.server.connections):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert served < count
        for _ in range(count):
            assert len((await read_response(reader))[2]) == size
    assert served == count


async def test_a_client_that_reads_nothing_between_requests_is_dropped() -> None:
    async def answer(request: Request, client: ClientConnection) -> None:
        client.write(build_local_response(200, bytes(64 * 1024 * 1024)))

    async with running_server(answer, Limits(keep_alive_seconds=0.5)) as running:
        _, writer = await running.connect()
        writer.write(GET + GET)
        async with asyncio.timeout(WAIT_SECONDS):
            while not running.server.connections:  # noqa: ASYNC110 -- until it is accepted
                await asyncio.sleep(0.01)
        await until_gone(running)
