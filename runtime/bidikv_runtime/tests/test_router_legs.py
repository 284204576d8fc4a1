"""Bodies of the legs."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_runtime.router.api.errors import ApiError
from bidikv_runtime.router.api.legs import (
    MESSAGES_DROPPED,
    PREFILL_DROPPED,
    RESPONSES_DROPPED,
    PrefillAnswer,
    bound_prefill_answer,
    build_decode_body,
    build_passed_body,
    build_prefill_body,
    check_fields,
    is_batch,
    may_refuse,
    may_reuse_tokens,
    needs_prefill,
    offers_tools,
    parse_prefill_answer,
    wants_events,
)
from bidikv_runtime.router.observe.record import Route

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
    sent = leg(build_prefill_body(check_fields(body), sources, SESSION, body_bytes=len(body)))
    assert sent == PROMPT | {
        "stream": False,
        "max_tokens": 1,
        "kv_transfer_params": {"bidikv_sources": sources, "bidikv_handover": True, "bidikv_body_bytes": len(body)}
        | NAMED
        | RETURN,
    }


def test_prefill_of_a_response_computes_its_prompt_and_stores_nothing() -> None:
    prompt = {
        "model": "m",
        "input": [{"role": "user", "content": "q", "store": 1}],
        "instructions": "be kind",
        "tools": [{"type": "function", "name": "f", "parameters": {"include": 1}}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_object"}},
        "reasoning": {"effort": "low"},
        "truncation": "auto",
        "chat_template_kwargs": {"a": 1},
        "metadata": {"k": "v"},
        "request_id": "chosen",
        "previous_response_id": None,
    }
    sampling = {
        "stream": True,
        "stream_options": {"include_obfuscation": False},
        "store": True,
        "background": False,
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
        "top_logprobs": 3,
        "max_output_tokens": 100,
        "max_tool_calls": 4,
        "enable_response_messages": True,
        "stop": "x",
        "structured_outputs": {"regex": "a"},
    }
    fields = check_fields(json.dumps(prompt | sampling).encode())
    sent = leg(build_prefill_body(fields, [], SESSION, route="responses"))
    params = {"bidikv_sources": [], "bidikv_handover": True} | NAMED | RETURN
    assert sent == prompt | {"stream": False, "store": False, "max_output_tokens": 1, "kv_transfer_params": params}


MESSAGES: dict[str, Any] = {
    "model": "m",
    "system": [{"type": "text", "text": "be kind"}],
    "messages": [{"role": "user", "content": "q"}],
    "output_config": {"effort": "low"},
    "metadata": {"user_id": "u"},
}


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, {}),
        ({"thinking": {"type": "disabled"}}, {"thinking": {"type": "disabled"}}),
        ({"thinking": {"type": "adaptive"}}, {"thinking": {"type": "adaptive"}}),
        ({"thinking": 5}, {"thinking": 5}),
        ({"tool_choice": {"type": "any"}}, {"tool_choice": {"type": "any"}}),
        ({"tool_choice": {"type": "tool", "name": "f"}}, {"tool_choice": {"type": "auto"}}),
        ({"tool_choice": None}, {"tool_choice": None}),
    ],
)
def test_prefill_of_messages_computes_their_prompt(sent: dict[str, Any], expected: dict[str, Any]) -> None:
    body = MESSAGES | {"stream": True, "max_tokens": 4000, "stop_sequences": ["x"]} | sent
    got = leg(build_prefill_body(check_fields(json.dumps(body).encode()), [], SESSION, route="messages"))
    params = {"bidikv_sources": [], "bidikv_handover": True} | NAMED
    assert got == MESSAGES | {"stream": False, "max_tokens": 1, "kv_transfer_params": params} | expected


def test_decode_gets_everything() -> None:
    body = json.dumps(PROMPT | SAMPLING).encode()
    fields = check_fields(body)
    sent = leg(build_decode_body(body, fields, ["10.0.0.9:5700"], SESSION, 70))
    params = {"bidikv_sources": ["10.0.0.9:5700"], "bidikv_prefilled_tokens": 70, "bidikv_body_bytes": len(body)}
    assert sent == PROMPT | SAMPLING | {"kv_transfer_params": params | NAMED | RETURN}
    unguarded = leg(build_decode_body(body, fields, [], SESSION))
    assert unguarded["kv_transfer_params"] == {"bidikv_sources": [], "bidikv_body_bytes": len(body)} | NAMED | RETURN


def test_decode_alone_gets_its_limit() -> None:
    body = b'{"model": "m"}'
    sent = leg(build_decode_body(body, check_fields(body), [], SESSION, compute_limit=512))
    assert sent["kv_transfer_params"]["bidikv_compute_limit_tokens"] == 512
    assert "bidikv_prefilled_tokens" not in sent["kv_transfer_params"]
    assert (
        leg(build_decode_body(body, check_fields(body), [], SESSION, compute_limit=0))["kv_transfer_params"][
            "bidikv_compute_limit_tokens"
        ]
        == 0
    )


def test_tokens_of_prefill_reach_decode_byte_for_byte() -> None:
    body = b'{"model": "m", "messages": []}'
    answer = parse_prefill_answer(b'{"usage":{"prompt_tokens":3},"prompt_token_ids": [1, 20,3] ,"x":[]}')
    assert answer.token_ids is not None
    pieces = build_decode_body(body, check_fields(body), [], SESSION, 3, token_ids=answer.token_ids)
    assert b'"prompt_token_ids":[1, 20,3]' in b"".join(pieces)
    assert leg(pieces)["kv_transfer_params"]["prompt_token_ids"] == [1, 20, 3]
    assert leg(build_prefill_body(check_fields(body), [], SESSION, return_tokens=True))["return_token_ids"] is True


@pytest.mark.parametrize("own", [{}, {"cache_salt": "mine"}])
def test_a_tenants_salt_replaces_the_clients_in_both_legs(own: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", **own}).encode()
    fields = check_fields(body)
    assert leg(build_prefill_body(fields, [], SESSION, cache_salt=b'"s"'))["cache_salt"] == "s"
    assert leg(build_decode_body(body, fields, [], SESSION, cache_salt=b'"s"'))["cache_salt"] == "s"
    assert leg(build_decode_body(body, fields, [], SESSION)).get("cache_salt") == own.get("cache_salt")


def test_a_responses_id_is_set_unless_the_client_chose_one() -> None:
    for body, expected in ((b'{"input": "x" }', "resp_1"), (b'{"request_id": "mine"}', "mine")):
        assert leg(build_decode_body(body, check_fields(body), [], SESSION, response_id="resp_1"))["request_id"] == (
            expected
        )
    pieces = build_decode_body(b'{"input": "x" }', check_fields(b'{"input": "x" }'), [], SESSION, response_id="r")
    assert b"".join(pieces).startswith(b'{"input": "x" ,"request_id":"r","kv')


@given(
    st.dictionaries(st.sampled_from([*PROMPT, *SAMPLING, *PREFILL_DROPPED, "x"]), st.integers() | st.text("ab")),
    st.sampled_from(get_args(Route)[:4]),
)
def test_no_client_parameter_survives(body: dict[str, Any], route: Route) -> None:
    encoded = json.dumps(body).encode()
    fields = check_fields(encoded)
    rest = {key: value for key, value in body.items() if key != "kv_transfer_params"}
    ours: dict[str, Any] = {"bidikv_sources": []} | NAMED
    sent = leg(build_decode_body(encoded, fields, [], SESSION))
    assert sent == rest | {"kv_transfer_params": ours | {"bidikv_body_bytes": len(encoded)}}
    assert leg(build_passed_body(encoded, fields)) == rest
    prefill = leg(build_prefill_body(fields, [], SESSION, route=route))
    assert prefill["kv_transfer_params"] == ours | {"bidikv_handover": True}
    assert prefill["stream"] is False
    assert prefill["max_output_tokens" if route == "responses" else "max_tokens"] == 1
    dropped = {"responses": RESPONSES_DROPPED, "messages": MESSAGES_DROPPED}.get(route, PREFILL_DROPPED)
    assert not dropped & prefill.keys()


def test_a_passed_body_is_untouched_when_it_can_be() -> None:
    body = b' {"input" : "x" } '
    assert build_passed_body(body, check_fields(body)) == [body]


@pytest.mark.parametrize(
    ("route", "body", "expected"),
    [
        ("chat", {}, True),
        ("chat", {"prompt_logprobs": None, "echo": False, "use_beam_search": False}, True),
        ("chat", {"prompt_logprobs": 0}, False),
        ("completions", {"echo": True}, False),
        ("chat", {"use_beam_search": True}, False),
        ("chat", {"logprobs": 5}, True),
        ("responses", {"previous_response_id": None, "background": False}, True),
        ("responses", {"previous_response_id": "resp_1"}, False),
        ("responses", {"background": True}, False),
        ("messages", {}, True),
    ],
)
def test_who_needs_prefill(route: Route, body: dict[str, Any], expected: bool) -> None:
    assert needs_prefill(check_fields(json.dumps(body).encode()), route) is expected


@pytest.mark.parametrize(
    ("route", "body", "expected"),
    [
        ("chat", {"tools": [{"type": "mcp"}]}, True),
        ("completions", {"prompt": "p"}, True),
        ("completions", {"prompt": ["p"]}, False),
        ("responses", {"tools": [{"type": "function", "description": 'an "mcp"'}]}, True),
        ("responses", {"tools": [{"type": "function"}, {"type": "mcp"}]}, False),
        ("responses", {"tools": [{"type": "web_search_preview"}]}, False),
        ("responses", {}, True),
        ("messages", {"tools": [{"name": "mcp"}]}, True),
    ],
)
def test_who_may_be_refused(route: Route, body: dict[str, Any], expected: bool) -> None:
    assert may_refuse(check_fields(json.dumps(body).encode()), route) is expected


@pytest.mark.parametrize(
    ("route", "body", "expected"),
    [
        ("chat", {"messages": []}, True),
        ("chat", {"messages": [], "documents": [{"text": "d"}]}, False),
        ("chat", {"messages": [], "documents": None}, True),
        ("chat", {"messages": [], "return_prompt_text": True}, False),
        ("chat", {"messages": [], "return_token_ids": True}, True),
        ("completions", {"prompt": "p"}, False),
        ("responses", {"input": "p"}, False),
    ],
)
def test_who_may_reuse_tokens(route: Route, body: dict[str, Any], expected: bool) -> None:
    assert may_reuse_tokens(check_fields(json.dumps(body).encode()), route) is expected


@pytest.mark.parametrize(("stream", "expected"), [(b"true", True), (b"false", False), (b"null", False), (b"1", False)])
def test_who_wants_events(stream: bytes, expected: bool) -> None:
    assert wants_events(check_fields(b'{"stream": %b }' % stream)) is expected
    assert not wants_events(check_fields(b'{"x": 1}'))


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
    ("answer", "prompt", "cached"),
    [
        (b'{"usage": {"prompt_tokens": 70, "total_tokens": 71}, "choices": [{"x": 1}]}', 70, None),
        (b'{"usage": {"prompt_tokens": 70, "prompt_tokens_details": {"cached_tokens": 64}}}', 70, 64),
        (b'{"usage": {"prompt_tokens": 70, "prompt_tokens_details": null}}', 70, None),
        (b'{"usage": {"input_tokens": 70, "input_tokens_details": {"cached_tokens": 0}}}', 70, 0),
        (b'{"type": "message", "usage": {"input_tokens": 70, "output_tokens": 1}}', 70, None),
        (b'{"usage": {"input_tokens": 6, "cache_read_input_tokens": 64}}', 70, 64),
        (b'{"usage": {"input_tokens": 6, "cache_read_input_tokens": 60, "cache_creation_input_tokens": 4}}', 70, 60),
    ],
)
def test_what_prefills_answer_says(answer: bytes, prompt: int, cached: int | None) -> None:
    assert parse_prefill_answer(answer) == PrefillAnswer(prompt, cached)


@pytest.mark.parametrize(
    "answer",
    [
        b'{"usage": {"prompt_tokens": 0}}',
        b'{"usage": {"prompt_tokens": -1}}',
        b'{"usage": {"prompt_tokens": "70"}}',
        b'{"usage": {"prompt_tokens": true}}',
        b'{"usage": {"prompt_tokens": 1e400}}',
        b'{"usage": {}}',
        b'{"usage": null}',
        b"{}",
        b"[]",
        b"",
        b'{"usage": {"prompt_tokens": 70}',
        b"\xff",
    ],
)
def test_an_odd_prefill_answer_says_nothing(answer: bytes) -> None:
    assert parse_prefill_answer(answer) == PrefillAnswer()


@pytest.mark.parametrize("ids", [b"null", b"[]", b"[ ]", b'["1"]', b"[null]", b'"[1]"', b"{}", b"[[1]]"])
def test_what_is_no_list_of_tokens_is_not_handed_on(ids: bytes) -> None:
    answer = parse_prefill_answer(b'{"usage": {"prompt_tokens": 1}, "prompt_token_ids": %b}' % ids)
    assert answer == PrefillAnswer(1)


def test_an_answer_that_repeats_the_request_may_be_as_long() -> None:
    assert bound_prefill_answer("chat", 10**6) == bound_prefill_answer("messages", 10**6) < 10**6
    assert bound_prefill_answer("responses", 10**6) > 2 * 10**6
    assert bound_prefill_answer("chat", 10**6, returns_tokens=True) > 2 * 10**6


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
