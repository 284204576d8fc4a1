"""``make soak-kv``: random turns, edits, branches, aborts, kills, freezes and evictions for minutes; every completed
answer is compared with one of a monolith. The exit status says whether it held; build/bench/soak.json says the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from bidikv_runtime import contract
from e2e.bench.ask import Answer, EngineRefusal, LeaveEarly, build_body
from e2e.bench.authentication import write_token
from e2e.bench.compare import Comparison, Verdict, compare
from e2e.bench.processes import guardian, observe_group
from e2e.bench.soak_fleet import Fleet, describe_error
from e2e.bench.soak_plan import (
    Act,
    Disturbance,
    Kind,
    Leave,
    Turn,
    apply_turn,
    build_disturbances,
    build_text,
    build_turns,
)
from e2e.bench.soak_report import Counters, Tally, build_summary, compute_growth, find_faults
from e2e.engine.client import Completion
from e2e.engine.local import BLOCK_SIZE, ROOT, LocalEngine

FOLDER: Final = ROOT / "build" / "bench"
OUTPUT: Final = FOLDER / "soak.json"
LOGS: Final = FOLDER / "logs"
POOL_BLOCKS: Final = 160
"""5,120 tokens in each engine: four conversations of up to 3,000 do not fit, so there is eviction and preemption."""
LANES: Final = 4
RETRY_SECONDS: Final = 0.5
"""After a turn that was not completed: a dead engine must not be asked in a tight loop."""
SAMPLE_SECONDS: Final = 5.0
SAY_SECONDS: Final = 20.0
MAXIMUM_DUMPS: Final = 10
COUNTERS: Final = (
    contract.METRIC_REUSED_TOKENS,
    contract.METRIC_DISCARDED_TOKENS,
    contract.METRIC_LOOKUPS,
    contract.METRIC_VALIDATE_FAILURES,
    contract.METRIC_HOLDS_ENDED,
    contract.METRIC_HANDOVERS_LOST,
    contract.METRIC_COST_DECISIONS,
    "vllm:num_preemptions_total",
)


def say(text: str) -> None:
    print(f"[soak-kv] {text}", flush=True)


@dataclass
class Soak:
    """One run on engines that are up; ``run`` may be called once."""

    fleet: Fleet
    seed: int
    seconds: float
    lanes: int = LANES
    kills: bool = True
    folder: Path = FOLDER
    """Where wrong answers are described."""
    tally: Tally = field(default_factory=Tally)
    counters: Counters = field(default_factory=Counters)
    _resident: dict[tuple[str, int], list[tuple[float, int]]] = field(default_factory=dict)
    """By engine and process group, hence by life."""
    _recent: list[str] = field(default_factory=list)
    _dumps: int = 0
    _end: float = 0.0

    async def run(self) -> dict[str, Any]:
        """The content of soak.json."""
        began = time.monotonic()
        self._end = began + self.seconds
        plan = build_disturbances(self.seed, self.seconds, len(self.fleet.disturbed), kills=self.kills)
        watcher = asyncio.create_task(self._watch(began))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._disturb(plan, began))
                for lane in range(self.lanes):
                    group.create_task(self._play(lane))
            rest = [await self.fleet.come_to_rest(engine) for engine in self.fleet.disturbed]
            await self._sample(began)
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        self.tally.prefilled_again = self.fleet.prefilled_again
        growth = {
            f"{name}#{life}": round(rate, 2)
            for life, ((name, _), points) in enumerate(self._resident.items())
            if name != self.fleet.monolith.name and (rate := compute_growth(points)) is not None
        }
        [undisturbed] = [points for (name, _), points in self._resident.items() if name == self.fleet.monolith.name]
        baseline = round(compute_growth(undisturbed) or 0.0, 2)
        reused = self.counters.totals.get(contract.METRIC_REUSED_TOKENS, 0.0)
        return {
            "seed": self.seed,
            "seconds": round(time.monotonic() - began, 1),
            "lanes": self.lanes,
            "engines": [engine.name for engine in self.fleet.disturbed],
            "tally": {k: dict(v) if isinstance(v, Counter) else v for k, v in vars(self.tally).items()},
            "counters": {name: round(value) for name, value in self.counters.totals.items()},
            "rest": [asdict(engine) for engine in rest],
            "growth": growth,
            "growth_of_the_monolith": baseline,
            "faults": find_faults(self.tally, rest, growth, baseline, reused),
        }

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _play(self, lane: int) -> None:
        messages: list[dict[str, str]] = []
        for turn in build_turns(self.seed, lane):
            await asyncio.sleep(turn.pause_s)
            if time.monotonic() > self._end:
                return
            await self.fleet.wait_up(float("inf"))
            asked = apply_turn(messages, turn, self.seed)
            answers = await asyncio.gather(*(self._ask(turn, question) for question in asked))
            if answers[0] is not None:
                messages = [*asked[0], {"role": "assistant", "content": answers[0].text}]
            else:
                messages = [] if turn.kind is Kind.OPEN else messages
                await asyncio.sleep(RETRY_SECONDS)

    async def _ask(self, turn: Turn, messages: list[dict[str, str]]) -> Completion | None:
        """One request, counted and compared; None when it was not completed."""
        body = build_body(messages, turn.max_tokens)
        if turn.choices > 1:
            body |= {"n": turn.choices, "temperature": 1, "top_k": 1}  # vLLM refuses n > 1 at temperature 0
        if turn.stop:
            body["stop"] = list(turn.stop)
        if turn.salt:
            body["cache_salt"] = turn.salt
        self.tally.requests += 1
        began = time.monotonic()
        try:
            answer = await self.fleet.answer(
                turn.conversation,
                body,
                stream=turn.stream,
                leave_prefill_after=turn.leave_after if turn.leave is Leave.IN_PREFILL else None,
                leave_after_events=int(turn.leave_after) if turn.leave is Leave.IN_DECODE else None,
            )
        except LeaveEarly:
            self.tally.left += 1
            return None
        except (TimeoutError, EngineRefusal, aiohttp.ClientError, OSError) as error:
            self._count_error(turn, error, began)
            return None
        self.tally.completed += 1
        expected = await self.fleet.reference(body, stream=turn.stream)
        for choice in answer.choices:
            self._judge(turn, body, choice, expected)
        return answer.choices[0]

    def _count_error(self, turn: Turn, error: Exception, began: float) -> None:
        kind = describe_error(error)
        if isinstance(error, TimeoutError):
            self.tally.hung += 1
            say(f"HUNG: turn {turn.number} of lane {turn.lane}; lately: {'; '.join(self._recent[-5:])}")
        elif self.fleet.was_down(began):
            self.tally.errors_while_down[kind] += 1
        else:
            self.tally.errors[kind] += 1
            say(f"ERROR: turn {turn.number} of lane {turn.lane}: {error}; lately: {'; '.join(self._recent[-5:])}")

    def _judge(self, turn: Turn, body: dict[str, Any], choice: Completion, expected: Answer) -> None:
        found = compare(choice, expected.choices[0])
        self.tally.compared += 1
        if found.verdict is Verdict.WRONG:
            self.tally.wrong += 1
            self._dump(turn, body, choice, expected.choices[0], found)
            return
        self.tally.worst_distance = max(self.tally.worst_distance, found.distance)
        if found.verdict is Verdict.SAME:
            self.tally.same += 1
        else:
            self.tally.ties += 1

    def _dump(self, turn: Turn, body: dict[str, Any], got: Completion, expected: Completion, found: Comparison) -> None:
        """Everything needed to ask again, and to see what happened around it."""
        if self._dumps >= MAXIMUM_DUMPS:
            return
        self._dumps += 1
        path = self.folder / f"soak-wrong-{self._dumps}.json"
        content = {
            "seed": self.seed,
            "turn": asdict(turn),
            "body": body,
            "got": asdict(got),
            "expected": asdict(expected),
            "agreeing": found.agreeing,
            "distance": found.distance,
            "lately": self._recent[-20:],
            "logs": {engine.name: engine.log_end(200) for engine in self.fleet.disturbed},
        }
        path.write_text(json.dumps(content, indent=1, default=str) + "\n")
        say(f"WRONG: turn {turn.number} of lane {turn.lane}, see {path}")

    # --- disturbances -------------------------------------------------------------------------------------------------

    async def _disturb(self, plan: Sequence[Disturbance], began: float) -> None:
        async with asyncio.TaskGroup() as restarts:
            for number, step in enumerate(plan):
                await asyncio.sleep(max(0.0, began + step.at_s - time.monotonic()))
                engine = self.fleet.disturbed[step.engine]
                if not self.fleet.is_up(engine):
                    self.tally.disturbances["skipped, engine down"] += 1
                    continue
                self.tally.disturbances[step.act.value] += 1
                self._recent.append(f"{time.monotonic() - began:.1f} s {step.act.value} {engine.name}")
                if step.act is Act.KILL:
                    say(f"  {time.monotonic() - began:4.0f} s  killing {engine.name}")
                    restarts.create_task(self.fleet.kill(engine))
                else:
                    await self._disturb_gently(engine, step, number)

    async def _disturb_gently(self, engine: LocalEngine, step: Disturbance, number: int) -> None:
        """What an engine survives. It may be killed meanwhile: an error then means nothing."""
        if step.act is Act.FREEZE:
            await self.fleet.freeze(engine, step.seconds)
            return
        began = time.monotonic()
        try:
            if step.act is Act.RESET:
                await self.fleet.reset(engine)
            else:
                text = build_text(
                    random.Random(f"{self.seed}/evict/{number}"), (self.fleet.pool_blocks - 4) * BLOCK_SIZE
                )
                await self.fleet.evict(engine, text)
        except (EngineRefusal, aiohttp.ClientError, OSError) as error:
            counts = self.tally.errors_while_down if self.fleet.was_down(began) else self.tally.errors
            counts[f"{step.act.value}: {describe_error(error)}"] += 1

    # --- observation --------------------------------------------------------------------------------------------------

    async def _watch(self, began: float) -> None:
        said = time.monotonic()
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            await self._sample(began)
            if time.monotonic() - said > SAY_SECONDS:
                said = time.monotonic()
                t = self.tally
                say(
                    f"  {said - began:4.0f} s  {t.requests} requests, {t.compared} compared, {t.wrong} wrong, "
                    f"{t.hung} hung, {t.left} left, {sum(t.errors_while_down.values())} errors while an engine was "
                    f"down, {sum(t.errors.values())} others, "
                    f"{self.counters.totals.get(contract.METRIC_REUSED_TOKENS, 0):,.0f} tokens reused"
                )

    async def _sample(self, began: float) -> None:
        for engine in (*self.fleet.disturbed, self.fleet.monolith):
            if not self.fleet.is_up(engine):
                continue
            points = self._resident.setdefault((engine.name, engine.process_group), [])
            points.append((time.monotonic() - began, observe_group(engine.process_group).resident_bytes))
            if engine is self.fleet.monolith:
                continue
            try:
                async with asyncio.timeout(2.0):  # a frozen engine does not answer
                    self.counters.add(engine.name, await self.fleet.counters(engine, COUNTERS))
            except (TimeoutError, aiohttp.ClientError, OSError):
                continue


def build_engines(decodes: int) -> tuple[LocalEngine, list[LocalEngine], LocalEngine]:
    """P, the decode engines and M, not started."""
    length = ("--max-model-len", "4096")
    room = ("--num-gpu-blocks-override", str(POOL_BLOCKS), *length)
    environment = write_token(LOGS)

    def engine(name: str, **options: Any) -> LocalEngine:
        log = LOGS / f"soak-{name}.log"
        log.unlink(missing_ok=True)
        return LocalEngine(name, log, **options)

    return (
        engine("P", arguments=room, environment=environment),
        [engine(f"D{number}", arguments=room, environment=environment) for number in range(1, decodes + 1)],
        engine("M", arguments=length, connector_module=None),
    )


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m e2e.bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long requests are sent (default 10)")
    parser.add_argument("--seed", type=int, help="of the plan (default: another one each time)")
    parser.add_argument("--lanes", type=int, default=LANES, help=f"conversations at once (default {LANES})")
    parser.add_argument("--decodes", type=int, default=2, help="decode engines (default 2)")
    parser.add_argument("--no-kills", action="store_true", help="no engine is killed")
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse_arguments()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1_000_000)
    LOGS.mkdir(parents=True, exist_ok=True)
    for stale in FOLDER.glob("soak-wrong-*.json"):
        stale.unlink()
    prefill, decodes, monolith = build_engines(arguments.decodes)
    engines = [prefill, *decodes, monolith]
    say(f"seed {seed}: starting {len(engines)} engines")
    with guardian() as guard:
        try:
            for engine in engines:
                engine.start()
                guard(engine.process_group)
            for engine in engines:
                engine.wait_ready()
            say(f"{arguments.minutes:g} minutes, {arguments.lanes} conversations at once")
            fleet = Fleet(prefill, decodes, monolith, POOL_BLOCKS, guard)
            soak = Soak(fleet, seed, arguments.minutes * 60, arguments.lanes, not arguments.no_kills)
            result = asyncio.run(soak.run())
        finally:
            for engine in engines:
                engine.stop()
    OUTPUT.write_text(json.dumps(result, indent=1) + "\n")
    print(build_summary(result))
    print(f"All figures are in {OUTPUT.relative_to(ROOT)}; the same plan again: --seed {seed}")
    if result["faults"]:
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("[soak-kv] interrupted; the engines are stopped")
