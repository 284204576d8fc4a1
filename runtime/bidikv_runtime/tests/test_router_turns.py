"""Turns through a running router: legs, fidelity of bodies and headers, choice of engines."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yarl

from bidikv_runtime.tests.router_engine import answer_with
from bidikv_runtime.tests.router_rig import Rig, read_response, running_rig

CHAT = "/v1/chat/completions"
TURN: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 7}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_rig(prefill=2, decode=3) as running:
        yield running


async def test_a_streamed_turn_goes_through_both_legs(rig: Rig) -> None:
    async with rig.http.post(CHAT, json=TURN) as response:
        assert response.status == 200
        assert response.headers["x-engine"] == "yes"
        text = await response.text()
    assert text == 'data: {"n": 0}\n\ndata: {"n": 1}\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'
    prefill, decode = rig.sole_exchange("prefill"), rig.sole_exchange("decode")
    assert prefill.json["max_tokens"] == 1
    assert prefill.json["stream"] is False
    assert prefill.json["messages"] == TURN["messages"]
    assert len(prefill.json["kv_transfer_params"]["bidikv_sources"]) == 2
    # The engine that decodes is the first source: it holds the last turn.
    assert prefill.json["kv_transfer_params"]["bidikv_sources"][0] == rig.engine_of(decode).endpoint.lookup
    session = prefill.json["kv_transfer_params"]["bidikv_session"]
    assert decode.json["kv_transfer_params"] == {
        "bidikv_sources": [rig.engine_of(prefill).endpoint.lookup],
        "bidikv_session": session,
        "bidikv_body_bytes": len(json.dumps(TURN)),
    }
    assert {key: value for key, value in decode.json.items() if key != "kv_transfer_params"} == TURN


async def test_the_decode_body_is_the_clients_bytes(rig: Rig) -> None:
    body = b'{ "model":"m",\n "temperature": 0.70, "messages":[{"role":"user","content":"\\u00e9 \xc3\xa9"}] ,"x":1 }\n'
    async with rig.http.post(CHAT, data=body, headers={"content-type": "application/json"}) as response:
        assert response.status == 200
        assert (await response.json())["object"] == "answer"
    sent = rig.sole_exchange("decode").body
    assert sent.startswith(body.rstrip()[:-1] + b',"kv_transfer_params":')
    assert json.loads(sent) == json.loads(body) | {"kv_transfer_params": json.loads(sent)["kv_transfer_params"]}


async def test_a_clients_kv_transfer_params_reach_no_engine(rig: Rig) -> None:
    for path in (CHAT, "/v1/completions", "/v1/embeddings"):
        evil = {"model": "m", "prompt": "p", "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"}}
        async with rig.http.post(path, json=evil) as response:
            assert response.status == 200
    for exchange in rig.exchanges("prefill") + rig.exchanges("decode"):
        assert b"evil" not in exchange.body
    evil = {"model": "m", "prompt": "p", "vllm_xargs": {"kv_transfer_params": "evil"}}
    async with rig.http.post("/v1/completions", json=evil) as response:
        assert response.status == 400
        assert "vllm_xargs" in (await response.json())["error"]["message"]


async def test_end_to_end_headers_pass_and_hop_by_hop_headers_do_not(rig: Rig) -> None:
    headers = {
        "Authorization": "Bearer secret",
        "X-Request-Id": "abc",
        "X-Custom": "é",
        "Connection": "x-private, keep-alive",
        "X-Private": "1",
        "Keep-Alive": "5",
        "TE": "trailers",
    }
    async with rig.http.post(CHAT, json=TURN, headers=headers) as response:
        assert response.status == 200
        assert "connection" not in response.headers
    for exchange in (rig.sole_exchange("prefill"), rig.sole_exchange("decode")):
        assert exchange.header("authorization") == "Bearer secret"
        assert exchange.header("x-request-id") == "abc"
        assert exchange.header("x-custom") == "é".encode().decode("latin-1")
        for absent in ("connection", "x-private", "keep-alive", "te"):
            assert exchange.header(absent) is None


async def test_turns_of_a_session_reach_the_same_decode_engine(rig: Rig) -> None:
    for session in range(6):
        history = [{"role": "user", "content": f"question {session}"}]
        for turn in range(3):
            history += [{"role": "assistant", "content": f"a{turn}"}, {"role": "user", "content": f"q{turn}"}]
            async with rig.http.post(CHAT, json={**TURN, "messages": history}) as response:
                await response.read()
    by_session: dict[str, set[int]] = {}
    for exchange in rig.exchanges("decode"):
        by_session.setdefault(exchange.json["messages"][0]["content"], set()).add(rig.engine_of(exchange).port)
    assert len(by_session) == 6
    assert all(len(ports) == 1 for ports in by_session.values())
    assert len(set.union(*by_session.values())) > 1


async def test_one_way_mode_offers_prefill_no_sources() -> None:
    async with running_rig(prefill=1, decode=1, reuse="OneWay") as rig:
        async with rig.http.post(CHAT, json=TURN) as response:
            assert response.status == 200
            await response.read()
        assert rig.sole_exchange("prefill").json["kv_transfer_params"]["bidikv_sources"] == []
        assert 'bidikv_router_time_to_first_token_seconds_count{path="plain"} 1.0' in await rig.metrics()


async def test_requests_that_decode_must_compute_itself_have_no_prefill_leg(rig: Rig) -> None:
    async with rig.http.post("/v1/completions", json={"model": "m", "prompt": "p", "prompt_logprobs": 1}) as response:
        assert response.status == 200
    assert rig.exchanges("prefill") == []
    params = rig.sole_exchange("decode").json["kv_transfer_params"]
    assert params.keys() == {"bidikv_sources", "bidikv_session", "bidikv_body_bytes"}
    assert rig.sole_exchange("decode").json["kv_transfer_params"]["bidikv_sources"] == []


async def test_other_requests_reach_one_decode_engine(rig: Rig) -> None:
    body = b'{"model": "m",  "input": "text"}'
    async with rig.http.post("/v1/embeddings?x=1", data=body) as response:
        assert response.status == 200
    passed = [exchange for exchange in rig.exchanges("decode") if exchange.method == "POST"]
    assert [(exchange.target, exchange.body) for exchange in passed] == [("/v1/embeddings?x=1", body)]
    assert rig.exchanges("prefill") == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/load_lora_adapter", 404),
        ("POST", "/v1/%6coad_lora_adapter", 404),
        ("POST", "/reset_prefix_cache", 404),
        ("GET", "/", 404),
        ("DELETE", "/v1/models", 405),
    ],
)
async def test_what_the_router_does_not_serve_reaches_no_engine(rig: Rig, method: str, path: str, status: int) -> None:
    async with rig.http.request(method, yarl.URL(rig.url + path, encoded=True)) as response:
        assert response.status == status
        assert "message" in (await response.json())["error"]
    assert rig.exchanges("decode") == []


async def test_a_fragment_does_not_hide_a_path(rig: Rig) -> None:
    reader, writer = await rig.connect()
    # uvicorn would cut the fragment off
    writer.write(b"POST /v1/load_lora_adapter#x HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}")
    assert (await read_response(reader))[0] == 404
    writer.close()
    assert rig.exchanges("decode") == []


async def test_a_body_that_is_not_an_object_is_refused(rig: Rig) -> None:
    for body in (b"", b"[1]", b'{"a":', b'{"a": NaN}', b"\xff"):
        async with rig.http.post(CHAT, data=body) as response:
            assert response.status == 400
            assert "JSON object" in (await response.json())["error"]["message"]


async def test_engines_verdicts_pass_unchanged(rig: Rig) -> None:
    verdict = {"error": {"message": "too long", "type": "BadRequestError", "param": "x", "code": 400}}
    rig.behave("prefill", answer_with(400, verdict, "retry-after: 7"))
    async with rig.http.post(CHAT, json=TURN) as response:
        assert (response.status, response.headers["retry-after"]) == (400, "7")
        assert await response.json() == verdict
    assert len(rig.exchanges("prefill")) == 1
    assert rig.exchanges("decode") == []

    rig.behave("prefill", rig.answer)
    rig.behave("decode", answer_with(429, verdict, "Retry-After: 9"))
    async with rig.http.post(CHAT, json=TURN) as response:
        assert (response.status, response.headers["retry-after"]) == (429, "9")
        assert await response.json() == verdict
    assert len(rig.exchanges("decode")) == 1


async def test_a_large_history_arrives_whole(rig: Rig) -> None:
    messages = [{"role": "user", "content": f'{index} "quoted" \n é ' * 50} for index in range(3000)]
    body = json.dumps({**TURN, "messages": messages}).encode()
    assert len(body) > 2 * 1024 * 1024  # beyond the first allocation

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100_000):
            yield body[start : start + 100_000]

    for data in (io.BytesIO(body), chunks()):
        async with rig.http.post(CHAT, data=data) as response:
            assert response.status == 200
            await response.read()
    for exchange in rig.exchanges("prefill") + rig.exchanges("decode"):
        assert exchange.json["messages"] == messages
    assert "bidikv_router_buffered_bytes 0.0" in await rig.metrics()


async def test_metrics_tell_what_happened(rig: Rig) -> None:
    for _ in range(2):
        async with rig.http.post(CHAT, json=TURN) as response:
            await response.read()
    text = await rig.metrics()
    assert 'bidikv_router_time_to_first_token_seconds_count{path="plain"} 1.0' in text
    assert 'bidikv_router_stage_seconds_count{path="plain",stage="prefill"} 1.0' in text
    # The same request again: decode is known to hold it.
    assert 'bidikv_router_time_to_first_token_seconds_count{path="bidirectional"} 1.0' in text
    assert 'bidikv_router_requests_total{code="200",route="chat"} 2.0' in text
    assert "bidikv_router_sessions_total 1.0" in text
    assert 'bidikv_router_endpoints{role="decode",state="ready"} 3.0' in text
    assert "bidikv_router_requests_in_flight 0.0" in text


async def test_connections_to_engines_are_reused(rig: Rig) -> None:
    for _ in range(4):
        async with rig.http.post(CHAT, json=TURN) as response:
            await response.read()
    assert len(rig.exchanges("decode")) == 4
    assert len({(rig.engine_of(e).port, e.connection) for e in rig.exchanges("decode")}) == 1
