"""The cost model on synthetic machines whose true costs are known."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from bidikv_runtime.connector.cost import (
    EXPLORE,
    LAST_PATIENCE,
    MAXIMUM_PEERS,
    MINIMUM_STEPS,
    PULL,
    RECOMPUTE,
    CostModel,
    Decision,
    Part,
)

STEP_TOKENS = 4096
KIB = 1024
TOKEN_BYTES = 32 * KIB


@dataclass
class Machine:
    """Costs as on paper, times a noise of 15 %; one step in twenty takes 30 times as long."""

    step: float
    token: float
    attended: float
    decode: float
    latency: float
    byte: float
    stalls: float = 0.05

    def __post_init__(self) -> None:
        self.source = random.Random(1)

    def noisy(self, seconds: float) -> float:
        stalled = 30.0 if self.source.random() < self.stalls else 1.0
        return seconds * self.source.lognormvariate(0, 0.15) * stalled

    def prefill(self, context: int, tokens: int) -> float:
        """Without a step's own cost."""
        return self.token * tokens + self.attended * tokens * (context + tokens / 2)

    def run_steps(self, model: CostModel, count: int) -> None:
        for _ in range(count):
            prefills = [
                (self.source.randint(0, 30_000), round(2 ** self.source.uniform(1, 12)))
                for _ in range(self.source.choice((1, 1, 2)))
            ]
            decodes = self.source.randint(0, 20)
            seconds = self.step + self.decode * decodes + sum(self.prefill(*prefill) for prefill in prefills)
            model.record_step(prefills, decodes, self.noisy(seconds))
            model.record_step([], 20, self.noisy(self.step))

    def read(self, tokens: int, slowness: float = 1.0) -> float:
        return slowness * (self.latency + self.byte * tokens * TOKEN_BYTES)

    def run_reads(self, model: CostModel, peer: str, count: int, slowness: float = 1.0) -> None:
        for _ in range(count):
            tokens = round(2 ** self.source.uniform(6, 15))
            model.record_read(peer, tokens * TOKEN_BYTES, tokens, self.noisy(self.read(tokens, slowness)))


def part(tokens: int, peer: str = "p") -> Part:
    return Part(peer, tokens * TOKEN_BYTES, tokens)


def gpu(**changes: float) -> Machine:
    return Machine(
        **{"step": 5e-3, "token": 3e-5, "attended": 5e-10, "decode": 2e-5, "latency": 5e-3, "byte": 2e-10} | changes
    )


def cpu() -> Machine:
    return Machine(step=0.1, token=6e-4, attended=3e-8, decode=5e-3, latency=2e-3, byte=1e-9)


@pytest.mark.parametrize("machine", [gpu(), cpu(), gpu(attended=5e-9)], ids=["gpu", "cpu", "long context"])
@pytest.mark.parametrize(("context", "tokens"), [(0, 2048), (20_000, 1000), (0, 8192), (60_000, 4000)])
def test_prefill_is_learnt_through_noise_and_stalls(machine: Machine, context: int, tokens: int) -> None:
    model = CostModel("UCX", STEP_TOKENS)
    machine.run_steps(model, 400)
    truth = machine.prefill(context, tokens) + machine.step * tokens / STEP_TOKENS
    assert model.estimate_prefill(context, tokens) == pytest.approx(truth, rel=0.25)


def test_the_speed_of_prefill_is_known_after_some_steps() -> None:
    machine, model = gpu(stalls=0.0), CostModel("UCX", STEP_TOKENS)
    machine.run_steps(model, MINIMUM_STEPS - 1)
    assert model.estimate_prefill_speed() == 0.0
    machine.run_steps(model, 400)
    truth = STEP_TOKENS / (machine.step + machine.prefill(0, STEP_TOKENS))
    assert model.estimate_prefill_speed() == pytest.approx(truth, rel=0.25)


@pytest.mark.parametrize("tokens", [256, 2048, 16_384])
def test_reads_are_learnt_per_peer(tokens: int) -> None:
    machine, model = gpu(stalls=0.0), CostModel("UCX", STEP_TOKENS)
    for _ in range(12):
        machine.run_reads(model, "near", 3)
        machine.run_reads(model, "far", 3, slowness=8.0)
    near, far = (model.estimate_read(peer, tokens * TOKEN_BYTES, tokens) for peer in ("near", "far"))
    assert near == pytest.approx(machine.read(tokens), rel=0.5)
    assert far == pytest.approx(machine.read(tokens, 8.0), rel=0.5)


