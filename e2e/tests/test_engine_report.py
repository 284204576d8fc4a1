"""What an engine reports to routers, and decode legs that are sent without a prefill leg, on real engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
import pytest

from bidikv_runtime import contract
from bidikv_runtime.connector.cost import MINIMUM_STEPS
from bidikv_runtime.contract import EngineReport, SessionReport
from e2e.engine.client import EngineClient, Message
from e2e.engine.fixtures import OUTPUT_TOKENS, TOKEN, Deployment, assert_same, assistant, eventually, user, whole_blocks
from e2e.engine.local import HOST, SERVED_MODEL

pytestmark = [pytest.mark.engine, pytest.mark.asyncio]

LIMIT = 100
GUARDED = {contract.HANDOVER_HEADER: contract.HANDOVER_GUARDED}


async def report(client: EngineClient, known: EngineReport | None = None) -> EngineReport:
    """The engine's report, of what has changed after ``known``."""
    query = {"reads": "1"} | ({} if known is None else {"epoch": known.epoch, "since": str(known.sequence)})
    url = f"http://{HOST}:{client.engine.state_port}{contract.REPORT_PATH}"
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession() as http, http.get(url, params=query, headers=headers) as response:
        assert response.status == 200, await response.text()
        return msgspec.json.decode(await response.read(), type=EngineReport)


def find_session(of: EngineReport, name: str) -> SessionReport | None:
    return next((session for session in of.sessions if session.name == name), None)


async def send(
    engine: EngineClient, session: str, messages: list[Message], limit: int | None, **parameters: Any
) -> tuple[int, Mapping[str, str], str]:
    """A decode leg without a prefill leg, as the router sends it: status, headers and text of the answer."""
    params: dict[str, Any] = {contract.SESSION_PARAM: session}
    if limit is not None:
        params[contract.COMPUTE_LIMIT_PARAM] = limit
    body = {"model": SERVED_MODEL, "messages": messages, "max_tokens": 4, "ignore_eos": True} | parameters
    async with (
        aiohttp.ClientSession(engine.engine.url) as http,
        http.post(
            "/v1/chat/completions", json=body | {contract.KV_TRANSFER_PARAMS: params}, headers=GUARDED
        ) as response,
    ):
        return response.status, response.headers, await response.text()


async def exceeded(engine: EngineClient) -> int:
    return int((await engine.metrics()).value(contract.METRIC_COMPUTE_LIMIT_EXCEEDED))


async def test_a_turn_is_reported_with_what_is_left_of_it(deployment: Deployment) -> None:
    p, d, messages = deployment.p, deployment.d, [user("reported")]
    session = {contract.SESSION_PARAM: "reported", contract.BODY_BYTES_PARAM: 1234}
    before = await report(d)
    await p.chat(messages, max_tokens=1, stream=False, kv_transfer_params=session | {contract.HANDOVER_PARAM: True})
    read = session | {contract.SOURCES_PARAM: [p.engine.source]}
    [answer] = await d.chat(messages, max_tokens=OUTPUT_TOKENS, kv_transfer_params=read)
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    assert_same(answer, expected)

    prompt = len(await d.tokenize(messages))
    total = prompt + OUTPUT_TOKENS
    after = await report(d, before)
    assert after.sessions == (SessionReport("reported", prompt, total, whole_blocks(total - 1), 1234),)
    assert (await report(d, after)).sessions == ()
    assert find_session(await report(p), "reported") is None, "a prefill leg is no turn"
    assert after.engine != (await report(p)).engine
    assert after.compatibility == (await report(p)).compatibility

    # A session's blocks are given up last: it takes two prompts at a time that need nearly all of the pool together.
    await asyncio.gather(*(d.chat([user(f"evict {number}", 2400)], max_tokens=32) for number in range(2)))
    [evicted] = (await report(d, after)).sessions
    assert evicted.held_tokens < whole_blocks(total - 1)
    await eventually(d.reset_prefix_cache, "D to reset its prefix cache")
    left = find_session(await report(d), "reported")
    assert left is not None
    assert left.held_tokens == 0


