"""From runs to figures: paired ratios, medians over rounds, verdicts; pure.

A ratio is always of two targets in the same row and round, seconds apart; a goal's value is the median of these ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final, Literal

from e2e.bench.router.measure import Run
from e2e.bench.router.plan import MEMORY_REQUESTS
from e2e.bench.router.targets import BEFORE, DIRECT, OURS, PEER, TOY_PROXY

MIB: Final = 1024 * 1024
LEAST_ROUNDS: Final = 5
"""Below it a median is a figure, not a verdict."""


@dataclass(frozen=True)
class Memory:
    """Resident bytes of our router: fresh, after the warm-up, after all requests."""

    idle: int
    warm: int
    end: int
    requests: int

    @property
    def growth(self) -> float:
        """Share by which it grew after the warm-up."""
        return self.end / self.warm - 1


Value = Callable[[Run], float | None]
_VALUES: Final[dict[str, Value]] = {
    "req/s": lambda run: run.requests_per_second,
    "CPU per request": lambda run: run.cpu_us,
    "TTFT p50": lambda run: run.first_byte_p50_us,
    "TTFT p99": lambda run: run.first_byte_p99_us,
    "latency p50": lambda run: run.latency_p50_us,
}


@dataclass(frozen=True)
class Aim:
    """A goal as it was set; the ratio is ours over the base's."""

    id: str
    row: str
    figure: str
    """A key of the values, or ``added TTFT``: less what both direct legs take."""
    bound: Literal["<=", ">="]
    goal: float
    stretch: float | None
    base: str = PEER


AIMS: Final = (
    Aim("P1", "1 MB stream c=1", "added TTFT", "<=", 0.33, 0.20),
    Aim("P2", "1 MB c=8", "req/s", ">=", 3.5, 5),
    Aim("P2", "1 MB c=8", "CPU per request", "<=", 0.25, 0.15),
    Aim("P3", "100 KB stream c=1", "added TTFT", "<=", 0.50, 0.35),
    Aim("P3", "100 KB c=16", "req/s", ">=", 2.5, 3.5),
    Aim("P4", "small c=32", "req/s", ">=", 1.1, 1.5),
    Aim("P4", "small c=256", "req/s", ">=", 1.2, 2),
    Aim("P4", "small c=1", "latency p50", "<=", 1.15, 1.0),
    Aim("P5", "64 streams", "CPU per request", "<=", 1.0, 0.75),
    Aim("P5", "64 streams", "TTFT p99", "<=", 0.7, 0.4),
    Aim("P6", "small c=32", "req/s", ">=", 20, None, base=TOY_PROXY),
    Aim("P6", "1 MB stream c=1", "TTFT p50", "<=", 0.25, None, base=TOY_PROXY),
)
REGRESSION: Final = 1.05
"""Against another commit of ours: equal but for noise."""
IDLE_MIB: Final = (64.0, 40.0)
GROWTH: Final = (0.10, 0.01)


def build_regression_aims(rows: Sequence[str]) -> list[Aim]:
    """Each row's CPU per request and throughput against another commit's."""
    return [
        aim
        for row in rows
        for aim in (
            Aim("CPU", row, "CPU per request", "<=", REGRESSION, None, base=BEFORE),
            Aim("speed", row, "req/s", ">=", 1 / REGRESSION, None, base=BEFORE),
        )
    ]


@dataclass(frozen=True)
class Verdict:
    """A goal and what came out; ``met`` is None when there were too few rounds to say."""

    id: str
    measure: str
    bound: str
    goal: float
    stretch: float | None
    value: float | None
    lowest: float | None
    highest: float | None
    rounds: int
    met: bool | None
    stretch_met: bool | None


def compute_ratios(aim: Aim, runs: Sequence[Run]) -> list[float]:
    """One ratio per round in which both (and for added times the direct legs) were measured."""
    by_round: dict[int, dict[str, Run]] = {}
    for run in runs:
        if run.row == aim.row:
            by_round.setdefault(run.round, {})[run.target] = run
    ratios = []
    for number in sorted(by_round):
        ours, base = _compute_figure(aim, by_round[number], OURS), _compute_figure(aim, by_round[number], aim.base)
        if ours is not None and base is not None and base > 0:
            ratios.append(ours / base)
    return ratios


def _compute_figure(aim: Aim, runs: dict[str, Run], target: str) -> float | None:
    run = runs.get(target)
    if run is None:
        return None
    if aim.figure != "added TTFT":
        return _VALUES[aim.figure](run)
    direct = runs.get(DIRECT)
    if direct is None or direct.first_byte_p50_us is None or run.first_byte_p50_us is None:
        return None
    return run.first_byte_p50_us - direct.first_byte_p50_us


