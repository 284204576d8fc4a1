"""Which transitions make an Event, and what it looks like."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from bidikv_operator.events import build_event, choose_transitions, post_events, post_note
from bidikv_operator.kinds import EVENT
from bidikv_operator.kube import ConflictError, ForbiddenError
from bidikv_operator.tests.samples import FakeKube, make_resource

NOW = datetime(2026, 1, 2, 3, 4, 5, 6, UTC)


def condition(name: str, status: str, reason: str, message: str = "m") -> dict[str, Any]:
    time = "2026-01-02T03:04:05Z"
    return {"type": name, "status": status, "reason": reason, "message": message, "lastTransitionTime": time}


READY = condition("Ready", "True", "Ready")


def tell(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    return [f"{one['type']} {one['status']} {one['reason']}" for one in choose_transitions(before, after)]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (None, ("Accepted", "True", "Valid"), False),
        (("Accepted", "False", "Invalid"), ("Accepted", "True", "Valid"), True),
        (("Ready", "True", "Ready"), ("Ready", "True", "Ready"), False),
        (("PrefillReady", "False", "Starting"), ("PrefillReady", "True", "AllReplicasReady"), True),
        (None, ("PrefillReady", "False", "Starting"), False),
        (None, ("PrefillReady", "False", "Unschedulable"), True),
        # A rollout makes a role waver between its reasons.
        (("PrefillReady", "True", "AllReplicasReady"), ("PrefillReady", "True", "EnoughReplicasReady"), False),
        (("PrefillReady", "True", "EnoughReplicasReady"), ("PrefillReady", "True", "AllReplicasReady"), False),
        (("Ready", "True", "Ready"), ("Ready", "False", "Unschedulable"), False),
        (("Ready", "False", "Starting"), ("Ready", "True", "Ready"), True),
        (("Progressing", "False", "RolledOut"), ("Progressing", "True", "RollingOut"), True),
        (("Progressing", "False", "RolledOut"), ("Progressing", "True", "Starting"), False),
        (("Progressing", "True", "RollingOut"), ("Progressing", "False", "RolledOut"), True),
        (("Progressing", "True", "RollingOut"), ("Progressing", "False", "RolloutFailed"), True),
        (("Progressing", "False", "RolledOut"), ("Progressing", "False", "Paused"), True),
        (None, ("Degraded", "False", "AsExpected"), False),
        (("Degraded", "False", "AsExpected"), ("Degraded", "True", "EnginesUnreachable"), True),
        # Each deletion has an Event of its own.
        (("Degraded", "False", "AsExpected"), ("Degraded", "True", "EngineRecycled"), False),
        (("Degraded", "True", "EngineRecycled"), ("Degraded", "False", "AsExpected"), True),
        (None, ("TransportVerified", "Unknown", "NoTraffic"), False),
        (("TransportVerified", "Unknown", "NoTraffic"), ("TransportVerified", "True", "Verified"), True),
        (("TransportVerified", "True", "Verified"), ("TransportVerified", "False", "FellBackToTCP"), True),
        (None, ("Scaling", "False", "Disabled"), False),
        (("Scaling", "True", "WithinBounds"), ("Scaling", "True", "AtMaximum"), True),
        (("Scaling", "True", "AtMaximum"), ("Scaling", "True", "WithinBounds"), False),
    ],
)
def test_transitions(before: tuple[str, str, str] | None, after: tuple[str, str, str], told: bool) -> None:
    assert bool(tell([condition(*before)] if before else [], [condition(*after)])) is told


def test_other_words_are_no_transition() -> None:
    assert tell([READY], [{**READY, "message": "other words"}]) == []


def test_one_trouble_is_told_once() -> None:
    before = [
        condition("DecodeReady", "True", "AllReplicasReady"),
        condition("Progressing", "False", "RolledOut"),
        condition("Degraded", "False", "AsExpected"),
        READY,
    ]
    crash = [
        condition("Degraded", "True", "ContainerCrashing"),
        condition("DecodeReady", "False", "ContainerCrashing"),
        condition("Progressing", "True", "Starting"),
        condition("Ready", "False", "ContainerCrashing"),
    ]
    assert tell(before, crash) == ["DecodeReady False ContainerCrashing"]
    # The role still serves: then Degraded is the one that tells.
    crash[1] = condition("DecodeReady", "True", "EnoughReplicasReady")
    assert tell(before, crash) == ["Degraded True ContainerCrashing"]
    failed = [condition("Progressing", "False", "RolloutFailed"), condition("Degraded", "True", "RolloutFailed")]
    assert tell(before, failed) == ["Progressing False RolloutFailed"]
    # It stays a trouble of the role while the summary is written anew.
    assert tell([crash[2]], [condition("DecodeReady", "False", "ContainerCrashing"), crash[0]]) == [
        "DecodeReady False ContainerCrashing"
    ]


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("RollingOut", "Normal"),
        ("RolledOut", "Normal"),
        ("Verified", "Normal"),
        ("AsExpected", "Normal"),
        ("PeerTokenRotated", "Normal"),
        ("RolloutFailed", "Warning"),
        ("EngineRecycled", "Warning"),
        ("EnginesUnreachable", "Warning"),
        ("FellBackToTCP", "Warning"),
        ("ModelNotFound", "Warning"),
    ],
)
async def test_what_is_a_warning(reason: str, kind: str) -> None:
    kube = FakeKube()
    await post_note(kube, make_resource(), reason, "words", told=("1",), identity="op")
    (event,) = kube.objects.values()
    assert (event["type"], event["reason"], event["note"]) == (kind, reason, "words")


async def test_notes_of_one_reason_are_told_apart() -> None:
    kube = FakeKube()
    for told in ("uid-1", "uid-2", "uid-2"):
        await post_note(kube, make_resource(), "EngineRecycled", "words", told=(told,), identity="op")
    assert len(kube.objects) == 2


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
