"""Which transitions make an Event, and what it looks like."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from bidikv_operator.events import build_event, choose_transitions, post_events
from bidikv_operator.kinds import EVENT
from bidikv_operator.kube import ConflictError, ForbiddenError
from bidikv_operator.tests.samples import FakeKube, make_resource

NOW = datetime(2026, 1, 2, 3, 4, 5, 6, UTC)


def condition(name: str, status: str, reason: str, message: str = "m") -> dict[str, Any]:
    time = "2026-01-02T03:04:05Z"
    return {"type": name, "status": status, "reason": reason, "message": message, "lastTransitionTime": time}


READY = condition("Ready", "True", "Ready")


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ([], [condition("Accepted", "True", "Valid")], True),
        ([READY], [READY], False),
        ([READY], [{**READY, "message": "other words"}], False),
        (
            [condition("PrefillReady", "False", "Starting")],
            [condition("PrefillReady", "True", "AllReplicasReady")],
            True,
        ),
        ([], [condition("PrefillReady", "False", "Starting")], False),
        ([], [condition("PrefillReady", "False", "Unschedulable")], True),
        ([READY], [condition("Ready", "False", "Unschedulable")], False),
        ([condition("Ready", "False", "Starting")], [READY], True),
    ],
)
def test_transitions(before: list[dict[str, Any]], after: list[dict[str, Any]], told: bool) -> None:
    assert bool(choose_transitions(before, after)) is told


def test_event_form() -> None:
    event = build_event(
        make_resource(), condition("DecodeReady", "False", "OutOfMemory", "x" * 5000), identity="op", now=NOW
    )
    assert event["type"] == "Warning"
    assert event["reason"] == "OutOfMemory"
    assert event["eventTime"] == "2026-01-02T03:04:05.000006Z"
    assert event["regarding"]["uid"] == make_resource()["metadata"]["uid"]
    assert event["note"].startswith("DecodeReady is False: xxx")
    assert len(event["note"]) == 1024
    assert build_event(make_resource(), READY, identity="op", now=NOW)["type"] == "Normal"


async def test_posting_is_best_effort() -> None:
    kube = FakeKube()
    await post_events(kube, make_resource(), [], [READY], identity="op")
    assert [verb for verb, _ in kube.take_writes()] == ["create"]
    for error in (ConflictError("exists"), ForbiddenError("no")):
        kube.refuse = lambda verb, kind, name, error=error: error if kind == EVENT else None  # type: ignore[misc]
        await post_events(kube, make_resource(), [], [READY], identity="op")
