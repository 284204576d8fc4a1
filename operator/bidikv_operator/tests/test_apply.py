"""Applying children against an API server in memory."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import Any

import pytest

from bidikv_operator import names
from bidikv_operator.apply import Applier, choose_ownership
from bidikv_operator.build import Desired, build_all
from bidikv_operator.cache import ChildRef, Key, ObjectCache
from bidikv_operator.kinds import CONTROLLER_REVISION, DEPLOYMENT, POD_DISRUPTION_BUDGET, ROLE, SERVICE, Kind
from bidikv_operator.kube import ConflictError, ForbiddenError, InvalidError, TransientError
from bidikv_operator.observe import observe
from bidikv_operator.rollout.scale import Scaling, plan_scaling
from bidikv_operator.state import Applied, Observed
from bidikv_operator.tests.samples import FakeKube, find_set, make_resource, resolve, store_resource

Object = dict[str, Any]
KEY = Key("team", "chat")
NOW = datetime(2026, 1, 1, tzinfo=UTC)
PREFILL = find_set(make_resource(), names.PREFILL)


class World:
    """A cluster in memory with one resource, and the applier under test."""

    def __init__(self, resource: Object) -> None:
        self.cache = ObjectCache()
        self.kube = FakeKube(self.cache)
        self.applier = Applier(self.kube, self.cache)
        self.resource = store_resource(self.kube, resource)

    def change(self, **spec: Any) -> None:
        self.resource = store_resource(self.kube, {**self.resource, "spec": {**self.resource["spec"], **spec}})

    def restart(self) -> None:
        """A new process: no memory, the same cluster."""
        self.applier = Applier(self.kube, self.cache)

    def desired(self) -> Desired:
        scaling = self.scaling()
        return build_all(resolve(self.resource), self.observed().children, scaling.replicas, scaling.inputs)

    def observed(self) -> Observed:
        found = observe(self.cache, KEY)
        assert found is not None
        return found

    def scaling(self) -> Scaling:
        return plan_scaling(resolve(self.resource), self.observed(), NOW)

    async def apply(self) -> Applied:
        return await self.applier.apply_all(self.observed(), self.desired(), self.scaling())

    def live(self, kind: Kind, name: str) -> Object:
        return self.kube.objects["team", ChildRef(kind, name)]


@pytest.fixture
def world() -> World:
    return World(make_resource(prefill={"replicas": 2}))


async def test_creates_everything_in_order_then_rests(world: World) -> None:
    applied = await world.apply()
    expected = [("apply", f"{kind.kind} {manifest['metadata']['name']}") for kind, manifest in world.desired()]
    assert world.kube.take_writes() == expected
    assert not applied.failures
    assert set(applied.children) == {ChildRef(kind, manifest["metadata"]["name"]) for kind, manifest in world.desired()}
    await world.apply()
    world.restart()
    await world.apply()
    assert world.kube.take_writes() == []


async def test_a_deleted_child_comes_back(world: World) -> None:
    await world.apply()
    world.kube.take_writes()
    world.kube.remove(SERVICE, "team", "chat-decode")
    await world.apply()
    assert world.kube.take_writes() == [("apply", "Service chat-decode")]


async def test_a_new_child_costs_one_request(world: World) -> None:
    await world.apply()
    assert world.kube.reads == []


async def test_an_api_server_that_wants_no_version_of_a_new_object(world: World) -> None:
    async def refuse(kind: Kind, manifest: Object) -> Object:
        raise ConflictError("the object has been modified", status=409)

    world.kube.apply_new = refuse  # type: ignore[method-assign]
    applied = await world.apply()
    assert not applied.failures
    assert len(world.kube.take_writes()) == len(list(world.desired()))


async def test_an_edited_child_is_repaired(world: World) -> None:
    await world.apply()
    world.kube.take_writes()
    edited = copy.deepcopy(world.live(DEPLOYMENT, PREFILL))
    edited["spec"]["template"]["spec"]["containers"][0]["image"] = "other"
    world.kube.store(DEPLOYMENT, edited)
    await world.apply()
    assert world.kube.take_writes() == [("apply", f"Deployment {PREFILL}")]
    assert world.live(DEPLOYMENT, PREFILL)["spec"]["template"]["spec"]["containers"][0]["image"] != "other"


async def test_what_others_add_stays_and_is_no_drift(world: World) -> None:
    await world.apply()
    world.kube.take_writes()
    edited = copy.deepcopy(world.live(SERVICE, "chat"))
    edited["metadata"]["annotations"]["other.example/x"] = "1"
    world.kube.store(SERVICE, edited)
    await world.apply()
    assert world.kube.take_writes() == []


async def test_a_child_without_our_label_is_still_found(world: World) -> None:
    """The watches select the label: without it the child leaves the cache, but it must not be taken for foreign."""
    await world.apply()
    world.kube.take_writes()
    edited = copy.deepcopy(world.live(SERVICE, "chat"))
    del edited["metadata"]["labels"][names.LABEL_OWNER]
    world.cache.drop(SERVICE, world.live(SERVICE, "chat"))
    world.kube.store(SERVICE, edited)
    applied = await world.apply()
    assert not applied.failures
    assert world.live(SERVICE, "chat")["metadata"]["labels"][names.LABEL_OWNER] == "chat"


async def test_a_mutating_webhook_does_not_cause_a_loop(world: World) -> None:
    def mutate(obj: Object) -> Object:
        changed = copy.deepcopy(obj)
        changed["metadata"]["labels"][names.LABEL_PART_OF] = "rewritten"
        return changed

    world.kube.mutate = mutate
    await world.apply()
    world.kube.take_writes()
    await world.apply()
    await world.apply()
    assert world.kube.take_writes() == []


async def test_children_no_longer_desired_are_deleted(world: World) -> None:
    await world.apply()
    world.kube.take_writes()
    world.change(prefill={"replicas": 1})
    applied = await world.apply()
    assert ("delete", "PodDisruptionBudget chat-prefill") in world.kube.take_writes()
    assert ChildRef(POD_DISRUPTION_BUDGET, "chat-prefill") not in applied.children
    await world.apply()
    assert world.kube.take_writes() == []


async def test_a_foreign_object_of_the_same_name_is_left_alone(world: World) -> None:
    foreign = {"metadata": {"name": "chat-decode", "namespace": "team", "labels": {}}, "spec": {"theirs": True}}
    world.kube.store(SERVICE, foreign)
    applied = await world.apply()
    (failure,) = applied.failures
    assert failure.reason == names.REASON_NAME_TAKEN
    assert str(failure).startswith("Service chat-decode: exists and belongs to something else")
    assert world.live(SERVICE, "chat-decode")["spec"] == {"theirs": True}
    # Everything else is in place.
    assert len(applied.children) == len(list(world.desired())) - 1


async def test_children_of_a_deleted_namesake_are_waited_for(world: World) -> None:
    await world.apply()
    world.kube.take_writes()
    world.resource["metadata"]["uid"] = "a-new-life"
    world.resource = store_resource(world.kube, world.resource)
    world.restart()
    applied = await world.apply()
    assert len(applied.waiting) == len(list(world.desired()))
    assert world.kube.take_writes() == []
    for _, ref in list(world.kube.objects):
        if ref.kind.kind != names.KIND:
            world.kube.remove(ref.kind, "team", ref.name)
    assert not (await world.apply()).waiting


async def test_a_child_that_is_being_deleted_is_waited_for(world: World) -> None:
    await world.apply()
    world.kube.take_writes()
    leaving = copy.deepcopy(world.live(ROLE, "chat-router"))
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.kube.store(ROLE, leaving)
    applied = await world.apply()
    assert applied.waiting == (ChildRef(ROLE, "chat-router"),)
    assert world.kube.take_writes() == []


async def test_a_refused_child_does_not_stop_the_others(world: World) -> None:
    def refuse(verb: str, kind: Kind, name: str) -> Exception | None:
        return ForbiddenError("exceeded quota", status=403) if (kind, name) == (DEPLOYMENT, PREFILL) else None

    world.kube.refuse = refuse
    applied = await world.apply()
    (failure,) = applied.failures
    assert (failure.reason, str(failure)) == (names.REASON_APPLY_FAILED, f"Deployment {PREFILL}: exceeded quota")
    assert ChildRef(DEPLOYMENT, "chat-router") in applied.children
    world.kube.refuse = lambda verb, kind, name: None
    assert not (await world.apply()).failures


async def test_a_template_is_kept_only_once_it_was_accepted(world: World) -> None:
    world.kube.refuse = lambda verb, kind, name: InvalidError("bad") if (kind, name) == (DEPLOYMENT, PREFILL) else None
    await world.apply()
    revisions = {ref.name for _, ref in world.kube.objects if ref.kind == CONTROLLER_REVISION}
    assert [name.rsplit("-", 1)[0] for name in revisions] == ["chat-decode"]
    world.kube.refuse = lambda verb, kind, name: None
    await world.apply()
    revisions = {ref.name for _, ref in world.kube.objects if ref.kind == CONTROLLER_REVISION}
    assert sorted(name.rsplit("-", 1)[0] for name in revisions) == ["chat-decode", "chat-prefill"]


async def test_an_absent_api_server_stops_the_pass(world: World) -> None:
    world.kube.refuse = lambda verb, kind, name: TransientError("away")
    with pytest.raises(TransientError):
        await world.apply()
    assert len(world.kube.writes) == 1


OWNER = {"metadata": {"name": "chat", "uid": "me"}}
CONTROLLER = {"kind": names.KIND, "name": "chat", "uid": "me", "controller": True}
OUR_LABELS = {names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_OWNER: "chat"}


@pytest.mark.parametrize(
    ("metadata", "ownership"),
    [
        ({"ownerReferences": [CONTROLLER]}, "ours"),
        ({"ownerReferences": [{**CONTROLLER, "uid": "before"}]}, "previous"),
        ({"ownerReferences": [{**CONTROLLER, "name": "other", "uid": "x"}]}, "foreign"),
        ({"ownerReferences": [{**CONTROLLER, "kind": "ReplicaSet", "uid": "x"}]}, "foreign"),
        ({"ownerReferences": [{**CONTROLLER, "controller": False, "uid": "x"}]}, "foreign"),
        ({}, "foreign"),
        ({"labels": OUR_LABELS}, "ours"),
        ({"labels": {**OUR_LABELS, names.LABEL_OWNER: "other"}}, "foreign"),
        ({"labels": {names.LABEL_OWNER: "chat"}}, "foreign"),
    ],
)
def test_ownership(metadata: Object, ownership: str) -> None:
    assert choose_ownership({"metadata": metadata}, OWNER) == ownership


async def test_an_orphan_that_may_not_be_deleted_is_told(world: World) -> None:
    await world.apply()
    world.change(prefill={"replicas": 1})
    world.kube.refuse = lambda verb, kind, name: ForbiddenError("no", status=403) if verb == "delete" else None
    applied = await world.apply()
    assert [str(failure) for failure in applied.failures] == ["PodDisruptionBudget chat-prefill: no"]
    assert ChildRef(POD_DISRUPTION_BUDGET, "chat-prefill") in applied.children


async def test_an_object_that_took_a_child_s_name_meanwhile_is_not_written(world: World) -> None:
    """The cache still shows the child that was there before."""
    await world.apply()
    child = world.live(SERVICE, "chat")
    world.change(router={"service": {"annotations": {"team.example/x": "1"}}})
    world.kube.cache = None
    world.kube.remove(SERVICE, "team", "chat")
    owner = {"apiVersion": "v1", "kind": "Other", "name": "x", "uid": "other", "controller": True}
    metadata = {"name": "chat", "namespace": "team", "ownerReferences": [owner]}
    theirs = world.kube.store(SERVICE, {**child, "metadata": metadata})
    applied = await world.apply()
    assert [failure.reason for failure in applied.failures] == [names.REASON_NAME_TAKEN]
    assert world.live(SERVICE, "chat") == theirs


async def test_a_child_that_was_deleted_meanwhile_is_made_again(world: World) -> None:
    await world.apply()
    world.change(router={"service": {"annotations": {"team.example/x": "1"}}})
    world.kube.cache = None
    world.kube.remove(SERVICE, "team", "chat")
    assert not (await world.apply()).failures
    assert world.live(SERVICE, "chat")["metadata"]["annotations"]["team.example/x"] == "1"


async def test_a_revision_that_lost_its_label_gives_way(world: World) -> None:
    """It is not found any more, so a template is built again; what it holds cannot be changed."""
    await world.apply()
    ref = next(ref for ref in world.observed().children if ref.kind == CONTROLLER_REVISION)
    other = copy.deepcopy(world.live(CONTROLLER_REVISION, ref.name))
    other["metadata"]["labels"] = {}
    other["data"]["template"]["spec"]["hostname"] = "of-another-version"
    world.cache.drop(CONTROLLER_REVISION, world.live(CONTROLLER_REVISION, ref.name))
    world.kube.store(CONTROLLER_REVISION, other)
    assert (await world.apply()).waiting == (ref,)
    assert not (await world.apply()).waiting
    assert "hostname" not in world.live(CONTROLLER_REVISION, ref.name)["data"]["template"]["spec"]