def test_an_unknown_peer_costs_what_others_do() -> None:
    machine, model = gpu(stalls=0.0), CostModel("UCX", STEP_TOKENS)
    machine.run_reads(model, "known", 30, slowness=5.0)
    assert model.estimate_read("new", 1000 * TOKEN_BYTES, 1000) == pytest.approx(machine.read(1000, 5.0), rel=0.4)


@pytest.mark.parametrize("slowness", [10.0, 0.1])
def test_a_link_that_changes_for_good_is_learnt_within_a_dozen_reads(slowness: float) -> None:
    machine, model = gpu(stalls=0.0), CostModel("UCX", STEP_TOKENS)
    machine.run_reads(model, "p", 40)
    machine.run_reads(model, "p", 12, slowness)
    estimate = model.estimate_read("p", 4096 * TOKEN_BYTES, 4096)
    assert estimate == pytest.approx(machine.read(4096, slowness), rel=0.4)


@pytest.mark.parametrize("factor", [5.0, 0.2])
def test_a_machine_that_changes_for_good_is_learnt(factor: float) -> None:
    machine, model = gpu(), CostModel("UCX", STEP_TOKENS)
    machine.run_steps(model, 300)
    machine.step, machine.token, machine.attended = (
        factor * machine.step,
        factor * machine.token,
        factor * machine.attended,
    )
    machine.run_steps(model, 300)
    truth = machine.prefill(10_000, 2000) + machine.step * 2000 / STEP_TOKENS
    assert model.estimate_prefill(10_000, 2000) == pytest.approx(truth, rel=0.25)


def test_steps_that_are_all_small_do_not_wash_out_what_large_ones_taught() -> None:
    machine, model = gpu(stalls=0.0), CostModel("UCX", STEP_TOKENS)
    machine.run_steps(model, 100)
    for _ in range(3000):
        seconds = machine.step + machine.prefill(1000, 64)
        model.record_step([(1000, 64)], 0, machine.noisy(seconds))
    truth = machine.prefill(0, 8192) + machine.step * 2
    assert model.estimate_prefill(0, 8192) == pytest.approx(truth, rel=0.3)


def test_one_stalled_read_changes_little() -> None:
    machine, model = gpu(stalls=0.0), CostModel("UCX", STEP_TOKENS)
    machine.run_reads(model, "p", 40)
    before = model.estimate_read("p", 4096 * TOKEN_BYTES, 4096)
    model.record_read("p", 4096 * TOKEN_BYTES, 4096, 100 * before)
    assert model.estimate_read("p", 4096 * TOKEN_BYTES, 4096) == pytest.approx(before, rel=0.3)


def test_matches_are_read_until_enough_steps_were_seen() -> None:
    model = CostModel("UCX", STEP_TOKENS)
    for _ in range(MINIMUM_STEPS - 1):
        model.record_step([(0, 1000)], 0, 1e-6)
    assert model.choose([part(100_000)], 0, 1, busy=False).kind == PULL
    model.record_step([(0, 1000)], 0, 1e-6)
    assert model.choose([part(100_000)], 0, 1, busy=False).kind == RECOMPUTE


@pytest.mark.parametrize("factor", [3.0, 1 / 3.0], ids=["read cheaper", "prefill cheaper"])
@pytest.mark.parametrize("tokens", [4096, 16_384, 65_536])
def test_the_choice_is_right_away_from_break_even(factor: float, tokens: int) -> None:
    machine = gpu(stalls=0.0, step=1e-4)
    prefill = machine.prefill(0, tokens) + machine.step * tokens / STEP_TOKENS
    machine.latency, machine.byte = 0.0, prefill / factor / (tokens * TOKEN_BYTES)
    model = CostModel("LIBFABRIC", STEP_TOKENS)
    machine.run_steps(model, 200)
    model.record_step([], 1, 1e-4)
    for _ in range(30):
        seconds = machine.noisy(machine.read(tokens))
        model.record_read("p", tokens * TOKEN_BYTES, tokens, seconds)
    # What the engine is busy with just now is part of a read's cost; here next to nothing.
    for _ in range(9):
        model.record_step([], 1, 1e-4)
    decision = model.choose([part(tokens)], 0, tokens, busy=False)
    assert decision.kind == (PULL if factor > 1 else RECOMPUTE)


