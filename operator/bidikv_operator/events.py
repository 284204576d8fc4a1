"""Kubernetes Events about changes of conditions, for ``kubectl describe``.

Only a change of status or reason makes an Event, so their number is that of real transitions. Posting is best effort:
an Event that the API server refuses is logged and lost, the condition still tells.
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
QUIET_REASONS: Final = frozenset({names.REASON_NOT_CREATED, names.REASON_STARTING, names.REASON_ROLLING_OUT})
"""The ordinary course of things: told by conditions, not worth an Event."""
NORMAL_REASONS: Final = frozenset(
    {
        names.REASON_VALID,
        names.REASON_ALL_READY,
        names.REASON_ROLLED_OUT,
        names.REASON_READY,
        names.REASON_SCALED_TO_ZERO,
    }
)


class EventClient(Protocol):
    async def create(self, kind: Kind, manifest: Object) -> Object: ...


def choose_transitions(
    before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The conditions that changed in a way worth telling.

    Ready repeats the reason of what is not ready; only its becoming True is told.
    """
    known = {condition["type"]: (condition["status"], condition["reason"]) for condition in before}
    return [
        condition
        for condition in after
        if known.get(condition["type"]) != (condition["status"], condition["reason"])
        and condition["reason"] not in QUIET_REASONS
        and not (condition["type"] == names.READY and condition["status"] != "True")
    ]


def build_event(resource: Object, condition: Mapping[str, Any], *, identity: str, now: datetime) -> Object:
    """One Event. Equal transitions of one instant have one name, so that a repeated post is refused."""
    metadata = resource["metadata"]
    told = "|".join(
        (metadata["uid"], condition["type"], condition["status"], condition["reason"], condition["lastTransitionTime"])
    )
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {
            "name": f"{metadata['name']}.{hashlib.sha256(told.encode()).hexdigest()[:16]}",
            "namespace": metadata["namespace"],
        },
        "eventTime": now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": f"{names.GROUP}/operator",
        "reportingInstance": identity[:128],
        "action": "Reconcile",
        "reason": condition["reason"],
        "type": "Normal" if condition["reason"] in NORMAL_REASONS else "Warning",
        "note": f"{condition['type']} is {condition['status']}: {condition['message']}"[:NOTE_LIMIT],
        "regarding": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
    }


async def post_events(
    client: EventClient,
    resource: Object,
    before: Iterable[Mapping[str, Any]],
    after: Iterable[Mapping[str, Any]],
    *,
    identity: str,
) -> None:
    for condition in choose_transitions(before, after):
        event = build_event(resource, condition, identity=identity, now=datetime.now(UTC))
        try:
            await client.create(EVENT, event)
        except ConflictError:
            continue  # posted before
        except ApiError as error:
            logger.warning("An Event could not be posted: %s", error)
