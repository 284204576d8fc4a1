"""Which decode engine answers: agreement, bounded load, holders, zones, compatibility, warm-up, drain."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_runtime.router.choice.decode import compute_capacity
from bidikv_runtime.router.choice.endpoints import Pools
from bidikv_runtime.tests.choice_rig import FleetRig, decode, endpoint, held, prefill, rank, sessions

FOUR = [decode(number) for number in range(1, 5)]
P = [prefill(1)]


@pytest.mark.parametrize(
    ("load", "engines", "floor", "capacity"),
    [
        (0, 4, 8, 8),
        (0, 4, 0, 1),
        (3, 4, 0, 2),
        (31, 4, 8, 10),
        (32, 4, 8, 11),
        (31, 3.5, 8, 12),
        (1000, 1, 8, 1252),
        (5, 0, 8, 8),
    ],
)
def test_the_capacity(load: int, engines: float, floor: int, capacity: int) -> None:
    assert compute_capacity(load, engines, floor) == capacity


def test_an_idle_fleet_follows_the_ranking_whatever_the_order_of_discovery() -> None:
    one, other = FleetRig(P, FOUR), FleetRig(P, FOUR[::-1])
    for session in sessions(50):
        expected = rank(session, [e.address for e in FOUR])[:3]
        assert [e.address for e in one.fleet.choose_decode(session)] == expected
        assert [e.address for e in other.fleet.choose_decode(session)] == expected


def test_without_engines_there_is_no_choice() -> None:
    rig = FleetRig(P, [])
    assert rig.fleet.choose_decode(sessions(1)[0]) == []
    assert rig.fleet.explain_unready() == "No decode engine is ready."


@given(st.lists(st.integers(0, 40), min_size=2, max_size=6), st.integers(0, 12))
def test_no_engine_at_the_capacity_is_chosen(loads: list[int], floor: int) -> None:
    engines = [decode(number) for number in range(1, len(loads) + 1)]
    rig = FleetRig(P, engines, limits={"spill_floor": floor})
    for one, load in zip(engines, loads, strict=True):
        rig.report(one, requests=load)
    capacity = compute_capacity(sum(loads), len(loads), floor)
    load_of = {one.address: load for one, load in zip(engines, loads, strict=True)}
    for session in sessions(10):
        ranking = rank(session, list(load_of))
        expected = next(address for address in ranking if load_of[address] < capacity)
        assert rig.first(session).address == expected


def test_below_the_floor_nothing_spills() -> None:
    rig = FleetRig(P, FOUR)
    session = sessions(1)[0]
    home = rig.first(session)
    works = [rig.fleet.decoding(home) for _ in range(7)]
    assert rig.first(session) == home
    works.append(rig.fleet.decoding(home))
    second = rig.fleet.choose_decode(session)[0]
    assert second != home
    assert second.address == rank(session, [e.address for e in FOUR])[1]
    works.pop().end()
    assert rig.first(session) == home


def test_replicas_agree_by_reports() -> None:
    rigs = [FleetRig(P, FOUR) for _ in range(2)]
    session = sessions(1)[0]
    home = rigs[0].first(session)
    works = [rigs[0].fleet.decoding(home, sent=True) for _ in range(20)]
    assert rigs[0].first(session) != rigs[1].first(session) == home, "until the next report"
    for rig in rigs:
        rig.report(home, requests=20)
    assert rigs[0].first(session) == rigs[1].first(session) != home
    for work in works:
        work.end()
    assert rigs[0].first(session) == home, "its own is exact"


def test_a_session_stays_where_its_kv_is() -> None:
    rig = FleetRig(P, FOUR)
    for session in sessions(20):
        ranking = rig.fleet.choose_decode(session)
        last = next(e for e in FOUR if e not in ranking)
        rig.report(last, held(session, 5000))
        assert rig.fleet.choose_decode(session) == [last, *ranking[:2]]
        rig.report(ranking[1], held(session, 6000))
        assert rig.fleet.choose_decode(session) == [ranking[1], last, ranking[0]], "most of it first"
        rig.report(ranking[1], held(session, 12000))
        assert rig.fleet.choose_decode(session) == [ranking[1], ranking[0], ranking[2]], "less than half is not much"
        rig.report(ranking[1], held(session, 5000, prompt=12000))
        rig.report(last, held(session, 0))
        assert rig.fleet.choose_decode(session) == ranking, "most of it was evicted"
        rig.report(ranking[1], held(session, 0))
        assert rig.fleet.choose_decode(session) == ranking


def test_equal_holders_are_tried_in_the_sessions_order() -> None:
    rig = FleetRig(P, FOUR)
    for session in sessions(10):
        ranking = rig.fleet.choose_decode(session)
        for one in (ranking[2], ranking[0]):
            rig.report(one, held(session, 5000))
        assert rig.fleet.choose_decode(session) == [ranking[0], ranking[2], ranking[1]]


def test_a_holder_at_the_capacity_is_relieved_and_its_session_stays_where_it_went() -> None:
    rig = FleetRig(P, FOUR)
    session = sessions(1)[0]
    home, second, _ = rig.fleet.choose_decode(session)
    rig.report(home, held(session, 5000), requests=50)
    assert rig.first(session) == second
    assert rig.fleet.choose_sources(session, second, 2)[0] == home.lookup, "its KV is in reach"
    rig.report(second, held(session, 6000))
    rig.report(home, requests=0)
    assert rig.first(session) == second


def test_an_engine_whose_kv_blocks_are_used_up_is_relieved_while_another_has_some() -> None:
    rig = FleetRig(P, FOUR)
    session = sessions(1)[0]
    ranking = rig.fleet.choose_decode(session)
    rig.report(ranking[0], held(session, 5000), free_blocks=0.04)
    assert rig.fleet.choose_decode(session) == [*ranking[1:], next(e for e in FOUR if e not in ranking)]
    for one in FOUR:
        rig.report(one, free_blocks=0.0)
    assert rig.fleet.choose_decode(session) == ranking
    rig.report(ranking[0], free_blocks=0.05)
    assert rig.fleet.choose_decode(session) == ranking


def test_ones_own_turn_counts_until_the_report_tells() -> None:
    rig = FleetRig(P, FOUR)
    session = sessions(1)[0]
    third = rig.fleet.choose_decode(session)[2]
    for one in FOUR:
        rig.report(one)
    rig.now += 0.5
    rig.fleet.note_turn(session, third, 4000, 1000)
    assert rig.first(session) == third
    rig.now += 0.5
    rig.report(third)  # it was evicted at once
    assert rig.first(session) != third


def test_ones_own_turn_counts_for_a_while_when_the_engine_does_not_report() -> None:
    rig = FleetRig(P, FOUR)
    session = sessions(1)[0]
    third = rig.fleet.choose_decode(session)[2]
    rig.fleet.note_turn(session, third, 4000, 1000)
    rig.now += 59
    assert rig.first(session) == third
    rig.now += 2
    rig.fleet.note_turn(sessions(2)[1], third, 4000, 1000)
    assert rig.first(session) != third


def test_a_scale_up_moves_no_running_session_and_new_ones_only_to_the_new_engine() -> None:
    rig = FleetRig(P, FOUR[:3], limits={"warm_seconds": 0.0})
    keys = sessions(300)
    before = {session: rig.first(session) for session in keys}
    for one in FOUR[:3]:
        rig.report(one, *[held(session, 5000) for session in keys[:200] if before[session] == one])
    rig.fleet.replace(Pools(tuple(P), tuple(FOUR)))
    moved = [session for session in keys if rig.first(session) != before[session]]
    assert all(rig.first(session) == FOUR[3] for session in moved)
    assert set(moved) <= set(keys[200:])
    assert 10 < len(moved) < 45  # a quarter of 100 on average


def test_a_draining_engine_is_a_source_only() -> None:
    rig = FleetRig(P, FOUR)
    session = sessions(1)[0]
    home, second, _ = rig.fleet.choose_decode(session)
    rig.report(home, held(session, 5000))
    leaving = replace(home, ready=False, terminating=True)
    rig.fleet.replace(Pools(tuple(P), tuple(leaving if e == home else e for e in FOUR)))
    assert home.address not in [e.address for e in rig.fleet.choose_decode(session)]
    assert rig.first(session) == second
    assert rig.fleet.choose_sources(session, second, 2) == [home.lookup, second.lookup]
    unknown = sessions(40)[-1]
    sources = rig.fleet.choose_sources(unknown, rig.first(unknown), 4)
    assert sources == [f"{address.partition(':')[0]}:5700" for address in rank(unknown, [e.address for e in FOUR])]


# --- zones ---


def test_decode_engines_near_prefill_come_first_and_the_others_take_what_is_too_much() -> None:
    near = [decode(number, zone="a") for number in (1, 2)]
    far = [decode(number, zone="b") for number in (3, 4)]
    rig = FleetRig([prefill(1, zone="a")], [*near, *far])
    for session in sessions(30):
        ranking = rig.fleet.choose_decode(session)
        assert ranking[:2] == sorted(near, key=lambda e: rank(session, [n.address for n in near]).index(e.address))
        assert ranking[2] in far
    for one in near:
        rig.report(one, requests=8)
    assert {rig.first(session).address for session in sessions(30)} == {one.address for one in far}
    rig.fleet.replace(Pools((prefill(1, zone="a"), prefill(2, zone="b")), (*near, *far)))
    for one in near:
        rig.report(one, requests=0)
    assert {rig.first(session).address for session in sessions(60)} == {one.address for one in (*near, *far)}


def test_a_holder_in_another_zone_keeps_its_session() -> None:
    rig = FleetRig([prefill(1, zone="a")], [decode(1, zone="a"), decode(2, zone="b")])
    session = sessions(1)[0]
    rig.report(decode(2), held(session, 100))
    assert rig.first(session).host == decode(2).host


# --- compatibility ---


def test_in_a_rollout_sessions_move_only_to_complete_groups() -> None:
    old = [decode(1), decode(2)]
    new = [decode(3), decode(4)]
    rig = FleetRig([prefill(1), prefill(2)], [*old, *new])
    keys = sessions(60)
    for one in (prefill(1), prefill(2), *old):
        rig.report(one, compatibility="old")
    for one in new:
        rig.report(one, compatibility="new")
    assert all(rig.first(session) in old for session in keys), "no prefill engine fits the new ones"
    assert all(rig.fleet.choose_decode(session)[-1] in old for session in keys)
    holder = keys[0]
    rig.report(old[0], held(holder, 5000), compatibility="old")
    rig.report(prefill(2), compatibility="new")
    firsts = {session: rig.first(session) for session in keys}
    assert firsts[holder] == old[0], "a running session stays"
    assert {e.host for e in firsts.values()} == {e.host for e in (*old, *new)}, "both groups serve"
    for session, one in firsts.items():
        expected = prefill(1) if one in old else prefill(2)
        assert rig.fleet.choose_prefill(session, one) == expected
        assert rig.fleet.choose_prefill(session, one, {expected.address}) is None
        group = old if one in old else new
        assert set(rig.fleet.choose_sources(session, one, 4)) == {e.lookup for e in group}
    rig.report(prefill(1), compatibility="new")
    assert all(rig.first(session) in new for session in keys), "now the old group is incomplete"
    assert rig.fleet.choose_sources(holder, rig.first(holder), 4).count(old[0].lookup) == 0


def test_in_a_rollout_the_same_group_is_tried_next() -> None:
    groups = {decode(number).address: group for number, group in ((1, "x"), (2, "y"), (3, "x"), (4, "y"))}
    rig = FleetRig([prefill(1), prefill(2)], FOUR)
    for one in FOUR:
        rig.report(one, compatibility=groups[one.address])
    rig.report(prefill(1), compatibility="x")
    rig.report(prefill(2), compatibility="y")
    orders = {"".join(groups[e.address] for e in rig.fleet.choose_decode(session)) for session in sessions(60)}
    assert orders == {"xxy", "yyx"}


def test_without_any_complete_group_the_incomplete_ones_are_left() -> None:
    rig = FleetRig([prefill(1)], [decode(1), decode(2)])
    rig.report(prefill(1), compatibility="a")
    for one in (decode(1), decode(2)):
        rig.report(one, compatibility="b")
    session = sessions(1)[0]
    assert len(rig.fleet.choose_decode(session)) == 2
    assert rig.fleet.choose_prefill(session, decode(1)) is None


def test_an_engine_without_a_report_fits_everything() -> None:
    rig = FleetRig([prefill(1)], [decode(1), decode(2)])
    rig.report(prefill(1), compatibility="a")
    rig.report(decode(1), compatibility="a")
    assert {rig.first(session) for session in sessions(20)} == {decode(1), decode(2)}
    rig.report(decode(2), compatibility="b")
    assert {rig.first(session) for session in sessions(20)} == {decode(1)}
    rig.fleet.take_report(decode(2).address, None)
    assert {rig.first(session) for session in sessions(20)} == {decode(1), decode(2)}


# --- warm-up ---


def test_an_engine_that_joins_gets_a_growing_share_of_new_sessions() -> None:
    rig = FleetRig(P, FOUR[:3], limits={"warm_seconds": 30.0})
    keys = sessions(2000)
    before = {session: rig.first(session) for session in keys}
    rig.fleet.replace(Pools(tuple(P), tuple(FOUR)))
    taken: list[set[bytes]] = []
    for _ in range(5):
        firsts = {session: rig.first(session) for session in keys}
        assert all(one in (FOUR[3], before[session]) for session, one in firsts.items())
        taken.append({session for session, one in firsts.items() if one == FOUR[3]})
        rig.now += 7.5
    counts = [len(each) for each in taken]
    assert all(earlier < later for earlier, later in itertools.pairwise(taken)), "each keeps what it took"
    for count, share in zip(counts, (0, 0.25, 0.5, 0.75, 1), strict=True):
        assert abs(count - 500 * share) < 75
    other = FleetRig(P, FOUR)
    assert taken[-1] == {session for session in keys if other.first(session) == FOUR[3]}, "as if it had been there"


def test_an_engine_that_joins_does_not_lower_the_capacity_at_once() -> None:
    rig = FleetRig(P, FOUR[:2], limits={"warm_seconds": 30.0})
    for one in FOUR[:2]:
        rig.report(one, requests=20)
    keys = [session for session in sessions(100) if rig.first(session) == FOUR[0]]
    rig.report(FOUR[0], *[held(session, 5000) for session in keys], requests=20)
    rig.fleet.replace(Pools(tuple(P), (*FOUR[:2], FOUR[2])))
    assert all(rig.first(session) == FOUR[0] for session in keys)
    rig.now += 15  # now they are 2.5, and 20 is the capacity
    assert all(rig.first(session) == FOUR[0] for session in keys)
    rig.now += 15
    assert not any(rig.first(session) == FOUR[0] for session in keys)


def test_a_warming_engine_comes_before_one_at_the_capacity() -> None:
    rig = FleetRig(P, FOUR[:1], limits={"warm_seconds": 30.0})
    rig.report(FOUR[0], requests=50)
    rig.fleet.replace(Pools(tuple(P), tuple(FOUR[:2])))
    assert {rig.first(session) for session in sessions(20)} == {FOUR[0]}
    rig.now += 15  # one and a half engines: 43 is the capacity
    assert {rig.first(session) for session in sessions(20)} == {FOUR[1]}


def test_a_warming_engine_takes_everything_when_there_is_no_other() -> None:
    rig = FleetRig(P, [])
    rig.fleet.replace(Pools(tuple(P), (FOUR[0],)))
    assert rig.first(sessions(1)[0]) == FOUR[0]
    rig.fleet.replace(Pools(tuple(P), (FOUR[0], FOUR[1])))
    rig.fleet.replace(Pools(tuple(P), (FOUR[1],)))
    assert rig.first(sessions(1)[0]) == FOUR[1]


def test_an_engine_that_becomes_ready_again_warms_up_again_and_a_changed_neighbour_does_not_disturb_it() -> None:
    rig = FleetRig(P, FOUR[:2], limits={"warm_seconds": 30.0})
    keys = [session for session in sessions(200) if rig.first(session) == FOUR[0]]
    away = endpoint(101, ready=False, serving=False)
    rig.fleet.replace(Pools(tuple(P), (away, FOUR[1])))
    rig.fleet.replace(Pools(tuple(P), (FOUR[0], FOUR[1])))
    rig.now += 15
    rig.fleet.replace(Pools((prefill(1), prefill(2)), (FOUR[0], FOUR[1])))
    share = Counter(rig.first(session) == FOUR[0] for session in keys)[True] / len(keys)
    assert 0.35 < share < 0.65
    rig.now += 15
    assert all(rig.first(session) == FOUR[0] for session in keys)
