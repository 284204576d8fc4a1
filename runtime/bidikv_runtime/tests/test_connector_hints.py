"""Hints come from outside: whatever they hold, parsing gives usable values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_runtime import contract
from bidikv_runtime.connector.hints import Hints, parse_hints


def test_a_prefill_leg() -> None:
    params = {"bidikv_session": "s", "bidikv_expect": "return", "bidikv_handover": True, "bidikv_sources": []}
    assert parse_hints(params) == Hints("s", "return", handover=True)
    assert parse_hints(params).direction == contract.DIRECTION_FROM_DECODE


def test_a_decode_leg() -> None:
    hints = parse_hints({"bidikv_session": "s", "bidikv_expect": "over", "bidikv_prefilled_tokens": 4000})
    assert hints == Hints("s", "over", prefilled_tokens=4000)
    assert hints.direction == contract.DIRECTION_FROM_PREFILL


def test_a_decode_leg_without_a_prefill_leg() -> None:
    hints = parse_hints({"bidikv_session": "s", "bidikv_compute_limit_tokens": 512, "bidikv_body_bytes": 9000})
    assert hints == Hints("s", compute_limit=512, body_bytes=9000)
    assert parse_hints({"bidikv_compute_limit_tokens": 0}).compute_limit == 0


def test_a_decode_leg_that_is_repeated_without_a_guard_is_a_decode_leg() -> None:
    assert parse_hints({"bidikv_session": "s"}).direction == contract.DIRECTION_FROM_PREFILL


@pytest.mark.parametrize(
    "params",
    [
        None,
        [],
        "text",
        {"bidikv_session": ""},
        {"bidikv_session": "x" * 129},
        {"bidikv_session": 5},
        {"bidikv_expect": "perhaps"},
        {"bidikv_expect": ["return"]},
        {"bidikv_handover": "true"},
        {"bidikv_prefilled_tokens": -1},
        {"bidikv_prefilled_tokens": True},
        {"bidikv_prefilled_tokens": 1.5},
        {"bidikv_compute_limit_tokens": -1},
        {"bidikv_compute_limit_tokens": "512"},
        {"bidikv_compute_limit_tokens": False},
        {"bidikv_body_bytes": -1},
        {"bidikv_body_bytes": 2**64},
        {"bidikv_body_bytes": [1]},
    ],
)
def test_what_makes_no_sense_counts_as_absent(params: Any) -> None:
    assert parse_hints(params) == Hints()
    assert parse_hints(params).direction == contract.DIRECTION_UNKNOWN


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=4
)


@given(st.dictionaries(st.sampled_from(["bidikv_session", "bidikv_expect", "bidikv_handover"]), anything))
def test_no_value_raises(params: dict[str, Any]) -> None:
    hints = parse_hints(params)
    assert hints.session is None or 0 < len(hints.session) <= contract.MAXIMUM_SESSION_LENGTH
