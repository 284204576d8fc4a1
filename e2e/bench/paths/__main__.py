"""``python -m e2e.bench.paths``: the router's paths on real engines, side by side, into build/bench/paths.json.

One prefill and one decode engine, three routers in front: one is told which path to take, one never reads from
decode, one chooses. Every turn is asked on each path, one after the other, in a shuffled order; before each of
them prefill forgets, as if it had served many other conversations. Then the same beside a stream of the decode engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Final

from e2e.bench.authentication import write_token
from e2e.bench.kv import observe_environment
from e2e.bench.paths.measure import running_bench
from e2e.bench.paths.plan import QUICK, Gap, Sample, Sizes
from e2e.bench.paths.report import build_cells, build_stalls, build_tables
from e2e.bench.processes import guardian
from e2e.engine.local import ROOT, LocalEngine, running

OUTPUT: Final = ROOT / "build" / "bench" / "paths.json"
LOGS: Final = ROOT / "build" / "bench" / "logs"
POOL_BLOCKS: Final = 1200
"""38,400 tokens: the longest conversation, its branches, and what is left of the one before."""
MAXIMUM_LENGTH: Final = 16_384


def say(text: str) -> None:
    print(f"[bench-paths] {text}", flush=True)


async def measure(
    prefill: LocalEngine, decode: LocalEngine, environment: dict[str, str], sizes: Sizes
) -> tuple[list[Sample], list[Gap]]:
    """All rounds."""
    samples: list[Sample] = []
    gaps: list[Gap] = []
    async with running_bench(prefill, decode, environment, sizes) as bench:
        await bench.warm_up()
        for number in range(1, sizes.rounds + 1):
            for history in sizes.histories:
                found = await bench.measure_history(number, history)
                samples += found
                times = ", ".join(f"{s.new} {s.variant} {s.first_token_s * 1e3:,.0f}" for s in found)
                say(f"round {number}/{sizes.rounds}, history {history:,}, load {os.getloadavg()[0]:.1f}: ms: {times}")
            gaps += await bench.measure_beside(number)
    return samples, gaps


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m e2e.bench.paths", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: does it run at all")
    parser.add_argument("--rounds", type=int, help=f"conversations per size (default {Sizes().rounds})")
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse_arguments()
    sizes = QUICK if arguments.quick else Sizes()
    if arguments.rounds is not None:
        sizes = replace(sizes, rounds=arguments.rounds)
    LOGS.mkdir(parents=True, exist_ok=True)
    token = write_token(LOGS)
    flags = ("--max-model-len", str(MAXIMUM_LENGTH), "--num-gpu-blocks-override", str(POOL_BLOCKS))
    engines = {
        name: LocalEngine(name, LOGS / f"paths-{name}.log", arguments=flags, environment=token) for name in ("p", "d")
    }
    for engine in engines.values():
        engine.log.unlink(missing_ok=True)
    environment = observe_environment()
    say("starting engines")
    with guardian() as guard, running(engines):
        for engine in engines.values():
            guard(engine.process_group)
        samples, gaps = asyncio.run(measure(engines["p"], engines["d"], token, sizes))
    cells, stalls = build_cells(samples), build_stalls(gaps)
    result = {
        "environment": environment,
        "sizes": asdict(sizes),
        "cells": [asdict(cell) for cell in cells],
        "stalls": [asdict(stall) for stall in stalls],
        "samples": [asdict(sample) for sample in samples],
        "gaps": [asdict(gap) for gap in gaps],
    }
    OUTPUT.write_text(json.dumps(result, indent=1) + "\n")
    print()
    print(build_tables(cells, stalls))
    print(f"\nAll figures are in {OUTPUT.relative_to(ROOT)}.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("[bench-paths] interrupted; the engines are stopped")
