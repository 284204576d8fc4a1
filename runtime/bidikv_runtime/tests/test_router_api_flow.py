"""Responses and messages through a running router: their legs, their sessions, their errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from bidikv_runtime.router.api.session import parse_response_id
from bidikv_runtime.tests.router_engine import Exchange, MockEngine, answer_with
from bidikv_runtime.tests.router_rig import Rig, running_rig

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USAGE = {"usage": {"input_tokens": 70, "output_tokens": 1}}


async def respond(exchange: Exchange) -> None:
    """What vLLM does for a response: it names it by the request's id."""
    name = exchange.json["request_id"] if exchange.body else exchange.target.split("/")[3]
    await exchange.send_json(200, {"id": name, **USAGE})


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_rig(prefill=2, decode=4) as running:
        running.behave("prefill", answer_with(200, USAGE))
        yield running


def engine_of_last(rig: Rig) -> MockEngine:
    last = [engine for engine in rig.decode if engine.exchanges]
    assert len(last) == 1
    return last[0]


def forget(rig: Rig) -> None:
    for engine in (*rig.prefill, *rig.decode):
        engine.exchanges.clear()


async def test_a_response_runs_through_both_legs(rig: Rig) -> None:
    rig.behave("decode", respond)
    body = {"model": "m", "input": "hello", "max_output_tokens": 9, "store": True}
    async with rig.http.post(RESPONSES, json=body) as response:
        assert response.status == 200
        made = (await response.json())["id"]
    prefill, decode = rig.sole_exchange("prefill"), rig.sole_exchange("decode")
    assert (prefill.json["max_output_tokens"], prefill.json["store"], prefill.json["stream"]) == (1, False, False)
    assert "request_id" not in prefill.json
    assert decode.json["kv_transfer_params"]["bidikv_prefilled_tokens"] == 70
    assert {key: decode.json[key] for key in body} == body
    assert parse_response_id(made) == bytes.fromhex(decode.json["kv_transfer_params"]["bidikv_session"])


async def test_turns_that_follow_a_response_stay_on_its_engine_whichever_replica_serves_them(rig: Rig) -> None:
    rig.behave("decode", respond)
    engines = []
    for number in range(12):
        forget(rig)
        headers = {"authorization": f"Bearer {number % 3}"}
        made = ""
        seen: list[MockEngine] = []
        for turn in range(3):
            body = {"model": "m", "input": f"question {number} {turn}"}
            body |= {"previous_response_id": made} if made else {}
            async with rig.http.post(RESPONSES, json=body, headers=headers) as response:
                made = (await response.json())["id"]
            seen.append(engine_of_last(rig))
            assert len(rig.exchanges("prefill")) == 1  # of the first turn: only decode knows the others' prompts
        async with rig.http.get(f"{RESPONSES}/{made}") as response:
            assert (response.status, (await response.json())["id"]) == (200, made)
        async with rig.http.post(f"{RESPONSES}/{made}/cancel") as response:
            assert response.status == 200
        seen.append(engine_of_last(rig))
        assert len({id(engine) for engine in seen}) == 1
        engines.append(seen[0].port)
    assert len(set(engines)) > 1


async def test_messages_run_through_both_legs(rig: Rig) -> None:
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": 2000,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "messages": [{"role": "user", "content": "hello"}],
    }
    headers = {"x-api-key": "secret", "x-claude-code-session-id": "s", "anthropic-version": "2023-06-01"}
    async with rig.http.post(MESSAGES, json=body, headers=headers) as response:
        assert response.status == 200
    prefill, decode = rig.sole_exchange("prefill"), rig.sole_exchange("decode")
    assert prefill.json["max_tokens"] == 1
    assert "thinking" not in prefill.json
    assert decode.json["kv_transfer_params"]["bidikv_prefilled_tokens"] == 70
    for exchange in (prefill, decode):
        assert exchange.header("x-api-key") == "secret"
        assert exchange.header("anthropic-version") == "2023-06-01"


async def test_counting_tokens_takes_one_engine(rig: Rig) -> None:
    async with rig.http.post(f"{MESSAGES}/count_tokens", json={"model": "m", "messages": []}) as response:
        assert response.status == 200
    assert rig.exchanges("prefill") == []
    assert rig.sole_exchange("decode").json == {"model": "m", "messages": []}


@pytest.mark.parametrize(
    ("path", "kind"), [(MESSAGES, "invalid_request_error"), ("/v1/chat/completions", "invalid_request_error")]
)
async def test_errors_of_the_router_have_the_form_of_the_api(rig: Rig, path: str, kind: str) -> None:
    async with rig.http.post(path, data=b"[]") as response:
        assert response.status == 400
        error = await response.json()
    assert error["error"]["type"] == kind
    assert error.get("type") == ("error" if path == MESSAGES else None)


async def test_a_wrong_method_is_told_the_right_one(rig: Rig) -> None:
    async with rig.http.get(MESSAGES) as response:
        assert (response.status, response.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/chat/completions", b'data: {"error":'),
        (RESPONSES, b'event: error\ndata: {"type":"error",'),
        (MESSAGES, b'event: error\ndata: {"type":"error","error":{'),
    ],
)
async def test_a_broken_stream_ends_in_the_words_of_its_api(rig: Rig, path: str, expected: bytes) -> None:
    async def die(exchange: Exchange) -> None:
        await exchange.send_stream_head()
        await exchange.send_chunk(b"data: {}\n\n")
        exchange.writer.transport.abort()

    rig.behave("decode", die)
    async with rig.http.post(path, json={"model": "m", "stream": True}) as response:
        body = b""
        try:
            async for chunk in response.content.iter_any():
                body += chunk
        except aiohttp.ClientPayloadError:
            pass
    start, _, event = body.partition(b"data: {}\n\n\n\n")
    assert start == b""
    assert event.startswith(expected)
    assert json.loads(event.strip().rpartition(b"data: ")[2])["error"]["message"]
    assert b"[DONE]" not in body
