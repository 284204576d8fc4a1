"""The hand-over between the legs: what they tell the engines, and what happens when decode did not find the KV."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bidikv_runtime.router.limits import Limits
from bidikv_runtime.tests.router_engine import Behaviour, Exchange, answer, answer_with
from bidikv_runtime.tests.router_rig import Rig, running_rig

CHAT = "/v1/chat/completions"
TURN: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
LOST = {"error": {"message": "lost", "type": "bidikv_handover_lost", "param": None, "code": 503}}
PREFILLED = answer_with(200, {"usage": {"prompt_tokens": 900, "completion_tokens": 1}})
refuse = answer_with(503, LOST, "retry-after: 1", "x-bidikv-handover: lost")


async def refuse_guarded(exchange: Exchange) -> None:
    """What a decode engine does that finds nothing: it refuses if it may, else it computes."""
    guarded = exchange.header("x-bidikv-handover") == "guarded"
    assert guarded is ("bidikv_prefilled_tokens" in exchange.json["kv_transfer_params"])
    await (refuse if guarded else answer)(exchange)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_rig(prefill=2, decode=2) as running:
        running.behave("prefill", PREFILLED)
        yield running


def params(exchange: Exchange) -> dict[str, Any]:
    found: dict[str, Any] = exchange.json["kv_transfer_params"]
    return found


async def test_each_leg_tells_its_engine_what_it_is(rig: Rig) -> None:
    tools = {**TURN, "tools": [{"type": "function", "function": {"name": "f"}}]}
    async with rig.http.post(CHAT, json=tools, headers={"x-session-id": "customer 7"}) as response:
        assert response.status == 200
    prefill, decode = rig.sole_exchange("prefill"), rig.sole_exchange("decode")
    session = params(prefill)["bidikv_session"]
    assert params(prefill) == {
        "bidikv_sources": params(prefill)["bidikv_sources"],
        "bidikv_session": session,
        "bidikv_body_bytes": len(json.dumps(tools)),
        "bidikv_expect": "return",
        "bidikv_handover": True,
    }
    assert params(decode) == {
        "bidikv_sources": [rig.engine_of(prefill).endpoint.lookup],
        "bidikv_session": session,
        "bidikv_body_bytes": len(json.dumps(tools)),
        "bidikv_expect": "return",
        "bidikv_prefilled_tokens": 900,
    }
    assert (prefill.header("x-bidikv-handover"), decode.header("x-bidikv-handover")) == (None, "guarded")
    for name in ("customer", b"customer 7".hex()):
        assert name not in session

    async with rig.http.post(CHAT, json=TURN, headers={"x-session-id": "customer 8"}) as response:
        assert response.status == 200
    [other] = [sent for e in rig.exchanges("decode") if (sent := params(e))["bidikv_session"] != session]
    assert "bidikv_expect" not in other


async def test_clients_cannot_ask_for_or_see_the_guard(rig: Rig) -> None:
    headers = {"X-BidiKV-Handover": "guarded"}
    without_prefill = {"prompt": "p", "prompt_logprobs": 1}
    async with rig.http.post("/v1/completions", json=without_prefill, headers=headers) as response:
        assert response.status == 200
    assert rig.sole_exchange("decode").header("x-bidikv-handover") is None
    rig.behave("decode", refuse)
    async with rig.http.post("/v1/embeddings", json={"input": "p"}, headers=headers) as response:
        assert response.status == 503
        assert "x-bidikv-handover" not in response.headers


@pytest.mark.parametrize(
    "behaviour",
    [
        answer_with(200, {"usage": None}),
        answer_with(200, {"usage": {"prompt_tokens": 0}}),
        answer_with(200, {"usage": {"prompt_tokens": 900}, "padding": "x" * 100_000}),
    ],
    ids=["none", "zero", "long"],
)
async def test_without_a_count_decode_is_not_guarded(rig: Rig, behaviour: Behaviour) -> None:
    rig.behave("prefill", behaviour)
    async with rig.http.post(CHAT, json=TURN) as response:
        assert response.status == 200
        assert (await response.text()).endswith("[DONE]\n\n")
    assert "bidikv_prefilled_tokens" not in params(rig.sole_exchange("decode"))
    assert rig.sole_exchange("decode").header("x-bidikv-handover") is None


async def test_a_chunked_prefill_answer_is_read_to_its_end(rig: Rig) -> None:
    async def chunked(exchange: Exchange) -> None:
        await exchange.send_stream_head()
        await exchange.send_chunk(b'{"usage": {"prompt_tokens": 900}}')
        await exchange.send(b"0\r\n\r\n")

    rig.behave("prefill", chunked)
    for _ in range(2):
        async with rig.http.post(CHAT, json=TURN) as response:
            assert response.status == 200
            await response.read()
    assert len({(rig.engine_of(exchange).port, exchange.connection) for exchange in rig.exchanges("prefill")}) == 1
    assert [params(exchange)["bidikv_prefilled_tokens"] for exchange in rig.exchanges("decode")] == [900, 900]


async def test_a_batch_of_prompts_is_not_guarded(rig: Rig) -> None:
    async with rig.http.post("/v1/completions", json={"prompt": ["a", "b"]}) as response:
        assert response.status == 200
    assert len(rig.exchanges("prefill")) == 1
    assert "bidikv_prefilled_tokens" not in params(rig.sole_exchange("decode"))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_lost_handover_is_prefilled_again_and_always_answered(rig: Rig, stream: bool) -> None:
    rig.behave("decode", refuse_guarded)
    async with rig.http.post(CHAT, json={**TURN, "stream": stream}) as response:
        assert response.status == 200
        assert response.headers["x-engine"] == "yes"
        if stream:
            text = await response.text()
            assert text == 'data: {"n": 0}\n\ndata: {"n": 1}\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'
        else:
            assert (await response.json())["object"] == "answer"
    first, second = rig.exchanges("prefill")
    assert first.body == second.body
    guarded, unguarded = rig.exchanges("decode")
    assert rig.engine_of(guarded) is rig.engine_of(unguarded)
    assert guarded.json | {"kv_transfer_params": params(unguarded)} == unguarded.json
    assert params(guarded) == params(unguarded) | {"bidikv_prefilled_tokens": 900}
    text = await rig.metrics()
    assert "bidikv_router_handovers_lost_total 1.0" in text
    assert 'bidikv_router_retries_total{leg="prefill",reason="handover"} 1.0' in text
    assert 'bidikv_router_requests_total{code="200",route="chat"} 1.0' in text
    assert 'code="503"' not in text
    assert ('bidikv_router_time_to_first_token_seconds_count{path="plain"} 1.0' in text) is stream
    assert "bidikv_router_buffered_bytes 0.0" in text


async def test_a_large_body_survives_the_repetition(rig: Rig) -> None:
    rig.behave("decode", refuse_guarded)
    messages = [{"role": "user", "content": f"{index} é " * 2000} for index in range(100)]
    body = io.BytesIO(json.dumps({**TURN, "messages": messages}).encode())
    async with rig.http.post(CHAT, data=body) as response:
        assert response.status == 200
        await response.read()
    assert len(rig.exchanges("prefill")) == len(rig.exchanges("decode")) == 2
    for exchange in rig.exchanges("prefill") + rig.exchanges("decode"):
        assert exchange.json["messages"] == messages


async def test_a_refusal_that_breaks_off_is_a_refusal(rig: Rig) -> None:
    async def break_off(exchange: Exchange) -> None:
        if exchange.header("x-bidikv-handover") is None:
            await answer(exchange)
            return
        await exchange.send(b"HTTP/1.1 503 No\r\nx-bidikv-handover: lost\r\ncontent-length: 100\r\n\r\n{")
        exchange.writer.transport.abort()

    rig.behave("decode", break_off)
    async with rig.http.post(CHAT, json=TURN) as response:
        assert response.status == 200
        assert (await response.text()).endswith("[DONE]\n\n")
    assert len(rig.exchanges("prefill")) == len(rig.exchanges("decode")) == 2


async def test_a_second_refusal_reaches_the_client(rig: Rig) -> None:
    rig.behave("decode", refuse)  # an engine that refuses although it may not
    async with rig.http.post(CHAT, json=TURN) as response:
        assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert await response.json() == LOST
        assert "x-bidikv-handover" not in response.headers
    assert len(rig.exchanges("prefill")) == len(rig.exchanges("decode")) == 2
    assert "bidikv_router_handovers_lost_total 1.0" in await rig.metrics()


async def test_the_budget_limits_repeated_handovers() -> None:
    async with running_rig(prefill=1, decode=1, limits=Limits(retry_ratio=0, retry_reserve=0)) as rig:
        rig.behave("prefill", PREFILLED)
        rig.behave("decode", refuse_guarded)
        async with rig.http.post(CHAT, json=TURN) as response:
            assert (response.status, response.headers["retry-after"]) == (503, "1")
            assert (await response.json())["error"]["type"] == "bidikv_handover_lost"
        assert len(rig.exchanges("prefill")) == len(rig.exchanges("decode")) == 1
        assert "bidikv_router_handovers_lost_total 1.0" in await rig.metrics()


async def test_when_prefill_fails_the_second_time_its_verdict_counts(rig: Rig) -> None:
    rig.behave("decode", refuse_guarded)
    verdict = answer_with(400, {"error": "changed its mind"})

    async def once(exchange: Exchange) -> None:
        await (PREFILLED if len(rig.exchanges("prefill")) == 1 else verdict)(exchange)

    rig.behave("prefill", once)
    async with rig.http.post(CHAT, json=TURN) as response:
        assert response.status == 400
        assert await response.json() == {"error": "changed its mind"}
    assert len(rig.exchanges("decode")) == 1


async def test_another_503_of_decode_is_a_verdict_when_the_next_engine_says_so_too(rig: Rig) -> None:
    rig.behave("decode", answer_with(503, {"error": "overloaded"}))
    async with rig.http.post(CHAT, json=TURN) as response:
        assert response.status == 503
        assert await response.json() == {"error": "overloaded"}
    assert [len(engine.exchanges) for engine in rig.decode] == [1, 1]
    assert len(rig.exchanges("prefill")) == 1  # the KV is still there
    assert "bidikv_router_handovers_lost_total 0.0" in await rig.metrics()
