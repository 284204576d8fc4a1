"""``python -m e2e.bench.retention``: tokens computed again under each policy, by traffic and size of the pool."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from bidikv_runtime.connector.settings import Settings
from e2e.bench.retention.replay import Outcome, Replay
from e2e.bench.retention.workload import BLOCK_TOKENS, WORKLOADS, Parameters, build_trace, compute_working_set

POLICIES: Final = ("none", "LRU", "SessionAware", "optimum")
POOLS: Final = (0.75, 1.0, 1.5)
"""Pool by working set: the smallest is full of running requests most of the time."""
BUDGETS: Final = (0.3, 0.6, 0.9)
"""Share of the pool that sessions may hold; the first is the default."""
SEED: Final = 1


@dataclass(frozen=True)
class Cell:
    """One traffic in one pool."""

    workload: str
    requests: int
    working_set_blocks: int
    pool: float
    """By working set."""
    outcomes: dict[str, Outcome]
    """By policy; SessionAware also by budget, as ``SessionAware 0.6``."""


def build_settings(budget: float) -> Settings:
    """Defaults but for the budget."""
    return replace(Settings(lookup_host="", lookup_port=1), retention_budget=budget)


def compute_cell(name: str, parameters: Parameters, pool: float, seed: int, budgets: Sequence[float]) -> Cell:
    """All policies on one trace."""
    trace = build_trace(parameters, seed)
    working_set = compute_working_set(trace)
    blocks = int(pool * working_set)
    outcomes = {}
    for policy in POLICIES:
        for budget in budgets if policy == "SessionAware" else budgets[:1]:
            label = f"{policy} {budget:g}" if policy == "SessionAware" else policy
            outcomes[label] = Replay(trace, blocks, policy, build_settings(budget)).run()
    return Cell(name, len(trace), round(working_set), pool, outcomes)


def build_table(cells: Sequence[Cell]) -> str:
    """Millions of tokens computed again, and estimated seconds, for each cell and policy."""
    labels = list(cells[0].outcomes)
    lines = [f"{'traffic':34} {'pool':>5} {'refused':>8} " + " ".join(f"{label:>18}" for label in labels)]
    for cell in cells:
        figures = " ".join(
            f"{outcome.recomputed_tokens / 1e6:8.1f} M {outcome.recompute_seconds:6.0f} s"
            for outcome in cell.outcomes.values()
        )
        turned_away = cell.outcomes["LRU"].turned_away / cell.requests
        lines.append(f"{cell.workload:34} {cell.pool:5.2f} {turned_away:8.1%} {figures}")
    return "\n".join(lines)


def write_report(cells: Sequence[Cell], duration: float, path: Path) -> None:
    """Everything that the table shows, and what makes it reproducible."""
    report: dict[str, Any] = {
        "seed": SEED,
        "block_tokens": BLOCK_TOKENS,
        "duration_seconds": duration,
        "parameters": {name: asdict(replace(p, duration=duration)) for name, p in WORKLOADS.items()},
        "cells": [asdict(cell) for cell in cells],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    """Run all cells; a few minutes."""
    parser = argparse.ArgumentParser(prog="python -m e2e.bench.retention", description=__doc__)
    parser.add_argument("--duration", type=float, default=7200.0, help="seconds of traffic (default: %(default)g)")
    parser.add_argument("--out", type=Path, default=Path("build/bench/retention.json"))
    arguments = parser.parse_args()
    cells = []
    for name, parameters in WORKLOADS.items():
        for pool in POOLS:
            timed = replace(parameters, duration=arguments.duration)
            cells.append(compute_cell(name, timed, pool, SEED, BUDGETS))
            print(build_table(cells[-1:]) if len(cells) == 1 else build_table(cells[-1:]).splitlines()[1], flush=True)
    write_report(cells, arguments.duration, arguments.out)
    print(f"written to {arguments.out}; M: million tokens computed again, s: seconds that this takes, estimated")


if __name__ == "__main__":
    main()
