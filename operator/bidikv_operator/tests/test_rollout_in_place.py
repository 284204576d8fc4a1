"""Templates that change within a group: prefill's first, decode's once prefill's has been seen to start."""

from __future__ import annotations

from typing import Any

import pytest

from bidikv_operator import names
from bidikv_operator.cache import ChildRef
from bidikv_operator.kinds import CONTROLLER_REVISION, DEPLOYMENT
from bidikv_operator.names import DECODE, ENGINE_ROLES, PREFILL, Role
from bidikv_operator.rollout.plan import EngineSet, Target, may_take_newest
from bidikv_operator.tests.samples import make_resource
from bidikv_operator.tests.test_rollout_pass import World

HARMLESS = ["--max-num-seqs", "8"]
"""The group stays."""


def make_set(role: Role, **changes: Any) -> EngineSet:
    values: dict[str, Any] = {"replicas": 4, "live": 4, "ready": 4, "updated": 4, "is_rolled_out": True, **changes}
    return EngineSet(ref=ChildRef(DEPLOYMENT, role), role=role, group="g", is_current=True, **values)


OUTDATED = {"is_newest": False}
STARTING = {"is_rolled_out": False, "ready": 3, "updated": 1}


@pytest.mark.parametrize(
    ("prefill", "decode", "allowed"),
    [
        ({}, {}, True),
        (OUTDATED, OUTDATED, False),  # prefill first
        (STARTING, OUTDATED, False),
        ({**STARTING, "updated": 2}, OUTDATED, True),  # the second one means that the first is ready
        ({}, OUTDATED, True),  # only decode's has changed
        (STARTING, {**OUTDATED, "ready": 0}, True),  # nothing to lose: perhaps the change mends it
        (STARTING, {}, True),
    ],
)
def test_decode_waits_until_prefill_has_shown_that_the_template_starts(
    prefill: dict[str, Any], decode: dict[str, Any], allowed: bool
) -> None:
    sets = [make_set(PREFILL, **prefill), make_set(DECODE, **decode)]
    targets: dict[Role, Target] = {role: Target(4, 0, 1) for role in ENGINE_ROLES}
    assert may_take_newest(sets, DECODE, targets) == allowed
    assert may_take_newest(sets, PREFILL, targets)


def test_nobody_waits_for_a_prefill_that_is_not_wanted() -> None:
    targets: dict[Role, Target] = {"prefill": Target(0, 0, 0), "decode": Target(4, 0, 1)}
    assert may_take_newest([make_set(PREFILL, **OUTDATED), make_set(DECODE, **OUTDATED)], DECODE, targets)
    assert may_take_newest([make_set(DECODE, **OUTDATED)], DECODE, targets)


def inputs(world: World) -> dict[str, bool]:
    """Whether each role's set has the newest template's arguments."""
    return {role: HARMLESS[0] in str(world.set_of(role)["spec"]["template"]) for role in ENGINE_ROLES}


async def test_the_roles_roll_one_after_the_other() -> None:
    world = World(make_resource(prefill={"replicas": 1}, decode={"replicas": 1}))
    await world.settle()
    before = world.sets()
    changed = {"replicas": 1, "extraArgs": HARMLESS}
    world.change(prefill=changed, decode=changed)
    await world.reconcile()
    assert inputs(world) == {PREFILL: True, DECODE: False}
    assert world.condition("Progressing")["status"] == "True"
    await world.settle()
    assert inputs(world) == {PREFILL: True, DECODE: True}
    assert world.sets() == before
    assert world.condition("Progressing")["reason"] == "RolledOut"


async def test_a_template_that_does_not_start_leaves_decode_as_it_is() -> None:
    world = World(make_resource(prefill={"replicas": 1}, decode={"replicas": 1}))
    await world.settle()
    first = {role: world.set_of(role)["spec"]["template"] for role in ENGINE_ROLES}
    world.broken.add(HARMLESS[0])
    changed = {"replicas": 1, "extraArgs": HARMLESS}
    world.change(prefill=changed, decode=changed)
    await world.settle()
    assert inputs(world) == {PREFILL: True, DECODE: False}
    assert world.condition("DecodeReady")["status"] == "True"
    assert world.condition("Progressing")["reason"] == names.REASON_ROLLOUT_FAILED
    assert len([obj for obj in world.objects(CONTROLLER_REVISION) if "decode" in obj["metadata"]["name"]]) == 1
    world.change(prefill={"replicas": 1}, decode={"replicas": 1})
    await world.settle()
    assert {role: world.set_of(role)["spec"]["template"] for role in ENGINE_ROLES} == first
    assert world.condition("Progressing")["reason"] == "RolledOut"


async def test_another_operator_goes_on_where_the_last_one_stood() -> None:
    world = World(make_resource(prefill={"replicas": 1}, decode={"replicas": 1}))
    await world.settle()
    changed = {"replicas": 1, "extraArgs": HARMLESS}
    world.change(prefill=changed, decode=changed)
    await world.reconcile()
    world.start_operator("registry.example/bidikv/runtime:v2")
    await world.reconcile()
    assert inputs(world) == {PREFILL: True, DECODE: False}
    await world.settle()
    assert inputs(world) == {PREFILL: True, DECODE: True}
