"""Rendezvous hashing: agreement, balance, minimal movement."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from bidikv_runtime.router.choice.breaker import Breaker, BreakerLimits
from bidikv_runtime.router.choice.engine import Engine, Totals
from bidikv_runtime.router.choice.ranking import Rankings
from bidikv_runtime.router.choice.ring import compute_weights
from bidikv_runtime.tests.choice_rig import decode, rank, sessions

names = st.lists(st.text(min_size=1, max_size=8), unique=True, min_size=1, max_size=8)
keys = st.binary(min_size=16, max_size=16)


def test_weights_never_change() -> None:
    """Replicas of two releases must agree during a rollout: these values are part of the protocol."""
    assert [w.hex() for w in compute_weights(b"0123456789abcdef", [b"10.0.0.1:8000"])] == ["34f85c9f1878b223"]
    assert rank(b"0123456789abcdef", ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]) == [
        "10.0.0.2:8000",
        "10.0.0.3:8000",
        "10.0.0.1:8000",
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


def test_rankings_are_kept_up_to_a_bound_and_are_right_when_made_again() -> None:
    limits = BreakerLimits(3, 1, 30, 2)
    engines = [Engine(decode(number), "decode", Breaker(limits, None), Totals()) for number in range(1, 6)]  # type: ignore[arg-type]
    rankings = Rankings(engines)
    keys = sessions(5000)
    firsts = [rankings.get(key) for key in keys]
    assert rankings.get(keys[-1]) is firsts[-1]
    assert rankings.get(keys[0]) is not firsts[0]
    assert rankings.get(keys[0]) == firsts[0]
    addresses = [engine.endpoint.address for engine in engines]
    assert all(
        [address for _, address, _ in kept] == rank(key, addresses) for key, kept in zip(keys, firsts, strict=True)
    )
