"""Answers and errors of the HTTP side, in vLLM's shapes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bidikv_runtime import contract
from bidikv_runtime.connector.handover_error import is_lost_event, is_lost_handover, is_prelude
from e2e.simengine.faults import FaultSet
from e2e.simengine.responses_api import BrokenStream
from e2e.simengine.tests.inside import FAST, Answer, Inside, running_inside

USER = [{"role": "user", "content": "Tell me of the sea and of the ships on it."}]
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": USER, "max_tokens": 6, "ignore_eos": True},
    "completions": {"prompt": "Tell me of the sea.", "max_tokens": 6, "ignore_eos": True},
    "messages": {"messages": USER, "max_tokens": 6, "ignore_eos": True},
    "responses": {"input": USER, "max_output_tokens": 6, "ignore_eos": True},
}


def read_text(api: str, document: Any) -> str:
    """Of a whole answer."""
    if api == "chat":
        return str(document["choices"][0]["message"]["content"])
    if api == "completions":
        return str(document["choices"][0]["text"])
    content = document["content"] if api == "messages" else document["output"][0]["content"]
    return str(content[0]["text"])


def read_stream(api: str, events: list[Any]) -> str:
    """The text of a stream's events."""
    if api == "chat":
        return "".join(event["choices"][0]["delta"]["content"] for event in events if event["choices"])
    if api == "completions":
        return "".join(event["choices"][0]["text"] for event in events if event["choices"])
    if api == "messages":
        return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


@pytest.mark.parametrize("api", PATHS)
async def test_a_stream_says_what_a_whole_answer_says(api: str) -> None:
    async with running_inside() as inside:
        whole = await inside.request("POST", PATHS[api], BODIES[api])
        stream = await inside.request("POST", PATHS[api], BODIES[api] | {"stream": True})
    assert whole.status == stream.status == 200
    assert whole.headers[b"content-type"] == b"application/json"
    assert stream.headers[b"content-type"].startswith(b"text/event-stream")
    assert len(read_text(api, whole.json).split()) == 6
    assert read_stream(api, stream.events) == read_text(api, whole.json)
    usage = whole.json["usage"]
    told = usage.get("completion_tokens", usage.get("output_tokens"))
    assert told == 6
    ends = {"messages": "event: message_stop", "responses": "event: response.completed"}.get(api, "data: [DONE]")
    assert ends in b"".join(stream.pieces).decode()


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_the_core_fails_looks_like_vllms(api: str, stream: bool) -> None:
    """The connector's middleware knows vLLM's error by its form."""
    async with running_inside(faults=FaultSet(hang=True)) as inside:
        answer = asyncio.create_task(inside.request("POST", PATHS[api], BODIES[api] | {"stream": stream}))
        inside.core.abort(await inside.wait_for_request(), "error")
        if api == "responses" and stream:
            with pytest.raises(BrokenStream, match=r"union\[ResponseCreatedEvent"):
                await answer
            return
        failed = await answer
    if not stream:
        assert failed.status == 500
        assert is_lost_handover(failed.pieces[0])
        return
    events = [piece for piece in failed.pieces if piece and piece != b"data: [DONE]\n\n"]
    assert is_lost_event(events[-1])
    assert all(map(is_prelude, events[:-1]))


async def test_usage_and_token_ids_come_when_they_are_asked_for() -> None:
    async with running_inside("--enable-prompt-tokens-details") as inside:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = BODIES["chat"] | {"stream": True, "stream_options": options, "return_token_ids": True}
        first, *rest = (await inside.request("POST", PATHS["chat"], body)).events
        tokens = (await inside.request("POST", "/tokenize", {"messages": USER})).json["tokens"]
        again = (await inside.request("POST", PATHS["chat"], BODIES["chat"])).json
    assert first["prompt_token_ids"] == tokens
    assert [event["usage"]["completion_tokens"] for event in rest] == [1, 2, 3, 4, 5, 6, 6]
    assert sum(len(event["choices"][0]["token_ids"]) for event in rest if event["choices"]) == 6
    assert again["usage"]["prompt_tokens"] == len(tokens)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(tokens) // 16 * 16


