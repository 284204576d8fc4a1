"""What the watches last said, by resource: the operator's picture of the cluster. No I/O.

Why not kopf's own indices: they cannot be corrected (a watch that breaks for longer than the API server's history
relists, and what was deleted meanwhile gets no event), a write's answer is known here before the watch repeats it,
and kopf's barrier for them costs the square of the number of objects at start (4200 objects: over 20 CPU seconds, not
done).

Objects are kept packed: a Deployment takes 30 kB as Python's dicts and 2 kB as compressed JSON, and 1,000 resources
have 3,000 of them. The first object of a kind is the dictionary of the others, which makes them five times smaller
again (16,000 children: 697 B to 146 B each). Unpacking costs 20 to 50 us, and only who looks pays.

Invariants: of two versions of an object the newer stays (resource versions are ordered within a kind), and what was
deleted does not come back by a list or an answer from before its deletion; an object is filed under one owner only;
nothing here is shared with callers for mutation.
"""

from __future__ import annotations

import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from bidikv_operator import names
from bidikv_operator.kinds import INFERENCE, POD, Kind

Object = dict[str, Any]

UNKNOWN_VERSION: Final = -1
PACKING_LEVEL: Final = 1
"""Of zlib; a higher level takes four times as long and saves a tenth."""


@dataclass(frozen=True, order=True, slots=True)
class Key:
    """One BidiKVInference."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ChildRef:
    """A child within its owner's namespace."""

    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.kind.kind} {self.name}"


def owner_key(kind: Kind, obj: Mapping[str, Any]) -> Key | None:
    """The resource that an object belongs to by its label (itself for the resource), or None."""
    metadata = obj["metadata"]
    owner = metadata["name"] if kind == INFERENCE else (metadata.get("labels") or {}).get(names.LABEL_OWNER)
    # Interned: the twenty objects of a resource name the same two strings.
    return Key(sys.intern(metadata["namespace"]), sys.intern(owner)) if owner else None


def trim(kind: Kind, obj: Mapping[str, Any]) -> Object:
    """The part of an object that is worth its memory."""
    metadata = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    trimmed = {**obj, "metadata": metadata}
    if kind == POD:
        trimmed.pop("spec", None)
    return trimmed


def version_of(obj: Mapping[str, Any]) -> int:
    """The resource version as a number; where a server gives something else the later call wins."""
    return _parse_version(str(obj["metadata"].get("resourceVersion", "")))


def _parse_version(text: str) -> int:
    return int(text) if text.isdigit() else UNKNOWN_VERSION


@dataclass(frozen=True, slots=True)
class _Filed:
    """An object as it is kept, with what filing asks of it at hand."""

    version: int
    uid: str | None
    packed: bytes


class _Packer:
    """Objects of one kind to compressed JSON and back."""

    def __init__(self) -> None:
        self._dictionary: bytes | None = None
        """JSON of the first object. It stays, as whatever was packed needs it."""

    def pack(self, obj: Object) -> bytes:
        text = msgspec.json.encode(obj)
        if self._dictionary is None:
            self._dictionary = text
        packer = zlib.compressobj(PACKING_LEVEL, zdict=self._dictionary)
        return packer.compress(text) + packer.flush()

    def unpack(self, packed: bytes) -> Object:
        assert self._dictionary is not None, "nothing was packed"
        obj: Object = msgspec.json.decode(zlib.decompressobj(zdict=self._dictionary).decompress(packed))
        return obj


