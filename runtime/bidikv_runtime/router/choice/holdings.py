"""What engines hold of a session: what they report, and what this replica remembers until they do; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from bidikv_runtime.router.choice.engine import Engine
from bidikv_runtime.router.choice.memory import Memory, Noted

_MEMORY_SECONDS: Final = 60.0
"""How long an engine that does not report is believed to hold what it served."""
_REPORT_SLACK: Final = 0.1
"""Seconds that a report may take to arrive: it does not know a turn that ended meanwhile."""


class Holding(NamedTuple):
    """What an engine holds of a session, and of which turn; tokens."""

    engine: Engine
    prompt_tokens: int
    """Of the session's last known turn there."""
    held_tokens: int
    """From the front, the answer included."""
    body_bytes: int


class Holdings:
    """Finds them, and keeps the last finding: path and sources ask right after decode."""

    def __init__(self, clock: Callable[[], float], memory: Memory) -> None:
        self._now = clock
        self._memory = memory
        self._last: tuple[bytes, list[Holding]] | None = None

    def forget(self) -> None:
        """Something that the last finding rests on has changed."""
        self._last = None

    def find(self, session: bytes, engines: Iterable[Engine], by_address: Mapping[str, Engine]) -> list[Holding]:
        """What is held of ``session``.

        Args:
            session: its key.
            engines: decode engines that serve.
            by_address: all decode engines.
        """
        if self._last is not None and self._last[0] == session:
            return self._last[1]
        name = session.hex()
        found = []
        for engine in engines:
            held = engine.held.get(name)
            if held is not None:
                found.append(Holding(engine, held.prompt_tokens, held.held_tokens, held.body_bytes))
        noted = self._memory.get(session)
        if noted is not None and (last := by_address.get(noted.decode)) is not None:
            found = self._add_noted(found, last, noted)
        self._last = session, found
        return found

    def _add_noted(self, found: list[Holding], engine: Engine, noted: Noted) -> list[Holding]:
        """With a turn that this replica served, unless the engine's report knows better."""
        if not engine.endpoint.serving:
            return found
        if engine.report is None:
            if self._now() - noted.ended_at > _MEMORY_SECONDS:
                return found
        elif noted.ended_at < engine.reported_at - _REPORT_SLACK:
            return found
        others = []
        for holding in found:
            if holding.engine is not engine:
                others.append(holding)
            elif holding.body_bytes == noted.body_bytes:
                return found  # of the same turn, with the answer's tokens
        return [*others, Holding(engine, noted.prompt_tokens, noted.prompt_tokens, noted.body_bytes)]
