"""``make bench-router``: our router beside vllm-router and a toy proxy, on one core each, into build/bench/router.json.

All routers run at once, pinned to the same core, before the same mock engines; one of them is loaded at a time. A round
takes every row once, in random order, and in a row every target, in random order. A row in which others used the
machine's CPU is measured again; a run with a wrong or missing answer is void.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from e2e.bench.processes import guardian
from e2e.bench.router.bodies import build_body
from e2e.bench.router.cpu import choose_cores, observe_busy_seconds, observe_usage
from e2e.bench.router.measure import CHAT, Bench, Bodies, Run, compare_bodies, explain_void
from e2e.bench.router.plan import (
    LARGE,
    MEMORY,
    MEMORY_CONNECTIONS,
    MEMORY_REQUESTS,
    MEMORY_WARM_UP,
    ROWS,
    SMALL,
    Row,
    select_rows,
    shuffle,
)
from e2e.bench.router.report import (
    AIMS,
    LEAST_ROUNDS,
    Memory,
    build_regression_aims,
    build_result,
    build_tables,
    compute_ratios,
    judge,
    judge_memory,
    summarise,
)
from e2e.bench.router.targets import (
    BEFORE,
    DECODE,
    DIRECT,
    LOCAL,
    OURS,
    PEER,
    PREFILL,
    TOKENS,
    TOY_PROXY,
    BenchError,
    Engines,
    Target,
    build_ours,
    build_peer,
    build_toy,
    choose_ports,
    fetch,
)
from e2e.bench.router.tools import apply_peers, apply_tools, read_peer_version
from e2e.cluster.paths import find_paths
from e2e.cluster.progress import ClusterError
from e2e.install import ROOT

OUTPUT: Final = ROOT / "build" / "bench" / "router.json"
LOGS: Final = ROOT / "build" / "bench" / "logs"
FOREIGN_CORES: Final = 0.2
ATTEMPTS: Final = 4
"""How often a row is measured in one round before its round is given up."""
QUIET_SECONDS: Final = 60.0
QUIET_SAMPLE_SECONDS: Final = 0.5
SETTLE_SECONDS: Final = 1.0


def say(text: str) -> None:
    print(f"[bench-router] {text}", flush=True)


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    targets: list[str]
    rows: list[Row]
    rounds: int
    seed: int
    quick: bool
    foreign_cores: float
    against: str
    memory: bool
    output: Path


@dataclass
class Measured:
    """What has been measured so far."""

    runs: list[Run] = field(default_factory=list)
    discarded: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    fidelity: dict[str, Any] = field(default_factory=dict)
    memory: Memory | None = None


def measure_row(
    bench: Bench,
    row: Row,
    targets: dict[str, Target],
    number: int,
    options: Options,
    into: Measured,
    order: random.Random,
) -> None:
    """One row of a round, all targets; again while the machine is not quiet."""
    for _ in range(ATTEMPTS):
        wait_until_quiet(options.foreign_cores)
        runs = [
            bench.run_direct(row, number) if name == DIRECT else bench.run(row, targets[name], number)
            for name in shuffle(row.targets, order)
        ]
        void = {run.target: reason for run in runs if (reason := explain_void(run)) is not None}
        foreign = max(run.foreign_cores for run in runs)
        if void:
            reason = "; ".join(f"{target}: {text}" for target, text in void.items())
            into.problems.append(f"{row.name}, round {number}: {reason}")
        elif foreign > options.foreign_cores:
            reason = f"others used {foreign:.2f} cores"
        else:
            into.runs += runs
            shown = ", ".join(_describe(run) for run in sorted(runs, key=lambda run: row.targets.index(run.target)))
            say(f"  round {number}/{options.rounds} {row.name}: {shown}")
            return
        say(f"  round {number}/{options.rounds} {row.name}: does not count, {reason}")
        into.discarded.append({"reason": reason, "runs": [asdict(run) for run in runs]})


def wait_until_quiet(foreign_cores: float) -> None:
    """Wait until others use less than that, but not for ever: what is measured then is judged by the same bound."""
    deadline = time.monotonic() + QUIET_SECONDS
    while foreign_cores < math.inf and time.monotonic() < deadline:
        began, busy = time.monotonic(), observe_busy_seconds()
        time.sleep(QUIET_SAMPLE_SECONDS)
        if (observe_busy_seconds() - busy) / (time.monotonic() - began) <= foreign_cores:
            return


def _describe(run: Run) -> str:
    cpu = f", {run.cpu_us:,.0f} us" if run.cpu_us is not None else ""
    first = f", {run.first_byte_p50_us / 1000:.2f} ms" if run.first_byte_p50_us is not None else ""
    return f"{run.target} {run.requests_per_second:,.0f}/s{cpu}{first}"


def observe_fidelity(engines: Engines, target: Target, seed: int) -> dict[str, Any]:
    """Send one request through ``target`` and compare what either engine got with what was sent."""
    body = build_body(SMALL, stream=False, seed=seed)
    engines.set(chunks=0, gap_us=0, prompt_tokens=1, keep_bodies=1)
    found: dict[str, Any] = {}
    try:
        counts = {host: engines.count([host])[0] for host in (*PREFILL, *DECODE)}
        headers = {"content-type": "application/json", "x-session-id": "fidelity"}
        status, _ = fetch(target.address, CHAT, body, headers)
        if status != 200:
            raise BenchError(f"{target.name} answered {status} to the first request")
        for leg, hosts in (("prefill", PREFILL), ("decode", DECODE)):
            asked = [host for host in hosts if engines.count([host])[0] > counts[host]]
            found[leg] = compare_bodies(body, engines.read_last(asked[0])) if asked else None
    finally:
        engines.set(keep_bodies=0)
    return found


def measure_memory(bench: Bench, target: Target, idle: int, options: Options) -> Memory:
    """Resident memory of ``target`` over many large requests."""
    row = Row(MEMORY, LARGE, MEMORY_CONNECTIONS, 0, (target.name,))
    warm_up, requests = (20, 50) if options.quick else (MEMORY_WARM_UP, MEMORY_REQUESTS)
    say(f"  memory: {warm_up} + {requests:,} requests of 1 MB ...")
    seen = []
    for count in (warm_up, requests):
        load = bench.run_requests(row, target, count, MEMORY_CONNECTIONS)
        if load.errors:
            raise BenchError(f"{load.errors} requests of the memory run failed: {load.first_error}")
        time.sleep(SETTLE_SECONDS)
        seen.append(observe_usage(target.process.pid).resident_bytes)
    return Memory(idle=idle, warm=seen[0], end=seen[1], requests=requests)


def extract_source(reference: str, folder: Path) -> Path:
    """The folder ``runtime`` as git has it at ``reference``.

    Raises:
        BenchError: git does not know it.
    """
    archive = subprocess.run(["git", "archive", reference, "runtime"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode != 0:
        raise BenchError(f"--against {reference}: {archive.stderr.decode().strip()}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder / "runtime"


def measure(options: Options) -> Measured:
    """Start everything, take all rounds, stop everything."""
    paths = find_paths()
    tools = apply_tools(paths)
    needs_peers = {PEER, TOY_PROXY} & set(options.targets)
    environment = apply_peers(paths) if needs_peers else Path()
    router_core, core = choose_cores()
    os.sched_setaffinity(0, {core})
    measured, order = Measured(), random.Random(options.seed)
    with ExitStack() as stack:
        guard = stack.enter_context(guardian())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bidikv-bench-router-")))
        engines = Engines(tools, choose_ports(), core, LOGS)
        stack.callback(engines.process.stop)
        engines.start(guard)
        targets: dict[str, Target] = {}
        idle = 0
        for name in options.targets:
            if name == DIRECT:
                continue
            say(f"starting {name} ...")
            targets[name] = target = _build_target(name, engines, environment, router_core, options, folder)
            stack.callback(target.process.stop)
            target.start(guard)
            if name == OURS:
                time.sleep(SETTLE_SECONDS)
                idle = observe_usage(target.process.pid).resident_bytes
            measured.fidelity[name] = observe_fidelity(engines, target, options.seed)
        bodies = Bodies(engines, folder / "bodies", options.seed)
        bench = Bench(tools, engines, bodies, core)
        for number in range(1, options.rounds + 1):
            rows = {row.name: row for row in options.rows}
            for name in shuffle(list(rows), order):
                measure_row(bench, rows[name], targets, number, options, measured, order)
        if OURS in targets and options.memory:
            measured.memory = measure_memory(bench, targets[OURS], idle, options)
    for name in (OURS, BEFORE):
        for leg, seen in (measured.fidelity.get(name) or {}).items():
            # A byte-exact history is what the comparison with routers that re-encode it is about.
            if seen is None or not seen["messages_equal"]:
                measured.problems.append(f"{name}: the {leg} leg did not carry the messages as sent")
    return measured


def _build_target(name: str, engines: Engines, environment: Path, core: int, options: Options, folder: Path) -> Target:
    if name == PEER:
        return build_peer(engines, environment, core, LOGS)
    if name == TOY_PROXY:
        return build_toy(engines, environment, core, LOGS)
    source = extract_source(options.against, folder / BEFORE) if name == BEFORE else None
    limit = 512 if name == LOCAL else 0
    return build_ours(name, engines, core, LOGS, local_limit_tokens=limit, token_ids=name == TOKENS, source=source)


def parse_options(arguments: Sequence[str] | None) -> Options:
    """Read the command line.

    Raises:
        ValueError: a name is unknown.
    """
    parser = argparse.ArgumentParser(prog="python -m e2e.bench.router", description=__doc__.split("\n")[0])
    known = (OURS, PEER, TOY_PROXY, LOCAL, TOKENS, DIRECT)
    parser.add_argument(
        "--quick", action="store_true", help="one short round, without the peers unless named: does it run?"
    )
    parser.add_argument("--targets", nargs="+", choices=known, help=f"default: {' '.join(known)}")
    parser.add_argument(
        "--rows", nargs="+", default=[], metavar="ROW", help=f"of: {', '.join(row.name for row in ROWS)}"
    )
    parser.add_argument("--rounds", type=int, help=f"default: {LEAST_ROUNDS + 1}")
    parser.add_argument("--seed", type=int, help="of bodies and orders; default: another each time")
    parser.add_argument("--foreign", type=float, help=f"CPU that others may use, in cores; default: {FOREIGN_CORES}")
    parser.add_argument(
        "--against", default="", metavar="COMMIT", help=f"also measure our router of this commit ({BEFORE!r})"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: %(default)s")
    given = parser.parse_args(arguments)
    targets = given.targets or ([OURS] if given.against else [OURS, LOCAL, DIRECT] if given.quick else list(known))
    targets += [BEFORE] if given.against else []
    named = [name for name in given.rows if name != MEMORY]
    return Options(
        targets=targets,
        rows=select_rows(named, targets, quick=given.quick) if named or not given.rows else [],
        rounds=given.rounds or (1 if given.quick else LEAST_ROUNDS + 1),
        seed=random.randrange(1_000_000) if given.seed is None else given.seed,
        quick=given.quick,
        foreign_cores=given.foreign if given.foreign is not None else math.inf if given.quick else FOREIGN_CORES,
        against=given.against,
        memory=MEMORY in given.rows or not (given.rows or given.against),
        output=given.output,
    )


def describe_machine() -> dict[str, Any]:
    """What the figures depend on."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")), "unknown")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "peer": read_peer_version(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 1 when a run was void."""
    began = time.monotonic()
    try:
        options = parse_options(arguments)
        say(f"seed {options.seed}; {options.rounds} round(s) of {len(options.rows)} rows: {', '.join(options.targets)}")
        measured = measure(options)
    except (BenchError, ClusterError, ValueError, RuntimeError) as error:
        print(f"bench-router: {error}", file=sys.stderr)
        return 2
    aims = AIMS if not options.against else build_regression_aims([row.name for row in options.rows])
    verdicts = [judge(aim, compute_ratios(aim, measured.runs)) for aim in aims]
    verdicts += judge_memory(measured.memory) if not options.against else []
    summary = summarise(measured.runs)
    result = {
        "machine": describe_machine(),
        "options": {
            "seed": options.seed,
            "rounds": options.rounds,
            "quick": options.quick,
            "foreign_cores": None if options.quick else options.foreign_cores,
            "rows": [asdict(row) for row in options.rows],
        },
        "problems": measured.problems,
        "summary": summary,
        "fidelity": measured.fidelity,
        "runs": [asdict(run) for run in measured.runs],
        "discarded": measured.discarded,
    } | build_result(verdicts, measured.memory)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(["", *build_tables(summary, verdicts)]))
    for problem in measured.problems:
        say(f"VOID: {problem}")
    say(f"{options.output} after {time.monotonic() - began:.0f} s")
    return 1 if measured.problems else 0


if __name__ == "__main__":
    sys.exit(main())
