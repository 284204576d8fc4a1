"""Kubernetes Events about changes of conditions, and about what the operator did by itself, for ``kubectl describe``.

Only a change of status or reason makes an Event, so their number is that of real transitions. One trouble makes one
Event: what several conditions say with one reason is told once, by the most particular of them. Posting is best
effort: an Event that the API server refuses is logged and lost, the condition still tells.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from bidikv_operator import names
from bidikv_operator.kinds import EVENT, Kind
from bidikv_operator.kube import ApiError, ConflictError

Object = dict[str, Any]
logger = logging.getLogger(__name__)

NOTE_LIMIT: Final = 1024
"""What the events.k8s.io API accepts."""
QUIET_REASONS: Final = frozenset(
    {
        names.REASON_NOT_CREATED,
        names.REASON_STARTING,
        names.REASON_VERIFYING,
        names.REASON_NO_REPORTS,
        names.REASON_DISABLED,
        names.REASON_WITHIN_BOUNDS,
        names.REASON_WAITING_FOR_LEAVING_PODS,
        names.REASON_RECYCLED,
    }
)
"""The ordinary course of things, told by conditions and not worth an Event, and what ``post_note`` tells each time."""
NORMAL_REASONS: Final = frozenset(
    {
        names.REASON_VALID,
        names.REASON_ALL_READY,
        names.REASON_ENOUGH_READY,
        names.REASON_ROLLING_OUT,
        names.REASON_ROLLED_OUT,
        names.REASON_WAITING_FOR_DELETION,
        names.REASON_PAUSED,
        names.REASON_READY,
        names.REASON_SCALED_TO_ZERO,
        names.REASON_VERIFIED,
        names.REASON_AT_MINIMUM,
        names.REASON_AT_MAXIMUM,
        names.REASON_AS_EXPECTED,
        names.REASON_TOKEN_ROTATED,
    }
)
SUMMARIES: Final = frozenset({names.PROGRESSING, names.DEGRADED})
"""Conditions that repeat the reasons of others."""


class EventClient(Protocol):
    async def create(self, kind: Kind, manifest: Object) -> Object: ...


def choose_transitions(
    before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The conditions that changed in a way worth telling."""
    known = {condition["type"]: condition for condition in before}
    told: list[Mapping[str, Any]] = []
    reasons: set[str] = set()
    # Stable: the summaries come last among conditions of one reason.
    for condition in sorted(after, key=lambda one: one["type"] in SUMMARIES):
        previous = known.get(condition["type"])
        if _is_worth_telling(previous, condition) and condition["reason"] not in reasons:
            told.append(condition)
        if condition["type"] != names.READY and (condition["status"] == "False" or condition["type"] in SUMMARIES):
            reasons.add(condition["reason"])
    return told


def _is_worth_telling(previous: Mapping[str, Any] | None, condition: Mapping[str, Any]) -> bool:
    name, status, reason = condition["type"], condition["status"], condition["reason"]
    if previous is not None and (previous["status"], previous["reason"]) == (status, reason):
        return False
    if reason in QUIET_REASONS:
        return False
    if name == names.READY:
        return bool(status == "True")  # else it repeats what is not ready
    if name == names.TRANSPORT_VERIFIED and status == "Unknown":
        return False
    if name == names.ACCEPTED and status == "True":
        return previous is not None  # that a new resource is valid is no news
    if name == names.DEGRADED and status == "False":
        return previous is not None and previous["status"] == "True"
    if name in names.ROLE_CONDITIONS.values() and status == "True":
        return previous is None or previous["status"] != "True"  # a rollout makes it waver between its reasons
    return True


def build_event(resource: Object, condition: Mapping[str, Any], *, identity: str, now: datetime) -> Object:
    """The Event of a transition. Equal ones of one instant have one name, so that a repeated post is refused."""
    told = (condition["type"], condition["status"], condition["reason"], condition["lastTransitionTime"])
    note = f"{condition['type']} is {condition['status']}: {condition['message']}"
    return _build(resource, condition["reason"], note, told=told, identity=identity, now=now)


def _build(resource: Object, reason: str, note: str, *, told: Iterable[str], identity: str, now: datetime) -> Object:
    metadata = resource["metadata"]
    digest = hashlib.sha256("|".join((metadata["uid"], *told)).encode()).hexdigest()[:16]
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"name": f"{metadata['name']}.{digest}", "namespace": metadata["namespace"]},
        "eventTime": now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": f"{names.GROUP}/operator",
        "reportingInstance": identity[:128],
        "action": "Reconcile",
        "reason": reason,
        "type": "Normal" if reason in NORMAL_REASONS else "Warning",
        "note": note[:NOTE_LIMIT],
        "regarding": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
    }


async def post_note(
    client: EventClient, resource: Object, reason: str, note: str, *, told: Iterable[str], identity: str
) -> None:
    """Tell of something that the operator did by itself.

    Args:
        reason: one of ``names``; Normal if it is in ``NORMAL_REASONS``, else a Warning.
        told: what makes this event another one than the last of its reason (a pod's uid, a time).
    """
    event = _build(resource, reason, note, told=(reason, *told), identity=identity, now=datetime.now(UTC))
    await _post(client, event)


async def post_events(
    client: EventClient,
    resource: Object,
    before: Iterable[Mapping[str, Any]],
    after: Iterable[Mapping[str, Any]],
    *,
    identity: str,
) -> None:
    for condition in choose_transitions(before, after):
        await _post(client, build_event(resource, condition, identity=identity, now=datetime.now(UTC)))


async def _post(client: EventClient, event: Object) -> None:
    try:
        await client.create(EVENT, event)
    except ConflictError:
        return  # posted before
    except ApiError as error:
        logger.warning("An Event could not be posted: %s", error)
