"""Bodies of the router's bench: fixed by the seed, of the size asked for, agents' conversations."""

from __future__ import annotations

import json

import pytest

from e2e.bench.router.bodies import build_body

SIZES = (1_500, 100_000, 1_000_000)


@pytest.mark.parametrize("size", SIZES)
def test_a_body_has_the_size_and_follows_the_seed(size: int) -> None:
    body = build_body(size, stream=True, seed=3)
    assert size <= len(body) < size * 1.1 + 500
    assert body == build_body(size, stream=True, seed=3)
    assert body != build_body(size, stream=True, seed=4)


def test_a_body_is_a_conversation_of_an_agent() -> None:
    body = json.loads(build_body(100_000, stream=True, seed=3))
    roles = [message["role"] for message in body["messages"]]
    assert roles[0] == "system"
    assert roles[1:4] == ["user", "assistant", "tool"]
    assert len(roles) > 30
    calls = [call for message in body["messages"] for call in message.get("tool_calls", ())]
    assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)
    answered = {message["tool_call_id"] for message in body["messages"] if message["role"] == "tool"}
    assert {call["id"] for call in calls} == answered
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}


def test_without_a_stream_there_are_no_options_of_one() -> None:
    body = json.loads(build_body(1_500, stream=False, seed=3))
    assert body["stream"] is False
    assert "stream_options" not in body


def test_a_share_of_the_bytes_is_escapes() -> None:
    body = build_body(1_000_000, stream=False, seed=3)
    assert 0.03 < body.count(b"\\") / len(body) < 0.12