async def test_what_others_have_not_read_is_reported(deployment: Deployment) -> None:
    """Idle engines, too, know what would be lost with them: a preStop hook waits for it."""
    p, d, messages = deployment.p, deployment.d, [user("unread", 900)]
    session = {contract.SESSION_PARAM: "unread"}
    prefill = session | {contract.HANDOVER_PARAM: True}
    before = (await report(d)).unread_sessions
    await p.chat(messages, max_tokens=1, stream=False, kv_transfer_params=prefill)
    [answer] = await d.chat(
        messages, max_tokens=OUTPUT_TOKENS, kv_transfer_params=session | {contract.SOURCES_PARAM: [p.engine.source]}
    )
    assert (await report(p)).unread_handovers == 0
    assert (await report(d)).unread_sessions == before + 1
    messages += [assistant(answer), user("and more", 600)]
    await eventually(p.reset_prefix_cache, "P to reset its prefix cache")
    reused = await deployment.reused(p)
    await p.chat(
        messages, max_tokens=1, stream=False, kv_transfer_params=prefill | {contract.SOURCES_PARAM: [d.engine.source]}
    )
    assert await deployment.reused(p) > reused
    assert (await report(d)).unread_sessions == before


async def test_what_moved_the_kv_is_reported(deployment: Deployment) -> None:
    p, d = deployment.p, deployment.d
    before = (await report(p)).prompt_tokens, (await report(d)).reused_tokens
    turn = await deployment.turn([user("moved", 1200)])
    for engine, peer in ((p, d), (d, p)):
        told = await report(engine)
        assert told.transport is not None
        assert (told.transport.backend, told.transport.provider, told.transport.warning) == ("UCX", "tcp", "")
        assert told.unreachable == ()
        assert peer.engine.source in told.reached
    read = (await report(d)).transport
    assert read is not None
    assert read.read_bytes > 0
    assert read.failed_reads == 0
    assert read.bandwidth > 1e6
    assert (await report(p)).prompt_tokens == before[0] + len(turn.prompt_tokens)
    assert (await report(d)).reused_tokens == before[1] + turn.decode_reused


async def test_the_report_wants_the_token(deployment: Deployment) -> None:
    url = f"http://{HOST}:{deployment.d.engine.state_port}{contract.REPORT_PATH}"
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        assert response.status == 401


@pytest.mark.parametrize("stream", [True, False])
async def test_decode_computes_no_more_than_it_may(deployment: Deployment, stream: bool) -> None:
    d, before = deployment.d, await exceeded(deployment.d)
    session = f"limit {stream}"
    messages = [user(session)]
    for _ in range(2):  # had it computed the prompt the first time, it would find it now
        status, headers, text = await send(d, session, messages, LIMIT, stream=stream)
        assert status == 503, text
        assert headers[contract.HANDOVER_HEADER] == contract.HANDOVER_ANSWERED_LOST
        assert json.loads(text)["error"]["type"] == contract.HANDOVER_LOST
    assert find_session(await report(d), session) is None, "a refusal is no turn"
    status, headers, text = await send(d, session, messages, None, stream=stream)
    assert status == 200, text
    status, headers, text = await send(d, session, messages, LIMIT, stream=stream)
    assert status == 200, text
    assert contract.HANDOVER_HEADER not in headers
    assert await exceeded(d) == before + 2
    await deployment.assert_no_kv_in_use()


async def test_load_rises_and_returns_to_nothing(deployment: Deployment) -> None:
    d = deployment.d
    turns = [
        asyncio.create_task(d.chat([user(f"load {number}", 1500)], max_tokens=OUTPUT_TOKENS, stream=False))
        for number in range(4)
    ]

    async def is_busy() -> bool:
        now = await report(d)
        return now.requests > 1 and now.queued_tokens > 1000 and now.free_blocks < 1

    await eventually(is_busy, "D to report its load")
    await asyncio.gather(*turns)
    for number in range(MINIMUM_STEPS):
        await d.chat([user(f"step {number}", 100)], max_tokens=1)
    idle = await report(d)
    assert (idle.requests, idle.queued_tokens) == (0, 0)
    await deployment.assert_no_kv_in_use()
    assert (await report(d)).free_blocks == 1.0
    assert idle.prefill_tokens_per_second > 0
