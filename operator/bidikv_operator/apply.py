"""Bring the children of one resource to what is desired. The only writer of children.

Order: labels of sets that lost them, what a scale-down should take, then as ``Desired`` yields, then sets of engines
that are to become empty, then orphans. Engines give way only to sets that the API server has accepted: one that it
refuses, or whose kind it does not serve, takes nothing from those that run. At rest nothing is written, not even a
no-op apply (``drift.py``). An object that somebody else owns is never taken over, one that is being deleted is waited
for, and a set of engines that has pods is emptied before it is deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Protocol

from bidikv_operator import names
from bidikv_operator.build import Desired
from bidikv_operator.cache import ChildRef, Key, ObjectCache
from bidikv_operator.drift import LastApplied, is_unchanged, mark_applied, record_applied
from bidikv_operator.kinds import CONTROLLER_REVISION, DEPLOYMENT, LEADER_WORKER_SET, POD, Kind
from bidikv_operator.kube import ApiError, ConflictError, NotFoundError, TransientError
from bidikv_operator.rollout.scale import PodCost, Scaling
from bidikv_operator.rollout.sets import find_input, find_lost_sets
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
    async def patch(self, kind: Kind, namespace: str, name: str, *, uid: str, change: Object) -> Object: ...
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


def _is_due(kind: Kind, manifest: Object, children: Mapping[ChildRef, Object]) -> bool:
    """Whether an object should be written now: a template is kept once a set of engines with it was accepted."""
    if kind != CONTROLLER_REVISION:
        return True
    return any(
        find_input(child) == find_input(manifest)
        for ref, child in children.items()
        if ref.kind in (DEPLOYMENT, LEADER_WORKER_SET)
    )


@dataclass
class Applier:
    """Remembers what it applied, per resource, until told to forget."""

    client: ChildClient
    cache: ObjectCache
    _memory: dict[Key, dict[ChildRef, LastApplied]] = field(default_factory=dict)

    async def find_lost(self, observed: Observed) -> Observed:
        """The same with sets of engines that somebody took our labels from; they have them again.

        Others than the current ones are not applied, so nothing else would give them back. Nothing is asked unless pods
        run of which no set is known.

        Raises:
            TransientError: the API server is overloaded or away.
        """
        owner = observed.resource["metadata"]
        children = dict(observed.children)
        for ref, labels in find_lost_sets(owner["name"], observed.children, observed.pods).items():
            if ref.kind in observed.missing_kinds:
                continue
            try:
                live = await self.client.get(ref.kind, owner["namespace"], ref.name)
                if choose_ownership(live, observed.resource) != "ours" or live["metadata"].get("deletionTimestamp"):
                    continue
                change, uid = {"metadata": {"labels": labels}}, live["metadata"]["uid"]
                children[ref] = await self.client.patch(ref.kind, owner["namespace"], ref.name, uid=uid, change=change)
            except (NotFoundError, ConflictError):
                continue  # its pods are about to follow it
            except TransientError:
                raise
            except ApiError as error:
                logger.warning("%s/%s: its labels could not be restored: %s", owner["namespace"], ref.name, error)
                continue
            logger.info("%s/%s: %s has its labels again", owner["namespace"], owner["name"], ref)
            self.cache.put(ref.kind, children[ref])
        return replace(observed, children=children)

    async def apply_all(self, observed: Observed, desired: Desired, scaling: Scaling) -> Applied:
        """Apply what differs, delete what is no longer desired.

        A child that is refused does not stop the others: the status then tells of each. Kinds that the cluster does
        not serve are left out, which the status tells as well.

        Raises:
            TransientError: the API server is overloaded or away; all else would fail too.
        """
        owner = observed.resource
        key = Key(owner["metadata"]["namespace"], owner["metadata"]["name"])
        memory = self._memory.setdefault(key, {})
        children = dict(observed.children)
        failures: list[Failure] = []
        waiting: list[ChildRef] = []
        wanted = {*desired.kept, *scaling.others}
        for cost in scaling.costs:
            await self._write_cost(key.namespace, cost)
        accepted = set[ChildRef]()
        for kind, manifest in desired:
            ref = ChildRef(kind, manifest["metadata"]["name"])
            wanted.add(ref)
            if kind in observed.missing_kinds or not _is_due(kind, manifest, children):
                continue
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
                accepted.add(ref)
        if accepted >= set(scaling.replicas):
            for ref, count in scaling.others.items():
                try:
                    children[ref] = await self._resize(ref, children[ref], count, owner)
                except TransientError:
                    raise
                except ApiError as error:
                    failures.append(Failure(ref, names.REASON_APPLY_FAILED, str(error)))
        for ref in [ref for ref in children if ref not in wanted]:
            try:
                if await self._delete_orphan(key, ref, children[ref], owner):
                    del children[ref]
                    memory.pop(ref, None)
            except TransientError:
                raise
            except ApiError as error:
                failures.append(Failure(ref, names.REASON_APPLY_FAILED, str(error)))
        return Applied(children=children, failures=tuple(failures), waiting=tuple(waiting))

    def forget(self, key: Key) -> None:
        """The resource is gone; the garbage collector takes its children."""
        self._memory.pop(key, None)

    async def _apply_child(
        self, ref: ChildRef, manifest: Object, live: Object | None, owner: Object, memory: dict[ChildRef, LastApplied]
    ) -> Object | Failure | None:
        """The child as it is now; None while an earlier one is being deleted."""
        if live is None:
            try:
                return self._record(ref, manifest, await self.client.apply_new(ref.kind, manifest), memory)
            except ConflictError:
                # The watches select our label: an object that does not carry it is not in the cache, yet has the name.
                live = await self._find(ref, manifest)
        try:
            return await self._apply_over(ref, manifest, live, owner, memory)
        except ConflictError:
            # Deleted since, and perhaps another one took its name.
            return await self._apply_over(ref, manifest, await self._find(ref, manifest), owner, memory)

    async def _find(self, ref: ChildRef, manifest: Object) -> Object | None:
        with suppress(NotFoundError):
            return await self.client.get(ref.kind, manifest["metadata"]["namespace"], ref.name)
        return None

    async def _apply_over(
        self, ref: ChildRef, manifest: Object, live: Object | None, owner: Object, memory: dict[ChildRef, LastApplied]
    ) -> Object | Failure | None:
        """As ``_apply_child``; writes to ``live`` itself and to no successor of it.

        Raises:
            ConflictError: it is gone.
        """
        if live is None:
            return self._record(ref, manifest, await self.client.apply(ref.kind, manifest), memory)
        ownership = choose_ownership(live, owner)
        if ownership == "foreign":
            return Failure(ref, names.REASON_NAME_TAKEN, NAME_TAKEN)
        if ownership == "previous" or live["metadata"].get("deletionTimestamp"):
            return None
        if is_unchanged(manifest, live, memory.get(ref)):
            memory.setdefault(ref, record_applied(manifest, live))
            return live
        if ref.kind == CONTROLLER_REVISION and live.get("data") != manifest["data"]:
            # Cannot be changed. It was not written for what its name says, or lost its label and so was not found.
            await self.client.delete(ref.kind, live["metadata"]["namespace"], ref.name, uid=live["metadata"]["uid"])
            return None
        pinned = {**manifest, "metadata": {**manifest["metadata"], "uid": live["metadata"]["uid"]}}
        return self._record(ref, manifest, await self.client.apply(ref.kind, pinned), memory)

    def _record(self, ref: ChildRef, manifest: Object, answer: Object, memory: dict[ChildRef, LastApplied]) -> Object:
        metadata = manifest["metadata"]
        logger.info("%s/%s: applied %s", metadata["namespace"], metadata["labels"][names.LABEL_OWNER], ref)
        memory[ref] = record_applied(manifest, answer)
        self.cache.put(ref.kind, answer)
        return answer

    async def _write_cost(self, namespace: str, cost: PodCost) -> None:
        """A scale-down goes on without: it then takes one pod as well as another."""
        annotations = {names.ANNOTATION_DELETION_COST: str(cost.cost)}
        try:
            change = {"metadata": {"annotations": annotations}}
            self.cache.put(POD, await self.client.patch(POD, namespace, cost.pod, uid=cost.uid, change=change))
        except TransientError:
            raise
        except ApiError as error:
            logger.warning("%s/%s: its deletion cost could not be written: %s", namespace, cost.pod, error)

    async def _resize(self, ref: ChildRef, live: Object, count: int, owner: Object) -> Object:
        """Change the replicas of a set and nothing else of it."""
        if live["spec"].get("replicas", 1) == count or choose_ownership(live, owner) != "ours":
            return live
        metadata = live["metadata"]
        try:
            answer = await self.client.patch(
                ref.kind, metadata["namespace"], ref.name, uid=metadata["uid"], change={"spec": {"replicas": count}}
            )
        except (NotFoundError, ConflictError):
            return live  # deleted meanwhile: its event is on the way
        logger.info("%s/%s: %s has %d replicas now", metadata["namespace"], owner["metadata"]["name"], ref, count)
        self._memory[Key(metadata["namespace"], owner["metadata"]["name"])].pop(ref, None)
        self.cache.put(ref.kind, answer)
        return answer

    async def _delete_orphan(self, key: Key, ref: ChildRef, live: Object, owner: Object) -> bool:
        if live["metadata"].get("deletionTimestamp") or choose_ownership(live, owner) != "ours":
            return False
        await self.client.delete(ref.kind, key.namespace, ref.name, uid=live["metadata"]["uid"])
        logger.info("%s: deleted %s, which is no longer desired", key, ref)
        self.cache.drop(ref.kind, live)
        return True