def serve(model: CostModel, machine: Machine, requests: int, slowness: float) -> list[str]:
    """Decisions while every read that is chosen is observed."""
    kinds = []
    for _ in range(requests):
        decision = model.choose([part(4096)], 0, 4096, busy=False)
        kinds.append(decision.kind)
        if decision.kind != RECOMPUTE:
            seconds = machine.noisy(machine.read(4096, slowness))
            model.record_read("p", 4096 * TOKEN_BYTES, 4096, seconds)
            model.record_outcome(decision, seconds)
        model.record_step([(1000, 64)], 4, machine.noisy(machine.step + machine.prefill(1000, 64) + 4 * machine.decode))
    return kinds


def test_decisions_heal_after_the_link_becomes_slow_and_fast_again() -> None:
    machine, model = gpu(stalls=0.0, step=1e-4), CostModel("UCX", STEP_TOKENS)
    machine.run_steps(model, 60)
    assert set(serve(model, machine, 40, 1.0)[10:]) == {PULL}  # the prior of TCP is slower than this link
    slow = serve(model, machine, 400, 30.0)
    assert slow[20:].count(PULL) == 0
    assert 0 < slow[20:].count(EXPLORE) <= 10
    fast = serve(model, machine, 4 * LAST_PATIENCE, 1.0)
    assert fast[-1] == PULL
    assert model.regrets[PULL] <= 20


def test_exploring_becomes_rarer_while_it_does_not_pay() -> None:
    machine, model = gpu(stalls=0.0, step=1e-4), CostModel("UCX", STEP_TOKENS)
    machine.run_steps(model, 60)
    machine.run_reads(model, "p", 20, slowness=100.0)
    kinds = serve(model, machine, 1200, 100.0)
    explored = [i for i, kind in enumerate(kinds) if kind == EXPLORE]
    pauses = [second - first for first, second in pairwise(explored)]
    assert len(explored) >= 4
    assert pauses == sorted(pauses)
    assert kinds.count(PULL) == 0


@pytest.mark.parametrize(
    ("kind", "seconds", "regrets"),
    [
        (PULL, 0.9, {}),
        (PULL, 1.1, {PULL: 1}),
        (EXPLORE, 9.0, {}),
        (RECOMPUTE, 1.9, {}),
        (RECOMPUTE, 2.1, {RECOMPUTE: 1}),
    ],
)
def test_a_choice_slower_than_the_other_s_estimate_is_a_regret(
    kind: str, seconds: float, regrets: dict[str, int]
) -> None:
    model = CostModel("UCX", STEP_TOKENS)
    model.record_outcome(Decision(kind, read_seconds=2.0, recompute_seconds=1.0), seconds)
    assert dict(model.regrets) == regrets


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**6),
            st.integers(0, 10**6),
            st.integers(0, 1000),
            st.floats(allow_nan=True, allow_infinity=True),
        ),
        max_size=30,
    ),
    st.integers(0, 10**6),
    st.integers(1, 10**6),
    st.integers(1, 10**6),
)
def test_whatever_is_recorded_estimates_are_finite_and_grow(
    records: list[tuple[int, int, int, float]], context: int, tokens: int, more: int
) -> None:
    model = CostModel("UCX", STEP_TOKENS)
    for first, second, third, seconds in records:
        model.record_step([(first, second)], third, seconds)
        model.record_read("p", first, second, seconds)
        model.estimate_prefill(0, 1)
    prefill = [model.estimate_prefill(context, count) for count in (tokens, tokens + more)]
    longer = model.estimate_prefill(context + more, tokens)
    read = [model.estimate_read("p", count, count) for count in (tokens, tokens + more)]
    for value in (*prefill, longer, *read):
        assert math.isfinite(value)
        assert value >= 0
    assert prefill[0] <= prefill[1]
    assert prefill[0] <= longer
    assert read[0] <= read[1]


def test_the_description_is_bounded_and_json() -> None:
    model = CostModel("LIBFABRIC", STEP_TOKENS)
    for i in range(2 * MAXIMUM_PEERS):
        model.record_read(f"10.0.0.{i}:5700", 1 << 20, 32, 0.01)
    described = model.describe()
    assert len(described["reads"]) == 17
    assert len(json.dumps(described, allow_nan=False)) < 5000
