"""Which engine is deleted because nobody reaches it, and why none is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from bidikv_operator import names
from bidikv_operator.cache import Key
from bidikv_operator.engines.reach import STALE_SECONDS
from bidikv_operator.healing import MAXIMUM_RECORDS, TIME_FORMAT, Healer, Healing, Recycle, decide_healing
from bidikv_operator.kinds import POD, Kind
from bidikv_operator.kube import TransientError
from bidikv_operator.names import Role
from bidikv_operator.resolved import ResolvedHealing
from bidikv_operator.state import EngineFacts, Observed
from bidikv_operator.tests.engine_samples import make_facts, make_pod, make_report
from bidikv_operator.tests.samples import make_resource, resolve
from bidikv_runtime.contract import REACH_SECONDS

Object = dict[str, Any]
KEY = Key("team", "chat")
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
RESOLVED = resolve(make_resource(prefill={"replicas": 2}, decode={"replicas": 3}))
DEAD = {"age_seconds": STALE_SECONDS, "fault": "silent"}


def write(minutes_ago: float) -> str:
    return (NOW - timedelta(minutes=minutes_ago)).strftime(TIME_FORMAT)


class World:
    """Two prefill and three decode engines, all well."""

    def __init__(self) -> None:
        self.roles: dict[str, Role] = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode", "d3": "decode"}
        self.unreachable: dict[str, float] = {}
        self.pod_changes: dict[str, Object] = {}
        self.fact_changes: dict[str, Object] = {}
        self.resource = make_resource()
        self.resolved = RESOLVED

    @property
    def observed(self) -> Observed:
        pods = tuple(make_pod(name, role, **self.pod_changes.get(name, {})) for name, role in self.roles.items())
        engines: list[EngineFacts] = []
        for name, role in self.roles.items():
            changes = {"unreachable_seconds": self.unreachable.get(name, 0.0)} | self.fact_changes.get(name, {})
            if not self.pod_changes.get(name, {}).get("deleted"):
                engines.append(make_facts(name, role, make_report(), pod=name, uid=f"uid-{name}", **changes))
        return Observed(resource=self.resource, children={}, pods=pods, engines=tuple(engines))

    def recycled_before(self, *minutes_ago: float, role: Role = "decode") -> None:
        records = [{"role": role, "time": write(minutes)} for minutes in minutes_ago]
        self.resource["status"] = {"healing": {"recycled": records}}

    def decide(self, *, is_rolling: bool = False, remembered: Sequence[dict[str, str]] = ()) -> Healing:
        return decide_healing(self.observed, self.resolved, is_rolling=is_rolling, now=NOW, remembered=remembered)

    def heal(self, **changes: Any) -> None:
        self.resolved = replace(self.resolved, healing=ResolvedHealing(**changes))


@pytest.fixture
def world() -> World:
    return World()


def test_nothing_is_the_matter(world: World) -> None:
    assert world.decide() == Healing()


def test_an_engine_that_nobody_reaches_is_deleted(world: World) -> None:
    world.unreachable = {"d2": 60.0}
    healing = world.decide()
    assert healing.recycle == (Recycle("decode", "d2", "uid-d2"),)
    assert healing.recycled == ({"role": "decode", "time": "2026-01-02T03:04:05Z"},)
    assert healing.reason == names.REASON_RECYCLED
    assert "d2" not in healing.message


def test_not_before_its_time(world: World) -> None:
    world.unreachable = {"d2": 59.9}
    assert world.decide() == Healing()
    world.heal(unreachable_seconds=59)
    assert world.decide().recycle


def test_one_at_a_time_of_each_role_and_the_longest_unreachable_first(world: World) -> None:
    world.unreachable = {"d1": 100.0, "d3": 200.0, "p2": 80.0}
    assert [one.pod for one in world.decide().recycle] == ["p2", "d3"]
    for changes in ({"deleted": True}, {"ready": False}):
        world.pod_changes = {"d3": changes}
        healing = world.decide()
        assert [one.pod for one in healing.recycle] == ["p2"]
        assert healing.reason == names.REASON_UNREACHABLE
        assert (
            "1 decode engine cannot be reached by the others: this waits until the role's other pods" in healing.message
        )


def test_pods_that_are_not_ready_are_others_business(world: World) -> None:
    world.unreachable = {"d1": 100.0}
    world.pod_changes = {"d1": {"ready": False}}
    assert world.decide() == Healing()


def test_all_of_a_role_are_the_networks_fault(world: World) -> None:
    world.unreachable = {"d1": 100.0, "d2": 100.0, "d3": 100.0}
    healing = world.decide()
    assert (healing.recycle, healing.recycled, healing.reason) == ((), (), names.REASON_UNREACHABLE)
    assert "3 decode engines cannot be reached by the others: these are all of the role" in healing.message
    world.fact_changes = dict.fromkeys(("d1", "d2", "d3"), DEAD)
    assert not world.decide().recycle, "nor does it matter that the operator does not reach them"


@pytest.mark.parametrize(
    ("changes", "is_deleted"),
    [
        ({}, False),  # it answers the operator: perhaps a policy keeps peers from it
        (DEAD, True),
        ({**DEAD, "report": None}, False),  # it never answered: a policy keeps the operator from it
        ({**DEAD, "fault": "refused"}, False),
        ({**DEAD, "age_seconds": STALE_SECONDS - 1}, False),
    ],
)
def test_the_only_engine_of_a_role_is_deleted_if_the_operator_lost_it_too(
    world: World, changes: Object, is_deleted: bool
) -> None:
    world.roles = {"p1": "prefill", "d1": "decode"}
    world.unreachable = {"d1": 100.0}
    facts = [replace(one, **changes) if one.pod == "d1" else one for one in world.observed.engines]
    observed = replace(world.observed, engines=tuple(facts))
    healing = decide_healing(observed, RESOLVED, is_rolling=False, now=NOW)
    assert bool(healing.recycle) == is_deleted
    assert healing.reason == (names.REASON_RECYCLED if is_deleted else names.REASON_UNREACHABLE)


@pytest.mark.parametrize(
    ("healing", "paused", "rolling", "words"),
    [
        (ResolvedHealing(enabled=False), False, False, "spec.healing.mode"),
        (ResolvedHealing(), True, False, "spec.paused"),
        (ResolvedHealing(), False, True, "rollout"),
    ],
)
def test_it_is_told_why_nothing_is_done(
    world: World, healing: ResolvedHealing, paused: bool, rolling: bool, words: str
) -> None:
    world.unreachable = {"d2": 60.0}
    world.resolved = replace(RESOLVED, healing=healing, paused=paused)
    decided = world.decide(is_rolling=rolling)
    assert (decided.recycle, decided.reason) == ((), names.REASON_UNREACHABLE)
    assert words in decided.message


def test_the_budget_is_that_of_the_last_hour(world: World) -> None:
    world.unreachable = {"d2": 60.0}
    world.heal(per_hour=2)
    world.recycled_before(59, 10)
    healing = world.decide()
    assert healing.recycle == ()
    assert healing.recycled == tuple(world.resource["status"]["healing"]["recycled"]), "nothing is written"
    assert "spec.healing.maximumPerHour (2)" in healing.message
    world.recycled_before(61, 10)
    healing = world.decide()
    assert len(healing.recycle) == 1
    assert [record["time"] for record in healing.recycled] == [write(10), write(0)], (
        "older ones leave with the next one"
    )


def test_two_roles_share_the_budget(world: World) -> None:
    world.unreachable = {"p1": 60.0, "d2": 60.0}
    world.heal(per_hour=1)
    assert [one.role for one in world.decide().recycle] == ["prefill"]


def test_the_budget_survives_a_leader_and_a_crd_that_drops_it(world: World) -> None:
    world.unreachable = {"d2": 60.0}
    world.heal(per_hour=1)
    world.recycled_before(5)
    assert not world.decide().recycle
    world.resource["status"] = {}
    assert not world.decide(remembered=[{"role": "decode", "time": write(5)}]).recycle
    assert world.decide().recycle


def test_a_new_leader_leaves_what_was_said_until_it_can_know_better(world: World) -> None:
    told = {"type": names.DEGRADED, "status": "True", "reason": names.REASON_UNREACHABLE, "message": "as before"}
    world.resource["status"] = {"conditions": [{"type": "Ready", "reason": "Ready"}, told]}
    needed = REACH_SECONDS + 60
    world.fact_changes = {name: {"known_seconds": needed - 1} for name in world.roles}
    healing = world.decide()
    assert (healing.recycle, healing.reason, healing.message) == ((), names.REASON_UNREACHABLE, "as before")
    world.fact_changes["p2"] = {"known_seconds": needed}
    assert world.decide().reason is None
    told["reason"] = names.REASON_AS_EXPECTED
    world.fact_changes = {}
    assert world.decide().reason is None


def test_it_is_told_until_the_role_is_complete_again(world: World) -> None:
    world.recycled_before(5)
    world.pod_changes = {"d2": {"ready": False}}
    healing = world.decide()
    assert (healing.recycle, healing.reason) == ((), names.REASON_RECYCLED)
    world.pod_changes = {}
    healing = world.decide()
    assert (healing.reason, len(healing.recycled)) == (None, 1)
    world.pod_changes = {"d2": {"ready": False}}
    world.recycled_before(61)
    assert world.decide().reason is None


@given(
    unreachable=st.dictionaries(st.sampled_from(["p1", "p2", "d1", "d2", "d3"]), st.floats(0, 500)),
    broken=st.dictionaries(
        st.sampled_from(["p1", "p2", "d1", "d2", "d3"]), st.sampled_from([{"ready": False}, {"deleted": True}])
    ),
    before=st.lists(st.floats(0, 120), max_size=80),
    per_hour=st.integers(1, 64),
    rolling=st.booleans(),
)
def test_whatever_is_reported_little_is_deleted(
    unreachable: dict[str, float], broken: dict[str, Object], before: list[float], per_hour: int, rolling: bool
) -> None:
    world = World()
    world.unreachable, world.pod_changes = unreachable, broken
    world.heal(per_hour=per_hour)
    world.recycled_before(*before)
    healing = world.decide(is_rolling=rolling)
    roles = [one.role for one in healing.recycle]
    assert len(roles) == len(set(roles))
    assert not (rolling and roles)
    for one in healing.recycle:
        assert unreachable[one.pod] >= 60
        of_role = [name for name, role in world.roles.items() if role == one.role]
        assert not any(name in broken for name in of_role)
        assert any(unreachable.get(name, 0) < 60 for name in of_role)
    if healing.recycle:
        recent = [record for record in healing.recycled if record["time"] > write(60)]
        assert len(recent) <= per_hour
        assert len(healing.recycled) <= MAXIMUM_RECORDS
    assert bool(healing.reason) == bool(healing.message)


class Client:
    def __init__(self) -> None:
        self.deleted: list[tuple[str, str]] = []
        self.error: Exception | None = None

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        assert (kind, namespace) == (POD, "team")
        if self.error is not None:
            raise self.error
        self.deleted.append((name, uid))


async def test_the_healer_deletes_this_very_pod_and_remembers(world: World) -> None:
    client = Client()
    healer = Healer(client, clock=lambda: NOW)
    world.unreachable = {"d2": 60.0}
    world.heal(per_hour=1)
    healing = healer.decide(KEY, world.observed, world.resolved, is_rolling=False)
    await healer.recycle(KEY, healing)
    assert client.deleted == [("d2", "uid-d2")]
    assert not healer.decide(KEY, world.observed, world.resolved, is_rolling=False).recycle, "the status never came"
    healer.forget(KEY)
    assert healer.decide(KEY, world.observed, world.resolved, is_rolling=False).recycle


async def test_a_deletion_that_fails_has_used_its_place(world: World) -> None:
    client = Client()
    client.error = TransientError("away")
    healer = Healer(client, clock=lambda: NOW)
    world.unreachable = {"d2": 60.0}
    world.heal(per_hour=1)
    with pytest.raises(TransientError):
        await healer.recycle(KEY, healer.decide(KEY, world.observed, world.resolved, is_rolling=False))
    assert not healer.decide(KEY, world.observed, world.resolved, is_rolling=False).recycle


async def test_a_deletion_that_the_watch_has_not_told_yet_is_not_paid_twice(world: World) -> None:
    client = Client()
    healer = Healer(client, clock=lambda: NOW)
    world.unreachable = {"d2": 60.0, "d3": 70.0}
    healing = healer.decide(KEY, world.observed, world.resolved, is_rolling=False)
    await healer.recycle(KEY, healing)
    again = healer.decide(KEY, world.observed, world.resolved, is_rolling=False)
    assert not again.recycle, "one of the role is stopping, whatever the cache still shows"
    assert again.recycled == healing.recycled


async def test_a_resource_that_comes_back_begins_with_a_full_budget(world: World) -> None:
    healer = Healer(Client(), clock=lambda: NOW)
    world.unreachable = {"d2": 60.0}
    world.heal(per_hour=1)
    await healer.recycle(KEY, healer.decide(KEY, world.observed, world.resolved, is_rolling=False))
    successor = replace(world.resolved, uid="another")
    world.roles["d4"] = world.roles.pop("d2")
    world.unreachable = {"d4": 60.0}
    assert healer.decide(KEY, world.observed, successor, is_rolling=False).recycle
