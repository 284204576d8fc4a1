"""status.kvReuse: coarse, and steady."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from bidikv_operator.engines.reach import STALE_SECONDS
from bidikv_operator.state import EngineFacts
from bidikv_operator.status.reuse import LEAST_TOKENS, compute_reuse
from bidikv_operator.tests.engine_samples import make_facts, make_report


def decode(held: int) -> EngineFacts:
    return make_facts(f"d{held}", "decode", make_report(held_sessions=held, prompt_tokens=10**6, reused_tokens=10**6))


def prefill(prompt: int, reused: int) -> EngineFacts:
    return make_facts("p", "prefill", make_report(held_sessions=99, prompt_tokens=prompt, reused_tokens=reused))


@pytest.mark.parametrize(
    ("engines", "previous", "expected"),
    [
        ([], {"sessions": 8}, None),
        ([make_facts("a")], None, None),
        ([make_facts("a")], {"sessions": 8}, {"sessions": 8}),  # a new leader has asked nobody yet
        ([decode(100), make_facts("a")], {"sessions": 8}, {"sessions": 8}),
        ([make_facts("a", report=make_report(), age_seconds=STALE_SECONDS)], {"sessions": 8}, None),
        ([decode(0)], None, {"sessions": 0}),
        ([decode(1)], None, {"sessions": 1}),
        ([decode(700)], None, {"sessions": 512}),
        ([decode(700), decode(400)], None, {"sessions": 1024}),
        ([decode(700)], {"sessions": 1024}, {"sessions": 1024}),
        ([decode(512)], {"sessions": 1024}, {"sessions": 512}),
        ([decode(0)], {"sessions": 1}, {"sessions": 0}),
        ([prefill(LEAST_TOKENS - 1, 0)], None, {"sessions": 0}),
        ([prefill(LEAST_TOKENS, LEAST_TOKENS)], None, {"sessions": 0, "reusedTokensPercent": 100}),
        ([prefill(100_000, 84_000)], None, {"sessions": 0, "reusedTokensPercent": 80}),
        ([prefill(100_000, 89_000)], {"reusedTokensPercent": 80}, {"sessions": 0, "reusedTokensPercent": 80}),
        ([prefill(100_000, 90_000)], {"reusedTokensPercent": 80}, {"sessions": 0, "reusedTokensPercent": 90}),
    ],
)
def test_table(engines: list[EngineFacts], previous: dict[str, Any] | None, expected: dict[str, Any] | None) -> None:
    assert compute_reuse(engines, previous) == expected


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_it_is_at_rest_after_one_write(held: int, prompt: int, known: int) -> None:
    engines = [decode(held), prefill(prompt + LEAST_TOKENS, prompt)]
    first = compute_reuse(engines, {"sessions": known, "reusedTokensPercent": 40})
    assert first is not None
    assert compute_reuse(engines, first) == first
    assert first["sessions"] <= 2 * held
    assert held <= 2 * first["sessions"] or held == 0
    assert 0 <= first["reusedTokensPercent"] <= 100
