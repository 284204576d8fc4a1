"""Bring the children of one resource to what is desired. The only writer of children.

Order: as ``Desired`` yields, then orphans. At rest nothing is written, not even a no-op apply (``drift.py``). An object
that somebody else owns is never taken over, and one that is being deleted is waited for.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from bidikv_operator import names
from bidikv_operator.build import Desired
from bidikv_operator.cache import ChildRef, Key, ObjectCache
from bidikv_operator.drift import LastApplied, is_unchanged, mark_applied, record_applied
from bidikv_operator.kinds import Kind
from bidikv_operator.kube import ApiError, ConflictError, NotFoundError, TransientError
from bidikv_operator.state import Applied, Failure, Observed

Object = dict[str, Any]
Ownership = Literal["ours", "previous", "foreign"]
logger = logging.getLogger(__name__)

NAME_TAKEN: Final = (
    "exists and belongs to something else; delete or rename it, or recreate this resource under another name"
)


class ChildClient(Protocol):
    """What this module needs of the API server (``kube.Kube``)."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Object: ...
    async def apply(self, kind: Kind, manifest: Object) -> Object: ...
    async def apply_new(self, kind: Kind, manifest: Object) -> Object: ...
    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None: ...


def choose_ownership(live: Object, owner: Object) -> Ownership:
    """Whose child a live object is, seen from the resource ``owner``.

    ``previous``: of a deleted resource of the same name, soon to be collected. An object without a controller but
    with our labels is ours: it was orphaned on purpose, or somebody removed the reference.
    """
    metadata = live["metadata"]
    controller = next((ref for ref in metadata.get("ownerReferences") or [] if ref.get("controller")), None)
    own = owner["metadata"]
    if controller is None:
        labels = metadata.get("labels") or {}
        managed = labels.get(names.LABEL_MANAGED_BY) == names.MANAGED_BY
        return "ours" if managed and labels.get(names.LABEL_OWNER) == own["name"] else "foreign"
    if controller["uid"] == own["uid"]:
        return "ours"
    is_same_name = controller["kind"] == names.KIND and controller["name"] == own["name"]
    return "previous" if is_same_name else "foreign"


@dataclass
class Applier:
    """Remembers what it applied, per resource, until told to forget."""

    client: ChildClient
    cache: ObjectCache
    _memory: dict[Key, dict[ChildRef, LastApplied]] = field(default_factory=dict)

    async def apply_all(self, observed: Observed, desired: Desired) -> Applied:
        """Apply what differs, delete what is no longer desired.

        A child that is refused does not stop the others: the status then tells of each.

        Raises:
            TransientError: the API server is overloaded or away; all else would fail too.
        """
        owner = observed.resource
        key = Key(owner["metadata"]["namespace"], owner["metadata"]["name"])
        memory = self._memory.setdefault(key, {})
        children = dict(observed.children)
        failures: list[Failure] = []
        waiting: list[ChildRef] = []
        wanted = set()
        for kind, manifest in desired:
            ref = ChildRef(kind, manifest["metadata"]["name"])
            wanted.add(ref)
            try:
                outcome = await self._apply_child(ref, mark_applied(manifest), children.get(ref), owner, memory)
            except TransientError:
                raise
            except ApiError as error:
                memory.pop(ref, None)
                failures.append(Failure(ref, names.REASON_APPLY_FAILED, str(error)))
                continue
            if isinstance(outcome, Failure):
                failures.append(outcome)
            elif outcome is None:
                waiting.append(ref)
            else:
                children[ref] = outcome
        for ref in [ref for ref in children if ref not in wanted]:
            if await self._delete_orphan(key, ref, children[ref], owner):
                del children[ref]
                memory.pop(ref, None)
        return Applied(children=children, failures=tuple(failures), waiting=tuple(waiting))

    def forget(self, key: Key) -> None:
        """The resource is gone; the garbage collector takes its children."""
        self._memory.pop(key, None)

    async def _apply_child(
        self, ref: ChildRef, manifest: Object, live: Object | None, owner: Object, memory: dict[ChildRef, LastApplied]
    ) -> Object | Failure | None:
        """The child as it is now; None while an earlier one is being deleted."""
        namespace = manifest["metadata"]["namespace"]
        if live is None:
            try:
                return self._record(ref, manifest, await self.client.apply_new(ref.kind, manifest), memory)
            except ConflictError:
                # The watches select our label: an object that does not carry it is not in the cache, yet has the name.
                with suppress(NotFoundError):
                    live = await self.client.get(ref.kind, namespace, ref.name)
        if live is not None:
            ownership = choose_ownership(live, owner)
            if ownership == "foreign":
                return Failure(ref, names.REASON_NAME_TAKEN, NAME_TAKEN)
            if ownership == "previous" or live["metadata"].get("deletionTimestamp"):
                return None
            if is_unchanged(manifest, live, memory.get(ref)):
                memory.setdefault(ref, record_applied(manifest, live))
                return live
        return self._record(ref, manifest, await self.client.apply(ref.kind, manifest), memory)

    def _record(self, ref: ChildRef, manifest: Object, answer: Object, memory: dict[ChildRef, LastApplied]) -> Object:
        metadata = manifest["metadata"]
        logger.info("%s/%s: applied %s", metadata["namespace"], metadata["labels"][names.LABEL_OWNER], ref)
        memory[ref] = record_applied(manifest, answer)
        self.cache.put(ref.kind, answer)
        return answer

    async def _delete_orphan(self, key: Key, ref: ChildRef, live: Object, owner: Object) -> bool:
        if live["metadata"].get("deletionTimestamp") or choose_ownership(live, owner) != "ours":
            return False
        await self.client.delete(ref.kind, key.namespace, ref.name, uid=live["metadata"]["uid"])
        logger.info("%s: deleted %s, which is no longer desired", key, ref)
        self.cache.drop(ref.kind, live)
        return True
