"""The comparison of the cache with the API server."""

from __future__ import annotations

import pytest

from bidikv_operator import names
from bidikv_operator.cache import Key, ObjectCache
from bidikv_operator.kinds import INFERENCE, SERVICE, WATCHED_KINDS
from bidikv_operator.kube import TransientError
from bidikv_operator.resync import resync
from bidikv_operator.tests.samples import FakeKube, make_resource, store_resource

KEY = Key("team", "chat")


def service(name: str, owner: str | None = "chat") -> dict[str, object]:
    labels = {names.LABEL_OWNER: owner} if owner else {}
    return {"metadata": {"name": name, "namespace": "team", "labels": labels}}


@pytest.mark.parametrize("namespaces", [(), ("team",)])
async def test_completes_an_empty_cache(namespaces: tuple[str, ...]) -> None:
    kube, cache = FakeKube(), ObjectCache()
    store_resource(kube, make_resource())
    kube.store(SERVICE, service("chat"))
    kube.store(SERVICE, service("theirs", owner=None))
    found = await resync(kube, cache, namespaces)
    assert (found.count, set(found.keys)) == (2, {KEY})
    assert cache.resource(KEY) is not None
    assert [ref.name for ref in cache.children(KEY)] == ["chat"]
    assert [what for verb, what in kube.reads if verb == "list"] == [kind.kind for kind in WATCHED_KINDS]
    assert await resync(kube, cache, namespaces) == type(found)(0, frozenset())


async def test_other_namespaces_are_not_touched() -> None:
    kube, cache = FakeKube(), ObjectCache()
    store_resource(kube, make_resource())
    assert (await resync(kube, cache, ("elsewhere",))).count == 0
    assert cache.keys() == []


async def test_notices_what_no_watch_told() -> None:
    cache = ObjectCache()
    kube = FakeKube(cache)
    store_resource(kube, make_resource())
    kube.store(SERVICE, service("chat"))
    kube.cache = None
    kube.remove(SERVICE, "team", "chat")
    kube.remove(INFERENCE, "team", "chat")
    found = await resync(kube, cache, ())
    assert (found.count, set(found.keys)) == (2, {KEY}), "the key of a resource that is gone is named, to be forgotten"
    assert cache.keys() == []


async def test_a_failed_list_is_the_caller_s_to_repeat() -> None:
    class Away(FakeKube):
        async def pages(self, kind, namespace, *, label_selector=""):  # type: ignore[no-untyped-def]
            if kind == SERVICE:
                raise TransientError("away")
            async for page in super().pages(kind, namespace, label_selector=label_selector):
                yield page

    kube, cache = Away(), ObjectCache()
    store_resource(kube, make_resource())
    with pytest.raises(TransientError):
        await resync(kube, cache, ())
    assert cache.resource(KEY) is not None
