"""Engines of several groups, and engines that leave: who gets sessions, who is a source, who is asked for reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bidikv_runtime.router.choice.endpoints import Endpoint, Pools
from bidikv_runtime.router.choice.path import TurnFacts
from bidikv_runtime.tests.choice_rig import FleetRig, decode, held, prefill, sessions

PA, PB = prefill(1, state_port=5800), prefill(2, state_port=5800)
DA, DB = decode(1, state_port=5800), decode(2, state_port=5800)
GROUPS = {PA.address: "a", DA.address: "a", PB.address: "b", DB.address: "b"}


def leaving(endpoint: Endpoint) -> Endpoint:
    return replace(endpoint, ready=False, terminating=True)


def starting(endpoint: Endpoint) -> Endpoint:
    return replace(endpoint, ready=False, serving=False)


def build(*engines: Endpoint) -> FleetRig:
    """All of these have reported; engines of even numbers are of one group."""
    rig = FleetRig(*split(engines), limits={"warm_seconds": 0})
    for engine in engines:
        rig.report(engine, compatibility=GROUPS[engine.address])
    return rig


def split(engines: Sequence[Endpoint]) -> tuple[tuple[Endpoint, ...], tuple[Endpoint, ...]]:
    roles = {PA.address, PB.address}
    return tuple(e for e in engines if e.address in roles), tuple(e for e in engines if e.address not in roles)


def served_by(rig: FleetRig) -> dict[str, set[str]]:
    """Decode engines that get sessions, and the prefill engines that they are paired with, by address."""
    pairs: dict[str, set[str]] = {}
    for session in sessions(60):
        for first in rig.fleet.choose_decode(session)[:1]:
            chosen = rig.fleet.choose_prefill(session, first)
            pairs.setdefault(first.address, set()).add(chosen.address if chosen else "")
    return pairs


def pairs(*wanted: tuple[Endpoint, Endpoint]) -> dict[str, set[str]]:
    return {d.address: {p.address} for p, d in wanted}


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ((PA, DA, PB, DB), ((PA, DA), (PB, DB))),
        ((PA, DA, DB), ((PA, DA),)),
        ((PA, DA, starting(PB), DB), ((PA, DA),)),
        ((PA, DA, PB), ((PA, DA),)),
        ((PA, leaving(DA), PB, DB), ((PB, DB),)),
        ((leaving(PA), DA, PB, DB), ((PB, DB),)),
        ((leaving(PA), leaving(DA), PB, DB), ((PB, DB),)),
        ((leaving(PA), leaving(DA)), ((PA, DA),)),
        ((leaving(PA), leaving(DA), PB), ((PA, DA),)),
        ((leaving(PA), leaving(DA), DB), ((PA, DA),)),
        ((leaving(PA), DA, PB), ((PA, DA),)),
        ((PA, leaving(DA), DB), ((PA, DA),)),
        ((leaving(PA), DA, PB, leaving(DB)), ((PA, DA),)),  # of two broken groups that whose decode stays
    ],
)
def test_sessions_go_where_both_roles_are_ready_or_else_leave_last(
    engines: Sequence[Endpoint], expected: tuple[tuple[Endpoint, Endpoint], ...]
) -> None:
    rig = build(*engines)
    assert served_by(rig) == pairs(*expected)
    assert rig.fleet.explain_unready() is None


def test_one_that_neither_leaves_nor_serves_gets_nothing() -> None:
    rig = build(PA, starting(DA))
    assert served_by(rig) == {}
    assert rig.fleet.explain_unready() == "No decode engine is ready."


def test_an_engine_gets_sessions_only_once_its_group_is_known() -> None:
    rig = FleetRig((), ())
    rig.fleet.expect_reports()
    rig.fleet.replace(Pools((PA,), (DA,)))
    assert served_by(rig) == pairs((PA, DA)), "nobody is known: as good as anybody"
    for engine in (PA, DA):
        rig.report(engine, compatibility="a")
    rig.fleet.replace(Pools((PA, PB), (DA, DB)))
    assert served_by(rig) == pairs((PA, DA))
    rig.report(DB, compatibility="b")
    assert served_by(rig) == pairs((PA, DA))
    rig.report(PB, compatibility="b")
    rig.now += 1000
    assert served_by(rig) == pairs((PA, DA), (PB, DB))


def test_an_engine_that_does_not_report_fits_everybody_once_it_was_asked() -> None:
    rig = build(PA, DA)
    rig.fleet.expect_reports()
    rig.fleet.replace(Pools((PA,), (DA, DB)))
    assert served_by(rig) == pairs((PA, DA))
    rig.fleet.note_silence(DB.address, keep=True)
    rig.now += 1000
    assert served_by(rig) == pairs((PA, DA), (PA, DB))


def test_those_that_leave_are_asked_for_reports_and_stay_sources_of_their_group() -> None:
    other = decode(3, state_port=5800)
    rig = build(PA, DA, PB, DB)
    rig.fleet.replace(Pools((leaving(PA), PB, prefill(3)), (leaving(DA), DB, other)))
    rig.report(prefill(3), compatibility="a")
    rig.report(other, compatibility="a")
    asked = {engine.address for engine in rig.fleet.list_reporting()}
    assert asked == {PA.address, PB.address, DA.address, DB.address, other.address}
    [session] = sessions(1)
    rig.report(DA, held(session, 5000), compatibility="a")
    assert rig.fleet.choose_sources(session, other, 1) == [DA.lookup]
    assert DA.lookup not in rig.fleet.choose_sources(session, DB, 3)
    assert DA not in rig.fleet.choose_decode(session)
    turn = TurnFacts(session, 4 * 5100)
    assert rig.fleet.choose_path(turn, other).path == "bidirectional"
    assert rig.fleet.choose_path(turn, other).uncached_tokens < 200
    assert rig.fleet.choose_path(turn, DB).uncached_tokens > 4000, "computed anew"


def test_the_last_engine_of_a_group_that_leaves_will_not_be_read() -> None:
    def will_be_read(rig: FleetRig) -> set[str]:
        return {engine.address for engine in rig.fleet.list_reporting() if engine.reads}

    other = decode(3, state_port=5800)
    rig = build(PA, DA, PB, DB)
    rig.report(other, compatibility="a")
    assert {DA.address, DB.address} <= will_be_read(rig)
    rig.fleet.replace(Pools((PA, PB), (leaving(DA), DB)))
    assert DA.address not in will_be_read(rig), "its sessions are computed anew"
    rig.fleet.replace(Pools((PA, PB), (leaving(DA), DB, starting(other))))
    rig.report(other, compatibility="a")
    assert DA.address not in will_be_read(rig)
    rig.fleet.replace(Pools((PA, PB), (leaving(DA), DB, other)))
    assert DA.address in will_be_read(rig)
    rig.fleet.replace(Pools((PB,), (leaving(DA), DB, other)))
    assert DA.address not in will_be_read(rig), "no prefill could read it"
    oneway = FleetRig((PA,), (DA, other), reuse="OneWay")
    assert will_be_read(oneway) == set()


def test_a_session_whose_engine_leaves_stays_in_its_group_while_that_has_room() -> None:
    other = decode(3, state_port=5800)
    rig = FleetRig((PA, PB), (DA, DB, other), limits={"warm_seconds": 0, "spill_floor": 2})
    for engine, group in ((PA, "a"), (DA, "a"), (other, "a"), (PB, "b"), (DB, "b")):
        rig.report(engine, compatibility=group)
    rig.fleet.replace(Pools((PA, PB), (leaving(DA), DB, other)))
    keys = sessions(40)
    assert {rig.first(session).address for session in keys} == {DB.address, other.address}
    rig.report(DA, *(held(session, 5000) for session in keys), compatibility="a")
    assert {rig.first(session).address for session in keys} == {other.address}
    rig.report(other, requests=50, compatibility="a")
    assert {rig.first(session).address for session in keys} == {DB.address}
