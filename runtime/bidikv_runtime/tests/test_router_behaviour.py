"""What the router promises when something goes wrong, streamed and not: each promise of the folder's README once."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from bidikv_runtime.router.limits import Limits
from bidikv_runtime.router.observe.record import TurnRecord
from bidikv_runtime.tests.router_engine import WAIT_SECONDS, Behaviour, Exchange, answer, answer_with, hang
from bidikv_runtime.tests.router_rig import Rig, running_rig

CHAT = "/v1/chat/completions"
EVENTS = 'data: {"n": 0}\n\ndata: {"n": 1}\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'
PREFILLED = answer_with(200, {"usage": {"prompt_tokens": 900, "completion_tokens": 1}})
streaming = pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])


def turn(stream: bool, *messages: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {
        "model": "m",
        "stream": stream,
        "messages": [
            {"role": roles[index % 2], "content": text} for index, text in enumerate(messages or ("What is up?",))
        ],
    }


def params(exchange: Exchange) -> dict[str, Any]:
    found: dict[str, Any] = exchange.json["kv_transfer_params"]
    return found


def value(text: str, name: str) -> float:
    """One sample of an exposition; 0 when there is none."""
    return next((float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name + " ")), 0.0)


async def until(rig: Rig, name: str, wanted: float) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while value(await rig.metrics(), name) != wanted:  # noqa: ASYNC110 -- only /metrics tells, as in production
            await asyncio.sleep(0.01)


async def assert_answered(response: aiohttp.ClientResponse, stream: bool) -> None:
    assert response.status == 200, await response.text()
    if stream:
        assert await response.text() == EVENTS
    else:
        assert (await response.json())["object"] == "answer"


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_rig(prefill=2, decode=2) as running:
        running.behave("prefill", PREFILLED)
        yield running


# --- a prefill engine dies under load ---


@streaming
async def test_a_prefill_engine_killed_under_load_costs_no_request(stream: bool) -> None:
    async def slowly(exchange: Exchange) -> None:
        await asyncio.sleep(0.02)
        await PREFILLED(exchange)

    async with running_rig(prefill=2, decode=2, limits=Limits(retry_reserve=100)) as rig:
        rig.behave("prefill", slowly)

        async def converse(session: int) -> None:
            for _ in range(8):
                headers = {"x-session-id": str(session)}
                async with rig.http.post(CHAT, json=turn(stream), headers=headers) as response:
                    await assert_answered(response, stream)

        clients = [asyncio.ensure_future(converse(session)) for session in range(16)]
        await rig.prefill[0].wait_for_exchange(12)
        await rig.prefill[0].stop()
        await asyncio.gather(*clients)
        text = await rig.metrics()
        assert value(text, 'bidikv_router_requests_total{code="200",route="chat"}') == 16 * 8
        assert value(text, 'bidikv_router_retries_total{leg="prefill",reason="connection"}') >= 1
        breaker = f'bidikv_router_engine_breaker{{engine="{rig.prefill[0].endpoint.address}",role="prefill"}}'
        assert value(text, breaker) > 0


# --- decode fails before its answer ---


@streaming
@pytest.mark.parametrize(("status", "body"), [(503, {"error": "overloaded"}), (500, {"error": "dead"})])
async def test_the_only_decode_engine_is_asked_again_after_another_prefill(
    stream: bool, status: int, body: dict[str, str]
) -> None:
    async with running_rig(prefill=1, decode=1) as rig:
        rig.behave("prefill", PREFILLED)
        rig.behave("decode", answer_with(status, body, "retry-after: 4"))
        async with rig.http.post(CHAT, json=turn(stream)) as response:
            assert (response.status, response.headers["retry-after"]) == (status, "4")
            assert await response.json() == body
        assert len(rig.exchanges("prefill")) == len(rig.exchanges("decode")) == 2

        failing = rig.decode[0].behave

        async def once(exchange: Exchange) -> None:
            await (failing if len(rig.exchanges("decode")) == 3 else answer)(exchange)

        rig.behave("decode", once)
        async with rig.http.post(CHAT, json=turn(stream)) as response:
            await assert_answered(response, stream)
        text = await rig.metrics()
        assert value(text, "bidikv_router_handovers_pending") == 0
        assert value(text, "bidikv_router_prefills_total") == 4
        assert value(text, "bidikv_router_handed_over_total") == 2  # a verdict is an answer, too


@streaming
async def test_a_dead_decode_engine_is_an_error_that_may_be_retried(stream: bool) -> None:
    async with running_rig(prefill=1, decode=1) as rig:
        rig.behave("prefill", PREFILLED)
        await rig.decode[0].stop()
        async with rig.http.post(CHAT, json=turn(stream)) as response:
            assert (response.status, response.headers["retry-after"]) == (502, "1")
            assert "decode engine gave no answer" in (await response.json())["error"]["message"]
        assert len(rig.exchanges("prefill")) == 2


@streaming
async def test_another_decode_engine_reads_the_same_prefill(rig: Rig, stream: bool) -> None:
    rig.decode[0].behave = answer_with(500, {"error": "dead"})
    for session in range(4):
        async with rig.http.post(CHAT, json=turn(stream), headers={"x-session-id": str(session)}) as response:
            await assert_answered(response, stream)
    assert len(rig.decode[1].exchanges) == len(rig.exchanges("prefill")) == 4


@streaming
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_request_that_ends_engines_reaches_two_of_them_at_most(role: Any, stream: bool) -> None:
    async def die(exchange: Exchange) -> None:
        exchange.writer.transport.abort()

    async with running_rig(prefill=4, decode=4) as rig:
        rig.behave("prefill", PREFILLED)
        rig.behave(role, die)
        async with rig.http.post(CHAT, json=turn(stream)) as response:
            assert response.status == 502
        assert len(rig.exchanges(role)) == 2


@streaming
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_two_dead_engines_cost_no_request(role: Any, stream: bool) -> None:
    async with running_rig(prefill=3, decode=3) as rig:
        rig.behave("prefill", PREFILLED)
        for engine in rig.engines(role)[:2]:
            await engine.stop()
        for session in range(4):
            async with rig.http.post(CHAT, json=turn(stream), headers={"x-session-id": str(session)}) as response:
                await assert_answered(response, stream)


# --- clients that leave ---


@streaming
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_client_that_leaves_is_counted_and_its_prefill_settled(rig: Rig, phase: str, stream: bool) -> None:
    rig.behave("prefill" if phase == "prefill" else "decode", hang)
    request = asyncio.ensure_future(rig.http.post(CHAT, json=turn(stream)))
    exchange = await rig.next_exchange("prefill" if phase == "prefill" else "decode")
    if phase == "decode":
        assert value(await rig.metrics(), "bidikv_router_handovers_pending") == 1
    request.cancel()
    await exchange.wait_closed_by_router()
    await until(rig, f'bidikv_router_client_disconnects_total{{phase="{phase}"}}', 1)
    text = await rig.metrics()
    assert value(text, "bidikv_router_handovers_pending") == 0
    assert value(text, 'bidikv_router_handovers_abandoned_total{reason="client"}') == (phase == "decode")
    assert value(text, "bidikv_router_requests_in_flight") == 0


async def test_a_client_that_leaves_the_queue_reaches_no_engine() -> None:
    async with running_rig(prefill=1, decode=1, limits=Limits(max_prefills_per_engine=1)) as rig:
        rig.behave("prefill", hang)
        first = asyncio.ensure_future(rig.http.post(CHAT, json=turn(True)))
        await rig.next_exchange("prefill")
        second = asyncio.ensure_future(rig.http.post(CHAT, json=turn(True)))
        await until(rig, "bidikv_router_queued", 1)
        second.cancel()
        await until(rig, 'bidikv_router_client_disconnects_total{phase="queue"}', 1)
        assert value(await rig.metrics(), "bidikv_router_queued") == 0
        first.cancel()
        await rig.exchanges("prefill")[0].wait_closed_by_router()
        assert len(rig.exchanges("prefill")) == 1


# --- silence ---


def wait_then(released: asyncio.Event, behaviour: Behaviour) -> Behaviour:
    async def behave(exchange: Exchange) -> None:
        await released.wait()
        await behaviour(exchange)

    return behave


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_stream_is_kept_alive_while_nothing_comes(role: Any) -> None:
    async with running_rig(prefill=1, decode=1, limits=Limits(comment_seconds=0.01)) as rig:
        released = asyncio.Event()
        rig.behave("prefill", PREFILLED)
        rig.behave(role, wait_then(released, PREFILLED if role == "prefill" else answer))
        async with rig.http.post(CHAT, json=turn(True)) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            released.set()
            text = await response.text()
        assert text.replace(": keep-alive\n\n", "") == EVENTS
        assert value(await rig.metrics(), "bidikv_router_keep_alives_total") >= 1
        assert value(await rig.metrics(), 'bidikv_router_requests_total{code="200",route="chat"}') == 1


async def test_a_stream_is_kept_alive_between_two_events() -> None:
    async with running_rig(prefill=1, decode=1, limits=Limits(comment_seconds=0.01)) as rig:
        released = asyncio.Event()

        async def pause(exchange: Exchange) -> None:
            await exchange.send_stream_head()
            await exchange.send_chunk(b"data: 1\n\n")
            await released.wait()
            await exchange.send_chunk(b"data: 2\n\n")
            await exchange.send(b"0\r\n\r\n")

        rig.behave("decode", pause)
        async with rig.http.post(CHAT, json=turn(True)) as response:
            assert await response.content.readuntil(b"alive\n\n") == b"data: 1\n\n: keep-alive\n\n"
            released.set()
            assert (await response.text()).replace(": keep-alive\n\n", "") == "data: 2\n\n"


async def test_no_comment_breaks_an_event_in_two() -> None:
    async with running_rig(prefill=1, decode=1, limits=Limits(comment_seconds=0.01)) as rig:

        async def pause_within(exchange: Exchange) -> None:
            await exchange.send_stream_head()
            await exchange.send_chunk(b"data: ha")
            await asyncio.sleep(0.6)  # more than one look at the deadlines
            await exchange.send_chunk(b"lf\n\n")
            await exchange.send(b"0\r\n\r\n")

        rig.behave("decode", pause_within)
        async with rig.http.post(CHAT, json=turn(True)) as response:
            assert await response.text() == "data: half\n\n"


async def test_what_asked_for_no_stream_gets_no_comments() -> None:
    async with running_rig(prefill=1, decode=1, limits=Limits(comment_seconds=0.01)) as rig:

        async def later(exchange: Exchange) -> None:
            await asyncio.sleep(0.6)
            await answer(exchange)

        rig.behave("decode", later)
        async with rig.http.post(CHAT, json=turn(False)) as response:
            await assert_answered(response, False)


@pytest.mark.parametrize(
    ("role", "behaviour", "message"),
    [
        ("prefill", answer_with(400, {"error": {"message": "too long", "code": 400}}), "too long"),
        ("decode", answer_with(429, {"error": {"message": "slow down", "code": 429}}), "slow down"),
        ("decode", answer_with(400, "no object"), "status 400"),
    ],
)
async def test_an_error_behind_a_comment_is_an_event(role: Any, behaviour: Behaviour, message: str) -> None:
    async with running_rig(prefill=1, decode=1, limits=Limits(comment_seconds=0.01)) as rig:
        released = asyncio.Event()
        rig.behave(role, wait_then(released, behaviour))
        async with rig.http.post(CHAT, json=turn(True)) as response:
            await response.content.readuntil(b"\n\n")
            released.set()
            text = await response.text()
        assert text.count("data:") == 1
        assert message in json.loads(text.partition("data: ")[2])["error"]["message"]
        async with rig.http.get("/health") as response:  # on the same connection
            assert response.status == 200


async def test_an_engine_that_gives_no_answer_behind_a_comment_is_an_event() -> None:
    async with running_rig(prefill=1, decode=1, limits=Limits(comment_seconds=0.01, prefill_seconds=2.0)) as rig:
        rig.behave("prefill", hang)
        async with rig.http.post(CHAT, json=turn(True)) as response:
            assert response.status == 200
            text = await response.text()
        assert json.loads(text.partition("data: ")[2])["error"]["code"] == 504


# --- prefill that does not say what it did ---


@streaming
async def test_an_unannounced_prefill_is_counted_and_decode_answers(rig: Rig, stream: bool) -> None:
    rig.behave("prefill", answer_with(200, {"object": "answer"}))
    async with rig.http.post(CHAT, json=turn(stream)) as response:
        await assert_answered(response, stream)
    assert "bidikv_prefilled_tokens" not in params(rig.sole_exchange("decode"))
    assert value(await rig.metrics(), "bidikv_router_prefills_unannounced_total") == 1


@streaming
async def test_an_unannounced_prefill_fails_the_turn_if_so_configured(stream: bool) -> None:
    async with running_rig(prefill=1, decode=1, missing_prefill="Fail") as rig:
        rig.behave("prefill", answer_with(200, {"object": "answer"}))
        async with rig.http.post(CHAT, json=turn(stream)) as response:
            assert response.status == 502
        assert rig.exchanges("decode") == []
        text = await rig.metrics()
        assert value(text, "bidikv_router_prefills_unannounced_total") == 1
        assert value(text, "bidikv_router_handovers_pending") == 0


async def test_the_time_of_a_handover_is_exported(rig: Rig) -> None:
    async with rig.http.post(CHAT, json=turn(True)) as response:
        await response.read()
    text = await rig.metrics()
    for stage in ("queue", "prefill", "handover", "first_token", "stream"):
        assert value(text, f'bidikv_router_stage_seconds_count{{path="plain",stage="{stage}"}}') == 1
    assert 'stage="handover",le="30.0"' in text


# --- the local path ---


def refuse_beyond(tokens: int) -> Behaviour:
    """A decode engine that would have to compute ``tokens``."""

    async def behave(exchange: Exchange) -> None:
        limit = params(exchange).get("bidikv_compute_limit_tokens")
        if limit is not None and limit < tokens:
            assert exchange.header("x-bidikv-handover") == "guarded"
            lost = {"error": {"message": "lost", "type": "bidikv_handover_lost", "param": None, "code": 503}}
            await exchange.send_json(503, lost, "x-bidikv-handover: lost")
        else:
            await answer(exchange)

    return behave


@streaming
async def test_a_turn_that_decode_nearly_holds_goes_there_alone(stream: bool) -> None:
    async with running_rig(prefill=2, decode=3, local_limit_tokens=100) as rig:
        rig.behave("prefill", PREFILLED)
        long = "What is the meaning of all this? " * 120
        async with rig.http.post(CHAT, json=turn(stream, long)) as response:
            await assert_answered(response, stream)
        first = rig.sole_exchange("decode")
        async with rig.http.post(CHAT, json=turn(stream, long, "42.", "Why?")) as response:
            await assert_answered(response, stream)
        assert len(rig.exchanges("prefill")) == 1
        [second] = [e for e in rig.exchanges("decode") if e is not first]
        assert rig.engine_of(second) is rig.engine_of(first)
        sent = params(second)
        assert sent["bidikv_sources"] == []
        assert 0 < sent["bidikv_compute_limit_tokens"] <= 100
        text = await rig.metrics()
        assert value(text, 'bidikv_router_paths_total{path="plain",reason="first"}') == 1
        assert value(text, 'bidikv_router_paths_total{path="local",reason="held"}') == 1


@streaming
async def test_a_refused_local_turn_takes_the_other_path_and_is_not_tried_again_soon(stream: bool) -> None:
    async with running_rig(prefill=1, decode=1, local_limit_tokens=100) as rig:
        rig.behave("prefill", PREFILLED)
        rig.behave("decode", refuse_beyond(5000))
        for asked in range(1, 3):
            async with rig.http.post(CHAT, json=turn(stream)) as response:
                await assert_answered(response, stream)
            assert len(rig.exchanges("prefill")) == asked
        assert len(rig.exchanges("decode")) == 3
        assert params(rig.exchanges("decode")[1])["bidikv_prefilled_tokens"] == 900
        text = await rig.metrics()
        assert value(text, "bidikv_router_local_refusals_total") == 1
        assert value(text, 'bidikv_router_requests_total{code="200",route="chat"}') == 2
        assert 'code="503"' not in text


async def test_a_debug_header_takes_the_path_and_the_answer_names_it() -> None:
    async with running_rig(prefill=1, decode=1, local_limit_tokens=100, debug=True) as rig:
        rig.behave("prefill", PREFILLED)
        for path in ("local", "bidirectional", "plain"):
            async with rig.http.post(CHAT, json=turn(True), headers={"x-bidikv-path": path}) as response:
                assert response.headers["x-bidikv-path"] == path
                await response.read()
        assert [len(params(exchange)["bidikv_sources"]) for exchange in rig.exchanges("prefill")] == [1, 0]
        async with rig.http.get("/debug/sessions") as response:
            [session] = (await response.json())["sessions"]
            assert (session["turns"], session["path"]) == (3, "plain")
        async with rig.http.get("/debug/engines") as response:
            engines = (await response.json())["engines"]
            assert sorted(engine["role"] for engine in engines) == ["decode", "prefill"]


async def test_without_debug_the_header_means_nothing(rig: Rig) -> None:
    async with rig.http.post(CHAT, json=turn(True), headers={"x-bidikv-path": "local"}) as response:
        assert "x-bidikv-path" not in response.headers
        await response.read()
    assert len(rig.exchanges("prefill")) == 1
    async with rig.http.get("/debug/sessions") as response:
        assert response.status == 404


# --- what prefill has tokenised, decode need not ---


@pytest.mark.parametrize(
    ("text", "extra", "given"),
    [
        ("What is the meaning of all this? " * 120, {}, True),
        ("What is the meaning of all this? " * 120, {"return_prompt_text": True}, False),
        ("Short.", {}, False),
    ],
)
async def test_decode_is_given_the_tokens_of_a_long_chat(
    rig: Rig, text: str, extra: dict[str, Any], given: bool
) -> None:
    async def prefill(exchange: Exchange) -> None:
        document: dict[str, Any] = {"usage": {"prompt_tokens": 900}}
        if exchange.json.get("return_token_ids"):
            document["prompt_token_ids"] = [*range(900)]
        await exchange.send_json(200, document)

    rig.behave("prefill", prefill)
    async with rig.http.post(CHAT, json={**turn(True, text), **extra}) as response:
        await response.read()
    sent = rig.sole_exchange("decode").json
    assert sent["kv_transfer_params"].get("prompt_token_ids") == ([*range(900)] if given else None)
    assert "return_token_ids" not in sent
    assert ("return_token_ids" in rig.sole_exchange("prefill").json) is given


# --- models ---


def model_list(*names: str) -> Behaviour:
    return answer_with(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in names]})


async def test_models_of_all_engines_are_one_list(rig: Rig) -> None:
    rig.decode[0].behave, rig.decode[1].behave = model_list("base", "b"), model_list("base", "a")
    headers = {"authorization": "Bearer key"}
    async with rig.http.get("/v1/models", headers=headers) as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["a", "b", "base"]
    assert [exchange.header("authorization") for exchange in rig.exchanges("decode")] == ["Bearer key"] * 2
    async with rig.http.get("/v1/models/a", headers=headers) as response:
        assert (await response.json())["id"] == "a"
    async with rig.http.get("/v1/models/other", headers=headers) as response:
        assert response.status == 404
    assert len(rig.exchanges("decode")) == 2  # kept for a while


async def test_models_need_one_engine_only(rig: Rig) -> None:
    await rig.decode[0].stop()
    rig.decode[1].behave = model_list("base")
    async with rig.http.get("/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["base"]
    await rig.decode[1].stop()
    async with rig.http.get("/v1/models", headers={"authorization": "another"}) as response:
        assert (response.status, response.headers["retry-after"]) == (502, "1")


# --- other APIs ---


@pytest.mark.parametrize(
    ("path", "body", "status", "check"),
    [
        ("/v1/messages", [1], 400, lambda d: d["type"] == "error" and d["error"]["type"] == "invalid_request_error"),
        ("/v1/chat/completions", [1], 400, lambda d: d["error"]["code"] == 400),
    ],
)
async def test_errors_have_the_shape_of_their_api(rig: Rig, path: str, body: Any, status: int, check: Any) -> None:
    async with rig.http.post(path, json=body) as response:
        assert response.status == status
        assert check(await response.json())


async def test_a_response_is_found_again_at_its_engine(rig: Rig) -> None:
    async def respond(exchange: Exchange) -> None:
        if exchange.method == "POST":
            await exchange.send_json(200, {"id": exchange.json["request_id"]})
        else:
            await exchange.send_json(200, {"found": True})

    rig.behave("decode", respond)
    rig.behave("prefill", answer_with(200, {"usage": {"input_tokens": 900}}))
    for number in range(6):
        async with rig.http.post("/v1/responses", json={"model": "m", "input": f"question {number}"}) as response:
            name = (await response.json())["id"]
        holder = rig.engine_of(rig.exchanges("decode")[-1] if number == 0 else _latest(rig))
        before = {engine.port: len(engine.exchanges) for engine in rig.decode}
        async with rig.http.get(f"/v1/responses/{name}") as response:
            assert await response.json() == {"found": True}
        following = {"model": "m", "input": "and?", "previous_response_id": name}
        async with rig.http.post("/v1/responses", json=following) as response:
            assert response.status == 200
        assert len(holder.exchanges) == before[holder.port] + 2
    assert len(rig.exchanges("prefill")) == 6  # what follows a stored response, only its engine can render


def _latest(rig: Rig) -> Exchange:
    posts = [e for e in rig.exchanges("decode") if e.method == "POST" and "previous_response_id" not in e.json]
    return max(posts, key=lambda exchange: int(exchange.json["input"].split()[1]))


# --- a stream that goes on elsewhere ---


def events(*texts: str, name: str, finish: bool) -> list[bytes]:
    def chunk(delta: dict[str, str], reason: str | None = None) -> bytes:
        document = {
            "id": name,
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "delta": delta, "finish_reason": reason}],
        }
        return b"data: " + json.dumps(document).encode() + b"\n\n"

    made = [chunk({"role": "assistant", "content": ""}), *(chunk({"content": text}) for text in texts)]
    return [*made, chunk({}, "stop"), b"data: [DONE]\n\n"] if finish else made


def dying_after(*texts: str) -> Behaviour:
    async def behave(exchange: Exchange) -> None:
        await exchange.send_stream_head()
        for event in events(*texts, name="first", finish=False):
            await exchange.send_chunk(event)
        await exchange.send_chunk(b'data: {"id": "first", "cho')
        exchange.writer.transport.abort()

    return behave


async def test_a_broken_stream_goes_on_elsewhere_if_so_configured() -> None:
    async with running_rig(prefill=1, decode=2, continue_streams=True) as rig:
        rig.behave("prefill", PREFILLED)

        async def serve(exchange: Exchange) -> None:
            asked = len(rig.exchanges("decode"))
            if asked <= 2:
                await dying_after(f"part {asked}, ")(exchange)
                return
            await exchange.send_stream_head()
            for event in events("the end", name="last", finish=True):
                await exchange.send_chunk(event)
            await exchange.send(b"0\r\n\r\n")

        rig.behave("decode", serve)
        async with rig.http.post(CHAT, json={**turn(True), "max_tokens": 10}) as response:
            assert response.status == 200
            lines = [line for line in (await response.text()).split("\n\n") if line]
        assert lines.pop() == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert {chunk["id"] for chunk in chunks} == {"first"}
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert sum("role" in delta for delta in deltas) == 1
        assert "".join(delta.get("content", "") for delta in deltas) == "part 1, part 2, the end"
        *_, last = rig.exchanges("prefill")
        assert last.json["messages"][-1] == {"role": "assistant", "content": "part 1, part 2, "}
        follow_ups = [e.json for e in rig.exchanges("decode") if "continue_final_message" in e.json]
        assert sorted(asked["max_tokens"] for asked in follow_ups) == [8, 9]
        text = await rig.metrics()
        assert value(text, "bidikv_router_continued_streams_total") == 2
        assert value(text, 'bidikv_router_outcomes_total{outcome="answered"}') == 1


async def test_a_stream_that_cannot_go_on_ends_with_an_error_event() -> None:
    async with running_rig(prefill=1, decode=2, continue_streams=True) as rig:
        rig.behave("decode", dying_after("text"))
        body = {**turn(True), "logprobs": True}  # what came before the seam would not match
        async with rig.http.post(CHAT, json=body) as response:
            text = await response.text()
        assert '"code":502' in text
        assert "[DONE]" not in text
        assert len(rig.exchanges("decode")) == 1


# --- memory ---


@streaming
async def test_serving_leaves_no_cycles_for_the_collector(rig: Rig, stream: bool) -> None:
    async def serve(count: int) -> None:
        for _ in range(count):
            async with rig.http.post(CHAT, json=turn(stream)) as response:
                await assert_answered(response, stream)

    await serve(2)
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(found, TurnRecord) for found in gc.get_objects())
        await serve(20)
        await until(rig, "bidikv_router_requests_in_flight", 0)
        assert sum(isinstance(found, TurnRecord) for found in gc.get_objects()) <= before + 1
    finally:
        gc.enable()


# --- too much work ---


@pytest.mark.parametrize(
    ("queue_seconds", "status", "reason"), [(10 * WAIT_SECONDS, 429, "full"), (0.05, 503, "timeout")]
)
async def test_a_full_queue_answers_429_and_a_long_wait_503(queue_seconds: float, status: int, reason: str) -> None:
    limits = Limits(max_prefills_per_engine=1, max_queued=1, queue_seconds=queue_seconds)
    async with running_rig(prefill=1, decode=1, limits=limits) as rig:
        rig.behave("prefill", hang)
        turns = [asyncio.ensure_future(rig.http.post(CHAT, json=turn(True)))]
        await rig.next_exchange("prefill")
        if reason == "full":
            turns.append(asyncio.ensure_future(rig.http.post(CHAT, json=turn(True))))
            await until(rig, "bidikv_router_queued", 1)
        async with rig.http.post(CHAT, json=turn(True)) as response:
            assert response.status == status
            assert int(response.headers["retry-after"]) >= 1
        assert value(await rig.metrics(), f'bidikv_router_queue_refusals_total{{reason="{reason}"}}') == 1
        for unanswered in turns:
            unanswered.cancel()


async def test_traces_go_to_both_legs() -> None:
    async with running_rig(prefill=1, decode=1, trace_endpoint="http://127.0.0.1:9/v1/traces") as rig:
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
        async with rig.http.post(CHAT, json=turn(True), headers={"traceparent": parent}) as response:
            await response.read()
        sent = {e.header("traceparent") for e in rig.exchanges("prefill") + rig.exchanges("decode")}
        [header] = sent
        assert header is not None
        assert header.split("-")[1] == parent.split("-")[1]
        assert header.split("-")[2] != parent.split("-")[2]
