"""Engines and snapshots: who gets requests, who is a source, what static mode accepts."""

from __future__ import annotations

import pytest

from bidikv_runtime.router.choice.budget import RetryBudget
from bidikv_runtime.router.choice.endpoints import Endpoint, Pools, parse_static
from bidikv_runtime.tests.choice_rig import endpoint


@pytest.mark.parametrize(
    ("ready", "serving", "terminating", "gets_requests", "is_source"),
    [
        (True, True, False, True, True),
        (False, False, False, False, False),
        (False, True, True, False, True),
        (False, False, True, False, False),
        (True, False, False, False, False),  # publishNotReadyAddresses
        (True, True, True, False, True),  # publishNotReadyAddresses, draining
    ],
)
def test_conditions(ready: bool, serving: bool, terminating: bool, gets_requests: bool, is_source: bool) -> None:
    pools = Pools((), (endpoint(1, ready=ready, serving=serving, terminating=terminating),))
    assert bool(pools.ready_decode) is gets_requests
    assert bool(pools.serving_decode) is is_source


@pytest.mark.parametrize(
    ("prefill", "decode", "sentence"),
    [
        ((), (), "No prefill and no decode engine is ready."),
        ((endpoint(1),), (), "No decode engine is ready."),
        ((), (endpoint(1),), "No prefill engine is ready."),
        ((endpoint(1),), (endpoint(2),), None),
    ],
)
def test_unreadiness_is_explained(
    prefill: tuple[Endpoint, ...], decode: tuple[Endpoint, ...], sentence: str | None
) -> None:
    assert Pools(prefill, decode).explain_unready() == sentence


def test_static_engines() -> None:
    parsed = parse_static("10.0.0.1:8000, [fd00::1]:81@5701,name:8002,", 5700)
    assert [e.address for e in parsed] == ["10.0.0.1:8000", "[fd00::1]:81", "name:8002"]
    assert [e.lookup for e in parsed] == ["10.0.0.1:5700", "[fd00::1]:5701", "name:5700"]
    given = parse_static("a:1,b:2@3,c:4@5@6", 5700, 5800)
    assert [(e.lookup_port, e.state_port) for e in given] == [(5700, 5800), (3, 5800), (5, 6)]
    for wrong in ("10.0.0.1", ":8000", "a:b", "a:1@b", "a:1@2@b", "a:1@2@3@4"):
        with pytest.raises(ValueError, match="host:port"):
            parse_static(wrong, 5700)


def test_the_retry_budget() -> None:
    budget = RetryBudget(ratio=0.5, reserve=2)
    assert [budget.withdraw() for _ in range(3)] == [True, True, False]
    budget.deposit()
    assert not budget.withdraw()
    budget.deposit()
    assert budget.withdraw()
    for _ in range(100):
        budget.deposit()
    assert [budget.withdraw() for _ in range(3)] == [True, True, False]
