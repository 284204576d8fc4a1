"""What the router knows of sessions and engines, as JSON for a person who asks why a turn went where it went.

Served only with ``debug`` on: it shows engines' addresses. Of a session it shows the digest, which is also in the
access log, never a name or text of a client.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import msgspec

from bidikv_runtime.router.observe.engine_view import EngineView
from bidikv_runtime.router.observe.record import TurnRecord
from bidikv_runtime.router.observe.stages import compute_first_token_seconds

MAXIMUM_SESSIONS: Final = 1024


class RecentSessions:
    """The sessions whose turns ended last; bounded."""

    def __init__(self, maximum: int = MAXIMUM_SESSIONS) -> None:
        self._maximum = maximum
        self._sessions: OrderedDict[bytes, tuple[int, TurnRecord]] = OrderedDict()

    def note(self, record: TurnRecord) -> None:
        """A turn ended."""
        if not record.session:
            return
        turns, _ = self._sessions.pop(record.session, (0, None))
        self._sessions[record.session] = turns + 1, record
        if len(self._sessions) > self._maximum:
            self._sessions.popitem(last=False)

    def render(self, now: float) -> bytes:
        """JSON, the latest first; ``now`` is ``time.monotonic``."""
        sessions = [
            {"session": session.hex(), "turns": turns, **_describe(record, now)}
            for session, (turns, record) in reversed(self._sessions.items())
        ]
        return msgspec.json.encode({"sessions": sessions})


def _describe(record: TurnRecord, now: float) -> dict[str, object]:
    first_token = compute_first_token_seconds(record)
    return {
        "seconds_ago": round(now - record.ended_at, 3),
        "route": record.route,
        "path": record.path,
        "reason": record.reason,
        "status": record.status,
        "outcome": record.outcome,
        "prefill": record.prefill,
        "decode": record.decode,
        "body_bytes": record.body_bytes,
        "prompt_tokens": record.prompt_tokens,
        "first_token_seconds": None if math.isnan(first_token) else round(first_token, 6),
        "retries": record.retries,
    }


def render_engines(engines: Iterable[EngineView]) -> bytes:
    """JSON of what is known of each engine; null for the age of a report that there is none of."""
    return msgspec.json.encode({"engines": list(engines)})
