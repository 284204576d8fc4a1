"""Forecasts of when blocks are needed again, from gaps that were drawn from known distributions."""

from __future__ import annotations

import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from bidikv_runtime.connector.returns import Kind, Returns, build_kind

HORIZON = 600.0
KIND = build_kind("return", 5, 10_000)


def learnt(gaps: list[float | None], kind: Kind = KIND) -> Returns:
    returns = Returns(HORIZON)
    for gap in gaps:
        returns.observe(kind, returns.build_history(), gap)
    return returns


def test_before_anything_is_known_a_return_is_likely_and_ever_less_so() -> None:
    returns = Returns(HORIZON)
    forecast = returns.forecast(KIND, returns.build_history())
    assert 0.5 < forecast.chance(0.0) < 1.0
    ages = [0.0, 1.0, 10.0, 100.0, 500.0]
    assert [forecast.chance(age) for age in ages] == sorted((forecast.chance(age) for age in ages), reverse=True)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_the_chance_of_a_return_is_learnt(share: float) -> None:
    source = random.Random(1)
    returns = learnt([source.expovariate(1 / 5) if source.random() < share else None for _ in range(800)])
    assert returns.forecast(KIND, returns.build_history()).chance(0.0) == pytest.approx(share, abs=0.05)


def test_overdue_counts_less_where_gaps_are_short() -> None:
    source = random.Random(2)
    returns = learnt([source.expovariate(1 / 2) if source.random() < 0.8 else None for _ in range(500)])
    forecast = returns.forecast(KIND, returns.build_history())
    assert forecast.rate(0.5) > 5 * forecast.rate(60.0)
    assert forecast.chance(60.0) < 0.1


def test_due_counts_more_where_gaps_are_long() -> None:
    source = random.Random(3)
    returns = learnt([source.uniform(100, 200) for _ in range(500)])
    forecast = returns.forecast(KIND, returns.build_history())
    assert forecast.rate(70.0) > 1.5 * forecast.rate(1.0)


def test_kinds_are_told_apart() -> None:
    chat = build_kind(None, 1, 500)
    returns = learnt([2.0] * 200)
    for _ in range(200):
        returns.observe(chat, returns.build_history(), None)
    assert returns.forecast(KIND, returns.build_history()).chance(0.0) > 0.9
    assert returns.forecast(chat, returns.build_history()).chance(0.0) < 0.1


def test_a_session_s_own_gaps_count_in_the_end() -> None:
    returns = learnt([2.0] * 200)
    history = returns.build_history()
    for _ in range(60):
        returns.observe(build_kind("return", 1, 10), history, 300.0)
    forecast = returns.forecast(KIND, history)
    assert forecast.chance(100.0) > 0.9
    assert forecast.rate(100.0) > returns.forecast(KIND, returns.build_history()).rate(100.0)


def test_old_observations_fade() -> None:
    returns = learnt([None] * 3000 + [2.0] * 3000)
    assert returns.forecast(KIND, returns.build_history()).chance(0.0) > 0.7


@given(
    st.lists(st.one_of(st.none(), st.floats(0, 1e9)), max_size=200),
    st.floats(0, 1e9),
    st.sampled_from([1.0, 600.0, 86_400.0]),
)
def test_estimates_are_always_finite(gaps: list[float | None], age: float, horizon: float) -> None:
    returns = Returns(horizon)
    history = returns.build_history()
    for gap in gaps:
        returns.observe(KIND, history, gap)
    forecast = returns.forecast(KIND, history)
    assert math.isfinite(forecast.rate(age))
    assert forecast.rate(age) > 0
    assert 0 < forecast.chance(age) < 1


@given(st.lists(st.floats(0.01, 599), min_size=1, max_size=50), st.integers(0, 50))
def test_within_a_bin_the_rate_has_no_steps(gaps: list[float], lost: int) -> None:
    returns = learnt([*gaps, *[None] * lost])
    forecast = returns.forecast(KIND, returns.build_history())
    for edge in returns.edges:
        assert forecast.rate(edge * 0.9999) == pytest.approx(forecast.rate(edge * 1.0001), rel=0.01)


def test_the_description_names_the_kinds_and_is_bounded() -> None:
    returns = learnt([2.0, 2.0, None])
    for turns in range(1, 100):
        returns.observe(build_kind(None, turns, turns * 3000), returns.build_history(), 1.0)
    described = returns.describe()
    assert set(described) == {"return", "unknown"}
    assert described["return"] == {"observations": 3.0, "returned": 0.667, "median_seconds_at_most": 2.7}
