"""Ring and policy: agreement, balance, minimal movement, and who is chosen in which situation."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_runtime.router.choice.endpoints import Endpoint, Pools, parse_static
from bidikv_runtime.router.choice.fleet import RetryBudget
from bidikv_runtime.router.choice.policy import choose_prefill, choose_sources, rank_endpoints
from bidikv_runtime.router.choice.ring import compute_weight, rank

names = st.lists(st.text(min_size=1, max_size=8), unique=True, min_size=1, max_size=8)
keys = st.binary(min_size=16, max_size=16)


def endpoint(number: int, *, ready: bool = True, serving: bool = True, terminating: bool = False) -> Endpoint:
    return Endpoint(f"10.0.0.{number}", 8000, 5700, ready, serving, terminating)


def sessions(count: int) -> list[bytes]:
    return [b"%016d" % number for number in range(count)]


def test_weights_never_change() -> None:
    """Replicas of two releases must agree during a rollout: these values are part of the protocol."""
    assert compute_weight(b"0123456789abcdef", "10.0.0.1:8000") == 0xCBC76274F5F1D626
    assert rank(b"0123456789abcdef", ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]) == [
        "10.0.0.3:8000",
        "10.0.0.1:8000",
        "10.0.0.2:8000",
    ]


@given(keys, names)
def test_the_ranking_does_not_depend_on_the_order_of_discovery(key: bytes, engines: list[str]) -> None:
    assert rank(key, engines) == rank(key, reversed(engines))
    assert sorted(rank(key, engines)) == sorted(engines)


@given(keys, names, st.data())
def test_when_an_engine_leaves_only_its_sessions_move(key: bytes, engines: list[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(engines))
    before = rank(key, engines)
    assert rank(key, [name for name in engines if name != gone]) == [name for name in before if name != gone]


def test_sessions_are_spread_evenly() -> None:
    engines = [f"10.0.0.{number}:8000" for number in range(8)]
    load = Counter(rank(session, engines)[0] for session in sessions(8000))
    # Binomial(8000, 1/8): 1000 with a standard deviation of 30; the keys are fixed, so this cannot flake.
    assert all(880 < count < 1120 for count in load.values())


def test_suspects_come_last_and_are_never_excluded() -> None:
    engines = [endpoint(number) for number in range(1, 5)]
    for session in sessions(20):
        ranking = rank_endpoints(session, engines)
        assert [e.address for e in ranking] == rank(session, [e.address for e in engines])
        suspected = rank_endpoints(session, engines, {ranking[0].address})
        assert suspected == [*ranking[1:], ranking[0]]
        assert rank_endpoints(session, engines, {e.address for e in engines}) == ranking


def test_sources_lead_with_the_engine_that_decodes_and_include_a_leaving_one() -> None:
    for session in sessions(20):
        everybody = [endpoint(number) for number in range(1, 5)]
        holder = rank_endpoints(session, everybody)[0]
        assert choose_sources(session, everybody, 2)[0] == holder.lookup
        draining = [
            endpoint(number, ready=False, terminating=True) if f"10.0.0.{number}" == holder.host else endpoint(number)
            for number in range(1, 5)
        ]
        pools = Pools((), tuple(draining))
        new = rank_endpoints(session, pools.ready_decode)[0]
        assert new.host != holder.host
        assert choose_sources(session, pools.serving_decode, 2) == [holder.lookup, new.lookup]
        assert choose_sources(session, pools.serving_decode, 0) == []


@pytest.mark.parametrize(
    ("outstanding", "suspects", "exclude", "expected"),
    [
        ({"10.0.0.1:8000": 5, "10.0.0.2:8000": 3, "10.0.0.3:8000": 9}, (), (), "10.0.0.2"),
        ({"10.0.0.1:8000": 5, "10.0.0.2:8000": 3}, (), (), "10.0.0.3"),
        ({"10.0.0.1:8000": 5, "10.0.0.2:8000": 3}, ("10.0.0.3:8000",), (), "10.0.0.2"),
        ({"10.0.0.1:8000": 5, "10.0.0.2:8000": 3}, (), ("10.0.0.2:8000", "10.0.0.3:8000"), "10.0.0.1"),
        ({}, ("10.0.0.1:8000", "10.0.0.2:8000"), ("10.0.0.3:8000", "10.0.0.1:8000"), "10.0.0.2"),
    ],
)
def test_prefill_is_the_least_loaded(
    outstanding: dict[str, int], suspects: tuple[str, ...], exclude: tuple[str, ...], expected: str
) -> None:
    ready = [endpoint(number) for number in (1, 2, 3)]
    chosen = choose_prefill(b"s" * 16, ready, outstanding, suspects=suspects, exclude=exclude)
    assert chosen is not None
    assert chosen.host == expected


def test_idle_prefill_engines_share_sessions_and_keep_them() -> None:
    ready = [endpoint(number) for number in (1, 2, 3)]
    chosen = [choose_prefill(session, ready, {}) for session in sessions(60)]
    assert len({e.host for e in chosen if e}) == 3
    assert chosen == [choose_prefill(session, ready[::-1], {}) for session in sessions(60)]
    assert choose_prefill(b"s" * 16, ready, {}, exclude={e.address for e in ready}) is None


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
