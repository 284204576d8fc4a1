"""Hand-overs that were lost: decode refuses a long prompt that prefill announced and nobody holds, with one error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bidikv_runtime import contract
from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.router.observe.metrics import HANDOVERS_LOST
from bidikv_runtime.tests.router_process import running_router
from e2e.engine.client import EngineClient, Message, Metrics
from e2e.engine.fixtures import OUTPUT_TOKENS, Deployment, assert_same, user
from e2e.engine.local import HOST, SERVED_MODEL, LocalEngine, free_port

pytestmark = [pytest.mark.engine, pytest.mark.asyncio]

LONG = 2700
"""Tokens of a prompt above the limit up to which decode computes itself (2,048), within the pool of 5,120."""
GUARDED = {contract.HANDOVER_HEADER: contract.HANDOVER_GUARDED}


async def ask(
    engine: EngineClient,
    messages: Sequence[Message],
    announced: int,
    *,
    source: str,
    headers: Mapping[str, str] = GUARDED,
    path: str = "chat/completions",
    **parameters: Any,
) -> tuple[int, Mapping[str, str], str]:
    """A decode leg as the router sends it: status, headers and text of the answer."""
    params = {contract.SOURCES_PARAM: [source], contract.PREFILLED_PARAM: announced}
    body = {"model": SERVED_MODEL, "max_tokens": 4, "ignore_eos": True, contract.KV_TRANSFER_PARAMS: params}
    body |= {"messages": list(messages)} if path == "chat/completions" else {"prompt": messages[0]["content"]}
    async with (
        aiohttp.ClientSession(engine.engine.url) as http,
        http.post(f"/v1/{path}", json=body | parameters, headers=headers) as response,
    ):
        return response.status, response.headers, await response.text()


async def lost(engine: EngineClient) -> int:
    return int((await engine.metrics()).value(contract.METRIC_HANDOVERS_LOST))


def assert_refused(answer: tuple[int, Mapping[str, str], str]) -> None:
    status, headers, text = answer
    assert status == 503, text
    assert headers["Retry-After"] == "1"
    assert headers[contract.HANDOVER_HEADER] == contract.HANDOVER_ANSWERED_LOST
    error = json.loads(text)["error"]
    assert (error["type"], error["code"]) == (contract.HANDOVER_LOST, 503)


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("chat/completions", {}),
        ("chat/completions", {"stream": True}),
        ("chat/completions", {"stream": True, "n": 2, "temperature": 1.0, "return_token_ids": True}),
        ("chat/completions", {"stream": True, "response_format": {"type": "json_object"}}),
        ("completions", {}),
        ("completions", {"stream": True}),
    ],
)
async def test_decode_refuses_a_long_prompt_that_nobody_holds(
    deployment: Deployment, path: str, parameters: dict[str, Any]
) -> None:
    d, before = deployment.d, await lost(deployment.d)
    messages = [user(f"lost {path} {parameters}", LONG)]
    for _ in range(2):  # had it computed the prompt the first time, it would find it now
        assert_refused(await ask(d, messages, LONG, source=deployment.p.engine.source, path=path, **parameters))
    assert await lost(d) == before + 2 * parameters.get("n", 1)
    await deployment.assert_no_kv_in_use()


async def test_without_the_header_the_error_is_vllms_own(deployment: Deployment) -> None:
    messages = [user("lost without header", LONG)]
    status, headers, text = await ask(deployment.d, messages, LONG, source=deployment.p.engine.source, headers={})
    assert status == 500
    assert contract.HANDOVER_HEADER not in headers
    assert json.loads(text)["error"]["message"] == "Internal server error"


@pytest.mark.parametrize("stream", [True, False])
async def test_decode_computes_what_is_short_enough(deployment: Deployment, stream: bool) -> None:
    before = await lost(deployment.d)
    messages = [user(f"short {stream}", 600)]
    status, headers, text = await ask(deployment.d, messages, 600, source=deployment.p.engine.source, stream=stream)
    assert status == 200, text
    assert contract.HANDOVER_HEADER not in headers
    assert await lost(deployment.d) == before


async def test_what_decode_or_prefill_holds_is_not_lost(deployment: Deployment) -> None:
    p, d, before = deployment.p, deployment.d, await lost(deployment.d)
    messages = [user("held", LONG)]
    announced = len(await p.tokenize(messages))
    await p.chat(messages, max_tokens=1, stream=False)
    status, _, text = await ask(d, messages, announced, source=p.engine.source)  # reads it from P
    assert status == 200, text
    await p.reset_prefix_cache()
    status, _, text = await ask(d, messages, announced, source=p.engine.source)  # has it itself
    assert status == 200, text
    assert await lost(d) == before


async def test_a_handover_that_is_overwritten_during_its_read_is_lost(deployment: Deployment) -> None:
    reader, source, before = deployment.p, deployment.d, await lost(deployment.p)  # P is the one with faults
    messages = [user("overwritten", LONG)]
    await source.chat(messages, max_tokens=1)
    deployment.fault(hold_reads=True)
    leg = asyncio.create_task(ask(reader, messages, LONG, source=source.engine.source))
    await deployment.held("read")
    await deployment.evict(source)
    deployment.fault()
    assert_refused(await leg)
    assert await lost(reader) == before + 1
    await deployment.assert_no_kv_in_use()


async def test_a_refusal_disturbs_no_other_request(deployment: Deployment) -> None:
    d = deployment.d
    messages = [user("undisturbed", 600)]
    [expected] = await deployment.m.chat(messages, max_tokens=64)
    running = asyncio.create_task(d.chat(messages, max_tokens=64))
    for number in range(4):
        assert_refused(await ask(d, [user(f"beside {number}", LONG)], LONG, source=deployment.p.engine.source))
    [answer] = await running
    assert_same(answer, expected)
    await deployment.assert_no_kv_in_use()


@pytest.mark.parametrize("stream", [True, False])
async def test_through_the_router_the_client_sees_one_good_answer(
    deployment: Deployment, tmp_path: Path, stream: bool
) -> None:
    nobody = free_port()  # decode asks there for what prefill computed
    prefill = Endpoint(HOST, deployment.p.engine.port, nobody)
    decode = Endpoint(HOST, deployment.d.engine.port, deployment.d.engine.lookup_port)
    before = await lost(deployment.d)
    messages = [user(f"router {stream}", LONG)]
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    async with running_router([prefill], [decode]) as router:
        async with EngineClient(LocalEngine("router", tmp_path / "unused", port=router.port)) as client:
            [answer] = await client.chat(messages, max_tokens=OUTPUT_TOKENS, stream=stream)
        assert_same(answer, expected)
        async with aiohttp.ClientSession(router.url) as http, http.get("/metrics") as response:
            metrics = Metrics(await response.text())
    assert metrics.value(HANDOVERS_LOST) == 1
    assert metrics.value("bidikv_router_requests_total", code="200") == 1
    assert await lost(deployment.d) == before + 1
