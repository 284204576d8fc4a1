"""The splice changes what it is told to and not a byte more."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_runtime.router.api.splice import Buffer, NotAnObject, compute_length, parse_fields, set_fields, splice


def joined(pieces: list[Buffer]) -> bytes:
    assert compute_length(pieces) == len(b"".join(pieces))
    return b"".join(pieces)


@pytest.mark.parametrize(
    ("body", "drop", "override", "expected"),
    [
        (b'{"a": 1.50, "b":[1, 2]}', (), {}, b'{"a":1.50,"b":[1, 2]}'),
        (b'{"a":1,"b":2}', ("a",), {}, b'{"b":2}'),
        (b'{"a":1}', ("a",), {}, b"{}"),
        (b"{}", (), {}, b"{}"),
        (b"{ }", (), {"x": b"1"}, b'{"x":1}'),
        (b'{"x":0,"a":1}', (), {"x": b"1"}, b'{"a":1,"x":1}'),
        (b'{"a":1,"a":2}', (), {}, b'{"a":2}'),
        (b'{"a":1,"a":2}', ("a",), {"b": b"3"}, b'{"b":3}'),
        (b'{"\\u0061":1,"b":2}', ("a",), {}, b'{"b":2}'),
        (b'{"m":{"a":1,"a":2},"a":3}', ("a",), {}, b'{"m":{"a":1,"a":2}}'),
        (b'{"s":"}{][\\"a\\":","a":3}', ("a",), {}, b'{"s":"}{][\\"a\\":"}'),
        ('{"é":"ü\\u00fc","a":1}'.encode(), ("a",), {}, '{"é":"ü\\u00fc"}'.encode()),
    ],
)
def test_splice(body: bytes, drop: tuple[str, ...], override: dict[str, bytes], expected: bytes) -> None:
    assert joined(splice(parse_fields(body), drop, override)) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a":1}', b'{"a":1,"k":0}'),
        (b"{}", b'{"k":0}'),
        (b" { } ", b' { "k":0}'),
        (b'\n{ "a" : 1.0 }\r\n\t ', b'\n{ "a" : 1.0 ,"k":0}'),
        (b'{"a":1,"a":2}', b'{"a":1,"a":2,"k":0}'),
        (b'{"k":5, "a":1}', b'{"a":1,"k":0}'),
        (b'{"k":5,"k":6}', b'{"k":0}'),
        (b'{"\\u006b":5,"a":"k"}', b'{"a":"k","k":0}'),
        (b'{"a":{"k":1}}', b'{"a":{"k":1},"k":0}'),
    ],
)
def test_set_fields_keeps_the_body_unless_it_holds_the_key(body: bytes, expected: bytes) -> None:
    for kind in (bytes, bytearray, memoryview):
        typed: Buffer = kind(body)
        assert joined(set_fields(typed, parse_fields(typed), {"k": b"0"})) == expected


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b"1", b'"a"', b"null", b"{", b'{"a":1}{}'),
        *(b'{"a":1,}', b'{"a":[1 2]}', b'{"a":01}', b'{"a":NaN}', b'{"a":"\\q"}', b'{"a":"\n"}'),
        *(b'{"a":' + b"[" * 100_000, b'\xef\xbb\xbf{"a":1}', '{"a":1}'.encode("utf-16")),
    ],
)
def test_what_is_not_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(NotAnObject):
        parse_fields(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
objects = st.dictionaries(st.sampled_from(["a", "b", "k", "model", "", "é"]), json_values, max_size=6)


@given(objects, st.sets(st.sampled_from(["a", "k", "é"])), st.booleans(), st.sampled_from([None, 1]))
def test_splice_equals_editing_the_decoded_object(
    value: dict[str, Any], drop: set[str], ascii_only: bool, indent: int | None
) -> None:
    try:
        body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    except UnicodeEncodeError:
        return  # a lone surrogate has no UTF-8
    if b"\\ud" in body:
        return  # msgspec refuses lone surrogates
    fields = parse_fields(body)
    expected = {key: item for key, item in value.items() if key not in drop and key != "x"} | {"x": [1]}
    assert json.loads(joined(splice(fields, drop, {"x": b"[1]"}))) == expected
    for key, raw in fields.items():
        assert bytes(raw) in body
        assert json.loads(bytes(raw)) == value[key]
    assert json.loads(joined(set_fields(body, fields, {"k": b"[2]"}))) == value | {"k": [2]}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b' {"a":1 } ', b' {"a":1 ,"k":0,"l":"x"}'),
        (b"{}", b'{"k":0,"l":"x"}'),
        (b'{"l":5, "a":1}', b'{"a":1,"k":0,"l":"x"}'),
    ],
)
def test_several_fields_are_set_at_once(body: bytes, expected: bytes) -> None:
    assert joined(set_fields(body, parse_fields(body), {"k": b"0", "l": b'"x"'})) == expected
    assert joined(set_fields(body, parse_fields(body), {})) == body.rstrip()


def test_large_values_are_referenced_not_copied() -> None:
    body = b'{"a":1,"messages":"' + b"x" * 100_000 + b'","b":2}'
    pieces = splice(parse_fields(body), (), {})
    assert joined(pieces) == body
    assert [type(piece) for piece in pieces] == [bytes, memoryview, bytes]
