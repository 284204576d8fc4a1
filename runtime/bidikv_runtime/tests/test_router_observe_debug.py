"""What /debug shows."""

from __future__ import annotations

import json
from dataclasses import replace

from bidikv_runtime.router.observe.debug import RecentSessions, render_engines
from bidikv_runtime.router.observe.engine_view import EngineView
from bidikv_runtime.router.observe.record import TurnRecord
from bidikv_runtime.tests.router_records import STREAM


def test_the_latest_sessions_come_first_and_within_a_bound() -> None:
    sessions = RecentSessions(maximum=2)
    for name in (b"a", b"b", b"a", b"c"):
        sessions.note(replace(STREAM, session=name))
    sessions.note(TurnRecord(1.0))  # no turn
    shown = json.loads(sessions.render(now=20.0))["sessions"]
    assert [(entry["session"], entry["turns"]) for entry in shown] == [("63", 1), ("61", 2)]
    assert shown[0] == {
        "session": "63",
        "turns": 1,
        "seconds_ago": 6.0,
        "route": "chat",
        "path": "bidirectional",
        "reason": "history",
        "status": 200,
        "outcome": "answered",
        "prefill": "10.0.0.1:8000",
        "decode": "10.0.0.2:8000",
        "body_bytes": 5000,
        "prompt_tokens": 1200,
        "first_token_seconds": 1.75,
        "retries": 0,
    }


def test_a_turn_without_a_stream_has_no_first_token() -> None:
    sessions = RecentSessions()
    sessions.note(replace(STREAM, streamed=False))
    assert json.loads(sessions.render(now=20.0))["sessions"][0]["first_token_seconds"] is None


def test_engines() -> None:
    views = [
        EngineView("decode", "d:1", name="decode-0", zone="z", load=3.0, report_age=0.25),
        EngineView("prefill", "p:1"),
    ]
    reported, silent = json.loads(render_engines(views))["engines"]
    assert (reported["address"], reported["name"], reported["load"], reported["report_age"]) == (
        "d:1",
        "decode-0",
        3.0,
        0.25,
    )
    assert silent["report_age"] is None
