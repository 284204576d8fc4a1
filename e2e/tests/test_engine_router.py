"""The router in front of real engines: what vLLM accepts, reuses and aborts when a router sits between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from bidikv_runtime.router.api.session import parse_response_id
from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.tests.router_process import RouterProcess, running_router
from e2e.engine.client import EngineClient
from e2e.engine.fixtures import (
    OUTPUT_TOKENS,
    Deployment,
    assert_same,
    assistant,
    eventually,
    user,
    whole_blocks,
)
from e2e.engine.local import HOST, SERVED_MODEL, LocalEngine

pytestmark = [pytest.mark.engine, pytest.mark.asyncio]

FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest_asyncio.fixture
async def router(deployment: Deployment) -> AsyncIterator[RouterProcess]:
    """A router in front of P and D; its turns have two legs, however short they are."""
    p, d = (Endpoint(HOST, client.engine.port, client.engine.lookup_port) for client in (deployment.p, deployment.d))
    async with running_router([p], [d], "--local-limit-tokens", "0") as running:
        yield running


@pytest_asyncio.fixture
async def client(router: RouterProcess, tmp_path: Path) -> AsyncIterator[EngineClient]:
    """The tests' client, bound to the router."""
    async with EngineClient(LocalEngine("router", tmp_path / "unused", port=router.port)) as bound:
        yield bound


