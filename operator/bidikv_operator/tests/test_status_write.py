"""When the status is written, and what is left of it under an older CRD."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from bidikv_operator.cache import ChildRef, ObjectCache
from bidikv_operator.kinds import INFERENCE
from bidikv_operator.kube import InvalidError
from bidikv_operator.status.write import RETRY_SECONDS, StatusWriter, is_same, shorten
from bidikv_operator.tests.samples import FakeKube, make_resource, store_resource

Object = dict[str, Any]

CONDITION: Object = {"type": "Ready", "status": "True", "reason": "Ready", "message": "m"}
STATUS: Object = {
    "observedGeneration": 3,
    "conditions": [CONDITION, {**CONDITION, "type": "Accepted"}],
    "endpoint": "http://chat",
    "decode": {"replicas": 1, "readyReplicas": 1, "group": "abc"},
    "kvReuse": {"sessions": 4},
}
REFUSAL = InvalidError("failed to create typed patch object: .status.kvReuse: field not declared in schema", status=500)


class World:
    def __init__(self) -> None:
        self.cache = ObjectCache()
        self.kube = FakeKube(self.cache)
        self.now = 0.0
        self.writer = StatusWriter(self.kube, self.cache, clock=lambda: self.now)
        store_resource(self.kube, make_resource())
        self.apply = self.kube.apply
        self.is_old = False

    @property
    def resource(self) -> Object:
        return self.kube.objects["team", ChildRef(INFERENCE, "chat")]

    def use_old_crd(self) -> None:
        """Refuse what the first CRD does not know, as a whole."""
        self.is_old = True

        async def apply(kind: Any, manifest: Object, *, subresource: str | None = None) -> Object:
            if self.is_old and shorten(manifest["status"]) != manifest["status"]:
                self.kube.writes.append(("refused", "status"))
                raise REFUSAL
            return await self.apply(kind, manifest, subresource=subresource)

        self.kube.apply = apply  # type: ignore[method-assign]

    async def write(self, status: Object = STATUS) -> bool:
        return await self.writer.write(self.resource, copy.deepcopy(status))


def test_only_news_are_written() -> None:
    foreign = {**CONDITION, "type": "SomebodyElses"}
    live = {**STATUS, "conditions": [foreign, *STATUS["conditions"][::-1]], "more": 1}
    assert is_same(live, STATUS)
    assert not is_same({}, STATUS)
    changed = [{**condition, "message": "x"} for condition in STATUS["conditions"]]
    assert not is_same({**live, "conditions": changed}, STATUS)
    assert not is_same({**live, "endpoint": "x"}, STATUS)
    assert not is_same({**live, "decode": {**STATUS["decode"], "readyReplicas": 0}}, STATUS)


async def test_written_once() -> None:
    world = World()
    assert await world.write()
    assert not await world.write()
    assert world.kube.take_writes() == [("apply status", "BidiKVInference chat")]


async def test_an_older_crd_gets_what_it_knows_and_is_not_asked_again_and_again() -> None:
    world = World()
    world.use_old_crd()
    assert await world.write()
    assert world.resource["status"] == shorten(STATUS)
    assert "group" not in world.resource["status"]["decode"]
    world.kube.take_writes()
    for _ in range(3):
        assert not await world.write()
    assert world.kube.take_writes() == [], "neither writes nor refused attempts"


async def test_a_newer_crd_is_noticed_after_a_while() -> None:
    world = World()
    world.use_old_crd()
    await world.write()
    world.now = RETRY_SECONDS
    assert not await world.write(), "still the older one: nothing new to tell"
    world.is_old, world.now = False, 2 * RETRY_SECONDS
    assert await world.write()
    assert world.resource["status"] == STATUS


async def test_any_other_refusal_is_raised() -> None:
    world = World()
    world.kube.refuse = lambda verb, kind, name: InvalidError("status.conditions[0].reason: Invalid value")
    with pytest.raises(InvalidError):
        await world.write()
