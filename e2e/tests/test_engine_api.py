"""What the router makes of each API's requests, before real engines; the tests send the legs themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from bidikv_runtime import contract
from bidikv_runtime.router.api.continuation import Recorder, Rewriter
from bidikv_runtime.router.api.legs import (
    PrefillAnswer,
    bound_prefill_answer,
    build_decode_body,
    build_prefill_body,
    check_fields,
    parse_prefill_answer,
)
from bidikv_runtime.router.api.session import build_response_id, parse_response_id
from bidikv_runtime.router.api.splice import Buffer
from bidikv_runtime.router.observe.record import Route
from e2e.engine.client import EngineClient
from e2e.engine.fixtures import Deployment, text, user
from e2e.engine.local import SERVED_MODEL

pytestmark = [pytest.mark.engine, pytest.mark.asyncio]

SESSION = bytes(range(16))
GUARDED = {contract.HANDOVER_HEADER: contract.HANDOVER_GUARDED}
PATHS: dict[Route, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}}
FUNCTION = {"type": "function", "name": "look", "parameters": SCHEMA}
TOOL = {"name": "look", "description": "looks", "input_schema": SCHEMA}
CALL = [
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"place": "here"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "a house"},
]


async def post(
    engine: EngineClient, path: str, body: bytes, headers: Mapping[str, str] | None = None
) -> tuple[int, str]:
    sent = {"content-type": "application/json", **(headers or {})}
    async with (
        aiohttp.ClientSession(engine.engine.url) as http,
        http.post(path, data=body, headers=sent) as response,
    ):
        return response.status, await response.text()


def joined(pieces: list[Buffer]) -> bytes:
    return b"".join(pieces)


async def run_prefill(deployment: Deployment, route: Route, body: bytes, **options: Any) -> PrefillAnswer:
    """The prefill leg, with nobody to read from."""
    leg = build_prefill_body(check_fields(body), [], SESSION, route=route, body_bytes=len(body), **options)
    status, answer = await post(deployment.p, PATHS[route], joined(leg))
    assert status == 200, answer
    assert len(answer) < bound_prefill_answer(route, len(body), returns_tokens="return_tokens" in options)
    return parse_prefill_answer(answer.encode())


@pytest.mark.parametrize(
    ("route", "parameters"),
    [
        ("responses", {"input": text("r plain", 300)}),
        ("responses", {"input": text("r stream", 300), "stream": True, "max_output_tokens": 30}),
        ("responses", {"input": [user("r items", 300)], "instructions": text("r kind", 100), "store": True}),
        ("responses", {"input": [user("r call", 300), *CALL], "tools": [FUNCTION], "tool_choice": "none"}),
        (
            "responses",
            {
                "input": text("r logs", 300),
                "include": ["message.output_text.logprobs"],
                "top_logprobs": 2,
                "enable_response_messages": True,
            },
        ),
        ("responses", {"input": text("r json", 300), "text": {"format": {"type": "json_object"}}}),
        ("responses", {"input": text("r effort", 300), "reasoning": {"effort": "low"}, "truncation": "auto"}),
        ("responses", {"input": text("r tools", 300), "max_tool_calls": 3, "metadata": {"a": "b"}, "stop": ["x"]}),
        ("messages", {"messages": [user("m plain", 300)]}),
        ("messages", {"messages": [user("m stream", 300)], "stream": True, "system": text("m kind", 100)}),
        ("messages", {"messages": [user("m stop", 300)], "stop_sequences": ["x"], "metadata": {"user_id": "u"}}),
        ("messages", {"messages": [user("m off", 300)], "thinking": {"type": "disabled"}}),
        ("messages", {"messages": [user("m effort", 300)], "output_config": {"effort": "high"}}),
        ("messages", {"messages": [user("m tools", 300)], "tools": [TOOL], "tool_choice": {"type": "none"}}),
        ("chat", {"messages": [user("c ids", 300)], "stream": True}),
    ],
)
async def test_decode_finds_exactly_the_prompt_that_prefill_computed(
    deployment: Deployment, route: Route, parameters: dict[str, Any]
) -> None:
    limit = {"max_output_tokens" if route == "responses" else "max_tokens": 8}
    body = json.dumps({"model": SERVED_MODEL, **limit, **parameters}).encode()
    prefilled = await run_prefill(deployment, route, body)
    assert prefilled.prompt_tokens is not None
    assert prefilled.prompt_tokens > 300
    before = await deployment.reused(deployment.d)
    leg = build_decode_body(body, check_fields(body), [deployment.p.engine.source], SESSION, prefilled.prompt_tokens)
    status, answer = await post(deployment.d, PATHS[route], joined(leg), GUARDED)
    assert status == 200, answer
    assert '"error"' not in answer.replace('"error":null', "")
    assert await deployment.reused(deployment.d) - before == prefilled.prompt_tokens
    await deployment.assert_no_kv_in_use()


async def test_a_thinking_budget_does_not_stop_prefill(deployment: Deployment) -> None:
    request = {"model": SERVED_MODEL, "messages": [user("m budget", 300)], "max_tokens": 1100}
    body = json.dumps(request | {"thinking": {"type": "enabled", "budget_tokens": 1024}}).encode()
    plain = await run_prefill(deployment, "messages", json.dumps(request).encode())
    assert (await run_prefill(deployment, "messages", body)).prompt_tokens == plain.prompt_tokens


async def test_decode_takes_prefills_tokens(deployment: Deployment) -> None:
    body = json.dumps({"model": SERVED_MODEL, "messages": [user("tokens", 300)], "max_tokens": 4}).encode()
    prefilled = await run_prefill(deployment, "chat", body, return_tokens=True)
    assert prefilled.token_ids is not None
    assert json.loads(bytes(prefilled.token_ids)) == await deployment.p.tokenize([user("tokens", 300)])
    before = await deployment.reused(deployment.d)
    leg = build_decode_body(
        body,
        check_fields(body),
        [deployment.p.engine.source],
        SESSION,
        prefilled.prompt_tokens,
        token_ids=prefilled.token_ids,
    )
    status, answer = await post(deployment.d, PATHS["chat"], joined(leg), GUARDED)
    assert status == 200, answer
    assert await deployment.reused(deployment.d) - before == prefilled.prompt_tokens


async def test_a_salt_is_part_of_what_is_found(deployment: Deployment) -> None:
    body = json.dumps({"model": SERVED_MODEL, "messages": [user("salted", 300)], "max_tokens": 4}).encode()
    prefilled = await run_prefill(deployment, "messages", body, cache_salt=b'"one"')
    assert prefilled.prompt_tokens is not None
    for salt, found in ((b'"two"', 0), (b'"one"', prefilled.prompt_tokens)):
        before = await deployment.reused(deployment.d)
        leg = build_decode_body(
            body,
            check_fields(body),
            [deployment.p.engine.source],
            SESSION,
            prefilled.prompt_tokens,  # so few that decode computes what it does not find
            cache_salt=salt,
        )
        status, answer = await post(deployment.d, PATHS["messages"], joined(leg))
        assert status == 200, answer
        assert await deployment.reused(deployment.d) - before == found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "parameters"),
    [
        ("responses", {"input": text("refused", 2700), "max_output_tokens": 4}),
        ("messages", {"messages": [user("refused", 2700)], "max_tokens": 4}),
    ],
)
async def test_decode_refuses_messages_and_responses_that_nobody_holds(
    deployment: Deployment, route: Route, parameters: dict[str, Any], stream: bool
) -> None:
    body = json.dumps({"model": SERVED_MODEL, "stream": stream, **parameters}).encode()
    leg = build_decode_body(body, check_fields(body), [deployment.p.engine.source], SESSION, 2700)
    status, answer = await post(deployment.d, PATHS[route], joined(leg), GUARDED)
    assert status == 503, answer
    assert json.loads(answer)["error"]["type"] == contract.HANDOVER_LOST
    await deployment.assert_no_kv_in_use()


async def test_only_decode_stores_a_response_and_its_id_names_the_session(deployment: Deployment) -> None:
    body = json.dumps({"model": SERVED_MODEL, "input": text("stored", 300), "max_output_tokens": 4}).encode()
    fields, made = check_fields(body), build_response_id(SESSION)
    await run_prefill(deployment, "responses", body)
    leg = build_decode_body(body, fields, [deployment.p.engine.source], SESSION, response_id=made)
    status, answer = await post(deployment.d, PATHS["responses"], joined(leg))
    assert status == 200, answer
    assert json.loads(answer)["id"] == made
    assert parse_response_id(made) == SESSION

    following = {"model": SERVED_MODEL, "input": "and then?", "max_output_tokens": 4, "previous_response_id": made}
    found = []
    for engine in (deployment.d, deployment.p):
        async with (
            aiohttp.ClientSession(engine.engine.url) as http,
            http.get(f"/v1/responses/{made}") as response,
        ):
            found.append(response.status)
        found.append((await post(engine, PATHS["responses"], json.dumps(following).encode()))[0])
    assert found == [200, 200, 404, 404]


@pytest.mark.parametrize("route", ["chat", "completions"])
async def test_a_broken_stream_goes_on_with_the_same_text(deployment: Deployment, route: Route) -> None:
    asked = {"messages": [user("continued", 100)]} if route == "chat" else {"prompt": text("continued", 100)}
    request = {"model": SERVED_MODEL, "temperature": 0, "max_tokens": 24, "ignore_eos": True, "stream": True, **asked}
    body = json.dumps(request | {"stream_options": {"include_usage": True}}).encode()
    fields = check_fields(body)
    status, whole = await post(deployment.d, PATHS[route], body)
    assert status == 200, whole
    recorder = Recorder.build(route, fields)
    assert recorder is not None
    seen = recorder.feed(whole.encode()[: len(whole) // 2])  # within an event, or not
    follow_up = recorder.build_follow_up(body, fields)
    assert follow_up is not None
    status, rest = await post(deployment.p, PATHS[route], joined(follow_up))
    assert status == 200, rest
    seen += Rewriter(recorder).feed(rest.encode())
    assert summarise(seen.decode()) == summarise(whole)


def summarise(stream: str) -> list[Any]:
    """Text, ids, finish reasons and usage of a stream; how it is cut into events does not count."""
    *events, done, rest = stream.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    said = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    roles = [choice["delta"]["role"] for choice in choices if "role" in choice.get("delta", {})]
    finished = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    usage = chunks[-1]["usage"]
    counts = [usage[key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")]
    return [said, roles, finished, counts, len({(chunk["id"], chunk["created"]) for chunk in chunks})]
