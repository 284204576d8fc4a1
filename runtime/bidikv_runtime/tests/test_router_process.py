"""The router as a process: start, drain on SIGTERM, exit status, imports."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import aiohttp

from bidikv_runtime.tests.router_engine import WAIT_SECONDS, Exchange, running_engines
from bidikv_runtime.tests.router_process import RouterProcess, running_router

CHAT = "/v1/chat/completions"
TURN = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


@contextlib.asynccontextmanager
async def draining(delay: float, resume: asyncio.Event) -> AsyncIterator[tuple[RouterProcess, aiohttp.ClientResponse]]:
    """A router that was told to end, and a stream through it that goes on when told."""

    async def stream_until_told(exchange: Exchange) -> None:
        await exchange.send_stream_head()
        await exchange.send_chunk(b"data: 1\n\n")
        await resume.wait()
        await exchange.send_chunk(b"data: 2\n\n")
        await exchange.send(b"0\r\n\r\n")

    async with (
        running_engines(2) as (prefill, decode),
        running_router([prefill.endpoint], [decode.endpoint], "--drain-delay-seconds", str(delay)) as router,
        aiohttp.ClientSession(router.url) as http,
    ):
        async with http.get("/ready") as response:
            assert response.status == 200
        decode.behave = stream_until_told
        async with http.post(CHAT, json=TURN) as streaming:
            assert await streaming.content.readuntil(b"1\n\n")
            router.process.send_signal(signal.SIGTERM)
            yield router, streaming


async def is_listening(router: RouterProcess) -> bool:
    try:
        async with aiohttp.ClientSession() as fresh, fresh.get(router.url + "/health"):
            return True
    except aiohttp.ClientConnectorError:
        return False
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
        return True  # it closed while this connection waited to be accepted


async def test_a_drain_begins_with_still_accepting_but_unready() -> None:
    resume = asyncio.Event()
    async with draining(3600, resume) as (router, streaming), aiohttp.ClientSession(router.url) as http:
        async with asyncio.timeout(WAIT_SECONDS):
            status = 200
            while status == 200:
                async with http.get("/ready") as response:
                    status = response.status
        assert status == 503
        assert response.headers["connection"] == "close"
        async with aiohttp.ClientSession() as fresh, fresh.get(router.url + "/health") as response:
            assert response.status == 200
        resume.set()
        assert await streaming.read() == b"data: 2\n\n"
        assert router.process.returncode is None


async def test_a_drain_finishes_running_streams_and_exits_with_zero() -> None:
    resume = asyncio.Event()
    async with draining(0.1, resume) as (router, streaming):
        async with asyncio.timeout(WAIT_SECONDS):
            while await is_listening(router):  # noqa: ASYNC110 -- of another process
                await asyncio.sleep(0.02)
        assert router.process.returncode is None
        resume.set()
        assert await streaming.read() == b"data: 2\n\n"
        assert await router.exit_status() == 0


async def test_a_drain_cuts_off_what_outlasts_the_grace() -> None:
    async def stream_forever(exchange: Exchange) -> None:
        await exchange.send_stream_head()
        await exchange.send_chunk(b"data: 1\n\n")
        await exchange.wait_closed_by_router()

    async with (
        running_engines(2) as (prefill, decode),
        running_router(
            [prefill.endpoint], [decode.endpoint], "--drain-delay-seconds", "0", "--drain-grace-seconds", "0.2"
        ) as router,
        aiohttp.ClientSession(router.url) as http,
    ):
        decode.behave = stream_forever
        async with http.post(CHAT, json=TURN) as streaming:
            assert await streaming.content.readuntil(b"1\n\n")
            router.process.send_signal(signal.SIGTERM)
            assert await router.exit_status() == 1
        await decode.exchanges[0].wait_closed_by_router()


def test_the_router_imports_neither_an_engine_nor_the_operators_libraries() -> None:
    code = (
        "import sys, bidikv_runtime.router.__main__; "
        "print([m for m in ('vllm', 'torch', 'pydantic', 'kubernetes', 'kopf', 'zmq', 'bidikv_operator') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
