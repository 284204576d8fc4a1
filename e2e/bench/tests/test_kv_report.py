"""Medians, paired ratios and goals of bench-kv."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from e2e.bench.compare import Comparison, Verdict
from e2e.bench.kv_plan import LARGE, SMALL
from e2e.bench.kv_report import (
    Goal,
    Idle,
    Questions,
    Sample,
    Spread,
    build_goal_lines,
    build_table,
    compute_spread,
    evaluate_goals,
    pair_ratios,
    summarise_outputs,
    summarise_turns,
)
from e2e.bench.kv_setups import LOCAL_HIT, ONE_WAY, OURS, STOCK


def sample(
    setup: str, seconds: float, *, number: int = 1, turn: int = 9, kind: str = LARGE, tokens: int = 10_600
) -> Sample:
    streamed = setup not in (STOCK, LOCAL_HIT)
    return Sample(
        "float32",
        number,
        turn,
        kind,
        setup,
        tokens,
        seconds - 0.1,
        seconds if streamed else None,
        seconds,
        0,
        0,
        {"prefill: lookup": 0.001},
    )


def goal(goals: list[Goal], part: str) -> Goal:
    [found] = [g for g in goals if part in g.name]
    return found


def test_spread() -> None:
    assert compute_spread([3.0, 1.0, 8.0]) == Spread(3.0, 1.0, 8.0, 3)
    assert compute_spread([]) is None


def test_ratios_pair_rounds_and_skip_what_lacks_a_partner() -> None:
    samples = [
        sample(ONE_WAY, 9.0, number=1),
        sample(ONE_WAY, 8.0, number=2),
        sample(ONE_WAY, 5.0, number=3),
        sample(OURS, 3.0, number=1),
        sample(OURS, 4.0, number=2),
    ]
    assert pair_ratios(samples, "ttft_s", ONE_WAY, OURS) == [3.0, 2.0]
    assert pair_ratios(samples, "ttft_s", STOCK, OURS) == []


def test_goals_at_a_long_history() -> None:
    samples = []
    for number, slow in enumerate((12.0, 9.0, 14.0), start=1):
        samples += [
            sample(ONE_WAY, slow, number=number),
            sample(OURS, 3.0, number=number),
            sample(STOCK, 3.0, number=number),
            sample(LOCAL_HIT, 2.9, number=number),
            sample(OURS, 0.6, number=number, turn=10, kind=SMALL),
            sample(LOCAL_HIT, 0.5, number=number, turn=10, kind=SMALL),
            sample(STOCK, 0.5, number=number, turn=10, kind=SMALL),
        ]
    idle = [Idle(OURS, "float32", 8, 264, 25.0, 0.02), Idle(STOCK, "float32", 8, 264, 25.0, 0.6)]
    questions = [
        Questions(750, 0.001, 0.0, 0.0004),
        Questions(750, 0.002, 0.001, 0.0015),
        Questions(750, 0.001, 0.0, None),
    ]
    goals = evaluate_goals(samples, idle, questions, {OURS: 0, STOCK: 2})
    speed = goal(goals, "one-way TTFT / ours")
    assert (speed.value, speed.met) == (4.0, True)
    assert goal(goals, "hit, long history, large").value == pytest.approx(2.9 / 2.8)
    assert goal(goals, "hit, long history, large").met is True
    assert goal(goals, "hit, long history, small").met is False
    worst = goal(goals, "stock bidirectional")
    assert worst.value == pytest.approx(1.2)
    assert worst.met is False
    assert "turn 10" in worst.detail
    assert goal(goals, "idle").met is True
    asked = goal(goals, "lookup and validation")
    assert asked.value == pytest.approx(2.45)
    assert asked.met is False
    assert goal(goals, "unlike").met is True
    assert [g.name for g in goals if "unlike" in g.name and STOCK in g.name] == []


def test_goals_stay_open_where_nothing_tells() -> None:
    goals = evaluate_goals([sample(ONE_WAY, 2.0, tokens=900), sample(OURS, 1.0, tokens=900)], [], [], {})
    assert goal(goals, "one-way TTFT / ours").met is None
    assert goal(goals, "lookup").value is None
    assert "open" in build_goal_lines(goals)
    assert "MISSED" not in build_goal_lines(goals)


def test_a_wrong_answer_misses_its_goal() -> None:
    assert goal(evaluate_goals([], [], [], {OURS: 1}), "unlike").met is False


def test_summary_is_json_and_its_table_has_a_line_per_turn() -> None:
    samples = [sample(ONE_WAY, 9.0), sample(OURS, 3.0), sample(LOCAL_HIT, 2.9), sample(OURS, 0.4, turn=10, kind=SMALL)]
    summary = json.loads(json.dumps(summarise_turns(samples, "float32")))
    assert [row["turn"] for row in summary] == [9, 10]
    assert summary[0]["ratios"]["one-way/bidikv"] == asdict(Spread(3.0, 3.0, 3.0, 1))
    assert summary[0]["setups"][LOCAL_HIT]["ttft_s"] is None
    assert summary[1]["ratios"]["one-way/bidikv"] is None
    table = build_table(summary, "float32").splitlines()
    assert table[2].split()[:3] == ["9", LARGE, "10,600"]
    assert "3.00" in table[2]
    assert len({len(line) for line in table[1:4]}) == 1


def test_outputs_are_counted_by_verdict() -> None:
    found = summarise_outputs(
        [Comparison(Verdict.SAME, 32, 1e-5), Comparison(Verdict.TIE, 4, 2e-5), Comparison(Verdict.WRONG, 0, 0.4)]
    )
    assert found == {
        "compared": 3,
        "same": 1,
        "tie": 1,
        "wrong": 1,
        "agreeing_tokens": 36,
        "worst_logprob_distance": 0.4,
    }
