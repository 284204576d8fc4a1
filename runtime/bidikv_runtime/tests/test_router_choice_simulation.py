"""Replicas in front of engines in virtual time: balance, affinity, restarts, scale-up, with reports a second old."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bidikv_runtime.router.limits import Limits
from bidikv_runtime.tests.choice_simulation import Simulation

UNBOUNDED = replace(Limits(), spill_floor=1_000_000)


@pytest.mark.parametrize("zipf", [1.1, 1.4])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_popular_sessions_overload_no_engine_and_most_turns_find_their_kv(replicas: int, zipf: float) -> None:
    simulation = Simulation(engines=8, replicas=replicas, arrivals_per_second=20, zipf=zipf)
    simulation.run(60)
    simulation.measure()
    simulation.run(120)
    assert simulation.imbalance <= 1.25
    assert simulation.affinity >= 0.95


def test_without_the_bound_a_popular_session_overloads_its_engine() -> None:
    simulation = Simulation(engines=8, replicas=2, arrivals_per_second=20, limits=UNBOUNDED)
    simulation.run(60)
    simulation.measure()
    simulation.run(120)
    assert simulation.imbalance > 1.5


def test_replicas_that_are_killed_and_started_again_lose_no_affinity() -> None:
    simulation = Simulation(engines=8, replicas=2, arrivals_per_second=20)
    simulation.run(60)
    for victim in (0, 1, 1, 0):
        simulation.fleets[victim] = simulation.build_fleet()
        simulation.measure()
        simulation.run(15)
        assert simulation.later_turns > 200
        assert simulation.affinity >= 0.95
        assert simulation.imbalance <= 1.25


def test_a_scale_up_keeps_sessions_and_relieves_engines() -> None:
    simulation = Simulation(engines=4, replicas=2, arrivals_per_second=10)
    simulation.run(60)
    new = simulation.add_engine()
    simulation.measure()
    simulation.run(20)
    assert simulation.affinity >= 0.95
    simulation.run(100)
    simulation.measure()
    simulation.run(60)
    assert new.load_seconds > 0
    assert simulation.imbalance <= 1.25
    assert simulation.affinity >= 0.95
