"""From samples to medians, paired ratios, goals, JSON and a table. Pure.

Every ratio is of two set-ups in the same round and turn, minutes apart on the same machine; its median and its extremes
over the rounds are reported. No absolute time is a goal except where the goal is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from e2e.bench.compare import Comparison, Verdict
from e2e.bench.kv_plan import LARGE, SMALL
from e2e.bench.kv_setups import LOCAL_HIT, MONOLITH, ONE_WAY, OURS, STOCK

SPEED_GOALS: Final = {"float32": 3.0, "bfloat16": 4.0}
LOCAL_HIT_GOAL: Final = 1.10
IDLE_GOAL_CORES: Final = 0.03
LOOKUP_GOAL_MS: Final = 2.0
NOISE: Final = 1.05
"""Two set-ups that do the same work differ by up to this here; "not slower" cannot be told more finely."""
LONG_TOKENS: Final = 9_000
"""Goals at 10,000 tokens are evaluated on prompts from here on; a quick run leaves them open."""


RATIOS: Final = {
    "one-way/bidikv": ("ttft_s", ONE_WAY, OURS),
    "stock/bidikv*": ("engine_ttft_s", STOCK, OURS),
    "bidikv/hit**": ("prefill_s", OURS, LOCAL_HIT),
    "bidikv/monolith": ("ttft_s", OURS, MONOLITH),
}
"""Name -> the time that is compared, and of which set-ups."""


@dataclass(frozen=True)
class Sample:
    """One turn of one conversation in one set-up; times in seconds as in ``kv_setups.TurnTimes``."""

    dtype: str
    round: int
    turn: int
    kind: str
    setup: str
    prompt_tokens: int
    prefill_s: float
    ttft_s: float | None
    engine_ttft_s: float
    prefill_local_tokens: int
    prefill_remote_tokens: int
    parts: Mapping[str, float]


@dataclass(frozen=True)
class Spread:
    median: float
    lowest: float
    highest: float
    count: int


@dataclass(frozen=True)
class Goal:
    """``met`` is None where nothing was measured that could tell."""

    name: str
    value: float | None
    goal: float
    unit: str
    met: bool | None
    detail: str = ""


@dataclass(frozen=True)
class Idle:
    """CPU of a decode engine's processes while it holds sessions and nobody asks."""

    setup: str
    dtype: str
    sessions: int
    blocks: int
    """KV blocks that are pinned (upstream) or held (ours)."""
    seconds: float
    cores: float


@dataclass(frozen=True)
class Questions:
    """Lookup and validation of one read of ``blocks`` blocks, as the reader's own metrics tell."""

    blocks: int
    lookup_s: float | None
    lookup_wait_s: float | None
    """How much of it the scheduler waited in place; the rest of it went by beside the scheduler's other work."""
    validate_s: float | None


def compute_spread(values: Iterable[float]) -> Spread | None:
    """Median and extremes; None of nothing."""
    found = sorted(values)
    return Spread(median(found), found[0], found[-1], len(found)) if found else None


def pair_ratios(samples: Sequence[Sample], field: str, above: str, below: str) -> list[float]:
    """``above`` / ``below`` of a time, for each round, turn and data type in which both were measured."""

    def times(setup: str) -> dict[tuple[str, int, int], float]:
        found = {(s.dtype, s.round, s.turn): getattr(s, field) for s in samples if s.setup == setup}
        return {key: value for key, value in found.items() if value}

    upper, lower = times(above), times(below)
    return [upper[key] / lower[key] for key in sorted(upper.keys() & lower.keys())]


def select(samples: Sequence[Sample], dtype: str, turn: int) -> list[Sample]:
    return [s for s in samples if s.dtype == dtype and s.turn == turn]


def find_last_turn(samples: Sequence[Sample], dtype: str, kind: str) -> int | None:
    """The last turn of a kind, at which the history is longest; None when it is too short for the goals."""
    turns = [s.turn for s in samples if s.dtype == dtype and s.kind == kind and s.prompt_tokens >= LONG_TOKENS]
    return max(turns, default=None)


def summarise_turns(samples: Sequence[Sample], dtype: str) -> list[dict[str, Any]]:
    """Per turn: the times of each set-up, and the ratios."""
    rows = []
    for turn in sorted({s.turn for s in samples if s.dtype == dtype}):
        these = select(samples, dtype, turn)
        setups = {}
        for setup in dict.fromkeys(s.setup for s in these):
            own = [s for s in these if s.setup == setup]
            setups[setup] = {
                "ttft_s": _plain(compute_spread(s.ttft_s for s in own if s.ttft_s)),
                "engine_ttft_s": _plain(compute_spread(s.engine_ttft_s for s in own)),
                "prefill_s": _plain(compute_spread(s.prefill_s for s in own)),
                "prefill_local_tokens": median(s.prefill_local_tokens for s in own),
                "prefill_remote_tokens": median(s.prefill_remote_tokens for s in own),
                "parts_s": {
                    part: _plain(compute_spread(s.parts[part] for s in own if part in s.parts))
                    for part in sorted({part for s in own for part in s.parts})
                },
            }
        rows.append(
            {
                "turn": turn,
                "kind": these[0].kind,
                "prompt_tokens": int(median(s.prompt_tokens for s in these)),
                "setups": setups,
                "ratios": {
                    name: _plain(compute_spread(pair_ratios(these, field, above, below)))
                    for name, (field, above, below) in RATIOS.items()
                },
            }
        )
    return rows


