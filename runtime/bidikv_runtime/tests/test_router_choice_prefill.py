"""Which prefill engine computes: the one that would begin first, near decode, else the session's own."""

from __future__ import annotations

import pytest

from bidikv_runtime.tests.choice_rig import FleetRig, decode, prefill, sessions

D = decode(1)


def rig_of(*queued: int, speeds: tuple[float, ...] = (), zones: str = "", zone: str = "") -> FleetRig:
    """Prefill engines 1, 2, ... with these prompt tokens queued."""
    engines = [prefill(n, zone=zones[n - 1 : n]) for n in range(1, len(queued) + 1)]
    rig = FleetRig(engines, [decode(1, zone=zone)])
    for number, (engine, tokens) in enumerate(zip(engines, queued, strict=True)):
        speed = speeds[number] if speeds else 1000.0
        rig.report(engine, queued_tokens=tokens, prefill_tokens_per_second=speed)
    return rig


@pytest.mark.parametrize(
    ("queued", "speeds", "zones", "zone", "expected"),
    [
        ((500, 300, 900), (), "", "", 2),
        ((500, 300, 0), (), "", "", 3),
        ((4000, 3000, 9000), (1000.0, 500.0, 9000.0), "", "", 3),
        ((2000, 3000, 9000), (1000.0, 0.0, 9000.0), "", "", 2),  # an unknown speed is the others' mean
        ((200, 0, 0), (), "abb", "a", 1),  # the other zone is not shorter by the margin
        ((300, 0, 900), (), "abb", "a", 2),
        ((300, 0, 900), (), "abb", "", 2),
        ((300, 100, 900), (), "", "a", 2),
    ],
)
def test_it_is_the_one_that_would_begin_first(
    queued: tuple[int, ...], speeds: tuple[float, ...], zones: str, zone: str, expected: int
) -> None:
    rig = rig_of(*queued, speeds=speeds, zones=zones, zone=zone)
    for session in sessions(10):
        chosen = rig.fleet.choose_prefill(session, decode(1, zone=zone))
        assert chosen is not None
        assert chosen.host == prefill(expected).host


def test_idle_engines_share_sessions_and_keep_them() -> None:
    rig, other = rig_of(0, 0, 0), rig_of(0, 10, 0)
    chosen = [rig.fleet.choose_prefill(session, D) for session in sessions(60)]
    assert len(set(chosen)) == 3
    assert chosen == [other.fleet.choose_prefill(session, D) for session in sessions(60)], "about equal is equal"


def test_ones_own_legs_count_at_once() -> None:
    rig = rig_of(0, 0)
    session = sessions(1)[0]
    first = rig.fleet.choose_prefill(session, D)
    assert first is not None
    work = rig.fleet.prefilling(first, 5000)
    second = rig.fleet.choose_prefill(session, D)
    assert second is not None
    assert second != first
    more = rig.fleet.prefilling(second, 6000)
    assert rig.fleet.choose_prefill(session, D) == first
    work.end()
    more.end()
    assert rig.fleet.choose_prefill(session, D) == first


def test_an_engine_that_failed_this_turn_is_not_chosen_again() -> None:
    rig = rig_of(0, 0)
    session = sessions(1)[0]
    first = rig.fleet.choose_prefill(session, D)
    assert first is not None
    second = rig.fleet.choose_prefill(session, D, {first.address})
    assert second is not None
    assert second != first
    assert rig.fleet.choose_prefill(session, D, {first.address, second.address}) is None


def test_a_decode_engine_that_left_meanwhile_still_gets_a_prefill_engine() -> None:
    rig = rig_of(0)
    assert rig.fleet.choose_prefill(sessions(1)[0], decode(9)) is not None
