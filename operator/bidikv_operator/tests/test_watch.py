"""kopf is set up as a watch engine that writes nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import kopf
import pytest
import yarl
from kopf._core.intents import registries  # the registry has no public view of its handlers

from bidikv_operator import names
from bidikv_operator.cache import Key, ObjectCache
from bidikv_operator.kinds import CHILD_KINDS, INFERENCE, POD, SERVICE, WATCHED_KINDS
from bidikv_operator.tests.samples import make_resource
from bidikv_operator.watch import Forgetful, WatchAges, build_registry, build_settings, kopf_selector


@pytest.fixture
def registry() -> kopf.OperatorRegistry:
    return build_registry(ObjectCache(), lambda key: None, WatchAges())


def test_no_handler_makes_kopf_write(registry: registries.OperatorRegistry) -> None:
    """Change handlers, timers, daemons and webhooks are what makes kopf store annotations and finalizers."""
    assert not registry._changing.get_all_handlers()
    assert not registry._spawning.get_all_handlers()
    assert not registry._webhooks.get_all_handlers()
    watched = {handler.selector.plural for handler in registry._watching.get_all_handlers() if handler.selector}
    assert watched == {kind.plural for kind in WATCHED_KINDS}
    assert not registry._indexing.get_all_handlers(), "their barrier costs the square of the number of objects"


def test_the_default_registry_stays_empty(registry: registries.OperatorRegistry) -> None:
    assert not kopf.get_default_registry()._watching.get_all_handlers()


def test_settings() -> None:
    settings = build_settings()
    assert settings.posting.enabled is False
    assert settings.peering.standalone is True
    assert settings.scanning.disabled is True
    selectors = settings.watching.label_selectors
    for kind in (*CHILD_KINDS, POD):
        assert selectors[kopf_selector(kind)] == names.LABEL_OWNER
    assert len(selectors) == len(CHILD_KINDS) + 1, "the resource itself is watched without a selector"


async def test_events_fill_the_cache_and_name_the_owner() -> None:
    cache, named = ObjectCache(), list[Key]()
    registry: registries.OperatorRegistry = build_registry(cache, named.append, WatchAges())
    handlers: dict[str | None, Any] = {
        handler.selector.plural: handler.fn for handler in registry._watching.get_all_handlers() if handler.selector
    }
    resource = make_resource()
    await handlers[INFERENCE.plural](event={"type": "ADDED", "object": resource})
    assert cache.resource(Key("team", "chat")) == resource
    await handlers[INFERENCE.plural](event={"type": "DELETED", "object": resource})
    assert cache.resource(Key("team", "chat")) is None
    stray = {"metadata": {"name": "x", "namespace": "team"}}
    await handlers[POD.plural](event={"type": None, "object": stray})
    assert named == [Key("team", "chat")] * 2


async def test_the_echo_of_a_write_names_nothing() -> None:
    cache, named = ObjectCache(), list[Key]()
    registry: registries.OperatorRegistry = build_registry(cache, named.append, WatchAges())
    handlers: dict[str | None, Any] = {
        handler.selector.plural: handler.fn for handler in registry._watching.get_all_handlers() if handler.selector
    }
    labels = {names.LABEL_OWNER: "chat"}
    service = {"metadata": {"name": "chat", "namespace": "team", "resourceVersion": "7", "labels": labels}}
    cache.put(SERVICE, service)  # the answer to an apply
    await handlers[SERVICE.plural](event={"type": "ADDED", "object": service})
    assert not named
    newer = {"metadata": {**service["metadata"], "resourceVersion": "8"}}
    await handlers[SERVICE.plural](event={"type": "MODIFIED", "object": newer})
    assert named == [Key("team", "chat")]


@pytest.mark.parametrize(("told", "expected"), [(3, []), (2, [Key("team", "chat")])])
async def test_the_echo_of_a_status_names_the_resource_if_it_holds_another_spec(told: int, expected: list[Key]) -> None:
    """Somebody changed the spec between the look at it and the write of the status."""
    cache, named = ObjectCache(), list[Key]()
    registry: registries.OperatorRegistry = build_registry(cache, named.append, WatchAges())
    handlers: dict[str | None, Any] = {
        handler.selector.plural: handler.fn for handler in registry._watching.get_all_handlers() if handler.selector
    }
    answer = {**make_resource(), "status": {"observedGeneration": told}}
    cache.put(INFERENCE, answer)
    await handlers[INFERENCE.plural](event={"type": "MODIFIED", "object": answer})
    assert named == expected


async def test_kopf_remembers_no_object() -> None:
    memories = Forgetful()
    memory = await memories.recall({"metadata": {"uid": "u"}}, memobase=kopf.Memo(), noticed_by_listing=True)
    assert memory.noticed_by_listing
    assert list(memories.iter_all_memories()) == []
    await memories.forget({"metadata": {"uid": "u"}})


async def test_age_of_the_oldest_watch() -> None:
    now = [100.0]
    ages = WatchAges(clock=lambda: now[0])
    (record,) = ages.build_trace().on_request_end

    async def request(url: str, status: int = 200) -> None:
        params = SimpleNamespace(url=yarl.URL(url), response=SimpleNamespace(status=status))
        await record(None, SimpleNamespace(), params)  # type: ignore[arg-type]

    assert ages.oldest_seconds() == 0
    await request("https://api/api/v1/pods?watch=true")
    now[0] += 10
    await request("https://api/apis/apps/v1/deployments?watch=true")
    await request("https://api/apis/apps/v1/deployments?limit=5")
    assert ages.oldest_seconds() == 10
    await request("https://api/api/v1/pods?watch=true", status=500)
    assert ages.oldest_seconds() == 10
    await request("https://api/api/v1/pods?watch=true")
    assert ages.oldest_seconds() == 0


async def test_waiting_for_the_watches() -> None:
    ages = WatchAges()
    waiting = asyncio.create_task(ages.wait_for(2))
    ages.record("/api/v1/pods")
    ages.record("/api/v1/pods")
    await asyncio.sleep(0)
    assert not waiting.done()
    ages.record("/api/v1/services")
    async with asyncio.timeout(10):
        await waiting