async def test_decode_takes_the_tokens_that_it_is_given() -> None:
    async with running_inside() as inside:
        tokens = (await inside.request("POST", "/tokenize", {"messages": USER})).json["tokens"]
        params = {contract.KV_TRANSFER_PARAMS: {contract.TOKEN_IDS_PARAM: tokens}}
        given = await inside.chat("something else", max_tokens=6, ignore_eos=True, **params)
        asked = await inside.request("POST", PATHS["chat"], BODIES["chat"])
    assert read_text("chat", given.json) == read_text("chat", asked.json)


async def test_a_stop_string_ends_the_answer_before_it_also_across_tokens() -> None:
    async with running_inside() as inside:
        whole = read_text("chat", (await inside.request("POST", PATHS["chat"], BODIES["chat"])).json)
        stop = whole[len(whole.split()[0]) - 2 :][:4]  # the end of the first word and the beginning of the second
        for stream in (False, True):
            answer = await inside.request("POST", PATHS["chat"], BODIES["chat"] | {"stop": [stop], "stream": stream})
            text = read_stream("chat", answer.events) if stream else read_text("chat", answer.json)
            assert text == whole[: whole.index(stop)]
            choice = (answer.events[-1] if stream else answer.json)["choices"][0]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert inside.core.pool.usage == 0


async def test_an_answer_ends_by_itself_unless_it_must_not() -> None:
    async with running_inside(environment=FAST | {"BIDIKV_SIM_ANSWER_TOKENS": "5"}) as inside:
        free = (await inside.chat("a question")).json
        longer = (await inside.chat("a question", min_tokens=60, max_tokens=100)).json
        bound = (await inside.chat("a question", ignore_eos=True, max_tokens=100)).json
    assert free["choices"][0]["finish_reason"] == "stop"
    assert free["usage"]["completion_tokens"] < 60 <= longer["usage"]["completion_tokens"]
    assert bound["choices"][0]["finish_reason"] == "length"
    assert bound["usage"]["completion_tokens"] == 100


async def test_a_partial_answer_goes_on_as_the_whole_one_did() -> None:
    async with running_inside() as inside:
        whole = read_text("chat", (await inside.chat("go on", max_tokens=10, ignore_eos=True)).json)
        cut = " ".join(whole.split()[:4])
        messages = [{"role": "user", "content": "go on"}, {"role": "assistant", "content": cut}]
        body = {"messages": messages, "max_tokens": 6, "ignore_eos": True}
        rest = await inside.request(
            "POST", PATHS["chat"], body | {"add_generation_prompt": False, "continue_final_message": True}
        )
    assert cut + read_text("chat", rest.json) == whole


