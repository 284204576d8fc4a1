"""Figures of the router's bench: ratios are paired, medians over rounds, void and missing runs decide nothing."""

from __future__ import annotations

import dataclasses
import random

import pytest

from e2e.bench.router.cpu import parse_busy_seconds, parse_run_time
from e2e.bench.router.measure import Run, compare_bodies, explain_void
from e2e.bench.router.plan import ROWS, select_rows, shuffle
from e2e.bench.router.report import (
    AIMS,
    GROWTH,
    MIB,
    Aim,
    Memory,
    build_tables,
    compute_ratios,
    judge,
    judge_memory,
    summarise,
)
from e2e.bench.router.targets import DIRECT, LOCAL, OURS, PEER, TOY_PROXY

RUN = Run(
    row="1 MB stream c=1",
    target=OURS,
    round=1,
    requests=100,
    errors=0,
    first_error="",
    requests_per_second=50.0,
    latency_p50_us=9000.0,
    latency_p99_us=12_000.0,
    first_byte_p50_us=3000.0,
    first_byte_p99_us=4000.0,
    connect_us=100.0,
    cpu_us=2000.0,
    router_cores=0.5,
    resident_bytes=40 * MIB,
    prefill_requests=100,
    decode_requests=100,
    prefill_bytes=1_000_000.0,
    decode_bytes=1_000_100.0,
    foreign_cores=0.0,
)


def run(target: str, number: int, **changes: object) -> Run:
    return dataclasses.replace(RUN, target=target, round=number, **changes)  # type: ignore[arg-type]


def aim(identity: str, figure: str) -> Aim:
    return next(a for a in AIMS if a.id == identity and a.figure == figure)


def test_added_time_is_what_exceeds_both_direct_legs_of_the_same_round() -> None:
    runs = [
        *(run(OURS, 1, first_byte_p50_us=3000.0), run(PEER, 1, first_byte_p50_us=11_000.0)),
        run(DIRECT, 1, first_byte_p50_us=1000.0),
        *(run(OURS, 2, first_byte_p50_us=4000.0), run(PEER, 2, first_byte_p50_us=8000.0)),
        run(DIRECT, 2, first_byte_p50_us=2000.0),
    ]
    assert compute_ratios(aim("P1", "added TTFT"), runs) == [2000 / 10_000, 2000 / 6000]


def test_a_round_without_one_of_the_targets_gives_no_ratio() -> None:
    added = aim("P1", "added TTFT")
    whole = [run(OURS, 1), run(PEER, 1), run(DIRECT, 1, first_byte_p50_us=0.0)]
    for missing in (OURS, PEER, DIRECT):
        assert compute_ratios(added, [r for r in whole if r.target != missing]) == []
    assert compute_ratios(added, whole) == [1.0]


def test_other_rows_and_targets_do_not_matter() -> None:
    throughput = aim("P4", "req/s")
    runs = [run(OURS, 1), run(PEER, 1), run(OURS, 2, row=throughput.row)]
    assert compute_ratios(throughput, runs) == []
    runs.append(run(PEER, 2, row=throughput.row, requests_per_second=25.0))
    assert compute_ratios(throughput, runs) == [2.0]


@pytest.mark.parametrize(
    ("bound", "ratios", "met", "stretch_met"),
    [
        ("<=", [0.2, 0.3, 0.9], True, False),
        ("<=", [0.1, 0.1, 0.9], True, True),
        ("<=", [0.1, 0.5, 0.9], False, False),
        (">=", [0.1, 0.5, 0.9], True, False),
        (">=", [0.1, 0.8, 0.9], True, True),
        (">=", [0.1, 0.2, 0.9], False, False),
    ],
)
def test_the_median_decides(bound: str, ratios: list[float], met: bool, stretch_met: bool) -> None:
    stretch = 0.15 if bound == "<=" else 0.7
    wanted = Aim("X", "row", "req/s", bound, 0.33, stretch)  # type: ignore[arg-type]
    verdict = judge(wanted, ratios, least_rounds=3)
    assert (verdict.value, verdict.lowest, verdict.highest) == (ratios[1], ratios[0], ratios[2])
    assert (verdict.met, verdict.stretch_met) == (met, stretch_met)


def test_too_few_rounds_give_a_figure_and_no_verdict() -> None:
    verdict = judge(AIMS[0], [0.1, 0.2])
    assert verdict.value == pytest.approx(0.15)
    assert verdict.met is None
    assert judge(AIMS[0], []).value is None


