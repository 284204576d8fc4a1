"""Two routers in a storm: engines that fail in every way, clients that leave, snapshots and reports that change.

Whatever happens, every request ends in time with the right whole answer, a clean error, or a cut where nothing else is
left to say it; what can be tried again is no client's concern; and afterwards nothing is left behind.

``BIDIKV_STORM_SEEDS`` sets how many seeds are tried, ``BIDIKV_STORM_FIRST`` the first one: a failure names its seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from random import Random

import pytest

from bidikv_runtime.contract import RouterConfig
from bidikv_runtime.router.choice.endpoints import Endpoint, Pools
from bidikv_runtime.router.http.client import Request
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.router.observe.record import TurnRecord
from bidikv_runtime.router.wiring import Router
from bidikv_runtime.tests.router_engine import WAIT_SECONDS
from bidikv_runtime.tests.router_storm import (
    ANY,
    RETRIABLE,
    SILENCE_SECONDS,
    Fault,
    Outcome,
    State,
    StormClient,
    StormEngine,
    build_pieces,
)

SEEDS = int(os.environ.get("BIDIKV_STORM_SEEDS", "2"))
FIRST = int(os.environ.get("BIDIKV_STORM_FIRST", "1"))
CLIENTS = 48
TURNS = 4
GAUGES = ("requests_in_flight", "handovers_pending", "prefill_slots_used", "queued", "buffered_bytes")
REQUEST_SECONDS = 30.0
"""Far above what the routers' own limits add up to: one that takes longer hangs."""
LIMITS = Limits(
    prefill_seconds=REQUEST_SECONDS,
    decode_first_byte_seconds=REQUEST_SECONDS,
    decode_idle_seconds=REQUEST_SECONDS,
    comment_seconds=0.1,
    max_prefills_per_engine=4,
    queue_seconds=20.0,
    breaker_seconds=0.05,
    breaker_max_seconds=0.4,
    probe_seconds=0.3,
    report_seconds=0.05,
    report_idle_seconds=0.05,
    report_timeout_seconds=0.2,
    retry_reserve=100_000,
    warm_seconds=0.2,
    token_ids_from=8,
)


@dataclass
class Storm:
    """Everything that a storm needs."""

    random: Random
    routers: list[Router]
    ports: list[int]
    records: list[TurnRecord]
    prefill: list[StormEngine]
    decode: list[StormEngine]
    steady: bool
    """Only the first engine of each role fails, and the last one is ready all the time: a request that two engines have
    received is not sent to a third one, lest it be what ends them."""

    @property
    def engines(self) -> list[StormEngine]:
        return [*self.prefill, *self.decode]

    async def upset(self) -> None:
        """Kill engines, bring them back on their ports, and change what routers see of them."""
        mortal = [self.prefill[0], self.decode[0]] if self.steady else self.engines
        while True:
            await asyncio.sleep(self.random.random() * 0.06)
            engine = self.random.choice(mortal)
            match self.random.randrange(4):
                case 0:
                    await engine.stop()
                    await asyncio.sleep(self.random.random() * 0.08)
                    await engine.start()
                case 1:
                    for idle in mortal:
                        if not idle.running:
                            idle.drop_connections()
                case _:
                    self.random.choice(self.routers).take_pools(self._draw_pools())

    def _draw_pools(self) -> Pools:
        def draw(engines: list[StormEngine]) -> tuple[Endpoint, ...]:
            states = [self._draw_state() for _ in engines]
            if self.steady:
                states[-1] = "ready"
            return tuple(e.describe(state) for e, state in zip(engines, states, strict=True) if state is not None)

        return Pools(draw(self.prefill), draw(self.decode))

    def _draw_state(self) -> State | None:
        return self.random.choice(["ready", "ready", "ready", "ready", "ready", "leaving", "unready", None])

    def show_all(self) -> None:
        """Every engine is there and ready."""
        for router in self.routers:
            router.take_pools(
                Pools(tuple(e.describe() for e in self.prefill), tuple(e.describe() for e in self.decode))
            )


@contextlib.asynccontextmanager
async def storming(
    seed: int, faults: tuple[Fault, ...], share: float, *, steady: bool, continue_streams: bool
) -> AsyncIterator[Storm]:
    """Two routers and six engines, in the middle of it; calm when the block is left."""
    random = Random(seed)
    engines: dict[str, list[StormEngine]] = {}
    for role in ("prefill", "decode"):
        engines[role] = [
            StormEngine(seed, role, number, faults, 0.0 if steady and number > 0 else share) for number in range(3)
        ]
    config = RouterConfig(
        namespace="",
        prefill_service="",
        decode_service="",
        served_model_name="m",
        local_limit_tokens=random.choice([0, 64, 100_000]),
        source_count=2,
        continue_streams=continue_streams,
    )
    limits = LIMITS
    if "stall" in faults:
        limits = replace(
            limits,
            prefill_seconds=SILENCE_SECONDS,
            decode_first_byte_seconds=SILENCE_SECONDS,
            decode_idle_seconds=SILENCE_SECONDS,
        )
    routers = [Router(config, limits) for _ in range(2)]
    records: list[TurnRecord] = []
    storm = Storm(random, routers, [], records, engines["prefill"], engines["decode"], steady)
    for engine in storm.engines:
        await engine.start()
    storm.show_all()
    for router in routers:
        router.proxy._observers = (records.append,)
        router.start_control()
        storm.ports.append(await router.listen("127.0.0.1", 0))
    upsetting = asyncio.create_task(storm.upset())
    try:
        yield storm
    finally:
        upsetting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await upsetting
        for router in routers:
            await router.close()
        for engine in storm.engines:
            await engine.stop()


