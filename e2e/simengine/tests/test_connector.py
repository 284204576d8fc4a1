"""The KV protocol between two simulated engines: over real lookup ports, within one process and without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest

from bidikv_runtime import contract
from bidikv_runtime.contract import EngineReport, TransportReport
from e2e.engine.client import Metrics as Scrape
from e2e.engine.local import free_port
from e2e.simengine.engine import EngineCore, Finish, Request
from e2e.simengine.faults import Faults, FaultSet
from e2e.simengine.metrics import Metrics
from e2e.simengine.settings import parse_engine
from e2e.simengine.tests.inside import FAST, WAIT_SECONDS
from e2e.simengine.text import Answer

HOST = "127.0.0.1"
SLOW_READ = {"BIDIKV_SIM_READ_SECONDS": "0.2"}
REQUESTS = 60
"""Of a round of the random test."""


class Peer:
    """An engine's core whose steps run."""

    def __init__(self, *arguments: str, environment: dict[str, str], **settings: Any) -> None:
        self.lookup_port = free_port()
        transfer = contract.kv_transfer_config(fabric="TCP", lookup_port=self.lookup_port)
        extra = {"bidikv_state_port": 0, "bidikv_cost_model": "AlwaysPull", "bidikv_lookup_deadline_ms": 5000}
        transfer["kv_connector_extra_config"] |= extra | settings
        line = ["--prefix-caching-hash-algo", contract.HASH_ALGORITHM, "--kv-transfer-config", json.dumps(transfer)]
        variables = FAST | {"PYTHONHASHSEED": "0", contract.ENV_LOOKUP_HOST: HOST} | environment
        engine, _ = parse_engine([*line, *arguments], variables)
        self.faults = Faults(FaultSet())
        self.core = EngineCore(engine, self.faults, Metrics("simulated", connector=True))

    @property
    def source(self) -> str:
        return f"{HOST}:{self.lookup_port}"

    async def answer(self, tokens: list[int], limit: int = 4, **params: Any) -> tuple[list[int], Finish]:
        """The answer's tokens, and how it ended."""
        request = Request("request", list(tokens), limit, ignore_eos=True, kv_transfer_params=params)
        self.core.add(request)
        generated = []
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                output = await request.outputs.get()
                if output.token is not None:
                    generated.append(output.token)
                if output.finish is not None:
                    return generated, output.finish

    async def wait_for_read(self) -> None:
        """Return when a read is under way."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                if self.value("vllm:num_requests_waiting_by_reason", reason="deferred"):
                    return
                await asyncio.sleep(0.001)

    def value(self, name: str, **labels: str) -> float:
        return Scrape(self.core.render_metrics().decode()).value(name, **labels)

    def report(self) -> EngineReport:
        assert self.core.connector is not None
        return self.core.connector.reporter.build()


@contextlib.asynccontextmanager
async def running_peers(
    *arguments: str, environment: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[tuple[Peer, Peer]]:
    peers = [Peer(*arguments, environment=environment or {}, **settings) for _ in range(2)]
    steps = [asyncio.create_task(peer.core.run()) for peer in peers]
    try:
        yield peers[0], peers[1]
    finally:
        for task, peer in zip(steps, peers, strict=True):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            peer.core.close()


PROMPT = list(range(70_000, 71_000))


async def test_what_one_engine_holds_the_other_reads_and_the_answer_is_the_same() -> None:
    async with running_peers() as (p, d):
        alone = await d.answer(PROMPT, bidikv_session="s", bidikv_body_bytes=5000)
        read = await p.answer(PROMPT, bidikv_sources=[d.source], bidikv_handover=True)
        assert read == alone
        assert p.value(contract.METRIC_REUSED_TOKENS, direction=contract.DIRECTION_FROM_DECODE) == 992
        assert p.value("vllm:external_prefix_cache_hits_total") == 992
        assert p.value(contract.METRIC_LOOKUPS, result="hit") == 1
        assert p.value(contract.METRIC_READ_BYTES) == 992 * 65_536
        [session] = d.report().sessions
        assert (session.name, session.prompt_tokens, session.total_tokens) == ("s", 1000, 1004)
        assert (session.held_tokens, session.body_bytes) == (992, 5000)
        assert p.report().sessions == ()  # a prefill leg is no turn
        assert p.report().compatibility == d.report().compatibility
        assert (d.report().requests, d.report().queued_tokens, d.report().free_blocks) == (0, 0, 1.0)


async def test_what_has_moved_and_who_is_reached_is_reported() -> None:
    environment = {"BIDIKV_SIM_READ_BYTES_PER_SECOND": "2e9", "BIDIKV_SIM_PROVIDER": "rdma"}
    async with running_peers(environment=environment) as (p, d):
        assert p.report().transport == TransportReport("UCX", "rdma")
        await d.answer(PROMPT)
        await p.answer(PROMPT, bidikv_sources=[d.source])
        report = p.report()
        assert report.transport == TransportReport("UCX", "rdma", "", 992 * 65_536, 0, 2e9)
        assert (report.prompt_tokens, report.reused_tokens) == (1000, 992)
        assert (report.reached, report.unreachable) == ((d.source,), ())
        assert d.report().transport == TransportReport("UCX", "rdma"), "it was read from"


async def test_a_silent_lookup_port_is_reported_by_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bidikv_runtime.connector.peers.SILENT_SECONDS", 0.1)
    async with running_peers(bidikv_lookup_deadline_ms=100, bidikv_silent_period_seconds=0.1) as (p, d):
        alone = await d.answer(PROMPT)
        d.faults.set(FaultSet(silent=True))
        async with asyncio.timeout(WAIT_SECONDS):
            while p.report().unreachable != (d.source,):
                assert await p.answer(PROMPT, bidikv_sources=[d.source]) == alone
                assert p.core.pool.reset()
        assert p.report().reached == ()
        assert p.value(contract.METRIC_REUSED_TOKENS) == 0
        d.faults.set(FaultSet())
        async with asyncio.timeout(WAIT_SECONDS):
            while p.report().reached != (d.source,):
                assert await p.answer(PROMPT, bidikv_sources=[d.source]) == alone
                assert p.core.pool.reset()
        assert p.report().unreachable == ()


async def test_decode_reads_all_that_prefill_hands_over() -> None:
    async with running_peers() as (p, d):
        await p.answer(PROMPT, limit=1, bidikv_handover=True)
        _, ended = await d.answer(PROMPT, bidikv_sources=[p.source], bidikv_prefilled_tokens=1000)
        assert ended == "length"
        assert d.value(contract.METRIC_REUSED_TOKENS) == 1000  # the partly filled last block, too


@pytest.mark.parametrize("moment", ["before", "during"])
async def test_kv_that_is_gone_is_computed(moment: str) -> None:
    async with running_peers(environment=SLOW_READ) as (p, d):
        alone = await d.answer(PROMPT)
        if moment == "before":
            assert d.core.pool.reset()
        asked = asyncio.create_task(p.answer(PROMPT, bidikv_sources=[d.source]))
        if moment == "during":
            await p.wait_for_read()
            assert d.core.pool.reset()
        assert await asked == alone
        assert p.value(contract.METRIC_REUSED_TOKENS) == 0
        assert p.value(contract.METRIC_DISCARDED_TOKENS) == (992 if moment == "during" else 0)
        assert p.value(contract.METRIC_VALIDATE_FAILURES, reason="reallocated") == (moment == "during")
        assert p.value(contract.METRIC_LOOKUPS, result="miss") == (moment == "before")
        assert d.report().sessions == ()
        assert p.core.pool.usage == 0


async def test_a_request_that_is_aborted_during_its_read_leaves_nothing() -> None:
    async with running_peers(environment=SLOW_READ) as (p, d):
        await d.answer(PROMPT)
        asked = asyncio.create_task(p.answer(PROMPT, bidikv_sources=[d.source]))
        await p.wait_for_read()
        [request] = p.core.requests
        p.core.abort(request)
        assert (await asked) == ([], "abort")
        assert p.core.pool.usage == 0
        assert p.core.unfinished == 0
        assert p.value(contract.METRIC_PUBLISHED_BLOCKS) == 0


@pytest.mark.parametrize(
    ("params", "ended", "metric"),
    [
        ({"bidikv_compute_limit_tokens": 999}, "error", contract.METRIC_COMPUTE_LIMIT_EXCEEDED),
        ({"bidikv_compute_limit_tokens": 1000}, "length", None),
        ({"bidikv_prefilled_tokens": 1000}, "error", contract.METRIC_HANDOVERS_LOST),
        ({"bidikv_prefilled_tokens": 500}, "length", None),
        ({}, "length", None),
    ],
)
async def test_decode_refuses_what_it_would_have_to_compute(
    params: dict[str, int], ended: Finish, metric: str | None
) -> None:
    async with running_peers(bidikv_recompute_limit_tokens=500) as (_, d):
        tokens, reason = await d.answer(PROMPT, bidikv_session="s", **params)
        assert (bool(tokens), reason) == (ended == "length", ended)
        for counted in (contract.METRIC_COMPUTE_LIMIT_EXCEEDED, contract.METRIC_HANDOVERS_LOST):
            assert d.value(counted) == (counted == metric)
        assert len(d.report().sessions) == (ended == "length")
        assert d.core.unfinished == 0
        assert d.core.pool.usage == 0


async def test_what_is_evicted_is_no_longer_reported_as_held() -> None:
    async with running_peers("--num-gpu-blocks-override", "81", "--max-model-len", "1200") as (_, d):
        await d.answer(PROMPT, bidikv_session="first")
        await d.answer(list(range(90_000, 91_000)), bidikv_session="second")
        held = {session.name: session.held_tokens for session in d.report().sessions}
        assert held["second"] == 992
        assert held["first"] < 992 - 500


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_answers_are_right_and_nothing_is_left(seed: int) -> None:
    """Two small engines that read from each other, under more requests than fit, with aborts and lost caches."""
    random = Random(seed)
    environment = {"BIDIKV_SIM_READ_SECONDS": "0.003", "BIDIKV_SIM_STEP_SECONDS": "0.0005"}
    pool = ("--num-gpu-blocks-override", "41", "--max-model-len", "600", "--max-num-batched-tokens", "128")
    async with running_peers(*pool, environment=environment, bidikv_minimum_tokens=16) as peers:

        async def run(number: int) -> None:
            await asyncio.sleep(random.random() * 0.3)
            at = random.randrange(2)
            prompt = [*range(70_000, 70_000 + random.randrange(1, 400)), *range(80_000, 80_000 + random.randrange(100))]
            params: dict[str, Any] = {"bidikv_sources": [peers[1 - at].source], "bidikv_session": str(number % 5)}
            if random.random() < 0.3:
                params["bidikv_handover"] = True
            request = Request(str(number), list(prompt), random.randrange(1, 60), ignore_eos=True)
            request.kv_transfer_params = params
            peers[at].core.add(request)
            if random.random() < 0.3:
                await asyncio.sleep(random.random() * 0.05)
                peers[at].core.abort(request)
            generated = []
            while True:
                output = await request.outputs.get()
                if output.token is not None:
                    generated.append(output.token)
                if output.finish is not None:
                    break
            expected = Answer(prompt, 48)
            assert generated == [expected.next(may_end=False)[0] for _ in generated]
            assert output.finish in ("length", "abort")
            assert output.finish == "abort" or len(generated) == request.max_tokens

        async def lose() -> None:
            for _ in range(10):
                await asyncio.sleep(random.random() * 0.05)
                blocks = {random.randrange(1, 41) for _ in range(10)}
                victim = random.choice(peers)
                victim.core.pool.reset()
                victim.core.pool.evict_blocks(block for block in blocks if not victim.core.pool.blocks[block].ref_cnt)

        def count(metric: str) -> float:
            return sum(peer.value(metric) for peer in peers)

        for first in range(0, 10 * REQUESTS, REQUESTS):
            async with asyncio.timeout(WAIT_SECONDS):
                await asyncio.gather(lose(), *(run(first + number) for number in range(REQUESTS)))
            for peer in peers:
                assert peer.core.unfinished == 0
                assert peer.core.pool.usage == 0
                assert (peer.report().requests, peer.report().queued_tokens) == (0, 0)
                assert all(block.ref_cnt == 0 for block in peer.core.pool.blocks[1:])
            # Which requests meet, and in what order they draw, depends on the machine: it may take another round.
            if count(contract.METRIC_REUSED_TOKENS) and count("vllm:num_preemptions_total"):
                return
        pytest.fail("nothing was read, or nothing preempted, in any round")


async def test_engines_of_different_models_share_nothing() -> None:
    async with running_peers() as (p, d):
        await d.answer(PROMPT)
        other = Peer("--revision", "other", environment={})
        steps = asyncio.create_task(other.core.run())
        try:
            await other.answer(PROMPT, bidikv_sources=[d.source])
            assert other.value(contract.METRIC_LOOKUPS, result="refused") == 1
            assert other.value(contract.METRIC_REUSED_TOKENS) == 0
            assert other.report().compatibility != p.report().compatibility
        finally:
            steps.cancel()
            other.core.close()
