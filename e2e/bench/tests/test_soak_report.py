"""Whether a soak held, and the growth of memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from e2e.bench.soak_report import (
    GROWTH_LIMIT_MIB_PER_MINUTE,
    Counters,
    Rest,
    Tally,
    build_summary,
    compute_growth,
    compute_slope,
    find_faults,
)

MIB = 1 << 20
GOOD = Rest("D", True, 0, 0, True)


def good_tally(**changes: Any) -> Tally:
    return Tally(**({"requests": 3, "completed": 3, "compared": 3, "same": 3} | changes))


def test_a_good_run_has_no_fault() -> None:
    assert (
        find_faults(good_tally(ties=1, errors_while_down=Counter({"HTTP 500": 4})), [GOOD], {"D#0": 1.0}, 0.0, 500.0)
        == []
    )


@pytest.mark.parametrize(
    ("tally", "rest", "growth", "reused", "word"),
    [
        (good_tally(wrong=1), GOOD, {}, 1.0, "differ"),
        (good_tally(hung=1), GOOD, {}, 1.0, "hung"),
        (good_tally(errors=Counter({"HTTP 500": 1})), GOOD, {}, 1.0, "HTTP 500"),
        (good_tally(compared=0), GOOD, {}, 1.0, "compared"),
        (good_tally(), GOOD, {}, 0.0, "reused"),
        (good_tally(), Rest("D", True, 2, 0, False), {}, 1.0, "2 blocks in use"),
        (good_tally(), Rest("D", True, 0, 0, False), {}, 1.0, "in use"),
        (good_tally(), Rest("D", True, 0, 3, True), {}, 1.0, "3 blocks in quarantine"),
        (good_tally(), Rest("D", False, 0, None, False), {}, 1.0, "does not answer"),
        (good_tally(), GOOD, {"D#0": GROWTH_LIMIT_MIB_PER_MINUTE + 1}, 1.0, "grew"),
    ],
)
def test_each_fault_is_named(tally: Tally, rest: Rest, growth: dict[str, float], reused: float, word: str) -> None:
    [fault] = find_faults(tally, [rest], growth, 0.0, reused)
    assert word in fault


def test_slope_of_a_line_and_of_too_little() -> None:
    assert compute_slope([(0, 1.0), (1, 3.0), (2, 5.0)]) == pytest.approx(2.0)
    assert compute_slope([(1, 1.0)]) is None
    assert compute_slope([(1, 1.0), (1, 2.0)]) is None


def test_an_engine_may_grow_as_the_monolith_does() -> None:
    assert find_faults(good_tally(), [GOOD], {"D#0": 12.0}, 6.0, 1.0) == []
    assert len(find_faults(good_tally(), [GOOD], {"D#0": 16.0}, 6.0, 1.0)) == 1
    assert len(find_faults(good_tally(), [GOOD], {"D#0": 9.0}, -6.0, 1.0)) == 1


def test_growth_ignores_the_warm_up_and_short_lives() -> None:
    steady = [(float(s), 100 * MIB if s < 60 else 900 * MIB) for s in range(0, 601, 5)]
    assert compute_growth(steady) == pytest.approx(0.0)
    leaking = [(float(s), 900 * MIB + s * MIB // 6) for s in range(0, 601, 5)]
    assert compute_growth(leaking) == pytest.approx(10.0, rel=0.01)
    assert compute_growth(leaking[:10]) is None
    assert compute_growth([]) is None


def test_counters_go_on_over_a_restart() -> None:
    counters = Counters()
    for engine, value in (("P", 5.0), ("P", 9.0), ("D", 2.0), ("P", 3.0), ("P", 4.0)):
        counters.add(engine, {"reused": value})
    assert counters.totals == {"reused": 9.0 + 2.0 + 4.0}


def test_summary_names_the_faults() -> None:
    result = {
        "seed": 1,
        "seconds": 60.0,
        "tally": {
            **dict.fromkeys(("requests", "completed", "left", "compared", "same", "ties", "wrong", "hung"), 0),
            **{key: {} for key in ("disturbances", "errors_while_down", "errors")},
        },
        "counters": {},
        "rest": [{"engine": "P", "leaked_blocks": 0}],
        "growth": {},
        "growth_of_the_monolith": 0.5,
        "faults": ["nothing was reused"],
    }
    assert build_summary(result).endswith("FAULT: nothing was reused")
    assert build_summary(result | {"faults": []}).endswith("held")
