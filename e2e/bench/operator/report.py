"""From a run to figures, verdicts and a table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any, Final

from e2e.bench.operator.measure import Baseline, Phase, Run
from e2e.bench.operator.observe import count_calls
from e2e.bench.operator.plan import FULL, Plan

MEGABYTE: Final = 1e6

COLD_GOAL_SECONDS: Final = 60.0
CHANGE_GOAL_SECONDS: Final = 0.5
RESIDENT_GOAL_BYTES: Final = 150e6


@dataclass(frozen=True)
class Verdict:
    """A goal, what was measured, and whether it is met; all goals are upper bounds."""

    goal: str
    bound: float
    value: float

    @property
    def is_met(self) -> bool:
        return self.value <= self.bound


def compute_percentile(values: Sequence[float], percent: int) -> float:
    """By linear interpolation; the only value of one sample."""
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def judge(run: Run) -> list[Verdict]:
    """The goals, which are set for 1,000 resources."""
    peak = max(run.changed_usage.peak_bytes, run.restart_usage.peak_bytes)
    return [
        Verdict("cold reconcile, s", COLD_GOAL_SECONDS, run.cold.seconds),
        Verdict("change to child p99, s", CHANGE_GOAL_SECONDS, compute_percentile(run.change_seconds, 99)),
        Verdict("resident at rest, MB", RESIDENT_GOAL_BYTES / MEGABYTE, run.usage.resident_bytes / MEGABYTE),
        Verdict("resident at the peak, MB", RESIDENT_GOAL_BYTES / MEGABYTE, peak / MEGABYTE),
        Verdict("writes at rest", 0, run.rest.writes),
        Verdict("writes after a restart", 0, run.restart.writes),
    ]


def build_result(plan: Plan, run: Run, baseline: Baseline | None, *, cores: int, load: float) -> dict[str, Any]:
    """The content of ``operator.json``."""
    return {
        "resources": plan.resources,
        "children": run.children,
        "machine": {"cores": cores, "load": round(load, 2)},
        "cold": _build_phase(run.cold),
        "rest": _build_phase(run.rest),
        "change": {
            **_build_phase(run.changes),
            "samples": len(run.change_seconds),
            "p50_seconds": round(compute_percentile(run.change_seconds, 50), 4),
            "p99_seconds": round(compute_percentile(run.change_seconds, 99), 4),
            "max_seconds": round(max(run.change_seconds), 4),
        },
        "restart": _build_phase(run.restart),
        "memory_bytes": {
            "after_cold": run.cold_usage.resident_bytes,
            "at_rest": run.usage.resident_bytes,
            "after_changes": run.changed_usage.resident_bytes,
            "peak": run.changed_usage.peak_bytes,
            "after_restart": run.restart_usage.resident_bytes,
            "peak_after_restart": run.restart_usage.peak_bytes,
        },
        "baseline": _build_baseline(run, baseline),
        "goals": [
            {"goal": verdict.goal, "bound": verdict.bound, "value": round(verdict.value, 3), "met": verdict.is_met}
            for verdict in judge(run)
        ],
        "goals_apply": plan.resources == FULL.resources,
    }


def _build_phase(phase: Phase) -> dict[str, Any]:
    return {
        "seconds": round(phase.seconds, 2),
        "operator_cpu_seconds": round(phase.operator_cpu_seconds, 2),
        "api_server_cpu_seconds": round(phase.api_server_cpu_seconds, 2),
        "writes": phase.writes,
        "calls": count_calls(phase.calls),
    }


def _build_baseline(run: Run, baseline: Baseline | None) -> dict[str, Any] | None:
    """A bare client's time for the same writes, and the operator's time as a multiple of it."""
    if baseline is None:
        return None
    return {
        "seconds": round(baseline.seconds, 2),
        "writes": baseline.writes,
        "api_server_cpu_seconds": round(baseline.api_server_cpu_seconds, 2),
        "cold_ratio": round(run.cold.seconds / baseline.seconds, 2),
    }


def build_table(result: dict[str, Any]) -> str:
    """The figures for people, in Markdown."""
    rows = ["| goal | at most | measured | met |", "| --- | ---: | ---: | --- |"]
    rows += [
        f"| {goal['goal']} | {goal['bound']:g} | {goal['value']:g} | {'yes' if goal['met'] else '**no**'} |"
        for goal in result["goals"]
    ]
    rows += [
        "",
        "| phase | seconds | operator CPU s | API server CPU s | writes |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name in ("cold", "rest", "change", "restart"):
        phase = result[name]
        rows.append(
            f"| {name} | {phase['seconds']:.1f} | {phase['operator_cpu_seconds']:.1f} | "
            f"{phase['api_server_cpu_seconds']:.1f} | {phase['writes']} |"
        )
    if result["baseline"]:
        base = result["baseline"]
        rows.append(
            f"| bare client | {base['seconds']:.1f} | | {base['api_server_cpu_seconds']:.1f} | {base['writes']} |"
        )
    return "\n".join(rows)
