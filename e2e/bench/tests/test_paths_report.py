"""The report of ``e2e.bench.paths`` on samples made by hand."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from e2e.bench.paths.measure import compute_longest_gap
from e2e.bench.paths.plan import BIDIRECTIONAL, CHOSEN, LOCAL, PLAIN, Gap, Sample
from e2e.bench.paths.report import Spread, build_cells, build_stalls, build_tables


def build_round(
    number: int, local: float, bidirectional: float, plain: float, chosen: float, path: str
) -> list[Sample]:
    times = {LOCAL: local, BIDIRECTIONAL: bidirectional, PLAIN: plain, CHOSEN: chosen}
    return [
        Sample(number, 2000, 30, variant, path if variant == CHOSEN else variant, "held", 2030 + number, seconds)
        for variant, seconds in times.items()
    ]


def test_ratios_are_of_one_round_and_regret_is_of_forced_turns() -> None:
    samples = [
        *build_round(1, 0.1, 0.2, 2.0, 9.0, LOCAL),  # the best choice, however long the chosen turn took
        *build_round(2, 0.2, 0.6, 1.2, 0.1, BIDIRECTIONAL),  # 0.4 s too long
        *build_round(3, 0.3, 0.3, 3.0, 0.3, LOCAL),
    ]
    [cell] = build_cells(samples)
    assert (cell.history, cell.new, cell.prompt_tokens) == (2000, 30, 2032)
    assert astuple(cell.bidirectional_to_local) == pytest.approx((2.0, 1.0, 3.0))
    assert cell.plain_to_bidirectional == Spread(10.0, 2.0, 10.0)
    assert cell.first_token_s[CHOSEN] == Spread(0.3, 0.1, 9.0)
    assert cell.choices == {"local, held": 2, "bidirectional, held": 1}
    assert cell.regret_s == pytest.approx(0.4 / 3)
    assert cell.regret_share == pytest.approx(0.4 / 0.6)


def test_a_round_without_one_of_the_paths_is_an_error() -> None:
    with pytest.raises(KeyError):
        build_cells(build_round(1, 0.1, 0.2, 2.0, 0.1, LOCAL)[1:])


def test_a_gap_counts_when_it_lies_in_the_interval_in_part() -> None:
    times = [0.0, 1.0, 1.1, 3.0, 3.1, 7.0]
    assert compute_longest_gap(times, 1.05, 1.2) == pytest.approx(1.9)  # begins before the end, ends behind it
    assert compute_longest_gap(times, 0.5, 1.05) == pytest.approx(1.0)
    assert compute_longest_gap(times, 8.0, 9.0) == 0.0


def test_the_tables_show_every_size_and_kind() -> None:
    samples = build_round(1, 0.1, 0.2, 2.0, 0.1, LOCAL)
    gaps = [Gap(n, 150, LOCAL, LOCAL, "forced", 0.15, 0.02, 0.1 * n) for n in (1, 2, 3)]
    gaps.append(Gap(1, 150, CHOSEN, BIDIRECTIONAL, "stall", 0.25, 0.02, 0.03))
    stalls = build_stalls(gaps)
    assert {stall.variant: stall.choices for stall in stalls} == {
        CHOSEN: {"bidirectional, stall": 1},
        LOCAL: {"local, forced": 3},
    }
    lines = build_tables(build_cells(samples), stalls).splitlines()
    assert (
        "| 2,000 | 30 | 100 | 200 | 2,000 | 2.00 (2.00-2.00) | 10.00 (10.00-10.00) | 100 | local, held | 0 (0%) |"
        in lines
    )
    assert "| 150 | local | local, forced | 150 | 20 (20-20) | 200 (100-300) |" in lines
    assert "| 150 | chosen | bidirectional, stall | 250 | 20 (20-20) | 30 (30-30) |" in lines