def test_memory_is_judged_by_growth_after_the_warm_up() -> None:
    idle, growth = judge_memory(Memory(idle=70 * MIB, warm=100 * MIB, end=105 * MIB, requests=5000))
    assert (idle.value, idle.met) == (70.0, False)
    assert growth.value == pytest.approx(0.05)
    assert (growth.met, growth.stretch_met) == (True, False)
    assert "5,000" in growth.measure
    assert growth.goal == GROWTH[0]


def test_few_requests_of_memory_decide_nothing() -> None:
    assert [v.met for v in judge_memory(Memory(idle=MIB, warm=MIB, end=MIB, requests=50))] == [True, None]
    assert [v.met for v in judge_memory(None)] == [None, None]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"errors": 2, "first_error": "an answer had status 500"}, "status 500"),
        ({"requests": 0, "prefill_requests": 0, "decode_requests": 0}, "no request"),
        ({"decode_requests": 99}, "decode got 99"),
        ({"prefill_requests": 0}, "prefill got 0"),
    ],
)
def test_a_run_is_void_unless_every_request_had_both_legs(changes: dict[str, object], word: str) -> None:
    assert explain_void(RUN) is None
    assert word in (explain_void(run(OURS, 1, **changes)) or "")


def test_the_local_path_has_no_prefill_leg_and_the_direct_legs_no_router() -> None:
    assert explain_void(run(LOCAL, 1, prefill_requests=0)) is None
    assert explain_void(run(DIRECT, 1, prefill_requests=40, decode_requests=60)) is None


def test_what_a_router_changed_is_told() -> None:
    sent = b'{"model":"m","messages":[{"role":"user","content":null}],"temperature":0.7,"seed":1}'
    got = b'{"model":"m","messages":[{"role":"user"}],"temperature":0.699999,"stream":false}'
    assert compare_bodies(sent, got) == {
        "messages_equal": False,
        "changed": ["messages", "temperature"],
        "dropped": ["seed"],
        "added": ["stream"],
        "bytes": len(got),
    }
    assert compare_bodies(sent, sent)["messages_equal"]


def test_rows_keep_the_targets_that_were_asked_for() -> None:
    rows = {row.name: row for row in select_rows([], [OURS, LOCAL, "before"], quick=False)}
    assert rows.keys() == {row.name for row in ROWS}
    assert rows["small c=32"].targets == (OURS, LOCAL, "before")
    assert rows["64 streams"].targets == (OURS, "before")
    assert [row.name for row in select_rows(["64 streams"], [PEER], quick=True)] == ["64 streams"]
    assert select_rows(["64 streams"], [TOY_PROXY], quick=False) == []
    with pytest.raises(ValueError, match="'1 GB'"):
        select_rows(["1 GB"], [OURS], quick=False)


def test_the_order_is_a_permutation_that_the_seed_fixes() -> None:
    names = [row.name for row in ROWS]
    first = shuffle(names, random.Random(1))
    assert sorted(first) == sorted(names)
    assert first == shuffle(names, random.Random(1))
    assert any(shuffle(names, random.Random(seed)) != first for seed in range(2, 6))


def test_tables_show_what_is_missing_as_missing() -> None:
    summary = summarise([RUN, run(DIRECT, 1, cpu_us=None, first_byte_p99_us=None), run(OURS, 2, cpu_us=3000.0)])
    lines = build_tables(summary, [judge(AIMS[0], []), judge(AIMS[0], [0.1] * 5)])
    assert "| 1 MB stream c=1 | direct | 50 | - | 9.00 | 3.00 | - | 1 |" in lines
    assert "| 1 MB stream c=1 | ours | 50 | 2,500 | 9.00 | 3.00 | 4.00 | 2 |" in lines
    assert lines[-2].endswith("| - | - | ? |")
    assert lines[-1].endswith("| 0.10 | 0.10, 0.10 | yes, stretch too |")


def test_run_time_and_busy_time_as_the_kernel_writes_them() -> None:
    assert parse_run_time("1500000000 12 34\n") == 1.5
    text = "cpu  100 20 30 4000 500 6 7 8 90 10\ncpu0 1 1 1 1 1 1 1 1 1 1\nintr 5\n"
    assert parse_busy_seconds(text) == pytest.approx((100 + 20 + 30 + 6 + 7 + 8) / 100)
