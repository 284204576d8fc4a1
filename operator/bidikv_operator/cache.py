"""What the watches last said, by resource: the operator's picture of the cluster. No I/O.

Why not kopf's own indices: they cannot be corrected (a watch that breaks for longer than the API server's history
relists, and what was deleted meanwhile gets no event), a write's answer is known here before the watch repeats it,
and kopf's barrier for them costs the square of the number of objects at start (4200 objects: over 20 CPU seconds, not
done).

Invariants: of two versions of an object the newer stays (resource versions are ordered within a kind), and what was
deleted does not come back by a list or an answer from before its deletion; an object is filed under one owner only;
nothing here is shared with callers for mutation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bidikv_operator import names
from bidikv_operator.kinds import INFERENCE, POD, Kind

Object = dict[str, Any]


@dataclass(frozen=True, order=True)
class Key:
    """One BidiKVInference."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class ChildRef:
    """A child within its owner's namespace."""

    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.kind.kind} {self.name}"


def owner_key(kind: Kind, obj: Mapping[str, Any]) -> Key | None:
    """The resource that an object belongs to by its label (itself for the resource), or None."""
    metadata = obj["metadata"]
    if kind == INFERENCE:
        return Key(metadata["namespace"], metadata["name"])
    owner = (metadata.get("labels") or {}).get(names.LABEL_OWNER)
    return Key(metadata["namespace"], owner) if owner else None


def trim(kind: Kind, obj: Mapping[str, Any]) -> Object:
    """The part of an object that is worth its memory."""
    metadata = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    trimmed = {**obj, "metadata": metadata}
    if kind == POD:
        trimmed.pop("spec", None)
    return trimmed


def version_of(obj: Mapping[str, Any]) -> int:
    """The resource version as a number; -1 where a server gives something else, so that the later call wins."""
    text = str(obj["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdigit() else -1


class ObjectCache:
    """Resources, their children and their pods."""

    def __init__(self) -> None:
        self._objects: dict[Key, dict[ChildRef, Object]] = defaultdict(dict)
        self._owners: dict[tuple[str, ChildRef], Key] = {}
        self._deleted: dict[tuple[str, ChildRef], int] = {}
        """Version of each deletion since the last ``correct`` of its kind, which forgets them."""

    def put(self, kind: Kind, obj: Mapping[str, Any]) -> Key | None:
        """File an object as watched or as answered to a write. Returns its owner."""
        ref, key = ChildRef(kind, obj["metadata"]["name"]), owner_key(kind, obj)
        namespace = obj["metadata"]["namespace"]
        previous = self._owners.get((namespace, ref))
        if self._is_outlived((namespace, ref), obj):
            return key
        if previous is not None:
            known = self._objects[previous][ref]
            if version_of(obj) < version_of(known):
                return previous
            if previous != key:
                self._remove(namespace, ref)
        if key is None:
            return None
        self._objects[key][ref] = trim(kind, obj)
        self._owners[namespace, ref] = key
        return key

    def drop(self, kind: Kind, obj: Mapping[str, Any]) -> Key | None:
        """Forget a deleted object, unless another took its name already. Returns the owner it was filed under."""
        ref, namespace = ChildRef(kind, obj["metadata"]["name"]), obj["metadata"]["namespace"]
        self._deleted[namespace, ref] = max(version_of(obj), self._deleted.get((namespace, ref), -1))
        key = self._owners.get((namespace, ref))
        if key is None:
            return owner_key(kind, obj)
        if self._objects[key][ref]["metadata"].get("uid") == obj["metadata"].get("uid"):
            self._remove(namespace, ref)
        return key

    def resource(self, key: Key) -> Object | None:
        return self._objects.get(key, {}).get(ChildRef(INFERENCE, key.name))

    def children(self, key: Key) -> dict[ChildRef, Object]:
        """Children proper: neither the resource nor pods."""
        found = self._objects.get(key, {})
        return {ref: obj for ref, obj in found.items() if ref.kind not in (INFERENCE, POD)}

    def pods(self, key: Key) -> tuple[Object, ...]:
        return tuple(obj for ref, obj in self._objects.get(key, {}).items() if ref.kind == POD)

    def keys(self) -> list[Key]:
        """Everything that may need work: resources, and owners of which only children are left."""
        return list(self._objects)

    def resources(self) -> list[Object]:
        """All resources that exist."""
        return [resource for key in self._objects if (resource := self.resource(key)) is not None]

    def correct(
        self, kind: Kind, namespace: str | None, items: Iterable[Mapping[str, Any]], version: str
    ) -> tuple[int, set[Key]]:
        """Make the cached objects of one kind equal to a live list of a namespace (None: of all), taken at ``version``.

        What is newer than the list stays. Returns how many objects differed, and the keys they belong to.
        """
        differing = 0
        concerned: set[Key | None] = set()
        seen = set()
        for obj in items:
            place = (obj["metadata"]["namespace"], ChildRef(kind, obj["metadata"]["name"]))
            seen.add(place)
            key = self._owners.get(place)
            if self._is_outlived(place, obj):
                continue  # its deletion was told while the list was on its way
            if key is None or version_of(self._objects[key][place[1]]) < version_of(obj):
                concerned |= {key, self.put(kind, obj)}
                differing += 1
        listed_at = int(version) if version.isdigit() else -1
        for place, key in list(self._owners.items()):
            is_listed_place = place[1].kind == kind and namespace in (None, place[0])
            if is_listed_place and place not in seen and version_of(self._objects[key][place[1]]) <= listed_at:
                self._remove(*place)
                concerned.add(key)
                differing += 1
        for place, deleted_at in list(self._deleted.items()):
            if place[1].kind == kind and namespace in (None, place[0]) and deleted_at <= listed_at:
                del self._deleted[place]  # whatever is listed from now on is from after it
        return differing, {key for key in concerned if key is not None}

    def _is_outlived(self, place: tuple[str, ChildRef], obj: Mapping[str, Any]) -> bool:
        """Whether this version of an object is from before its deletion."""
        return 0 <= version_of(obj) <= self._deleted.get(place, -1)

    def _remove(self, namespace: str, ref: ChildRef) -> None:
        key = self._owners.pop((namespace, ref))
        del self._objects[key][ref]
        if not self._objects[key]:
            del self._objects[key]
