"""Sessions: the order of names, and stability of the derived one from turn to turn."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_runtime.router.api.session import (
    Identity,
    build_response_id,
    identify,
    iterate_elements,
    parse_response_id,
)
from bidikv_runtime.router.api.splice import Fields, parse_fields
from bidikv_runtime.router.api.tenant import compute_cache_salt, compute_tenant
from bidikv_runtime.router.http.http1 import Headers

SYSTEM = {"role": "system", "content": 'you [are] {an} agent, "quoted" \\'}
USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}
MORE = {"role": "user", "content": "more"}


def who(body: dict[str, Any], headers: Headers | None = None, **dumps: Any) -> Identity:
    encoded = json.dumps(body, **dumps).encode()
    return identify(headers or [], parse_fields(encoded), encoded)


def session(body: dict[str, Any], headers: Headers | None = None, **dumps: Any) -> bytes:
    return who(body, headers, **dumps).session


def derived(fields: Fields) -> bytes:
    return identify([], fields, b"").session


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
        (chat(USER), [(b"session_id", b"s")], chat(session_id="s")),
        (chat(USER), [(b"X-Claude-Code-Session-Id", b"s")], chat(session_id="s")),
        (chat(USER), [(b"x-session-affinity", b"s"), (b"x-opencode-session", b"o")], chat(session_id="o")),
        (chat(USER), [(b"session-id", b"s"), (b"thread-id", b"s")], chat(session_id="s")),
        ({"input": "x", "conversation": "c"}, [], chat(session_id="c")),
        ({"input": "x", "conversation": {"id": "c", "x": 1}}, [], chat(session_id="c")),
        ({"input": "x", "conversation": {"id": 5}, "metadata": {"session_id": "s"}}, [], chat(session_id="s")),
        (chat(USER, metadata={"session_id": "s", "user_id": "u"}), [], chat(session_id="s")),
        (chat(USER, metadata={"user_id": "user_1f_account_2a-3b_session_4c-5d"}), [], chat(session_id="4c-5d")),
        (chat(USER, metadata={"user_id": '{"device_id": "d", "session_id": "s"}'}), [], chat(session_id="s")),
        (chat(USER, prompt_cache_key="p", conversation="c", metadata={"session_id": "s"}), [], chat(session_id="p")),
        (chat(USER, previous_response_id="resp_other"), [], chat(session_id="resp_other")),
        (chat(USER, previous_response_id="resp_other", session_id="s"), [], chat(session_id="s")),
    ],
)
def test_named_sessions(body: dict[str, Any], headers: Headers, same_as: dict[str, Any]) -> None:
    assert session(body, headers) == session(same_as)
    assert session(body, headers) != session(chat(USER))
    assert who(body, headers).named


@pytest.mark.parametrize(
    "more",
    [
        {"conversation": None},
        {"conversation": 5},
        {"metadata": None},
        {"metadata": {"user_id": "somebody"}},
        {"metadata": {"user_id": "{not json"}},
        {"metadata": {"user_id": 7}},
        {"metadata": {"user_id": '{"session_id": 1}'}},
        {"previous_response_id": None},
        {"previous_response_id": 5},
    ],
)
def test_what_names_no_session(more: dict[str, Any]) -> None:
    assert session(chat(USER, **more)) == session(chat(USER))
    assert not who(chat(USER, **more)).named


def test_conversations_within_a_session_are_sessions() -> None:
    headers = [(b"x-claude-code-session-id", b"s")]
    agents = [session(chat(USER), [*headers, (b"x-claude-code-agent-id", name)]) for name in (b"a", b"b")]
    threads = [session(chat(USER), [(b"thread-id", name), *headers]) for name in (b"t", b"u")]
    assert len({session(chat(USER), headers), *agents, *threads}) == 5
    assert session(chat(USER), [(b"thread-id", b"t")]) == session(chat(USER))  # it names no session by itself


@pytest.mark.parametrize("body", [chat(USER), chat(USER, session_id="s"), {"input": "x"}, {"prompt": "p"}])
def test_tenants_are_kept_apart(body: dict[str, Any]) -> None:
    keys = [
        *([], [(b"Authorization", b"Bearer a")], [(b"authorization", b"Bearer b")], [(b"x-api-key", b"Bearer c")]),
        [(b"x-api-key", b"x"), (b"authorization", b"Bearer d")],
    ]
    identities = [who(body, headers) for headers in keys]
    assert len({identity.session for identity in identities}) == len(keys)
    assert len({identity.tenant for identity in identities}) == len(keys)
    assert identities[0].tenant == b""
    assert who(body, [(b"AUTHORIZATION", b"Bearer a")]) == identities[1]
    for identity in identities:
        assert b"Bearer" not in identity.tenant + identity.session


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (chat(USER), True),
        (chat(SYSTEM, USER, MORE), True),
        (chat(SYSTEM, {"role": "user", "content": 'I am "assistant"'}), True),
        (chat(USER, ANSWER), False),
        (chat(USER, ANSWER, MORE), False),
        ({"input": "hello"}, True),
        ({"input": [USER]}, True),
        ({"input": [USER, ANSWER, MORE]}, False),
        ({"input": [USER, {"type": "function_call"}, {"type": "function_call_output", "output": "x"}]}, False),
        ({"input": "hello", "previous_response_id": "resp_1"}, False),
        ({"input": "hello", "previous_response_id": None}, True),
        ({"prompt": "hello"}, False),
        ({}, False),
    ],
)
@pytest.mark.parametrize("dumps", [{}, {"indent": 1}, {"separators": (",", ":")}])
def test_first_turns(body: dict[str, Any], expected: bool, dumps: dict[str, Any]) -> None:
    assert who(body, **dumps).first_turn is expected


@given(st.binary(min_size=16, max_size=16))
def test_a_response_id_carries_its_session(key: bytes) -> None:
    first, second = build_response_id(key), build_response_id(key)
    assert first != second
    assert parse_response_id(first) == parse_response_id(second) == key
    assert len(first) < 64


def test_a_turn_that_follows_a_response_has_its_session() -> None:
    first = {"model": "m", "input": "hello"}
    headers: Headers = [(b"authorization", b"Bearer a")]
    made = build_response_id(session(first, headers))
    following = {"model": "m", "input": "and now?", "previous_response_id": made}
    assert session(following, headers) == session(first, headers)
    assert who(following, headers).named
    assert session(following | {"session_id": "s"}) == session({"session_id": "s"})


@given(st.text(alphabet="0123456789abcdef resp_x", max_size=70) | st.text())
def test_other_ids_carry_no_session(text: str) -> None:
    assert parse_response_id(text) is None
    assert parse_response_id("resp_" + text) is None


@given(st.binary(min_size=16, max_size=16), st.integers(5, 60), st.sampled_from("0123456789abcdef"))
def test_a_damaged_id_carries_no_session(key: bytes, place: int, digit: str) -> None:
    made = build_response_id(key)
    damaged = made[:place] + digit + made[place + 1 :]
    assert damaged == made or parse_response_id(damaged) is None


def salt(tenant: bytes, **body: Any) -> bytes | None:
    return compute_cache_salt(tenant, parse_fields(json.dumps(body).encode()))


def test_salts_tell_tenants_and_their_own_salts_apart() -> None:
    tenants = [b"", compute_tenant(b"Bearer a"), compute_tenant(b"Bearer b")]
    salts = [salt(tenant, **own) for tenant in tenants for own in ({}, {"cache_salt": "x"}, {"cache_salt": "y"})]
    assert None not in salts
    assert len(set(salts)) == len(salts)
    assert salt(tenants[1], cache_salt=None) == salt(tenants[1])
    for value in salts:
        # vLLM allows up to 128 characters, without '@', '/', a backslash or NUL.
        assert json.loads(value or b"") == json.loads(value or b"").strip("@/\\\0")
        assert len(json.loads(value or b"")) == 64


@pytest.mark.parametrize("own", ["", 5, ["x"]])
def test_a_salt_that_vllm_refuses_is_left_to_it(own: Any) -> None:
    assert salt(b"t", cache_salt=own) is None


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
    assert derived({"messages": raw}) == derived({"messages": raw})


@pytest.mark.parametrize("value", ["1", "true", '["a"]', '{"a": 1}'])
def test_a_session_id_that_is_not_text_still_names_one(value: str) -> None:
    fields = parse_fields(f'{{"session_id": {value}, "messages": []}}'.encode())
    other = parse_fields(f'{{"session_id": {value}, "messages": [1]}}'.encode())
    assert derived(fields) == derived(other)


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


@pytest.mark.parametrize("dumps", [{}, {"indent": 2}, {"ensure_ascii": False}])
def test_a_long_history_has_the_session_of_its_beginning(dumps: dict[str, Any]) -> None:
    opening = [SYSTEM, {"role": "user", "content": 'é "x" [' * 10}]
    sessions = {session(chat(*opening, *[ANSWER, MORE] * turns), **dumps) for turns in (0, 1, 10, 100, 1000)}
    assert len(sessions) == 1


def test_of_a_long_history_only_the_opening_is_read() -> None:
    # Invalid JSON behind the first user message: a full scan would trip over it.
    user = b'{"role":"user","content":"%b"}' % (b"x" * 20_000)
    whole, broken = msgspec.Raw(b"[%b]" % user), msgspec.Raw(b'[%b,"unterminated' % user)
    assert derived({"messages": broken}) == derived({"messages": whole})
