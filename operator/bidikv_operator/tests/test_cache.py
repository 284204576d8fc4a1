"""The cache's invariants."""

from __future__ import annotations

from typing import Any

from bidikv_operator import names
from bidikv_operator.cache import ChildRef, Key, ObjectCache
from bidikv_operator.kinds import INFERENCE, POD, SERVICE, Kind
from bidikv_operator.tests.samples import make_resource

KEY = Key("team", "chat")


def service(version: int, *, owner: str | None = "chat", uid: str = "u1", name: str = "chat") -> dict[str, Any]:
    labels = {names.LABEL_OWNER: owner} if owner else {}
    metadata = {"name": name, "namespace": "team", "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"metadata": {**metadata, "managedFields": ["much"]}, "spec": {"v": version}}


def correct(
    cache: ObjectCache, kind: Kind, namespace: str | None, items: list[dict[str, Any]], version: str
) -> tuple[int, set[Key]]:
    """Against a list in two pages."""
    correction = cache.correct(kind, namespace)
    correction.add(items[:1])
    correction.add(items[1:])
    return correction.finish(version)


def test_objects_are_found_by_owner() -> None:
    cache = ObjectCache()
    assert cache.put(INFERENCE, make_resource()) == KEY
    assert cache.put(SERVICE, service(1)) == KEY
    assert cache.put(POD, service(1, name="p")) == KEY
    assert cache.put(SERVICE, service(1, owner=None, name="other")) is None
    assert set(cache.children(KEY)) == {ChildRef(SERVICE, "chat")}
    assert [pod["metadata"]["name"] for pod in cache.pods(KEY)] == ["p"]
    resource = cache.resource(KEY)
    assert resource is not None
    assert cache.resources() == [resource]


def test_what_costs_memory_is_dropped() -> None:
    cache = ObjectCache()
    cache.put(SERVICE, service(1))
    cache.put(POD, service(1, name="p"))
    assert "managedFields" not in cache.children(KEY)[ChildRef(SERVICE, "chat")]["metadata"]
    assert "spec" not in cache.pods(KEY)[0]


def test_an_older_version_never_replaces_a_newer_one() -> None:
    cache = ObjectCache()
    cache.put(SERVICE, service(9))  # the answer to our own write
    cache.put(SERVICE, service(8))  # the watch is behind
    assert cache.children(KEY)[ChildRef(SERVICE, "chat")]["spec"] == {"v": 9}
    cache.put(SERVICE, service(10))
    assert cache.children(KEY)[ChildRef(SERVICE, "chat")]["spec"] == {"v": 10}


def test_a_late_deletion_does_not_remove_the_successor() -> None:
    cache = ObjectCache()
    cache.put(SERVICE, service(5, uid="new"))
    assert cache.drop(SERVICE, service(4, uid="old")) == KEY
    assert cache.children(KEY)
    assert cache.drop(SERVICE, service(5, uid="new")) == KEY
    assert not cache.children(KEY)


def test_a_deletion_of_the_unknown_names_its_owner() -> None:
    assert ObjectCache().drop(SERVICE, service(1)) == KEY
    assert ObjectCache().drop(SERVICE, service(1, owner=None)) is None


def test_a_changed_owner_label_moves_the_object() -> None:
    cache = ObjectCache()
    cache.put(SERVICE, service(1))
    assert cache.put(SERVICE, service(2, owner="other")) == Key("team", "other")
    assert not cache.children(KEY)
    assert cache.put(SERVICE, service(3, owner=None)) is None
    assert not cache.children(Key("team", "other"))


def test_correction_by_a_live_list() -> None:
    cache = ObjectCache()
    cache.put(SERVICE, service(1, name="gone"))
    cache.put(SERVICE, service(2, name="stale"))
    cache.put(SERVICE, service(3, name="same"))
    cache.put(SERVICE, service(30, name="newer"))  # created after the list was taken
    cache.put(POD, service(1, name="pod"))  # of another kind: not concerned
    live = [service(7, name="stale"), service(3, name="same"), service(8, name="missed", owner="other")]
    assert correct(cache, SERVICE, "team", live, "20") == (3, {KEY, Key("team", "other")})
    versions = {ref.name: obj["spec"]["v"] for ref, obj in cache.children(KEY).items()}
    assert versions == {"stale": 7, "same": 3, "newer": 30}
    assert set(cache.children(Key("team", "other"))) == {ChildRef(SERVICE, "missed")}
    assert cache.pods(KEY)
    assert correct(cache, SERVICE, "team", live, "20") == (0, set())


def test_correction_concerns_the_listed_namespace_only() -> None:
    cache = ObjectCache()
    cache.put(SERVICE, service(1))
    assert correct(cache, SERVICE, "elsewhere", [], "20") == (0, set())
    assert correct(cache, SERVICE, None, [], "20") == (1, {KEY})
    assert cache.keys() == []


def test_what_was_deleted_while_a_list_was_on_its_way_stays_deleted() -> None:
    cache = ObjectCache()
    cache.put(SERVICE, service(5))
    listed = [service(5)]  # taken at version 6
    assert cache.drop(SERVICE, service(8)) == KEY
    assert correct(cache, SERVICE, None, listed, "6") == (0, set())
    assert cache.keys() == []
    cache.drop(SERVICE, service(5))  # the operator itself forgets what it had seen
    cache.put(SERVICE, service(7))  # the late answer to a write from before the deletion
    assert cache.keys() == []
    assert correct(cache, SERVICE, None, [service(9, uid="new")], "10") == (1, {KEY})  # recreated, and no event told


def test_deletions_are_not_remembered_beyond_the_next_list() -> None:
    cache = ObjectCache()
    for n in range(100):
        cache.drop(POD, service(n, name=f"p{n}"))
    correct(cache, POD, "elsewhere", [], "200")
    correct(cache, SERVICE, None, [], "200")
    assert len(cache._deleted) == 100
    correct(cache, POD, None, [], "200")
    assert not cache._deleted


def test_a_version_that_is_filed_is_known() -> None:
    cache = ObjectCache()
    assert not cache.knows(SERVICE, service(5))
    cache.put(SERVICE, service(5))
    assert cache.knows(SERVICE, service(5))
    assert not cache.knows(SERVICE, service(4))
    assert not cache.knows(SERVICE, service(6))
    odd = {"metadata": {**service(5)["metadata"], "name": "odd", "resourceVersion": "x"}}
    cache.put(SERVICE, odd)
    assert not cache.knows(SERVICE, odd), "versions that cannot be compared prove nothing"


def test_what_is_returned_is_the_caller_s_own() -> None:
    cache = ObjectCache()
    cache.put(INFERENCE, make_resource())
    resource = cache.resource(KEY)
    assert resource is not None
    resource["spec"].clear()
    assert cache.resource(KEY) == make_resource()
