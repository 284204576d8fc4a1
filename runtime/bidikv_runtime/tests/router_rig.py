"""A router in this process between mock engines and a client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from bidikv_runtime.contract import ReuseMode, RouterConfig
from bidikv_runtime.router.choice.endpoints import Pools
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.router.wiring import Router
from bidikv_runtime.tests.router_engine import (
    WAIT_SECONDS,
    Behaviour,
    Exchange,
    MockEngine,
    answer,
    running_engines,
)

Role = Literal["prefill", "decode"]


@dataclass
class Rig:
    """What a test needs to drive and to observe."""

    router: Router
    port: int
    prefill: list[MockEngine]
    decode: list[MockEngine]
    http: aiohttp.ClientSession
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    answer = staticmethod(answer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def engines(self, role: Role) -> list[MockEngine]:
        return self.prefill if role == "prefill" else self.decode

    def exchanges(self, role: Role) -> list[Exchange]:
        return [exchange for engine in self.engines(role) for exchange in engine.exchanges]

    def sole_exchange(self, role: Role) -> Exchange:
        exchanges = self.exchanges(role)
        assert len(exchanges) == 1, f"{len(exchanges)} requests reached {role}"
        return exchanges[0]

    def engine_of(self, exchange: Exchange) -> MockEngine:
        return next(engine for engine in (*self.prefill, *self.decode) if exchange in engine.exchanges)

    def behave(self, role: Role, behaviour: Behaviour) -> None:
        for engine in self.engines(role):
            engine.behave = behaviour

    async def next_exchange(self, role: Role) -> Exchange:
        """The first request that reaches any engine of ``role``."""
        waits = [asyncio.ensure_future(engine.wait_for_exchange()) for engine in self.engines(role)]
        try:
            done, _ = await asyncio.wait(waits, timeout=WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def metrics(self) -> str:
        async with self.http.get("/metrics") as response:
            return await response.text()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection to the router, closed at the end of the test at the latest."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer


@contextlib.asynccontextmanager
async def running_rig(
    *,
    prefill: int,
    decode: int,
    reuse: ReuseMode = "Bidirectional",
    limits: Limits | None = None,
    **options: Any,
) -> AsyncIterator[Rig]:
    """A started router with healthy engines; ``options`` are fields of its configuration.

    Its turns have two legs unless ``local_limit_tokens`` is given: mock engines' prompts are all tiny.
    """
    config = RouterConfig(
        namespace="",
        prefill_service="",
        decode_service="",
        served_model_name="m",
        reuse=reuse,
        source_count=2,
        **{"local_limit_tokens": 0, **options},
    )
    async with running_engines(prefill + decode) as engines:
        router = Router(config, limits or Limits())
        router.take_pools(
            Pools(tuple(e.endpoint for e in engines[:prefill]), tuple(e.endpoint for e in engines[prefill:]))
        )
        port = await router.server.listen("127.0.0.1", 0)
        timeout = aiohttp.ClientTimeout(total=3 * WAIT_SECONDS)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout) as http:
            rig = Rig(router, port, engines[:prefill], engines[prefill:], http)
            try:
                yield rig
            finally:
                for writer in rig.writers:
                    writer.transport.abort()
                await router.close()


async def read_response(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body (by Content-Length or to the end) of one response on a bare connection."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_SECONDS)).decode("latin-1")
    line, *fields = head.split("\r\n")[:-2]
    headers = {name.lower(): value.strip() for name, _, value in (entry.partition(":") for entry in fields)}
    if "content-length" in headers:
        body = await asyncio.wait_for(reader.readexactly(int(headers["content-length"])), WAIT_SECONDS)
    else:
        body = await asyncio.wait_for(reader.read(), WAIT_SECONDS)
    return int(line.split(" ")[1]), headers, body
