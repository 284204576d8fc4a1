"""A running router that has just started, before engines that report: what it knows is enough."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Any

import aiohttp

from bidikv_runtime.contract import REPORT_PATH, SessionReport
from bidikv_runtime.router.choice.endpoints import Pools
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.router.wiring import Router
from bidikv_runtime.tests.choice_rig import CONFIG, report
from bidikv_runtime.tests.router_engine import WAIT_SECONDS, Exchange, MockEngine, answer, running_engines

CHAT = "/v1/chat/completions"
TURN = {"model": "m", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x" * 8000}]}
SESSION = {"x-session-id": "s"}


class ReportingEngine:
    """Answers turns, and reports the sessions of those that it answered."""

    def __init__(self, engine: MockEngine) -> None:
        self.turns: list[dict[str, Any]] = []
        """``kv_transfer_params`` of each."""
        self.held: dict[str, SessionReport] = {}
        self.endpoint = replace(engine.endpoint, state_port=engine.port)
        engine.behave = self.behave

    async def behave(self, exchange: Exchange) -> None:
        if exchange.target.startswith(REPORT_PATH):
            await exchange.send_json(200, asdict(report(*self.held.values())))
            return
        params = exchange.json["kv_transfer_params"]
        self.turns.append(params)
        length = params["bidikv_body_bytes"]
        self.held[params["bidikv_session"]] = SessionReport(params["bidikv_session"], 2000, 2100, 2100, length)
        await answer(exchange)


@contextlib.asynccontextmanager
async def started_router(pools: Pools) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a new replica, which is ready."""
    router = Router(CONFIG, replace(Limits(), warm_seconds=0.0))
    port = await router.listen("127.0.0.1", 0)
    control = router.start_control()
    router.take_pools(pools)
    try:
        timeout = aiohttp.ClientTimeout(total=WAIT_SECONDS)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout) as http:
            async with asyncio.timeout(WAIT_SECONDS):
                while not await is_ready(http):  # noqa: ASYNC110 -- as a kubelet does
                    await asyncio.sleep(0.002)
            yield http
            assert not any(task.done() for task in control)
    finally:
        await router.close()


async def is_ready(http: aiohttp.ClientSession) -> bool:
    async with http.get("/ready") as response:
        return response.status == 200


async def test_a_replica_that_has_just_started_knows_where_a_session_is_and_that_decode_can_do_it_alone() -> None:
    async with running_engines(5) as mocks:
        prefill, *decode = [ReportingEngine(mock) for mock in mocks]

        def pools(*chosen: ReportingEngine) -> Pools:
            return Pools((prefill.endpoint,), tuple(one.endpoint for one in chosen))

        async with started_router(pools(*decode)) as http, http.post(CHAT, json=TURN, headers=SESSION) as response:
            assert response.status == 200
        home = next(one for one in decode if one.turns)
        assert len(prefill.turns) == 1
        assert "bidikv_compute_limit_tokens" not in home.turns[0]

        # The session is moved by hand: only reports can tell the new replica.
        other = next(one for one in decode if one is not home)
        other.held, home.held = home.held, {}
        for _ in range(2):
            async with started_router(pools(*decode)) as http, http.post(CHAT, json=TURN, headers=SESSION) as response:
                assert response.status == 200
        assert (len(home.turns), len(prefill.turns)) == (1, 1)
        assert [turn["bidikv_compute_limit_tokens"] for turn in other.turns] == [512, 512]


async def test_what_decode_holds_elsewhere_is_offered_to_prefill() -> None:
    async with running_engines(5) as mocks:
        prefill, *decode = [ReportingEngine(mock) for mock in mocks]
        everybody = Pools((prefill.endpoint,), tuple(one.endpoint for one in decode))
        async with started_router(everybody) as http, http.post(CHAT, json=TURN, headers=SESSION) as response:
            assert response.status == 200
        home = next(one for one in decode if one.turns)
        leaving = replace(home.endpoint, ready=False, terminating=True)
        drained = Pools((prefill.endpoint,), tuple(leaving if one is home else one.endpoint for one in decode))
        async with started_router(drained) as http, http.post(CHAT, json=TURN, headers=SESSION) as response:
            assert response.status == 200
        assert len(home.turns) == 1
        assert prefill.turns[1]["bidikv_sources"][0] == home.endpoint.lookup
        assert sum(len(one.turns) for one in decode) == 2
