"""What the router does when engines fail, clients leave, and either misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from bidikv_runtime.router.choice.endpoints import Pools
from bidikv_runtime.router.http.deadlines import Deadlines
from bidikv_runtime.router.http.http1 import build_local_response
from bidikv_runtime.router.http.server import ClientConnection, Request, Server
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.tests.router_engine import WAIT_SECONDS, Exchange, answer, answer_with, hang
from bidikv_runtime.tests.router_rig import Rig, Role, read_response, running_rig

CHAT = "/v1/chat/completions"
TURN: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\n"


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_rig(prefill=2, decode=2) as running:
        yield running


def raw_turn(body: dict[str, Any] | None = None) -> bytes:
    """A whole turn as a client sends it."""
    data = json.dumps(TURN if body is None else body).encode()
    return HEAD + b"content-length: %d\r\n\r\n" % len(data) + data


async def close_without_answer(exchange: Exchange) -> None:
    """Break the connection as a dying process does."""
    exchange.writer.transport.abort()


async def until_metric(rig: Rig, line: str) -> None:
    """Wait for a line of /metrics (a disconnect is counted after the client is already gone)."""
    async with asyncio.timeout(WAIT_SECONDS):
        while line not in await rig.metrics():  # noqa: ASYNC110 -- only /metrics tells, as in production
            await asyncio.sleep(0.01)


# --- clients that leave ---


@pytest.mark.parametrize(("role", "phase"), [("prefill", "prefill"), ("decode", "decode")])
async def test_leaving_before_an_answer_closes_the_leg(rig: Rig, role: Role, phase: str) -> None:
    rig.behave(role, hang)
    _, writer = await rig.connect()
    writer.write(raw_turn())
    exchange = await rig.next_exchange(role)
    assert not exchange.closed_by_router.is_set()
    writer.close()
    await exchange.wait_closed_by_router()
    if role == "prefill":
        assert rig.exchanges("decode") == []
    await until_metric(rig, f'bidikv_router_client_disconnects_total{{phase="{phase}"}} 1.0')
    assert "bidikv_router_requests_in_flight 0.0" in await rig.metrics()
    assert "bidikv_router_buffered_bytes 0.0" in await rig.metrics()


async def test_leaving_within_a_stream_closes_the_leg(rig: Rig) -> None:
    async def stream_forever(exchange: Exchange) -> None:
        await exchange.send_stream_head()
        await exchange.send_chunk(b"data: 1\n\n")
        await exchange.wait_closed_by_router()

    rig.behave("decode", stream_forever)
    reader, writer = await rig.connect()
    writer.write(raw_turn())
    await asyncio.wait_for(reader.readuntil(b"data: 1\n\n"), WAIT_SECONDS)
    writer.transport.abort()
    await (await rig.next_exchange("decode")).wait_closed_by_router()
    await until_metric(rig, 'bidikv_router_client_disconnects_total{phase="stream"} 1.0')


async def test_leaving_within_the_body_reaches_no_engine(rig: Rig) -> None:
    _, writer = await rig.connect()
    writer.write(HEAD + b"content-length: 1000\r\n\r\n{")
    await until_metric(rig, "bidikv_router_buffered_bytes 1.0")
    writer.close()
    await until_metric(rig, "bidikv_router_buffered_bytes 0.0")
    assert rig.exchanges("prefill") == []


async def test_an_engine_connection_of_a_cancelled_leg_is_not_used_again(rig: Rig) -> None:
    rig.behave("decode", hang)
    _, writer = await rig.connect()
    writer.write(raw_turn())
    first = await rig.next_exchange("decode")
    writer.close()
    await first.wait_closed_by_router()
    rig.behave("decode", answer)
    async with rig.http.post(CHAT, json=TURN) as response:
        assert (await response.text()).endswith("[DONE]\n\n")
    assert rig.exchanges("decode")[1].connection != first.connection


# --- engines that fail before an answer ---


async def test_a_dead_prefill_engine_costs_no_request(rig: Rig) -> None:
    await rig.prefill[0].stop()
    for session in range(8):
        async with rig.http.post(CHAT, json=TURN, headers={"x-session-id": str(session)}) as response:
            assert response.status == 200
            assert (await response.text()).endswith("[DONE]\n\n")
    assert len(rig.prefill[1].exchanges) == 8
    # Suspected after the first failure, it was not tried for every session.
    assert 'bidikv_router_retries_total{leg="prefill",reason="connection"} 1.0' in await rig.metrics()


@pytest.mark.parametrize("behaviour", [close_without_answer, answer_with(500, {"error": "x"})])
async def test_a_failing_prefill_leg_is_sent_to_the_other_engine(rig: Rig, behaviour: Any) -> None:
    rig.prefill[0].behave = behaviour
    for session in range(4):
        async with rig.http.post(CHAT, json=TURN, headers={"x-session-id": str(session)}) as response:
            assert response.status == 200
            await response.read()
    assert len(rig.prefill[1].exchanges) == 4
    for exchange in rig.exchanges("decode"):
        assert exchange.json["kv_transfer_params"]["bidikv_sources"] == [rig.prefill[1].endpoint.lookup]


async def test_the_last_prefill_verdict_reaches_the_client(rig: Rig) -> None:
    rig.behave("prefill", answer_with(503, {"error": "busy"}, "retry-after: 3"))
    async with rig.http.post(CHAT, json=TURN) as response:
        assert (response.status, response.headers["retry-after"]) == (503, "3")
        assert await response.json() == {"error": "busy"}
    assert len(rig.exchanges("prefill")) == 2
    assert rig.exchanges("decode") == []


async def test_without_prefill_engines_the_answer_is_an_error_not_a_hidden_recompute(rig: Rig) -> None:
    for engine in rig.prefill:
        await engine.stop()
    async with rig.http.post(CHAT, json=TURN) as response:
        assert response.status == 502
        assert "prefill engine gave no answer" in (await response.json())["error"]["message"]
    rig.router.take_pools(Pools((), rig.router.fleet.pools.decode))
    async with rig.http.post(CHAT, json=TURN) as response:
        assert (response.status, response.headers["retry-after"]) == (503, "1")
    assert rig.exchanges("decode") == []


async def test_without_decode_engines_prefill_does_not_compute(rig: Rig) -> None:
    rig.router.take_pools(Pools(rig.router.fleet.pools.prefill, ()))
    async with rig.http.post(CHAT, json=TURN) as response:
        assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert "No decode engine is ready" in (await response.json())["error"]["message"]
    async with rig.http.get("/ready") as response:
        assert (response.status, await response.text()) == (503, "No decode engine is ready.")
    assert rig.exchanges("prefill") == []


@pytest.mark.parametrize("dead", [True, False])
async def test_decode_that_breaks_before_its_head_is_replaced_by_the_next(rig: Rig, dead: bool) -> None:
    if dead:
        await rig.decode[0].stop()
    else:
        rig.decode[0].behave = close_without_answer
    for session in range(6):
        async with rig.http.post(CHAT, json=TURN, headers={"x-session-id": str(session)}) as response:
            assert response.status == 200
            assert (await response.text()).endswith("[DONE]\n\n")
    assert len(rig.decode[1].exchanges) == 6
    assert len(rig.exchanges("prefill")) == 6  # the KV is still there: nothing is computed twice


async def test_retries_are_limited_by_the_budget() -> None:
    async with running_rig(prefill=2, decode=1, limits=Limits(retry_ratio=0, retry_reserve=0)) as rig:
        rig.behave("prefill", close_without_answer)
        async with rig.http.post(CHAT, json=TURN) as response:
            assert response.status == 502
        assert len(rig.exchanges("prefill")) == 1


async def test_a_stale_connection_is_replaced_without_using_another_engine(rig: Rig) -> None:
    async with rig.http.post(CHAT, json=TURN) as response:
        await response.read()
    decode = rig.engine_of(rig.sole_exchange("decode"))

    async def close_the_reused_one(exchange: Exchange) -> None:
        await (close_without_answer if exchange.connection == 0 else answer)(exchange)

    decode.behave = close_the_reused_one  # the engine closed it just when the request was sent
    async with rig.http.post(CHAT, json=TURN) as response:
        assert (await response.text()).endswith("[DONE]\n\n")
    assert [exchange.connection for exchange in decode.exchanges] == [0, 0, 1]
    assert 'bidikv_router_retries_total{leg="decode",reason="stale"} 1.0' in await rig.metrics()


async def test_idle_connections_are_closed_before_the_engine_does_it() -> None:
    async with running_rig(prefill=1, decode=1, limits=Limits(upstream_idle_seconds=0)) as rig:
        for _ in range(2):
            async with rig.http.post(CHAT, json=TURN) as response:
                await response.read()
        assert [exchange.connection for exchange in rig.exchanges("decode")] == [0, 1]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_silent_engine_ends_in_504(role: Role) -> None:
    # Only for the silent one: the other has all the time that it needs.
    limits = Limits(prefill_seconds=0.05) if role == "prefill" else Limits(decode_first_byte_seconds=0.05)
    async with running_rig(prefill=2, decode=2, limits=limits) as rig:
        rig.behave(role, hang)
        async with rig.http.post(CHAT, json=TURN) as response:
            assert response.status == 504
            assert f"{role} engine gave no answer" in (await response.json())["error"]["message"]
        await rig.sole_exchange(role).wait_closed_by_router()  # and it was not tried a second time


@pytest.mark.parametrize(
    "reply",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3, 3\r\n\r\nabc",
    ],
)
async def test_an_answer_that_is_not_http_is_never_relayed(reply: bytes) -> None:
    async def misbehave(exchange: Exchange) -> None:
        await exchange.send(reply)
        await exchange.wait_closed_by_router()

    async with running_rig(prefill=1, decode=1) as rig:
        rig.behave("decode", misbehave)
        async with rig.http.post(CHAT, json=TURN) as response:
            assert response.status == 502


# --- engines that fail within an answer ---


async def test_a_broken_stream_ends_with_an_error_event(rig: Rig) -> None:
    async def die(exchange: Exchange) -> None:
        await exchange.send_stream_head()
        await exchange.send_chunk(b"data: 1\n\n")
        exchange.writer.close()

    rig.behave("decode", die)
    async with rig.http.post(CHAT, json=TURN) as response:
        text = await response.text()  # aiohttp would raise if the framing were broken
    events = [event for event in text.split("\n\n") if event]
    assert events[0] == "data: 1"
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == 502
    assert len(events) == 2
    assert "bidikv_router_broken_streams_total 1.0" in await rig.metrics()


@pytest.mark.parametrize("tail", [b"ff\r\ndata: half", b"f", b"5\r\ndata:"])
async def test_a_stream_broken_within_a_chunk_is_cut_off(rig: Rig, tail: bytes) -> None:
    async def die(exchange: Exchange) -> None:
        await exchange.send_stream_head()
        await exchange.send_chunk(b"data: 1\n\n")
        await exchange.send(tail)
        exchange.writer.close()

    rig.behave("decode", die)
    reader, writer = await rig.connect()
    writer.write(raw_turn())
    received = b""
    with contextlib.suppress(ConnectionError):
        received = await asyncio.wait_for(reader.read(), WAIT_SECONDS)
    writer.close()
    assert b"error" not in received  # it would have landed inside the engine's chunk
    assert not received.endswith(b"0\r\n\r\n")


async def test_a_silent_stream_ends_with_an_error_event() -> None:
    async def stall(exchange: Exchange) -> None:
        await exchange.send_stream_head()
        await exchange.send_chunk(b"data: 1\n\n")
        await exchange.wait_closed_by_router()

    async with running_rig(prefill=1, decode=1, limits=Limits(decode_idle_seconds=0.05)) as rig:
        rig.behave("decode", stall)
        async with rig.http.post(CHAT, json=TURN) as response:
            assert '"code":502' in await response.text()


async def test_a_broken_document_is_cut_off(rig: Rig) -> None:
    async def die(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        exchange.writer.close()

    rig.behave("decode", die)
    with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientOSError)):
        async with rig.http.post(CHAT, json={**TURN, "stream": False}) as response:
            await response.read()


async def test_bytes_behind_an_answer_reach_no_client(rig: Rig) -> None:
    async def smuggle(exchange: Exchange) -> None:
        await exchange.send(
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
        )
        await exchange.wait_closed_by_router()

    rig.behave("decode", smuggle)
    reader, writer = await rig.connect()
    writer.write(raw_turn())
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        assert b"evil" not in await asyncio.wait_for(reader.read(), WAIT_SECONDS)
    writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_nobody_asked_for_is_not_taken_for_the_next_one(rig: Rig, stream: bool) -> None:
    async def send_another(exchange: Exchange) -> None:
        await answer(exchange)
        with contextlib.suppress(ConnectionError):
            await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")
        await exchange.wait_closed_by_router()

    rig.behave("decode", send_another)
    with contextlib.suppress(aiohttp.ClientPayloadError):  # when both came in one segment
        async with rig.http.post(CHAT, json={**TURN, "stream": stream}) as response:
            assert "evil" not in await response.text()
    await rig.sole_exchange("decode").wait_closed_by_router()
    rig.behave("decode", answer)
    async with rig.http.post(CHAT, json={**TURN, "stream": stream}) as response:
        assert "evil" not in await response.text()


# --- back-pressure ---


async def test_a_slow_client_slows_its_engine(rig: Rig) -> None:
    piece, count, sent = b"x" * 65536, 1024, 0

    async def flood(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.send_stream_head()
        for _ in range(count):
            await exchange.send_chunk(piece)
            sent += len(piece)
        await exchange.send(b"0\r\n\r\n")

    rig.behave("decode", flood)
    reader, writer = await rig.connect()
    writer.write(raw_turn())
    await rig.next_exchange("decode")
    async with asyncio.timeout(WAIT_SECONDS):
        seen = -1
        while sent == 0 or sent != seen:  # until nothing moves any more
            seen = sent
            await asyncio.sleep(0.2)
    assert sent < piece.__len__() * count, "the router took the whole answer though its client did not read"
    received = bytearray()
    async with asyncio.timeout(3 * WAIT_SECONDS):
        while not received.endswith(b"0\r\n\r\n"):
            data = await reader.read(1 << 20)
            assert data, "the connection ended within the answer"
            received += data
    assert received.count(piece) == count
    writer.close()


async def test_a_stalled_client_is_not_blamed_on_its_engine(caplog: pytest.LogCaptureFixture) -> None:
    async def flood(exchange: Exchange) -> None:
        await exchange.send_stream_head()
        while not exchange.closed_by_router.is_set():
            await exchange.send_chunk(b"x" * 65536)

    async with running_rig(prefill=1, decode=1, limits=Limits(decode_idle_seconds=0.3)) as rig:
        rig.behave("decode", flood)
        _, writer = await rig.connect()
        writer.write(raw_turn())
        exchange = await rig.next_exchange("decode")
        await exchange.wait_closed_by_router()
        await until_metric(rig, "bidikv_router_broken_streams_total 1.0")
    assert "broke off: the client took nothing for 0.3 s" in caplog.text


async def test_a_client_that_neither_reads_nor_sends_any_more_is_gone(rig: Rig) -> None:
    async def flood(exchange: Exchange) -> None:
        await exchange.send_stream_head()
        while not exchange.closed_by_router.is_set():
            await exchange.send_chunk(b"x" * 65536)

    rig.behave("decode", flood)
    _, writer = await rig.connect()
    writer.write(raw_turn())
    exchange = await rig.next_exchange("decode")
    writer.write_eof()  # with bytes waiting for it, so that an orderly close would never finish
    await exchange.wait_closed_by_router()


# --- bounds ---


async def test_a_body_above_the_limit_is_refused() -> None:
    async with running_rig(prefill=1, decode=1, limits=Limits(max_body_bytes=1000)) as rig:
        reader, writer = await rig.connect()
        writer.write(HEAD + b"content-length: 1001\r\n\r\n" + b"x" * 1001)
        status, headers, body = await read_response(reader)
        assert (status, headers["connection"]) == (413, "close")
        assert b"limit of 1000 bytes" in body
        writer.close()

        reader, writer = await rig.connect()
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1f4\r\n%b\r\n" % (b"x" * 500) * 3)
        assert (await read_response(reader))[0] == 413
        writer.close()

        reader, writer = await rig.connect()
        writer.write(HEAD + b"content-length: 1001\r\nexpect: 100-continue\r\n\r\n")
        assert (await read_response(reader))[0] == 413  # instead of the invitation
        writer.close()
        assert 'bidikv_router_requests_total{code="413",route="local"} 3.0' in await rig.metrics()
        assert rig.exchanges("prefill") == []


async def test_requests_in_flight_are_bounded() -> None:
    async with running_rig(prefill=1, decode=1, limits=Limits(max_in_flight=1)) as rig:
        rig.behave("prefill", hang)
        _, writer = await rig.connect()
        writer.write(raw_turn())
        await rig.next_exchange("prefill")
        async with rig.http.post(CHAT, json=TURN) as response:
            assert (response.status, response.headers["retry-after"]) == (503, "1")
        async with rig.http.get("/health") as response:
            assert response.status == 200  # probes are not requests
        writer.close()


async def test_buffered_bodies_are_bounded() -> None:
    async with running_rig(prefill=1, decode=1, limits=Limits(max_buffered_bytes=1000)) as rig:
        _, first = await rig.connect()
        first.write(HEAD + b"content-length: 1000\r\n\r\n" + b"x" * 900)
        await until_metric(rig, "bidikv_router_buffered_bytes 900.0")
        reader, second = await rig.connect()
        second.write(HEAD + b"content-length: 200\r\n\r\n")
        status, headers, _ = await read_response(reader)
        assert (status, headers["retry-after"]) == (503, "1")
        first.close()
        second.close()
        await until_metric(rig, "bidikv_router_buffered_bytes 0.0")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_long_stream_does_not_hold_its_history(rig: Rig, chunked: bool) -> None:
    async def forget_and_answer(exchange: Exchange) -> None:
        await answer(exchange)
        exchange.body = b""

    async def forget_and_stall(exchange: Exchange) -> None:
        exchange.body = b""
        await exchange.send_stream_head()
        await exchange.wait_closed_by_router()

    rig.behave("prefill", forget_and_answer)
    rig.behave("decode", forget_and_stall)
    size = 16 * 1024 * 1024
    _, writer = await rig.connect()
    tracemalloc.start()
    try:
        sent = raw_turn({**TURN, "user": "x" * size})
        if chunked:
            head, _, data = sent.partition(b"\r\n\r\n")
            sent = HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
            del head, data
        writer.write(sent)
        await writer.drain()
        del sent
        await rig.next_exchange("decode")
        await until_metric(rig, "bidikv_router_buffered_bytes 0.0")
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "bidikv_router_requests_in_flight 1.0" in await rig.metrics()
    assert held < size / 4
    assert peak > size
    writer.close()


@pytest.mark.parametrize("sent", [b"POST /v1/chat", HEAD + b"content-length: 10\r\n\r\n{"])
async def test_a_client_that_is_too_slow_gets_408(sent: bytes) -> None:
    limits = Limits(head_seconds=0.05, body_seconds=0.05)
    async with running_rig(prefill=1, decode=1, limits=limits) as rig:
        reader, writer = await rig.connect()
        writer.write(sent)
        assert (await read_response(reader))[0] == 408
        writer.close()


async def test_a_client_that_does_not_read_the_end_of_its_last_answer_is_dropped() -> None:
    served = asyncio.Event()

    async def application(request: Request, client: ClientConnection) -> None:
        client.write(build_local_response(200, bytes(64 * 1024 * 1024), close=client.will_close))
        served.set()

    loop = asyncio.get_running_loop()
    server = Server(loop, application, Limits(keep_alive_seconds=0.5), Deadlines(loop), lambda error: None)
    port = await server.listen("127.0.0.1", 0)
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(GET + b"connection: close\r\n\r\n")
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            await served.wait()
            while server.connections:  # noqa: ASYNC110 -- nothing announces it
                await asyncio.sleep(0.01)
    finally:
        writer.transport.abort()
        await server.close()


async def test_an_idle_client_connection_is_closed() -> None:
    async with running_rig(prefill=1, decode=1, limits=Limits(keep_alive_seconds=0.05)) as rig:
        reader, writer = await rig.connect()
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), WAIT_SECONDS) == b""
        writer.close()


# --- HTTP ---

GET = b"GET /health HTTP/1.1\r\nhost: a\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}", 400),
        (HEAD + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n{}", 400),
        (HEAD + b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}", 400),
        (HEAD + b"content-length: 2, 2\r\n\r\n{}", 400),
        (HEAD + b"content-length: +2\r\n\r\n{}", 400),
        (HEAD + b"content-length: -1\r\n\r\n", 400),
        (HEAD + b"content-length: 99999999999999999999999\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /v1/x HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}garbage", 400),
        (HEAD + b"x: a\r\n folded\r\n\r\n", 400),
        (HEAD + b"x : a\r\n\r\n", 400),
        (HEAD + b"x: a\nx: b\r\n\r\n", 400),
        (HEAD + b"x: a\x00b\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (GET + b"host: b\r\n\r\n", 400),
        (b"GET http://other/health HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"GET /health HTTP/2.0\r\nhost: a\r\n\r\n", 505),
        (b"nonsense\r\n\r\n", 400),
        (GET + b"x: %b\r\n\r\n" % (b"a" * 70_000), 431),
        (b"GET /health" + b"a" * 70_000, 431),
    ],
)
async def test_ambiguous_or_broken_requests_are_refused_and_the_connection_closed(
    rig: Rig, sent: bytes, status: int
) -> None:
    reader, writer = await rig.connect()
    writer.write(sent + GET + b"\r\n")  # must not be taken for a second request
    got, headers, _ = await read_response(reader)
    assert (got, headers["connection"]) == (status, "close")
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), WAIT_SECONDS) == b""
    writer.close()
    assert rig.exchanges("prefill") + rig.exchanges("decode") == []


@pytest.mark.parametrize("sent", [GET + b"connection: close\r\n\r\n", b"GET /health HTTP/1.0\r\n\r\n"])
async def test_a_client_that_wants_no_other_response_gets_the_end(rig: Rig, sent: bytes) -> None:
    reader, writer = await rig.connect()
    writer.write(sent)
    status, headers, _ = await read_response(reader)
    assert (status, headers["connection"]) == (200, "close")
    assert await asyncio.wait_for(reader.read(), WAIT_SECONDS) == b""
    writer.close()


async def test_pipelined_requests_are_answered_in_order(rig: Rig) -> None:
    reader, writer = await rig.connect()
    writer.write(GET + b"\r\n" + raw_turn({**TURN, "stream": False}) + b"GET /nothing HTTP/1.1\r\nhost: a\r\n\r\n")
    assert [(await read_response(reader))[0] for _ in range(3)] == [200, 200, 404]
    writer.close()


async def test_a_request_behind_a_chunked_one_is_not_misread(rig: Rig) -> None:
    data = json.dumps({**TURN, "stream": False}).encode()
    reader, writer = await rig.connect()
    writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) + GET + b"\r\n")
    status, headers, _ = await read_response(reader)
    assert (status, headers["connection"]) == (200, "close")
    assert rig.sole_exchange("decode").json["messages"] == TURN["messages"]
    writer.close()


async def test_chunked_bodies_may_come_in_any_pieces(rig: Rig) -> None:
    data = json.dumps({**TURN, "stream": False}).encode()
    sent = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    for byte in data:
        sent += b"1;extension=1\r\n%c\r\n" % byte
    sent += b"0\r\ntrailer: dropped\r\n\r\n"
    reader, writer = await rig.connect()
    for start in range(0, len(sent), 777):
        writer.write(sent[start : start + 777])
        await writer.drain()
    assert (await read_response(reader))[0] == 200
    decode = rig.sole_exchange("decode")
    assert decode.json["messages"] == TURN["messages"]
    assert decode.header("trailer") is None
    writer.close()


async def test_expect_continue_is_answered(rig: Rig) -> None:
    data = json.dumps({**TURN, "stream": False}).encode()
    reader, writer = await rig.connect()
    writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(data))
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_SECONDS) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(data)
    assert (await read_response(reader))[0] == 200
    assert rig.sole_exchange("decode").header("expect") is None
    writer.close()


async def test_an_http10_client_gets_plain_framing(rig: Rig) -> None:
    data = json.dumps(TURN).encode()
    reader, writer = await rig.connect()
    writer.write(b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    status, headers, body = await read_response(reader)
    assert status == 200
    assert "transfer-encoding" not in headers
    assert body == b'data: {"n": 0}\n\ndata: {"n": 1}\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'
    writer.close()


async def test_an_offer_to_upgrade_is_ignored(rig: Rig) -> None:
    reader, writer = await rig.connect()
    data = json.dumps({**TURN, "stream": False}).encode()
    offer = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: x\r\n"
    writer.write(HEAD + offer + b"content-length: %d\r\n\r\n" % len(data) + data)
    assert (await read_response(reader))[0] == 200
    decode = rig.sole_exchange("decode")
    assert decode.header("upgrade") is None
    assert decode.header("http2-settings") is None
    writer.close()


async def test_interim_answers_and_answers_that_end_with_the_connection(rig: Rig) -> None:
    async def old_style(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\n\r\nuntil the end")
        exchange.writer.close()

    rig.behave("decode", old_style)
    async with rig.http.post(CHAT, json=TURN) as response:
        assert (response.status, await response.text()) == (200, "until the end")


async def test_head_gets_no_body(rig: Rig) -> None:
    for path, status in (("/health", 200), ("/ready", 200), ("/metrics", 200), ("/nothing", 404)):
        async with rig.http.head(path) as response:
            assert (response.status, await response.read()) == (status, b"")