async def test_a_stored_response_is_found_and_followed() -> None:
    async with running_inside() as inside:
        made = (await inside.request("POST", PATHS["responses"], BODIES["responses"] | {"request_id": "resp_1"})).json
        assert made["id"] == "resp_1"
        assert (await inside.request("GET", "/v1/responses/resp_1")).json == made
        follow = {"input": "And then?", "previous_response_id": "resp_1", "max_output_tokens": 4}
        following = (await inside.request("POST", PATHS["responses"], follow)).json
        history = [*USER, {"role": "assistant", "content": read_text("responses", made)}]
        spelled = {"input": [*history, {"role": "user", "content": "And then?"}], "max_output_tokens": 4}
        same = (await inside.request("POST", PATHS["responses"], spelled)).json
        kept = BODIES["responses"] | {"request_id": "resp_2", "store": False}
        await inside.request("POST", PATHS["responses"], kept)
        missing = await inside.request("GET", "/v1/responses/resp_2")
    assert read_text("responses", following) == read_text("responses", same)
    assert missing.status == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("chat", b"{", 400, "no JSON"),
        ("chat", b"[]", 400, "JSON object"),
        ("chat", {"messages": []}, 400, "messages"),
        ("chat", {"messages": USER, "model": "other"}, 404, "The model `other` does not exist."),
        ("chat", {"messages": USER, "n": 2}, 400, "one choice"),
        ("chat", {"messages": USER, "max_tokens": 0}, 400, "max_tokens must be at least 1"),
        ("chat", {"messages": USER, "max_tokens": 1, "min_tokens": 2}, 400, "min_tokens"),
        ("chat", {"messages": USER, "stream_options": {}}, 400, "Stream options"),
        ("chat", {"messages": [{"role": "user", "content": "word " * 300}]}, 400, "maximum context length is 256"),
        ("chat", {"messages": USER, "kv_transfer_params": {"prompt_token_ids": [-1]}}, 400, "Token ids"),
        ("completions", {"prompt": ["a", "b"]}, 400, "no batch"),
        ("completions", {"prompt": ""}, 400, "empty"),
        ("responses", {"input": "a", "previous_response_id": "resp_0"}, 404, "resp_0"),
        ("messages", {"messages": USER}, 400, "max_tokens"),
    ],
)
async def test_mistakes_are_told_in_the_apis_form(path: str, body: Any, status: int, message: str) -> None:
    async with running_inside("--max-model-len", "256") as inside:
        answer = await inside.request("POST", PATHS[path], body)
    assert answer.status == status
    assert message in answer.json["error"]["message"]
    assert answer.json.get("type") == ("error" if path == "messages" else None)
    assert answer.json["error"].get("code") == (None if path == "messages" else status)


async def test_a_client_that_leaves_ends_its_request() -> None:
    async with running_inside(environment=FAST | {"BIDIKV_SIM_STEP_SECONDS": "0.005"}) as inside:
        leave = asyncio.Event()
        body = {"messages": USER, "stream": True, "ignore_eos": True}
        request = asyncio.create_task(inside.request("POST", PATHS["chat"], body, leave=leave))
        await inside.wait_for_request()
        leave.set()
        await request
        assert inside.core.unfinished == 0
        assert inside.core.pool.usage == 0


async def test_what_is_beside_the_turns() -> None:
    async with running_inside("--served-model-name", "one", "two") as inside:
        models = await inside.request("GET", "/v1/models")
        version = await inside.request("GET", "/version")
        health = await inside.request("GET", "/health")
        nowhere = await inside.request("GET", "/nowhere")
        method = await inside.request("GET", PATHS["chat"])
        count = await inside.request("POST", "/v1/messages/count_tokens", {"messages": USER, "system": "Be kind."})
        reset = await inside.request("POST", "/reset_prefix_cache")
    assert [card["id"] for card in models.json["data"]] == ["one", "two"]
    assert version.json == {"version": "0.32.0"}
    assert (health.status, nowhere.status, method.status) == (200, 404, 405)
    assert count.json["input_tokens"] > 10
    assert reset.json == {"success": True}


async def set_faults(inside: Inside, body: Any) -> Answer:
    data, answer = json.dumps(body).encode(), Answer()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data}

    async def send(message: Any) -> None:
        answer.status = message.get("status", answer.status)
        answer.pieces.append(message.get("body", b""))

    await inside.faults({"path": "/faults", "method": "POST"}, receive, send)
    return answer


async def test_faults_come_and_go() -> None:
    async with running_inside() as inside:
        assert (await set_faults(inside, {"status": 503, "unhealthy": True})).status == 200
        assert (await inside.request("POST", PATHS["chat"], BODIES["chat"])).status == 503
        assert (await inside.request("GET", "/health")).status == 503
        told = await set_faults(inside, {"slw": 3})
        assert told.status == 400
        assert "slow" in told.json["error"]
        assert (await inside.request("GET", "/health")).status == 503
        await set_faults(inside, {})
        assert (await inside.request("POST", PATHS["chat"], BODIES["chat"])).status == 200
        assert (await inside.request("GET", "/health")).status == 200
        await set_faults(inside, {"deaf": True})
        leave = asyncio.Event()
        unheard = asyncio.create_task(inside.request("GET", "/health", leave=leave))
        await asyncio.sleep(0.02)
        leave.set()
        assert (await unheard).status == 0