def judge(aim: Aim, ratios: Sequence[float], least_rounds: int = LEAST_ROUNDS) -> Verdict:
    """The verdict over the rounds' ratios."""
    value = median(ratios) if ratios else None
    enough = value is not None and len(ratios) >= least_rounds
    return Verdict(
        id=aim.id,
        measure=f"{aim.row}: {aim.figure}, ours / {aim.base}",
        bound=aim.bound,
        goal=aim.goal,
        stretch=aim.stretch,
        value=value,
        lowest=min(ratios, default=None),
        highest=max(ratios, default=None),
        rounds=len(ratios),
        met=_holds(value, aim.bound, aim.goal) if enough else None,
        stretch_met=_holds(value, aim.bound, aim.stretch) if enough and aim.stretch is not None else None,
    )


def _holds(value: float | None, bound: str, limit: float) -> bool | None:
    if value is None:
        return None
    return value <= limit if bound == "<=" else value >= limit


def judge_memory(memory: Memory | None) -> list[Verdict]:
    """The two verdicts on memory; one run decides."""
    idle = memory.idle / MIB if memory else None
    growth = memory.growth if memory else None
    requests = f"{memory.requests:,}" if memory else "many"
    enough = memory is not None and memory.requests >= MEMORY_REQUESTS
    return [
        _judge_one("P7", "RSS idle in MiB", idle, IDLE_MIB, decides=True),
        _judge_one("P7", f"RSS growth over {requests} requests of 1 MB", growth, GROWTH, decides=enough),
    ]


def _judge_one(name: str, measure: str, value: float | None, limits: tuple[float, float], *, decides: bool) -> Verdict:
    goal, stretch = limits
    met, stretch_met = (_holds(value, "<=", limit) if decides else None for limit in limits)
    return Verdict(name, measure, "<=", goal, stretch, value, value, value, int(value is not None), met, stretch_met)


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Medians over the rounds, per row and target in the order of the first run."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.row, run.target), []).append(run)
    return [
        {"row": row, "target": target, "rounds": len(group)}
        | {name: _median(group, value) for name, value in _VALUES.items()}
        | {"RSS": max((run.resident_bytes or 0 for run in group), default=0)}
        for (row, target), group in groups.items()
    ]


def _median(runs: Sequence[Run], value: Value) -> float | None:
    values = [number for run in runs if (number := value(run)) is not None]
    return median(values) if values else None


def build_tables(summary: Sequence[dict[str, Any]], verdicts: Sequence[Verdict]) -> list[str]:
    """Both tables, in Markdown."""
    lines = [
        "| load | target | req/s | CPU us | latency p50 ms | TTFT p50 ms | TTFT p99 ms | rounds |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    order = {name: number for number, name in enumerate(dict.fromkeys(entry["row"] for entry in summary))}
    for entry in sorted(summary, key=lambda e: (order[e["row"]], e["target"])):
        cells = [
            entry["row"],
            entry["target"],
            _show(entry["req/s"], 1, ",.0f"),
            _show(entry["CPU per request"], 1, ",.0f"),
            _show(entry["latency p50"], 1e-3, ".2f"),
            _show(entry["TTFT p50"], 1e-3, ".2f"),
            _show(entry["TTFT p99"], 1e-3, ".2f"),
            str(entry["rounds"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| goal | measure | wanted | stretch | value | lowest, highest | met |",
        "| --- | --- | ---: | ---: | ---: | --- | --- |",
    ]
    for v in verdicts:
        stretch = "-" if v.stretch is None else f"{v.stretch:g}"
        spread = "-" if v.lowest is None or v.rounds < 2 else f"{v.lowest:.2f}, {v.highest:.2f}"
        met = {None: "?", True: "yes", False: "no"}[v.met] + (", stretch too" if v.stretch_met else "")
        value = _show(v.value, 1, ".2f")
        lines.append(f"| {v.id} | {v.measure} | {v.bound} {v.goal:.3g} | {stretch} | {value} | {spread} | {met} |")
    return lines


def _show(value: float | None, factor: float, shape: str) -> str:
    return "-" if value is None else format(value * factor, shape)


def build_result(verdicts: Sequence[Verdict], memory: Memory | None) -> dict[str, Any]:
    """The verdicts and the memory as JSON values."""
    return {"goals": [asdict(verdict) for verdict in verdicts], "memory": asdict(memory) if memory else None}
