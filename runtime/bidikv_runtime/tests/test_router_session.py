"""Sessions: the order of names, and stability of the derived one from turn to turn."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_runtime.router.api.session import derive_session, iterate_elements
from bidikv_runtime.router.api.splice import parse_fields
from bidikv_runtime.router.http.http1 import Headers

SYSTEM = {"role": "system", "content": 'you [are] {an} agent, "quoted" \\'}
USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}
MORE = {"role": "user", "content": "more"}


def session(body: dict[str, Any], headers: Headers | None = None, **dumps: Any) -> bytes:
    return derive_session(headers or [], parse_fields(json.dumps(body, **dumps).encode()))


def chat(*messages: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **others}


@pytest.mark.parametrize(
    ("body", "headers", "same_as"),
    [
        (chat(USER), [(b"X-Session-ID", b"s")], chat(MORE, session_id="s")),
        (chat(USER, session_id="other"), [(b"x-session-id", b"s")], chat(session_id="s")),
        (chat(USER), [(b"session-id", b"b"), (b"X-Conversation-Id", b"a")], chat(session_id="a")),
        (chat(USER), [(b"x-session-id", b""), (b"session-id", b"s")], chat(session_id="s")),
        (chat(USER, prompt_cache_key="p", session_id="s"), [], chat(prompt_cache_key="p")),
        (chat(USER, prompt_cache_key=None, session_id="s"), [], chat(session_id="s")),
        (chat(USER, prompt_cache_key="", session_id="s"), [], chat(session_id="s")),
        (chat(USER, session_id="é"), [], chat(USER, conversation_id="é")),
    ],
)
def test_named_sessions(body: dict[str, Any], headers: Headers, same_as: dict[str, Any]) -> None:
    assert session(body, headers) == session(same_as)
    assert session(body, headers) != session(chat(USER))


@pytest.mark.parametrize("dumps", [{}, {"indent": 2}, {"separators": (",", ":")}])
@pytest.mark.parametrize("opening", [[USER], [SYSTEM, USER], [SYSTEM, SYSTEM, USER]])
def test_a_derived_session_is_stable_while_the_history_grows(dumps: dict[str, Any], opening: list[Any]) -> None:
    first = session(chat(*opening), **dumps)
    assert session(chat(*opening, ANSWER, MORE), **dumps) == first
    assert session(chat(*opening, ANSWER, MORE, ANSWER, USER, temperature=0.1, tools=[1]), **dumps) == first


def test_different_openings_are_different_sessions() -> None:
    bodies = [
        chat(USER),
        chat(MORE),
        chat(SYSTEM, USER),
        chat(SYSTEM, MORE),
        chat(ANSWER, USER),
        chat(),
        {"model": "n", "messages": [USER]},
        {"model": "m", "prompt": "hello"},
        {"model": "m", "prompt": "other"},
        {"model": "m", "input": "hello"},
        {"model": "m", "input": [USER]},
        {},
    ]
    assert len({session(body) for body in bodies}) == len(bodies) - 1  # a prompt and an input of equal text are one
    assert session({"model": "m", "prompt": "hello"}) == session({"model": "m", "input": "hello"})


def test_a_completions_prompt_is_known_by_its_beginning() -> None:
    start = "x" * 2000
    assert session({"prompt": start + "a"}) == session({"prompt": start + "b"})
    assert session({"prompt": "a" + start}) != session({"prompt": "b" + start})


@pytest.mark.parametrize("messages", ["1", '"text"', "{}", "[]", "[1, null]", '[{"role": 5}]', '[{"role":"user"'])
def test_odd_messages_never_raise(messages: str) -> None:
    raw = msgspec.Raw(messages.encode())
    assert derive_session([], {"messages": raw}) == derive_session([], {"messages": raw})


@pytest.mark.parametrize("value", ["1", "true", '["a"]', '{"a": 1}'])
def test_a_session_id_that_is_not_text_still_names_one(value: str) -> None:
    fields = parse_fields(f'{{"session_id": {value}, "messages": []}}'.encode())
    other = parse_fields(f'{{"session_id": {value}, "messages": [1]}}'.encode())
    assert derive_session([], fields) == derive_session([], other)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=10,
)


@given(st.lists(json_values, max_size=6), st.booleans(), st.sampled_from([None, 2]))
def test_elements_are_those_of_a_full_decoder(value: list[Any], ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    array = msgspec.Raw(text.encode("utf-8", "surrogatepass"))
    elements = list(iterate_elements(array))
    assert [json.loads(element.decode("utf-8", "surrogatepass")) for element in elements] == value
    assert all(element == element.strip() for element in elements)


def test_only_the_opening_is_read() -> None:
    # Invalid JSON behind the first user message: a full scan would trip over it.
    array = msgspec.Raw(b'[{"role":"user"},"unterminated')
    assert derive_session([], {"messages": array}) == derive_session(
        [], {"messages": msgspec.Raw(b'[{"role":"user"}]')}
    )
