"""A broken stream goes on elsewhere, and its client sees one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_runtime.router.api.continuation import Recorder, Rewriter
from bidikv_runtime.router.api.splice import parse_fields
from bidikv_runtime.router.observe.record import Route

CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": 'count "up"'}],
    "stream": True,
    "max_tokens": 20,
    "temperature": 0.5,
}
COMPLETIONS: dict[str, Any] = {"model": "m", "prompt": 'one "two" é', "stream": True, "max_tokens": 20}
WORDS = ["one", ' "two"', "\n\nthree é", "", " \\four", " 😀"]


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def chat_stream(
    words: Sequence[str], name: str = "1", *, prompt: int = 0, done: bool = True, each: bool = False
) -> bytes:
    """What vLLM sends for a chat; with ``prompt`` its usage at the end, with ``each`` in all events."""

    def chunk(delta: dict[str, Any], count: int, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        value: dict[str, Any] = {"id": f"chatcmpl-{name}", "object": "chat.completion.chunk", "created": int(name)}
        value |= {"model": f"m{name}", "choices": [choice]}
        return event(value | ({"usage": usage(prompt, count)} if each else {}))

    events = [chunk({"role": "assistant", "content": ""}, 0)]
    events += [chunk({"content": word}, number) for number, word in enumerate(words, start=1)]
    if done:
        events.append(chunk({"content": ""}, len(words) + 1, "stop"))
        if prompt:
            value = {"id": f"chatcmpl-{name}", "object": "chat.completion.chunk", "created": int(name)}
            events.append(event(value | {"model": f"m{name}", "choices": [], "usage": usage(prompt, len(words) + 1)}))
        events.append(b"data: [DONE]\n\n")
    return b"".join(events)


def completions_stream(words: Sequence[str], name: str = "1", *, done: bool = True) -> bytes:
    def chunk(text: str, finish: str | None = None) -> bytes:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return event({"id": f"cmpl-{name}", "created": int(name), "model": f"m{name}", "choices": [choice]})

    events = [chunk(word) for word in words]
    return b"".join([*events, chunk("", "stop"), b"data: [DONE]\n\n"] if done else events)


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, "x": None}


def recorder(request: dict[str, Any], route: Route = "chat") -> Recorder:
    built = Recorder.build(route, parse_fields(json.dumps(request).encode()))
    assert built is not None
    return built


def follow_up(built: Recorder, request: dict[str, Any]) -> Any:
    body = json.dumps(request).encode()
    pieces = built.build_follow_up(body, parse_fields(body))
    return None if pieces is None else json.loads(b"".join(pieces))


def values(stream: bytes) -> list[Any]:
    *events, rest = stream.decode().split("\n\n")
    assert rest == ""
    assert all(entry.startswith("data: ") for entry in events)
    return [json.loads(entry[6:]) for entry in events if entry != "data: [DONE]"]


def text_of(stream: bytes) -> str:
    choices = [choice for value in values(stream) for choice in value["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_a_stream_cut_anywhere_goes_on_as_if_it_were_one(route: Route) -> None:
    request = CHAT if route == "chat" else COMPLETIONS
    make = chat_stream if route == "chat" else completions_stream
    whole = make(WORDS)
    for cut in range(len(whole) + 1):
        built = recorder(request, route)
        seen = built.feed(whole[:cut])
        assert whole.startswith(seen)  # nothing but whole events, as they came
        said = text_of(seen)
        asked = follow_up(built, request)
        if asked is None:
            assert seen.endswith(b'"stop"}]}\n\n') or seen == whole
            assert built.build_ending() == (b"" if seen == whole else b"data: [DONE]\n\n")
            continue
        # The other engine goes on from exactly what the client has got.
        if route == "chat":
            history = asked["messages"]
            assert history[:1] == CHAT["messages"]
            assert history[1:] == ([{"role": "assistant", "content": said}] if said else [])
            assert asked.get("continue_final_message", False) is bool(said)
            assert asked.get("add_generation_prompt", True) is not bool(said)
        else:
            assert asked["prompt"] == COMPLETIONS["prompt"] + said
        assert asked["temperature"] == 0.5 if route == "chat" else "temperature" not in asked
        tokens = len(values(seen)) - (1 if route == "chat" and seen else 0)
        assert asked["max_tokens"] == 20 - tokens
        rest = make(WORDS[tokens:], "2")
        seen += Rewriter(built).feed(rest)
        assert [value["id"] for value in values(seen)] == [values(seen)[0]["id"]] * len(values(seen))
        assert {(value["created"], value["model"]) for value in values(seen)} == {
            (values(seen)[0]["created"], values(seen)[0]["model"])
        }
        assert text_of(seen) == "".join(WORDS)
        assert seen.count(b"[DONE]") == 1
        if route == "chat":
            assert seen.count(b'"role"') == 1
        assert built.tokens == len(WORDS) + 1
        assert follow_up(built, request) is None


@given(st.lists(st.integers(0, 1200), max_size=8), st.lists(st.text(max_size=5), max_size=6))
def test_how_the_bytes_come_does_not_matter(places: list[int], words: list[str]) -> None:
    whole = chat_stream(words, prompt=9)
    bounds = [0, *sorted(min(place, len(whole)) for place in places), len(whole)]
    pieces = [whole[start:end] for start, end in itertools.pairwise(bounds)]
    built = recorder(CHAT)
    assert b"".join(built.feed(piece) for piece in pieces) == whole
    assert (built.tokens, built.prompt_tokens) == (len(words) + 1, 9)
    once, often = Rewriter(recorder(CHAT)), Rewriter(recorder(CHAT))
    assert b"".join(often.feed(piece) for piece in pieces) == once.feed(whole)


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_a_stream_may_break_more_than_once(route: Route) -> None:
    request, make = (CHAT, chat_stream) if route == "chat" else (COMPLETIONS, completions_stream)
    built = recorder(request, route)
    seen = built.feed(make(WORDS[:2], "1", done=False))
    asked = follow_up(built, request)
    assert asked["max_tokens"] == 18
    # An engine that generates nothing changes nothing.
    seen += Rewriter(built).feed(make([], "2", done=False))
    assert follow_up(built, asked) == asked
    # One that generates two tokens, and breaks within an event.
    seen += Rewriter(built).feed(make(WORDS[2:4], "3", done=False) + b'data: {"id": "chatcmpl-2", "choi')
    asked = follow_up(built, asked)
    said = 'one "two"\n\nthree é'
    assert asked["max_tokens"] == 16
    if route == "chat":
        assert asked["messages"] == [*CHAT["messages"], {"role": "assistant", "content": said}]
        assert (asked["continue_final_message"], asked["add_generation_prompt"]) == (True, False)
    else:
        assert asked["prompt"] == COMPLETIONS["prompt"] + said
    seen += Rewriter(built).feed(make(WORDS[4:], "4"))
    assert text_of(seen) == "".join(WORDS)
    assert len({value["id"] for value in values(seen)}) == 1
    assert built.tokens == len(WORDS) + 1


@pytest.mark.parametrize("each", [False, True])
def test_usage_is_that_of_the_whole_answer(each: bool) -> None:
    built = recorder(CHAT | {"stream_options": {"include_usage": True}})
    seen = built.feed(chat_stream(WORDS[:4], prompt=100, done=False, each=each))
    # The second engine's prompt holds the first one's text.
    seen += Rewriter(built).feed(chat_stream(WORDS[4:], "2", prompt=104, each=each))
    assert values(seen)[-1]["choices"] == []
    assert values(seen)[-1]["usage"] == usage(100, 7)
    if each:
        assert [value["usage"]["completion_tokens"] for value in values(seen)[:-1]] == list(range(8))


def test_tokens_are_counted_as_exactly_as_the_stream_tells() -> None:
    chunk = {"id": "1", "created": 1, "model": "m", "choices": [{"index": 0, "delta": {"content": "x"}}]}
    built = recorder(CHAT | {"stream_interval": 4})
    built.feed(event(chunk) + event(chunk) + event(chunk))
    assert built.tokens == 9  # the first one at once, then by fours
    with_ids = recorder(CHAT | {"return_token_ids": True})
    choice = chunk["choices"][0] | {"token_ids": [1, 2, 3]}  # type: ignore[index]
    with_ids.feed(event(chunk | {"choices": [choice]}) * 2)
    assert with_ids.tokens == 6


def test_limits_are_reduced_by_what_was_generated() -> None:
    def after_three(request: dict[str, Any]) -> Any:
        built = recorder(request)
        built.feed(chat_stream(["a", "b", "c"], done=False))
        return follow_up(built, request)

    asked = after_three(CHAT | {"max_completion_tokens": 7, "min_tokens": 2})
    assert (asked["max_tokens"], asked["max_completion_tokens"], asked["min_tokens"]) == (17, 4, 0)
    assert after_three(CHAT | {"max_tokens": 4})["max_tokens"] == 1
    assert after_three(CHAT | {"max_tokens": 3}) is None
    assert "max_tokens" not in after_three({key: value for key, value in CHAT.items() if key != "max_tokens"})


def test_before_the_first_token_the_request_stays_the_same() -> None:
    body = b' {"messages": [ {"role":"user"} ], "stream": true } '
    built = Recorder.build("chat", parse_fields(body))
    assert built is not None
    seen = built.feed(chat_stream([], done=False))
    assert built.build_follow_up(body, parse_fields(body)) == [body]
    seen += Rewriter(built).feed(chat_stream(["a"], "2"))
    assert seen.count(b'"role"') == 1
    assert text_of(seen) == "a"
    # Not even the role came: then it comes from the second engine.
    assert Rewriter(recorder(CHAT)).feed(chat_stream(["a"], "2")).count(b'"role"') == 1


@pytest.mark.parametrize(
    "more",
    [
        {"stream": False},
        {"stream": None},
        {"n": 2},
        {"logprobs": True},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"response_format": {"type": "json_object"}},
        {"response_format": 5},
        {"structured_outputs": {"regex": "a"}},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"add_generation_prompt": False},
        {"echo": True},
        {"use_beam_search": True},
        {"messages": "text"},
    ],
)
def test_requests_that_cannot_be_continued(more: dict[str, Any]) -> None:
    assert Recorder.build("chat", parse_fields(json.dumps(CHAT | more).encode())) is None


@pytest.mark.parametrize(
    "more",
    [
        *({"n": 1}, {"n": None}, {"logprobs": False}, {"tools": [{}]}, {"tool_choice": "auto"}),
        *({"response_format": {"type": "text"}}, {"response_format": None}, {"echo": None}),
    ],
)
def test_requests_that_can_be_continued(more: dict[str, Any]) -> None:
    assert Recorder.build("chat", parse_fields(json.dumps(CHAT | more).encode())) is not None


def test_other_routes_and_prompts_of_tokens_cannot_be_continued() -> None:
    others: tuple[Route, ...] = ("responses", "messages", "passed")
    for route in others:
        assert Recorder.build(route, parse_fields(json.dumps(CHAT).encode())) is None
    for prompt in ([1, 2], ["a"], ["a", "b"], None):
        body = json.dumps(COMPLETIONS | {"prompt": prompt}).encode()
        assert Recorder.build("completions", parse_fields(body)) is None
    assert Recorder.build("completions", parse_fields(json.dumps(COMPLETIONS | {"suffix": "x"}).encode())) is None


@pytest.mark.parametrize(
    "choice",
    [
        {"index": 0, "delta": {"tool_calls": [{"index": 0}]}},
        {"index": 0, "delta": {"reasoning": "hm"}},
        {"index": 0, "delta": {"reasoning_content": "hm"}},
        {"index": 0, "delta": {"function_call": {}}},
        {"index": 1, "delta": {"content": "x"}},
        {"index": 0, "delta": {"content": "x"}, "logprobs": {"content": []}},
        {"index": 0, "delta": {"content": 5}},
    ],
)
def test_what_is_not_plain_text_ends_recording(choice: dict[str, Any]) -> None:
    built = recorder(CHAT)
    odd = event({"id": "1", "choices": [choice]})
    stream = chat_stream(["a"], done=False) + odd + event({"id": "1", "choices": []})
    assert b"".join(built.feed(stream[at : at + 7]) for at in range(0, len(stream), 7)) == stream
    assert not built.continuable
    assert follow_up(built, CHAT) is None
    assert built.feed(b"data: half") == b"data: half"


def test_an_event_without_an_end_ends_recording() -> None:
    built = recorder(CHAT)
    long = b"data: " + b"x" * 2_000_000
    assert built.feed(long) == long
    assert not built.continuable


def test_comments_and_other_lines_pass() -> None:
    built = recorder(CHAT)
    stream = b": ping\n\n" + chat_stream(["a"], done=False) + b"event: x\ndata: y\n\n"
    assert built.feed(stream) == stream
    assert built.continuable
    assert Rewriter(built).feed(b": ping\n\n") == b": ping\n\n"


def test_an_engine_that_says_it_failed_is_as_good_as_dead() -> None:
    failure = event({"error": {"message": "dead", "type": "InternalServerError", "param": None, "code": 500}})
    end = failure + b"data: [DONE]\n\n"
    built = recorder(CHAT)
    seen = built.feed(chat_stream(WORDS[:3], done=False) + end[:20])
    assert built.feed(end[20:]) == b""
    assert built.failed
    assert follow_up(built, CHAT)["messages"][1]["content"] == "".join(WORDS[:3])
    assert built.failed  # it may turn out that nobody can go on
    rewriter = Rewriter(built)
    assert built.release() == b""
    seen += rewriter.feed(chat_stream(WORDS[3:4], "2", done=False) + end)
    assert built.failed  # the second one, too
    assert built.release() == end
    assert text_of(seen) == "".join(WORDS[:4])


def test_a_clients_mistake_is_told() -> None:
    mistake = event({"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}})
    built = recorder(CHAT)
    assert built.feed(mistake) == mistake
    assert not built.continuable
    rewriter = Rewriter(recorder(CHAT))
    assert rewriter.feed(mistake) == mistake
