"""Turns that break late: behind a comment, behind a seam, behind the first byte, while somebody watches."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import logging
import tracemalloc
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest

from bidikv_runtime.router.choice.endpoints import Endpoint, Pools
from bidikv_runtime.router.http.deadlines import Deadlines
from bidikv_runtime.router.http.upstream import UpstreamConnection
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.router.observe.record import TurnRecord
from bidikv_runtime.router.observe.stages import compute_stages
from bidikv_runtime.tests.router_engine import WAIT_SECONDS, Behaviour, Exchange, answer, answer_with
from bidikv_runtime.tests.router_rig import Rig, read_response, running_rig

CHAT = "/v1/chat/completions"
TURN: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
PREFILLED = answer_with(200, {"usage": {"prompt_tokens": 900}})


def event(text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return b"data: %b\n\n" % json.dumps({"id": "a", "created": 1, "model": "m", "choices": [choice]}).encode()


def raw_turn(version: str = "1.1") -> bytes:
    data = json.dumps(TURN).encode()
    return b"POST %b HTTP/%b\r\nhost: r\r\ncontent-length: %d\r\n\r\n%b" % (
        CHAT.encode(),
        version.encode(),
        len(data),
        data,
    )


async def begin_and_die(exchange: Exchange) -> None:
    await exchange.send_stream_head()
    await exchange.send_chunk(event("one "))
    exchange.writer.transport.abort()


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """The first request is answered by the first one, and so on; the last one stays."""
    left = [*behaviours]

    async def behave(exchange: Exchange) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(exchange)

    return behave


def watch(rig: Rig) -> list[TurnRecord]:
    """The records of ended requests."""
    records: list[TurnRecord] = []
    rig.router.proxy._observers = (records.append,)
    return records


async def until_ended(records: list[TurnRecord]) -> TurnRecord:
    async with asyncio.timeout(WAIT_SECONDS):
        while not records:  # noqa: ASYNC110 -- observers are told after the client
            await asyncio.sleep(0.01)
    return records[-1]


# --- streams that may go on elsewhere ---


async def test_a_document_that_breaks_is_cut_off_not_followed_by_another_answer() -> None:
    async def cut_document(exchange: Exchange) -> None:
        await exchange.send(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{"a": 1')
        exchange.writer.close()

    async with running_rig(prefill=1, decode=1, continue_streams=True) as rig:
        rig.behave("prefill", PREFILLED)
        rig.behave("decode", in_turn(cut_document, answer))
        reader, writer = await rig.connect()
        writer.write(raw_turn())
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := await asyncio.wait_for(reader.read(4096), WAIT_SECONDS):
                received += data
        assert received.count(b"HTTP/1.1 ") <= 1
        assert len(rig.exchanges("decode")) == 1


async def test_a_stream_for_http10_breaks_without_a_second_beginning() -> None:
    async with running_rig(prefill=1, decode=1, continue_streams=True) as rig:
        rig.behave("prefill", PREFILLED)
        rig.behave("decode", in_turn(begin_and_die, answer))
        reader, writer = await rig.connect()
        writer.write(raw_turn("1.0"))
        status, _, body = await read_response(reader)
        assert status == 200
        assert body.startswith(event("one "))
        assert json.loads(body.removeprefix(event("one ")).strip().removeprefix(b"data: "))["error"]["code"] == 502
        assert len(rig.exchanges("decode")) == 1


async def test_an_error_behind_the_seam_ends_the_stream_once() -> None:
    """A second last chunk would be taken for the beginning of the next response."""
    async with running_rig(prefill=1, decode=1, continue_streams=True) as rig:
        records = watch(rig)
        rig.behave("prefill", PREFILLED)
        refuse = answer_with(400, {"error": {"message": "no prefix", "code": 400}})
        rig.behave("decode", in_turn(begin_and_die, refuse, answer))
        reader, writer = await rig.connect()
        writer.write(raw_turn())
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_SECONDS)
        body = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), WAIT_SECONDS)
        assert body.count(b'"no prefix"') == 1
        assert (await until_ended(records)).outcome == "broken"
        writer.write(raw_turn())
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_SECONDS)).startswith(b"HTTP/1.1 200 ")
        assert (await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), WAIT_SECONDS)).count(b"data: ") == 4


async def test_a_stream_for_which_no_other_engine_is_left_ends_with_an_event() -> None:
    async with running_rig(prefill=1, decode=1, continue_streams=True) as rig:
        records = watch(rig)
        rig.behave("prefill", PREFILLED)

        async def die_last(exchange: Exchange) -> None:
            rig.router.take_pools(Pools(rig.router.fleet.pools.prefill, ()))
            await begin_and_die(exchange)

        rig.behave("decode", die_last)
        async with rig.http.post(CHAT, json=TURN) as response:
            text = await response.text()  # raises when the framing is broken
        assert text.startswith(event("one ").decode())
        assert "No decode engine is ready" in json.loads(text.split("data: ")[2])["error"]["message"]
        record = await until_ended(records)
        assert (record.outcome, record.status) == ("broken", 200)


async def test_a_stream_does_not_go_on_for_a_client_that_takes_nothing() -> None:
    async def flood(exchange: Exchange) -> None:
        await exchange.send_stream_head()
        while not exchange.closed_by_router.is_set():
            await exchange.send_chunk(event("a") + b": %b\n\n" % (b"x" * 65536))  # little text: it could go on

    limits = Limits(decode_idle_seconds=0.3)
    async with running_rig(prefill=1, decode=2, limits=limits, continue_streams=True) as rig:
        records = watch(rig)
        rig.behave("prefill", PREFILLED)
        rig.behave("decode", flood)
        _, writer = await rig.connect()
        writer.write(raw_turn())
        record = await until_ended(records)
        assert (record.outcome, record.continued) == ("broken", 0)
        assert len(rig.exchanges("decode")) == 1


async def test_the_stages_of_a_stream_that_went_on_follow_each_other() -> None:
    async def end(exchange: Exchange) -> None:
        await exchange.send_stream_head()
        await exchange.send_chunk(event("two", "stop"))
        await exchange.send(b"0\r\n\r\n")

    async with running_rig(prefill=1, decode=1, continue_streams=True) as rig:
        records = watch(rig)
        rig.behave("prefill", PREFILLED)
        rig.behave("decode", in_turn(begin_and_die, end))
        async with rig.http.post(CHAT, json=TURN) as response:
            assert "two" in await response.text()
        record = await until_ended(records)
        assert record.continued == 1
        stages = compute_stages(record)
        assert [stage for stage, _, _ in stages] == ["queue", "prefill", "handover", "first_token", "stream"]
        assert all(begin <= end for _, begin, end in stages)


@pytest.mark.parametrize("continue_streams", [False, True])
async def test_a_connection_goes_on_behind_a_stream_that_ended_with_an_error(continue_streams: bool) -> None:
    """The head promised it: a client that sends its next request at once must not find the connection closed."""
    limits = Limits(retry_ratio=0, retry_reserve=0)
    async with running_rig(prefill=1, decode=1, limits=limits, continue_streams=continue_streams) as rig:
        rig.behave("prefill", PREFILLED)
        rig.behave("decode", in_turn(begin_and_die, answer))
        reader, writer = await rig.connect()
        writer.write(raw_turn())
        first = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), WAIT_SECONDS)
        assert b"connection: close" not in first
        assert b'"code":502' in first
        writer.write(raw_turn())
        second = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), WAIT_SECONDS)
        assert second.startswith(b"HTTP/1.1 200 ")
        assert b"[DONE]" in second


async def test_nothing_is_added_within_a_chunk_whose_end_was_not_relayed() -> None:
    async def end_chunk_and_break(exchange: Exchange) -> None:
        await exchange.send_stream_head()
        await exchange.send(b"10\r\ndata: one\r\n")  # within the chunk, at what looks like its end
        await asyncio.sleep(0.05)
        await exchange.send(b"abcde\r\nnonsense\r\n")  # its end, and what ends the exchange
        await exchange.wait_closed_by_router()

    async with running_rig(prefill=1, decode=1) as rig:
        rig.behave("prefill", PREFILLED)
        rig.behave("decode", end_chunk_and_break)
        reader, writer = await rig.connect()
        writer.write(raw_turn())
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := await asyncio.wait_for(reader.read(4096), WAIT_SECONDS):
                received += data
        assert received.endswith(b"10\r\ndata: one\r\n")


# --- behind a comment ---


async def test_an_error_that_breaks_off_behind_a_comment_is_an_event() -> None:
    async with running_rig(prefill=1, decode=1, limits=Limits(comment_seconds=0.01)) as rig:
        released = asyncio.Event()

        async def cut_error(exchange: Exchange) -> None:
            await released.wait()
            await exchange.send(b"HTTP/1.1 400 No\r\ncontent-length: 100\r\n\r\n{")
            exchange.writer.close()

        rig.behave("prefill", PREFILLED)
        rig.behave("decode", cut_error)
        async with rig.http.post(CHAT, json=TURN) as response:
            await response.content.readuntil(b"\n\n")
            released.set()
            text = await response.text()
        assert json.loads(text.partition("data: ")[2])["error"]["code"] == 502


async def test_no_comment_ends_an_event_whose_lines_come_one_by_one() -> None:
    async with running_rig(prefill=1, decode=1, limits=Limits(comment_seconds=0.01)) as rig:

        async def line_by_line(exchange: Exchange) -> None:
            await exchange.send_stream_head()
            await exchange.send_chunk(b"event: a\n")
            await asyncio.sleep(0.6)  # more than one look at the deadlines
            await exchange.send_chunk(b"data: b\n\n")
            await exchange.send(b"0\r\n\r\n")

        rig.behave("prefill", PREFILLED)
        rig.behave("decode", line_by_line)
        async with rig.http.post(CHAT, json=TURN) as response:
            assert await response.text() == "event: a\ndata: b\n\n"


# --- what is no turn ---


async def test_what_is_passed_on_is_not_held_while_it_is_answered() -> None:
    size = 16 * 1024 * 1024
    answering = asyncio.Event()

    async def forget_and_stall(exchange: Exchange) -> None:
        exchange.body = b""
        await exchange.send_stream_head()
        answering.set()
        await exchange.wait_closed_by_router()

    async with running_rig(prefill=1, decode=1) as rig:
        rig.behave("decode", forget_and_stall)
        reader, writer = await rig.connect()
        tracemalloc.start()
        try:
            writer.write(
                b"POST /v1/chat/completions/batch HTTP/1.1\r\nhost: r\r\ncontent-length: %d\r\n\r\n" % (size + 8)
                + b'{"u": "%b"}' % (b"x" * (size - 1))
            )
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_SECONDS)
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held < size / 4


async def test_a_passed_answer_that_breaks_counts_against_its_engine() -> None:
    async def cut_document(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n{")
        exchange.writer.close()

    async with running_rig(prefill=1, decode=2, limits=Limits(breaker_failures=1)) as rig:
        rig.behave("decode", in_turn(cut_document, answer))
        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientOSError)):
            async with rig.http.post("/tokenize", json={"prompt": "x"}) as response:
                await response.read()
        [first] = [engine for engine in rig.decode if engine.exchanges]
        states = {view.address: view.breaker for view in rig.router.fleet.describe() if view.role == "decode"}
        assert states[first.endpoint.address] == "open"
        assert list(states.values()).count("open") == 1


async def test_what_is_passed_on_finds_the_only_engine_that_is_left() -> None:
    async with running_rig(prefill=1, decode=3) as rig:
        for engine in rig.decode[:2]:
            await engine.stop()
        for session in range(6):
            async with rig.http.post("/tokenize", json={"prompt": "x"}, headers={"x-session-id": str(session)}) as got:
                assert got.status == 200


async def test_what_ends_engines_is_passed_on_to_two_of_them() -> None:
    async with running_rig(prefill=1, decode=3) as rig:
        rig.behave("decode", refuse_connection)
        async with rig.http.post("/tokenize", json={"prompt": "x"}) as response:
            assert response.status == 502
        assert len(rig.exchanges("decode")) == 2


async def test_a_connection_that_nobody_waits_for_any_more_is_forgotten() -> None:
    """uvloop does not tell a protocol of its end when it was connected but whoever wanted it has left."""
    async with running_rig(prefill=1, decode=1) as rig:
        pool, endpoint = rig.router.pool, rig.decode[0].endpoint
        for steps in range(200):
            task = asyncio.ensure_future(pool.acquire(endpoint))
            for _ in range(steps % 10):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await task).abort()
        await asyncio.sleep(0.1)
        watched = [owner for owner in pool.deadlines._watched if isinstance(owner, UpstreamConnection)]
        assert watched == []


async def test_a_connection_with_an_unsent_request_is_not_used_again() -> None:
    """An engine may answer, with an error for one, before it has read the whole request."""
    connections = 0

    async def answer_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        head = await reader.readuntil(b"\r\n\r\n")
        if b"content-length: 2\r\n" in head.lower():
            await reader.readexactly(2)
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\n{}")
        with contextlib.suppress(ConnectionError):
            await left.wait()
        writer.close()

    left = asyncio.Event()
    async with running_rig(prefill=1, decode=1) as rig:
        server = await asyncio.start_server(answer_at_once, "127.0.0.1", 0, limit=1024)
        port = server.sockets[0].getsockname()[1]
        pools = rig.router.fleet.pools
        rig.router.take_pools(Pools(pools.prefill, (Endpoint("127.0.0.1", port, 1),)))
        try:
            for body in (b'{"u": "%b"}' % (b"x" * 32 * 1024 * 1024), b"{}"):
                async with asyncio.timeout(WAIT_SECONDS), rig.http.post("/tokenize", data=io.BytesIO(body)) as response:
                    assert (response.status, await response.read()) == (413, b"{}")
            assert connections == 2
        finally:
            left.set()
            server.close()


async def test_a_deadline_that_fails_does_not_end_all_others(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        deadline = 0.0

        def on_deadline(self) -> None:
            raise ValueError("a defect")

    class Enforced:
        deadline = 0.0

        def on_deadline(self) -> None:
            passed.set()

    passed = asyncio.Event()
    deadlines = Deadlines(asyncio.get_running_loop())
    deadlines.watch(Failing())
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while "a defect" not in caplog.text:  # noqa: ASYNC110 -- only the log tells
                await asyncio.sleep(0.01)
            deadlines.watch(Enforced())
            await passed.wait()
    finally:
        deadlines.close()


# --- who watches, and what is left behind ---


async def test_an_observer_that_fails_harms_no_client() -> None:
    async with running_rig(prefill=1, decode=1) as rig:
        told: list[TurnRecord] = []

        def fail(record: TurnRecord) -> None:
            raise ValueError("a defect")

        rig.router.proxy._observers = (fail, told.append)
        reader, writer = await rig.connect()
        for count in (1, 2):
            writer.write(raw_turn())
            await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), WAIT_SECONDS)
            await until_ended(told)
            assert len(told) == count
        assert (await rig.metrics()).count("bidikv_router_requests_in_flight 0.0") == 1


async def test_a_defect_within_an_answer_is_a_broken_one(caplog: pytest.LogCaptureFixture) -> None:
    async with running_rig(prefill=1, decode=1) as rig:
        records = watch(rig)
        rig.behave("prefill", PREFILLED)

        rig.router.fleet.note_turn = Mock(side_effect=ValueError("a defect"))  # type: ignore[method-assign]
        with contextlib.suppress(aiohttp.ClientError):
            async with rig.http.post(CHAT, json=TURN) as response:
                await response.read()
        record = await until_ended(records)
        assert (record.outcome, record.status) == ("broken", 200)
    assert "a defect" in caplog.text


async def refuse_connection(exchange: Exchange) -> None:
    exchange.writer.transport.abort()


@pytest.mark.parametrize("behaviour", [refuse_connection, begin_and_die, answer_with(400, {"error": {}})])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_failures_leave_no_cycles_that_hold_a_body(
    role: Any, behaviour: Behaviour, caplog: pytest.LogCaptureFixture
) -> None:
    """The collector runs seldom: what an exception's traceback holds would stay for long."""
    caplog.set_level(logging.CRITICAL)  # pytest keeps what is logged, and with it the errors
    async with running_rig(prefill=1, decode=1, limits=Limits(retry_reserve=1000)) as rig:
        rig.behave("prefill", PREFILLED)
        rig.behave(role, behaviour)
        records = watch(rig)
        body = {**TURN, "user": "x" * 200_000}

        async def serve() -> None:
            records.clear()
            with contextlib.suppress(aiohttp.ClientError):
                async with rig.http.post(CHAT, json=body) as response:
                    await response.read()
            await until_ended(records)
            await asyncio.sleep(0)

        await serve()
        gc.collect()
        gc.disable()
        try:
            before = sum(isinstance(found, TurnRecord) for found in gc.get_objects())
            for _ in range(5):
                await serve()
            assert sum(isinstance(found, TurnRecord) for found in gc.get_objects()) <= before + 1
            assert rig.router.server.memory.kept_bytes < 2 * 210_000  # one body's memory, used again each time
        finally:
            gc.enable()