@pytest.mark.parametrize("stream", [True, False])
async def test_a_conversation_reuses_its_history_without_the_client_naming_it(
    deployment: Deployment, client: EngineClient, stream: bool
) -> None:
    messages = []
    previous = 0
    for number in range(3):
        messages.append(user(f"router {stream} {number}"))
        await eventually(deployment.p.reset_prefix_cache, "P to reset its prefix cache")  # as if evicted by others
        before = await deployment.reused(deployment.p), await deployment.reused(deployment.d)
        [answer] = await client.chat(messages, max_tokens=OUTPUT_TOKENS, stream=stream)
        after = await deployment.reused(deployment.p), await deployment.reused(deployment.d)
        [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
        assert_same(answer, expected)

        prompt = len(await deployment.p.tokenize(messages))
        held_by_decode = whole_blocks(previous + OUTPUT_TOKENS - 1) if number else 0
        assert after[0] - before[0] == held_by_decode
        assert after[1] - before[1] == prompt - held_by_decode  # the partly filled last block, too
        previous = prompt
        messages.append(assistant(answer))


@pytest.mark.parametrize(
    ("path", "parameters", "legs"),
    [
        ("chat/completions", {"stream": True, "stream_options": {"include_usage": True}}, 2),
        ("chat/completions", {"max_tokens": None, "max_completion_tokens": 5, "min_tokens": 4}, 2),
        ("chat/completions", {"n": 2, "temperature": 1.0, "seed": 1, "logprobs": True, "top_logprobs": 3}, 2),
        ("chat/completions", {"stop": ["x"], "include_stop_str_in_output": True, "stop_token_ids": [5]}, 2),
        ("chat/completions", {"tools": [TOOL], "tool_choice": "none"}, 2),
        ("chat/completions", {"response_format": {"type": "json_object"}}, 2),
        ("chat/completions", {"structured_outputs": {"choice": ["yes", "no"]}}, 2),
        ("chat/completions", {"return_token_ids": True, "return_prompt_text": True, "stream_interval": 2}, 2),
        ("chat/completions", {"logprobs": True, "logprob_token_ids": [5, 6]}, 2),
        ("chat/completions", {"truncate_prompt_tokens": 100, "cache_salt": "salt", "user": "u"}, 2),
        ("chat/completions", {"prompt_logprobs": 1}, 1),
        ("completions", {"prompt": "a plain prompt", "min_tokens": 3}, 2),
        ("completions", {"prompt": ["one", "two"], "n": 2, "temperature": 1.0, "stream": True}, 2),
        ("completions", {"prompt": list(range(10, 60)), "logprobs": 2}, 2),
        ("completions", {"prompt": "echoed", "echo": True, "logprobs": 1}, 1),
        ("completions", {"prompt": "beams", "use_beam_search": True, "n": 2}, 1),
        ("responses", {"input": "a plain question, not short"}, 2),
        ("responses", {"input": [user("r", 100)], "instructions": "be kind", "stream": True}, 2),
        ("responses", {"input": "x" * 100, "include": ["message.output_text.logprobs"], "top_logprobs": 2}, 2),
        ("responses", {"input": "x" * 100, "tools": [FUNCTION], "tool_choice": "none", "max_output_tokens": 5}, 2),
        ("messages", {"stream": True, "system": "be kind", "stop_sequences": ["x"]}, 2),
        ("messages", {"thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}}, 2),
        ("messages", {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "none"}}, 2),
    ],
)
async def test_both_legs_accept_what_vllm_accepts(
    deployment: Deployment, router: RouterProcess, path: str, parameters: dict[str, Any], legs: int
) -> None:
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    body: dict[str, Any] = {"model": SERVED_MODEL, limit: 8, **parameters}
    if path in ("chat/completions", "messages"):
        body["messages"] = [user(f"accepted {parameters}", 100)]
    started = await requests_finished(deployment.p), await requests_finished(deployment.d)
    async with aiohttp.ClientSession(router.url) as http, http.post(f"/v1/{path}", json=body) as response:
        text = await response.text()
        assert response.status == 200, text
        assert '"error"' not in text.replace('"error":null', "")
    async with aiohttp.ClientSession(router.url) as http, http.get("/metrics") as response:
        assert "bidikv_router_retries_total{" not in await response.text()
    assert (await requests_finished(deployment.p) > started[0]) is (legs == 2)
    assert await requests_finished(deployment.d) > started[1]


async def test_a_stored_response_is_found_and_followed(deployment: Deployment, router: RouterProcess) -> None:
    body: dict[str, Any] = {"model": SERVED_MODEL, "input": [user("stored", 300)], "max_output_tokens": 8}
    async with aiohttp.ClientSession(router.url) as http:
        async with http.post("/v1/responses", json=body) as response:
            assert response.status == 200
            made = (await response.json())["id"]
        async with http.get(f"/v1/responses/{made}") as response:
            assert response.status == 200
            assert (await response.json())["id"] == made
        prefills = await requests_finished(deployment.p)
        async with http.post("/v1/responses", json=body | {"previous_response_id": made}) as response:
            assert response.status == 200, await response.text()
            following = (await response.json())["id"]
    assert await requests_finished(deployment.p) == prefills  # only decode knows that prompt
    assert parse_response_id(made) == parse_response_id(following) is not None


async def requests_finished(client: EngineClient) -> float:
    return (await client.metrics()).value("vllm:request_success_total")


async def test_engines_verdicts_keep_their_status(deployment: Deployment, router: RouterProcess) -> None:
    async with aiohttp.ClientSession(router.url) as http:
        wrong_model = {"model": "other", "messages": [user("verdict", 10)]}
        async with http.post("/v1/chat/completions", json=wrong_model) as response:
            assert response.status == 404
            assert "other" in (await response.json())["error"]["message"]
        too_long = {"model": SERVED_MODEL, "messages": [user("verdict", 6000)]}
        async with http.post("/v1/chat/completions", json=too_long) as response:
            assert response.status == 400
        async with http.get("/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == SERVED_MODEL


async def test_a_client_that_leaves_stops_decode(deployment: Deployment, router: RouterProcess) -> None:
    body = {
        "model": SERVED_MODEL,
        "messages": [user("leaving", 100)],
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
    }
    before = await requests_finished(deployment.d)
    async with aiohttp.ClientSession(router.url) as http, http.post("/v1/chat/completions", json=body) as response:
        await response.content.readuntil(b"\n\n")
        response.close()

    async def stopped() -> bool:
        return (await deployment.d.metrics()).value("vllm:num_requests_running") == 0

    await eventually(stopped, "decode to stop", seconds=60)
    assert await requests_finished(deployment.d) == before  # vLLM counts what ran to its end, not what it aborted
    await deployment.assert_no_kv_in_use()