def summarise_outputs(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Agreement of one set-up's answers with the monolith's."""
    return {
        "compared": len(comparisons),
        **{verdict.value: sum(c.verdict is verdict for c in comparisons) for verdict in Verdict},
        "agreeing_tokens": sum(c.agreeing for c in comparisons),
        "worst_logprob_distance": max((c.distance for c in comparisons), default=0.0),
    }


def evaluate_goals(
    samples: Sequence[Sample],
    idle: Sequence[Idle],
    questions: Sequence[Questions],
    wrong: Mapping[str, int],
) -> list[Goal]:
    """All goals; ``wrong`` is the number of float32 answers per set-up that differ from the monolith's."""
    goals = []
    for dtype in dict.fromkeys(s.dtype for s in samples):
        turn = find_last_turn(samples, dtype, LARGE)
        these = [] if turn is None else select(samples, dtype, turn)
        tokens = f"{these[0].prompt_tokens:,} tokens" if these else "no prompt of 10,000 tokens in this run"
        goals.append(
            _at_least(
                f"one-way TTFT / ours, long history, large turn, {dtype}",
                pair_ratios(these, "ttft_s", ONE_WAY, OURS),
                SPEED_GOALS[dtype],
                tokens,
            )
        )
        for kind in (LARGE, SMALL):
            turn = find_last_turn(samples, dtype, kind)
            these = [] if turn is None else select(samples, dtype, turn)
            goals.append(
                _at_most(
                    f"our prefill leg / full local hit, long history, {kind} turn, {dtype}",
                    pair_ratios(these, "prefill_s", OURS, LOCAL_HIT),
                    LOCAL_HIT_GOAL,
                    "x",
                    tokens if these else "no prompt of 10,000 tokens in this run",
                )
            )
        worst, where = _worst_turn(samples, dtype)
        goals.append(
            _at_most(
                f"our TTFT / stock bidirectional, worst turn, {dtype}", worst, NOISE, "x", f"{where}; noise {NOISE}"
            )
        )
    goals += [
        _at_most(f"idle decode engine, {i.sessions} sessions, {i.dtype}", [i.cores], IDLE_GOAL_CORES, "cores", i.setup)
        for i in idle
        if i.setup == OURS
    ]
    both = [(q.lookup_s + q.validate_s) * 1e3 for q in questions if q.lookup_s is not None and q.validate_s is not None]
    blocks = max((q.blocks for q in questions), default=0)
    goals.append(_at_most("lookup and validation of a read", both, LOOKUP_GOAL_MS, "ms", f"{blocks} blocks"))
    goals += [
        Goal(f"answers of {setup} unlike the monolith's, float32", count, 0, "answers", count == 0)
        for setup, count in wrong.items()
        if setup == OURS
    ]
    return goals


def build_table(summary: Sequence[Mapping[str, Any]], dtype: str) -> str:
    """TTFT by turn for people: medians, times in seconds."""
    rows = [
        ["turn", "kind", "prompt", "monolith", "one-way", "stock*", "bidikv", "hit**", *RATIOS],
        *(
            [
                str(row["turn"]),
                row["kind"],
                f"{row['prompt_tokens']:,}",
                _median(row["setups"].get(MONOLITH, {}).get("ttft_s")),
                _median(row["setups"].get(ONE_WAY, {}).get("ttft_s")),
                _median(row["setups"].get(STOCK, {}).get("engine_ttft_s")),
                _median(row["setups"].get(OURS, {}).get("ttft_s")),
                _median(row["setups"].get(LOCAL_HIT, {}).get("prefill_s")),
                *(_median(row["ratios"][name]) for name in RATIOS),
            ]
            for row in summary
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["   ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    notes = (
        "*  prefill leg, then decode's own time to first token: its answers cannot be streamed",
        "** the prefill leg alone, with the history still in prefill's cache",
    )
    return "\n".join((dtype, *lines, *notes))


def build_goal_lines(goals: Sequence[Goal]) -> str:
    """One line a goal."""
    words = {True: "met", False: "MISSED", None: "open"}
    lines = []
    for goal in goals:
        value = "not measured" if goal.value is None else f"{goal.value:.3g} {goal.unit}"
        lines.append(f"{words[goal.met]:>6}  {goal.name}: {value} (goal {goal.goal:g}) {goal.detail}".rstrip())
    return "\n".join(lines)


def _worst_turn(samples: Sequence[Sample], dtype: str) -> tuple[list[float], str]:
    """Our TTFT over stock's at the turn where the median is worst, and which turn that is."""
    worst: list[float] = []
    where = "no turn"
    for turn in sorted({s.turn for s in samples if s.dtype == dtype}):
        ratios = pair_ratios(select(samples, dtype, turn), "engine_ttft_s", OURS, STOCK)
        if ratios and (not worst or median(ratios) > median(worst)):
            worst, where = ratios, f"turn {turn}"
    return worst, where


def _at_least(name: str, ratios: Sequence[float], goal: float, detail: str) -> Goal:
    spread = compute_spread(ratios)
    if spread is None:
        return Goal(name, None, goal, "x", None, detail)
    return Goal(name, spread.median, goal, "x", spread.median >= goal, f"{_extremes(spread)}, {detail}")


def _at_most(name: str, values: Sequence[float], goal: float, unit: str, detail: str) -> Goal:
    spread = compute_spread(values)
    if spread is None:
        return Goal(name, None, goal, unit, None, detail)
    return Goal(name, spread.median, goal, unit, spread.median <= goal, f"{_extremes(spread)}, {detail}")


def _extremes(spread: Spread) -> str:
    return f"{spread.lowest:.3g} to {spread.highest:.3g} of {spread.count}"


def _plain(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else {key: round(value, 5) for key, value in asdict(spread).items()}


def _median(spread: Mapping[str, float] | None) -> str:
    return f"{spread['median']:.2f}" if spread else "-"
