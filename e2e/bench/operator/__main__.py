"""``make bench-operator``: 1,000 resources on a real API server, into build/bench/operator.json.

Pods do not run. First a bare client sends the operator's writes (what the API server alone costs), then, on another
fresh control plane, the operator starts with all resources present, rests, follows single changes, and is restarted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from e2e.bench.operator.control_plane import enter_network, run_control_plane
from e2e.bench.operator.measure import Baseline, measure_baseline, measure_operator
from e2e.bench.operator.observe import observe_load
from e2e.bench.operator.plan import FULL, Plan
from e2e.bench.operator.report import build_result, build_table
from e2e.bench.processes import guardian
from e2e.cluster.paths import find_paths, find_tool
from e2e.install import ROOT

OUTPUT: Final = ROOT / "build" / "bench" / "operator.json"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.bench.operator", description=__doc__)
    parser.add_argument("--resources", type=int, default=FULL.resources)
    parser.add_argument("--changes", type=int, default=FULL.changes)
    parser.add_argument("--rest-seconds", type=float, default=FULL.rest_seconds)
    parser.add_argument("--no-baseline", action="store_true", help="leave the bare client out")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--keep", type=Path, help="folder for logs and data, kept; a temporary one when left out")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.inside:
        enter_network(["-m", "e2e.bench.operator", *arguments, "--inside"])
    plan = Plan(options.resources, options.changes, options.rest_seconds)
    if options.keep is not None:
        options.keep.mkdir(parents=True)
        _run(plan, options.keep, options.output, with_baseline=not options.no_baseline)
    else:
        with tempfile.TemporaryDirectory(prefix="bidikv-bench-") as folder:
            _run(plan, Path(folder), options.output, with_baseline=not options.no_baseline)
    return 0


def _run(plan: Plan, folder: Path, output: Path, *, with_baseline: bool) -> None:
    kubectl = find_tool("kubectl", find_paths())
    baseline: Baseline | None = None
    with guardian() as guard:
        if with_baseline:
            with run_control_plane(folder / "baseline", guard, audit_bodies=True) as control_plane:
                baseline = asyncio.run(measure_baseline(control_plane, plan, folder, kubectl))
        with run_control_plane(folder / "control-plane", guard) as control_plane:
            run = asyncio.run(measure_operator(control_plane, plan, folder, kubectl))
    result = build_result(plan, run, baseline, cores=os.cpu_count() or 0, load=observe_load())
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
    print(build_table(result))
    print(f"\nWritten to {output}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
