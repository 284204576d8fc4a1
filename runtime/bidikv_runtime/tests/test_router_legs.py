"""Bodies of the legs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_runtime.router.api.errors import ApiError
from bidikv_runtime.router.api.legs import (
    PREFILL_DROPPED,
    build_decode_body,
    build_passed_body,
    build_prefill_body,
    check_fields,
    is_batch,
    needs_prefill,
    offers_tools,
    parse_prefilled,
)

PROMPT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "q", "kv_transfer_params": {"nested": 1}, "n": 4}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"stop": 1, "n": 2}}}],
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
    "add_generation_prompt": False,
    "continue_final_message": True,
    "add_special_tokens": True,
    "documents": [],
    "mm_processor_kwargs": {},
    "truncate_prompt_tokens": 100,
    "cache_salt": "salt",
    "priority": 1,
}
SAMPLING: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 100,
    "max_completion_tokens": 50,
    "min_tokens": 5,
    "n": 3,
    "best_of": 4,
    "logprobs": True,
    "top_logprobs": 5,
    "prompt_logprobs": None,
    "stop": ["x"],
    "structured_outputs": {"regex": "a"},
    "kv_transfer_params": {"do_remote_decode": True},
}


SESSION = bytes(range(16))
NAMED = {"bidikv_session": SESSION.hex()}
RETURN = {"bidikv_expect": "return"}


def leg(pieces: Any) -> Any:
    return json.loads(b"".join(pieces))


def test_prefill_renders_the_same_prompt_and_generates_one_token() -> None:
    body = json.dumps(PROMPT | SAMPLING).encode()
    sources = ["10.0.0.1:5700", "10.0.0.2:5700"]
    sent = leg(build_prefill_body(check_fields(body), sources, SESSION))
    assert sent == PROMPT | {
        "stream": False,
        "max_tokens": 1,
        "kv_transfer_params": {"bidikv_sources": sources, "bidikv_handover": True} | NAMED | RETURN,
    }


def test_decode_gets_everything() -> None:
    body = json.dumps(PROMPT | SAMPLING).encode()
    fields = check_fields(body)
    sent = leg(build_decode_body(body, fields, ["10.0.0.9:5700"], SESSION, 70))
    params = {"bidikv_sources": ["10.0.0.9:5700"], "bidikv_prefilled_tokens": 70} | NAMED | RETURN
    assert sent == PROMPT | SAMPLING | {"kv_transfer_params": params}
    unguarded = leg(build_decode_body(body, fields, [], SESSION))
    assert unguarded["kv_transfer_params"] == {"bidikv_sources": []} | NAMED | RETURN


@given(st.dictionaries(st.sampled_from([*PROMPT, *SAMPLING, *PREFILL_DROPPED, "x"]), st.integers() | st.text("ab")))
def test_no_client_parameter_survives(body: dict[str, Any]) -> None:
    encoded = json.dumps(body).encode()
    fields = check_fields(encoded)
    rest = {key: value for key, value in body.items() if key != "kv_transfer_params"}
    ours: dict[str, Any] = {"bidikv_sources": []} | NAMED
    assert leg(build_decode_body(encoded, fields, [], SESSION)) == rest | {"kv_transfer_params": ours}
    assert leg(build_passed_body(encoded, fields)) == rest
    prefill = leg(build_prefill_body(fields, [], SESSION))
    assert prefill["kv_transfer_params"] == ours | {"bidikv_handover": True}
    assert (prefill["stream"], prefill["max_tokens"]) == (False, 1)
    assert not PREFILL_DROPPED & prefill.keys()


def test_a_passed_body_is_untouched_when_it_can_be() -> None:
    body = b' {"input" : "x" } '
    assert build_passed_body(body, check_fields(body)) == [body]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, True),
        ({"prompt_logprobs": None, "echo": False, "use_beam_search": False}, True),
        ({"prompt_logprobs": 0}, False),
        ({"echo": True}, False),
        ({"use_beam_search": True}, False),
        ({"logprobs": 5}, True),
    ],
)
def test_who_needs_prefill(body: dict[str, Any], expected: bool) -> None:
    assert needs_prefill(check_fields(json.dumps(body).encode())) is expected


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        (b'[{"type": "function"}]', True),
        (b'[\n    {"type": "function"}]', True),
        (b"[]", False),
        (b"[ \n ]", False),
        (b"null", False),
        (b"{}", False),
        (b'"[x]"', False),
    ],
)
def test_tools_announce_a_return(tools: bytes, expected: bool) -> None:
    assert offers_tools(check_fields(b'{"tools": %b, "x": [1]}' % tools)) is expected
    assert not offers_tools(check_fields(b'{"x": %b}' % tools))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (b'"text"', False),
        (b'"[\\"a\\"]"', False),
        (b"[1, 2]", False),
        (b"[]", False),
        (b'["a", "b"]', True),
        (b'[ "a"]', True),
        (b"[[1], [2]]", True),
    ],
)
def test_a_list_of_prompts_is_a_batch(prompt: bytes, expected: bool) -> None:
    assert is_batch(check_fields(b'{"prompt": %b}' % prompt)) is expected
    assert not is_batch(check_fields(b'{"messages": [{"role": "user"}]}'))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b'{"usage": {"prompt_tokens": 70, "total_tokens": 71}, "choices": [{"x": 1}]}', 70),
        (b'{"usage": {"prompt_tokens": 0}}', None),
        (b'{"usage": {"prompt_tokens": -1}}', None),
        (b'{"usage": {"prompt_tokens": "70"}}', None),
        (b'{"usage": {"prompt_tokens": true}}', None),
        (b'{"usage": {"prompt_tokens": 1e400}}', None),
        (b'{"usage": {}}', None),
        (b'{"usage": null}', None),
        (b"{}", None),
        (b"[]", None),
        (b"", None),
        (b'{"usage": {"prompt_tokens": 70}', None),
        (b"\xff", None),
    ],
)
def test_an_odd_prefill_answer_announces_nothing(answer: bytes, expected: int | None) -> None:
    assert parse_prefilled(answer) == expected


@pytest.mark.parametrize(
    "body",
    [
        b'{"vllm_xargs": {"kv_transfer_params": "x"}}',
        b'{"vllm_xargs": {"a": 1, "kv_transfer\\u005fparams": ["x"]}}',
        b'{"vllm_xargs": {}, "vllm_xargs": {"kv_transfer_params": 1}}',
    ],
)
def test_parameters_cannot_be_smuggled_through_extra_arguments(body: bytes) -> None:
    with pytest.raises(ApiError, match="vllm_xargs"):
        check_fields(body)


@pytest.mark.parametrize("body", [b'{"vllm_xargs": null}', b'{"vllm_xargs": {"a": 1}}', b'{"vllm_xargs": 3}'])
def test_other_extra_arguments_pass(body: bytes) -> None:
    assert "vllm_xargs" in check_fields(body)
