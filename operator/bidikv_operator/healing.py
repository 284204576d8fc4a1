"""Engines that are ready for Kubernetes and that their peers cannot reach: which pod to delete, and why none.

An engine whose probes answer and whose lookup port or network is dead costs every turn that counts on it a deadline,
and Kubernetes does not notice. Its peers do (``engines/reach.py``). It is replaced, carefully, since a deleted engine
costs its sessions and minutes of start:

- one at a time per role, and only while all other pods of the role are ready and none is stopping;
- never while a rollout runs or the resource is paused or healing is disabled;
- never when all engines of a role are called unreachable: then the network is at fault, and new pods would be no
  better. The only engine of a role is deleted if the operator does not reach it either, although it did before;
- at most ``per_hour`` within an hour.

The hour is kept in ``status.healing``, so that the next leader does not begin with a full budget. The status is written
before the pod is deleted: a process that ends in between leaves an unused entry and no engine too few. At rest nothing
is written, as old entries are dropped with the next one only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

from bidikv_operator import names
from bidikv_operator.cache import Key
from bidikv_operator.engines.reach import is_fresh
from bidikv_operator.kinds import POD, Kind
from bidikv_operator.names import Role
from bidikv_operator.resolved import Resolved
from bidikv_operator.state import EngineFacts, Observed
from bidikv_operator.status.pods import read_readiness
from bidikv_runtime.contract import REACH_SECONDS

logger = logging.getLogger(__name__)

BUDGET_PERIOD: Final = timedelta(hours=1)
MAXIMUM_RECORDS: Final = 64
"""What ``status.healing.recycled`` may hold."""
TIME_FORMAT: Final = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class Recycle:
    """A pod to delete."""

    role: Role
    pod: str
    uid: str


@dataclass(frozen=True)
class Healing:
    """What follows from what the engines say of each other."""

    recycle: tuple[Recycle, ...] = ()
    recycled: tuple[Mapping[str, str], ...] = ()
    """For ``status.healing.recycled``, the pods to delete now among them."""
    reason: str | None = None
    """Of Degraded; None when all engines can be reached."""
    message: str = ""


def decide_healing(
    observed: Observed,
    resolved: Resolved,
    *,
    is_rolling: bool,
    now: datetime,
    remembered: Sequence[Mapping[str, str]] = (),
) -> Healing:
    """What to do about engines that cannot be reached.

    Args:
        observed: pods, and what the engines reported.
        resolved: the resource.
        is_rolling: whether pods are being replaced anyway.
        now: with a time zone.
        remembered: what this process has recorded, in case the status could not hold it.
    """
    records = _find_records(observed.resource, remembered)
    used = sum(now - _read_time(record) < BUDGET_PERIOD for record in records)
    recycle: list[Recycle] = []
    reasons: list[tuple[str, str]] = []
    for role in names.ENGINE_ROLES:
        engines = [one for one in observed.engines if one.role == role]
        pods = [pod for pod in observed.pods if (pod["metadata"].get("labels") or {}).get(names.LABEL_ROLE) == role]
        accused = _find_accused(engines, pods, resolved.healing.unreachable_seconds)
        if not accused:
            if _is_being_replaced(role, pods, resolved, records, now):
                text = f"a {role} engine that its peers could not reach was deleted; another one takes its place"
                reasons.append((names.REASON_RECYCLED, text))
            continue
        hindrance = _find_hindrance(engines, accused, pods, resolved, is_rolling=is_rolling, used=used + len(recycle))
        if hindrance is None:
            chosen = max(accused, key=lambda one: (one.unreachable_seconds, one.uid))
            recycle.append(Recycle(role, chosen.pod, chosen.uid))
            text = f"a {role} engine that its peers cannot reach is deleted; another one takes its place"
            reasons.append((names.REASON_RECYCLED, text))
        else:
            count = len({one.uid for one in accused})
            subject = f"{count} {role} {'engine' if count == 1 else 'engines'} cannot be reached by the others"
            reasons.append((names.REASON_UNREACHABLE, f"{subject}: {hindrance}"))
    if recycle:
        recent = [record for record in records if now - _read_time(record) < BUDGET_PERIOD]
        added = [{"role": one.role, "time": now.astimezone(UTC).strftime(TIME_FORMAT)} for one in recycle]
        records = (*recent, *added)[-MAXIMUM_RECORDS:]
    if not reasons and (told := _find_told(observed, resolved)) is not None:
        reasons.append(told)
    # What needs a person comes before what heals by itself.
    reasons.sort(key=lambda item: item[0] != names.REASON_UNREACHABLE)
    return Healing(
        recycle=tuple(recycle),
        recycled=tuple(records),
        reason=reasons[0][0] if reasons else None,
        message="; ".join(text for _, text in reasons),
    )


def _find_told(observed: Observed, resolved: Resolved) -> tuple[str, str] | None:
    """What an earlier leader told of engines that cannot be reached, while this one cannot know better yet."""
    needed = REACH_SECONDS + resolved.healing.unreachable_seconds
    if not all(one.known_seconds < needed for one in observed.engines):
        return None
    for condition in (observed.resource.get("status") or {}).get("conditions") or []:
        if condition["type"] == names.DEGRADED and condition["reason"] == names.REASON_UNREACHABLE:
            return condition["reason"], condition["message"]
    return None


def _find_accused(
    engines: Sequence[EngineFacts], pods: Sequence[Mapping[str, Any]], seconds: float
) -> list[EngineFacts]:
    ready = {pod["metadata"]["uid"] for pod in pods if _is_ready(pod)}
    return [one for one in engines if one.uid in ready and 0 < one.unreachable_seconds >= seconds]


def _find_hindrance(
    engines: Sequence[EngineFacts],
    accused: Sequence[EngineFacts],
    pods: Sequence[Mapping[str, Any]],
    resolved: Resolved,
    *,
    is_rolling: bool,
    used: int,
) -> str | None:
    """Why no pod is deleted, with what to do; None when one may be."""
    healing = resolved.healing
    running = {one.uid for one in engines}
    if running == {one.uid for one in accused} and (
        len(running) > 1 or not _is_dead(engines, healing.unreachable_seconds)
    ):
        return (
            "these are all of the role, so the network is at fault rather than they; let all ports be open between the "
            "engines (NetworkPolicies; with EFA also the security group, for itself)"
        )
    if not healing.enabled:
        return "delete the pods, or set spec.healing.mode to Enabled"
    if resolved.paused:
        return "nothing is done while spec.paused is true"
    if is_rolling:
        return "this waits until the rollout is through"
    if not all(_is_ready(pod) for pod in pods):
        return "this waits until the role's other pods are ready and none is stopping"
    if used >= min(healing.per_hour, MAXIMUM_RECORDS):
        return f"spec.healing.maximumPerHour ({healing.per_hour}) is used up, see the engines' logs for what is wrong"
    return None


def _is_dead(engines: Sequence[EngineFacts], seconds: float) -> bool:
    """Whether the operator itself does not reach an engine any more that it did reach."""
    return all(
        one.report is not None and not is_fresh(one) and one.fault == "silent" and one.age_seconds >= seconds
        for one in engines
    )


def _is_being_replaced(
    role: Role,
    pods: Sequence[Mapping[str, Any]],
    resolved: Resolved,
    records: Sequence[Mapping[str, str]],
    now: datetime,
) -> bool:
    """Whether a pod was deleted within the hour and the role is not complete since."""
    last = max((_read_time(record) for record in records if record["role"] == role), default=None)
    if last is None or now - last >= BUDGET_PERIOD:
        return False
    engine = resolved.engine(role)
    return sum(map(_is_ready, pods)) < engine.replicas * engine.nodes


def _is_ready(pod: Mapping[str, Any]) -> bool:
    return not pod["metadata"].get("deletionTimestamp") and read_readiness(pod).is_ready


def _find_records(
    resource: Mapping[str, Any], remembered: Sequence[Mapping[str, str]]
) -> tuple[Mapping[str, str], ...]:
    told = ((resource.get("status") or {}).get("healing") or {}).get("recycled") or []
    # An older CRD drops the field; then memory has more to say.
    return tuple(remembered if len(remembered) > len(told) else told)


def _read_time(record: Mapping[str, str]) -> datetime:
    return datetime.strptime(record["time"], TIME_FORMAT).replace(tzinfo=UTC)


class DeleteClient(Protocol):
    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None: ...


@dataclass
class _Past:
    """What this process did for one resource."""

    owner_uid: str
    recycled: tuple[Mapping[str, str], ...] = ()
    deleted: set[str] = field(default_factory=set)
    """Uids of pods. The watch may tell of a deletion later than something else asks for the next pass."""


@dataclass
class Healer:
    """Decides, and deletes what was decided once the status tells of it."""

    client: DeleteClient
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    _past: dict[Key, _Past] = field(default_factory=dict)

    def decide(self, key: Key, observed: Observed, resolved: Resolved, *, is_rolling: bool) -> Healing:
        """See ``decide_healing``."""
        past, now = self._past.get(key), self.clock()
        if past is None or past.owner_uid != resolved.uid:
            past = self._past[key] = _Past(resolved.uid)
        past.deleted &= {pod["metadata"]["uid"] for pod in observed.pods}
        pods = tuple(
            _mark_leaving(pod, now) if pod["metadata"]["uid"] in past.deleted else pod for pod in observed.pods
        )
        return decide_healing(
            replace(observed, pods=pods), resolved, is_rolling=is_rolling, now=now, remembered=past.recycled
        )

    async def recycle(self, key: Key, healing: Healing) -> None:
        """Delete the pods; to be called after the status was written.

        Raises:
            ApiError: a pod could not be deleted; its place in the budget is used.
        """
        if not healing.recycle:
            return
        past = self._past[key]
        past.recycled = healing.recycled
        for one in healing.recycle:
            logger.warning("%s: deleting %s, a %s engine that its peers cannot reach", key, one.pod, one.role)
            await self.client.delete(POD, key.namespace, one.pod, uid=one.uid)
            past.deleted.add(one.uid)

    def forget(self, key: Key) -> None:
        """The resource is gone."""
        self._past.pop(key, None)


def _mark_leaving(pod: dict[str, Any], now: datetime) -> dict[str, Any]:
    return {**pod, "metadata": {"deletionTimestamp": now.strftime(TIME_FORMAT), **pod["metadata"]}}