class ObjectCache:
    """Resources, their children and their pods. Each call that returns objects unpacks them anew."""

    def __init__(self) -> None:
        self._objects: dict[Key, dict[ChildRef, _Filed]] = defaultdict(dict)
        self._packers: dict[Kind, _Packer] = defaultdict(_Packer)
        self._owners: dict[tuple[str, ChildRef], Key] = {}
        self._deleted: dict[tuple[str, ChildRef], int] = {}
        """Version of each deletion since the last ``correct`` of its kind, which forgets them."""

    def put(self, kind: Kind, obj: Mapping[str, Any]) -> Key | None:
        """File an object as watched or as answered to a write. Returns its owner."""
        ref, key = ChildRef(kind, obj["metadata"]["name"]), owner_key(kind, obj)
        namespace = sys.intern(obj["metadata"]["namespace"])
        previous = self._owners.get((namespace, ref))
        if self._is_outlived((namespace, ref), obj):
            return key
        if previous is not None:
            if version_of(obj) <= self._objects[previous][ref].version != UNKNOWN_VERSION:
                return previous
            if previous != key:
                self._remove(namespace, ref)
        if key is None:
            return None
        packed = self._packers[kind].pack(trim(kind, obj))
        self._objects[key][ref] = _Filed(version_of(obj), obj["metadata"].get("uid"), packed)
        self._owners[namespace, ref] = key
        return key

    def drop(self, kind: Kind, obj: Mapping[str, Any]) -> Key | None:
        """Forget a deleted object, unless another took its name already. Returns the owner it was filed under."""
        ref, namespace = ChildRef(kind, obj["metadata"]["name"]), obj["metadata"]["namespace"]
        self._deleted[namespace, ref] = max(version_of(obj), self._deleted.get((namespace, ref), UNKNOWN_VERSION))
        key = self._owners.get((namespace, ref))
        if key is None:
            return owner_key(kind, obj)
        if self._objects[key][ref].uid == obj["metadata"].get("uid"):
            self._remove(namespace, ref)
        return key

    def knows(self, kind: Kind, obj: Mapping[str, Any]) -> bool:
        """Whether this very version is filed: the watch repeats what a write's answer told."""
        ref, namespace = ChildRef(kind, obj["metadata"]["name"]), obj["metadata"]["namespace"]
        key = self._owners.get((namespace, ref))
        return key is not None and version_of(obj) == self._objects[key][ref].version != UNKNOWN_VERSION

    def resource(self, key: Key) -> Object | None:
        filed = self._objects.get(key, {}).get(ChildRef(INFERENCE, key.name))
        return self._packers[INFERENCE].unpack(filed.packed) if filed is not None else None

    def children(self, key: Key) -> dict[ChildRef, Object]:
        """Children proper: neither the resource nor pods."""
        found = self._objects.get(key, {})
        return {
            ref: self._packers[ref.kind].unpack(filed.packed)
            for ref, filed in found.items()
            if ref.kind not in (INFERENCE, POD)
        }

    def pods(self, key: Key) -> tuple[Object, ...]:
        found = self._objects.get(key, {})
        return tuple(self._packers[POD].unpack(filed.packed) for ref, filed in found.items() if ref.kind == POD)

    def keys(self) -> list[Key]:
        """Everything that may need work: resources, and owners of which only children are left."""
        return list(self._objects)

    def resources(self) -> list[Object]:
        """All resources that exist."""
        return [resource for key in self._objects if (resource := self.resource(key)) is not None]

    def correct(self, kind: Kind, namespace: str | None) -> Correction:
        """Make the cached objects of one kind equal to a live list of a namespace (None: of all)."""
        return Correction(self, kind, namespace)

    def _is_outlived(self, place: tuple[str, ChildRef], obj: Mapping[str, Any]) -> bool:
        """Whether this version of an object is from before its deletion."""
        return 0 <= version_of(obj) <= self._deleted.get(place, UNKNOWN_VERSION)

    def _remove(self, namespace: str, ref: ChildRef) -> None:
        key = self._owners.pop((namespace, ref))
        del self._objects[key][ref]
        if not self._objects[key]:
            del self._objects[key]


class Correction:
    """A comparison of the cache with a list, page by page: a whole list of Deployments would not fit beside the cache.

    What is newer than the list stays; events may arrive between the pages.
    """

    def __init__(self, cache: ObjectCache, kind: Kind, namespace: str | None) -> None:
        self._cache = cache
        self._kind = kind
        self._namespace = namespace
        self._seen: set[tuple[str, ChildRef]] = set()
        self._concerned: set[Key | None] = set()
        self._differing = 0

    def add(self, items: Iterable[Mapping[str, Any]]) -> None:
        """Objects that were listed."""
        cache = self._cache
        for obj in items:
            place = (obj["metadata"]["namespace"], ChildRef(self._kind, obj["metadata"]["name"]))
            self._seen.add(place)
            key = cache._owners.get(place)
            if cache._is_outlived(place, obj):
                continue  # its deletion was told while the list was on its way
            if key is None or cache._objects[key][place[1]].version < version_of(obj):
                self._concerned |= {key, cache.put(self._kind, obj)}
                self._differing += 1

    def finish(self, version: str) -> tuple[int, set[Key]]:
        """Drop what the list, taken at ``version``, did not hold.

        Returns how many objects differed, and the keys they belong to.
        """
        cache, listed_at = self._cache, _parse_version(version)
        for place, key in list(cache._owners.items()):
            if self._covers(place) and place not in self._seen and cache._objects[key][place[1]].version <= listed_at:
                cache._remove(*place)
                self._concerned.add(key)
                self._differing += 1
        for place, deleted_at in list(cache._deleted.items()):
            if self._covers(place) and deleted_at <= listed_at:
                del cache._deleted[place]  # whatever is listed from now on is from after it
        return self._differing, {key for key in self._concerned if key is not None}

    def _covers(self, place: tuple[str, ChildRef]) -> bool:
        return place[1].kind == self._kind and self._namespace in (None, place[0])