async def run_clients(storm: Storm, seed: int, *, may_leave: bool) -> list[Outcome]:
    clients = [
        StormClient(f"{seed}/{number}", storm.ports[number % 2], TURNS, may_leave, REQUEST_SECONDS)
        for number in range(CLIENTS)
    ]
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(client.run())
    return [outcome for client in clients for outcome in client.outcomes]


def judge(outcome: Outcome, storm: Storm) -> None:
    """An answer is the right one, or its beginning and a reason why there is no more."""
    right = "".join(build_pieces(outcome.nonce))
    broken = any(outcome.nonce in engine.broken for engine in storm.engines)
    match outcome.kind:
        case "whole":
            assert (outcome.status, outcome.text) == (200, right), outcome
        case "error":
            assert outcome.status >= 400, outcome
            assert outcome.detail, outcome
            assert "nonce-" not in outcome.detail or outcome.detail == outcome.nonce, outcome
        case "event":
            assert right.startswith(outcome.text), outcome
            assert "nonce-" not in outcome.detail or outcome.detail == outcome.nonce, outcome
        case "cut":
            assert broken, f"cut off, though no engine broke its answer off: {outcome}"
            assert right.startswith(outcome.text), outcome
        case "left":
            assert right.startswith(outcome.text), outcome


def list_remains(storm: Storm) -> list[str]:
    """What has not returned to nothing."""
    found = [f"{engine.name}: {len(engine.running)} answers under way" for engine in storm.engines if engine.running]
    for number, router in enumerate(storm.routers):
        text, fleet, kept = router.metrics.render().decode(), router.fleet, router.server.memory._kept
        works = [*fleet._prefill.values(), *fleet._decode.values()]
        idle = sum(len(connections) for connections in router.pool._idle.values())
        left = {name: f"\nbidikv_router_{name} 0.0\n" not in text for name in GAUGES} | {
            "pieces of work": fleet.busy or any(e.works or e.unsent or e.tokens for e in works),
            "connections of clients": bool(router.server.connections),
            "slots": bool(router.proxy.admission.active or router.proxy.admission.queued),
            "deadlines": len(router.pool.deadlines._watched) != idle,
            "bodies that somebody still looks at": any(sys.getrefcount(kept[i]) > 2 for i in range(len(kept))),
        }
        found += [f"router {number}: {name}" for name, there in left.items() if there]
    return found


async def until_calm(storm: Storm) -> None:
    """Wait until nothing is left of the requests."""
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while list_remains(storm):  # noqa: ASYNC110 -- nothing announces it
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"left behind: {list_remains(storm)}") from None


def check_balance(storm: Storm) -> None:
    """What is counted of hand-overs adds up, and no time runs backwards."""
    for record in storm.records:
        assert 0 <= record.handed_over + record.handovers_lost <= record.prefills, record
        assert record.ended_at >= record.received_at, record
        assert record.status or record.outcome == "disconnected", record


async def weather(
    seed: int, faults: tuple[Fault, ...], share: float, *, steady: bool, may_leave: bool
) -> tuple[list[Outcome], Storm]:
    """One storm from its beginning to what it leaves behind."""
    before = asyncio.all_tasks()
    continue_streams = seed % 2 == 0
    async with storming(seed, faults, share, steady=steady, continue_streams=continue_streams) as storm:
        outcomes = await run_clients(storm, seed, may_leave=may_leave)
        for outcome in outcomes:
            judge(outcome, storm)
        await until_calm(storm)
        check_balance(storm)
    storm.records.clear()
    async with asyncio.timeout(WAIT_SECONDS):
        while asyncio.all_tasks() - before:  # noqa: ASYNC110 -- engines notice the end by themselves
            await asyncio.sleep(0.01)
    return outcomes, storm


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # pytest keeps what is logged, and with it errors and their frames


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
async def test_every_request_ends_and_nothing_is_left(seed: int) -> None:
    gc.collect()
    gc.disable()  # what needs the collector to go away would be there for long
    try:
        before = Counter(type(found) for found in gc.get_objects() if isinstance(found, Request))
        outcomes, _ = await weather(seed, ANY, 0.25, steady=False, may_leave=True)
        after = Counter(type(found) for found in gc.get_objects() if isinstance(found, Request))
    finally:
        gc.enable()
    kinds = Counter(outcome.kind for outcome in outcomes)
    assert kinds["whole"] > len(outcomes) / 8, kinds
    assert kinds["left"], kinds
    assert kinds["error"], kinds
    assert after == before


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
async def test_what_can_be_tried_again_never_reaches_a_client(seed: int) -> None:
    outcomes, storm = await weather(seed, RETRIABLE, 0.7, steady=True, may_leave=False)
    failed = [outcome for outcome in outcomes if outcome.kind != "whole"]
    broken = {nonce for engine in storm.decode for nonce in engine.broken}
    # Left are answers of engines that were killed within them, and statuses of what is no turn.
    assert [o for o in failed if o.nonce not in broken and not (o.api == "passed" and o.detail == o.nonce)] == []
    assert len(failed) < len(outcomes) / 10
