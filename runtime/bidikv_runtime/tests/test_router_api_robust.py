"""Whatever JSON a client sends, the router forms legs of it and lets the engine judge."""

from __future__ import annotations

import json
from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st

from bidikv_runtime.router.api.continuation import Recorder
from bidikv_runtime.router.api.legs import (
    build_decode_body,
    build_prefill_body,
    may_refuse,
    may_reuse_tokens,
    needs_prefill,
    wants_events,
)
from bidikv_runtime.router.api.session import identify
from bidikv_runtime.router.api.splice import parse_fields
from bidikv_runtime.router.api.tenant import compute_cache_salt
from bidikv_runtime.router.observe.record import Route

KEYS = [
    *("messages", "input", "prompt", "model", "instructions", "tools", "tool_choice", "thinking", "response_format"),
    *("stream", "n", "max_tokens", "max_completion_tokens", "min_tokens", "stream_interval", "cache_salt", "metadata"),
    *("conversation", "conversation_id", "previous_response_id", "prompt_cache_key", "background", "request_id"),
]
WORDS = ["user", "assistant", "type", "role", "id", "content", "session_id", "user_id", "enabled", "tool", '{"a":', ""]
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(WORDS)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
    max_leaves=8,
)
routes: tuple[Route, ...] = get_args(Route)[:4]


@given(st.dictionaries(st.sampled_from(KEYS), values, max_size=6), st.sampled_from(routes), st.sampled_from([None, 1]))
def test_odd_bodies_become_legs(body: dict[str, Any], route: Route, indent: int | None) -> None:
    encoded = json.dumps(body, indent=indent).encode()
    fields = parse_fields(encoded)
    identity = identify([(b"authorization", b"Bearer x")], fields, encoded)
    assert len(identity.session) == 16
    assert identity == identify([(b"Authorization", b"Bearer x")], fields, encoded)
    for flag in (needs_prefill(fields, route), may_refuse(fields, route), may_reuse_tokens(fields, route)):
        assert isinstance(flag, bool)
    assert wants_events(fields) is (body.get("stream") is True)
    salt = compute_cache_salt(identity.tenant, fields)
    prefill = json.loads(b"".join(build_prefill_body(fields, [], identity.session, route=route, cache_salt=salt)))
    decode = json.loads(b"".join(build_decode_body(encoded, fields, [], identity.session, cache_salt=salt)))
    for key, value in body.items():
        if key != "cache_salt":
            assert decode[key] == value
        if key in ("messages", "input", "prompt", "model", "instructions", "tools"):
            assert prefill[key] == value
    recorder = Recorder.build(route, fields)
    if recorder is not None:
        recorder.feed(b'data: {"choices": [{"delta": {"content": "x"}, "text": "x"}]}\n\n')
        pieces = recorder.build_follow_up(encoded, fields)
        assert pieces is None or json.loads(b"".join(pieces))
