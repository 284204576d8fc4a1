"""One rank's reads under way: their parts, and what became of a request once all of its parts have ended. Pure.

A part ends in one of three ways: its source says how much of it is valid, its transfer fails, or it is abandoned for
taking too long. A request is over in this rank when all of its parts are; what counts is the prefix that is valid
without a gap, because vLLM cuts a request at the first block that is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bidikv_runtime.connector.lookup_client import Question
from bidikv_runtime.connector.ticket import Ticket


@dataclass
class Part:
    """Times are of ``time.monotonic``."""

    ticket: Ticket
    local_blocks: Sequence[int]
    """``ticket.blocks[i]`` is read into the block ``local_blocks[i]`` of this engine."""
    started: float
    deadline: float
    """When the part is abandoned, handshake and transfer together."""
    handles: list[Any] = field(default_factory=list)
    """NIXL's handles of its transfers, one for each remote rank that it reads from; none before the handshake."""
    transferred: bool = False
    asked: float = 0.0
    question: Question | None = None
    valid: int | None = None
    """Leading blocks that are valid; None until the part has ended."""
    failed: bool = False
    quarantined: bool = False
    """Its transfer may still write to its blocks."""


@dataclass(frozen=True)
class Outcome:
    """What became of a request's read in this rank."""

    request_id: str
    valid: int
    """Leading blocks of the read that may be used."""
    invalid_blocks: frozenset[int]
    """Blocks of this engine that must be computed instead."""
    failed: bool
    """The request has to go on in other blocks, or nothing arrived at all: vLLM takes it back to the start."""


def compute_outcome(parts: Sequence[Part]) -> Outcome:
    """What the parts of one request, all of them ended, come to."""
    ordered = sorted(parts, key=lambda part: part.ticket.offset)
    valid, whole, invalid = 0, True, set[int]()
    for part in ordered:
        assert part.valid is not None, part
        kept = part.valid if whole else 0
        valid += kept
        invalid.update(part.local_blocks[kept:])
        whole = whole and kept == len(part.local_blocks)
    quarantined = any(part.quarantined for part in parts)
    failed = quarantined or (valid == 0 and any(part.failed for part in parts))
    return Outcome(ordered[0].ticket.request_id, 0 if quarantined else valid, frozenset(invalid), failed)


class Reads:
    """Used by the worker's main thread."""

    def __init__(self) -> None:
        self._open: dict[str, Part] = {}
        self._requests: dict[str, list[Part]] = {}
        self._outcomes: list[Outcome] = []

    def __len__(self) -> int:
        """Parts that have not ended."""
        return len(self._open)

    def start(self, part_id: str, part: Part) -> None:
        """A part is on its way."""
        self._open[part_id] = part
        self._requests.setdefault(part.ticket.request_id, []).append(part)

    def find(self, part_id: str) -> Part | None:
        """The part, unless it has ended."""
        return self._open.get(part_id)

    def find_overdue(self, now: float) -> list[str]:
        """Parts whose transfer has not ended by their deadline. One that waits for its source's word is not overdue:
        the question has a deadline of its own."""
        return [part_id for part_id, part in self._open.items() if not part.transferred and now >= part.deadline]

    def end(self, part_id: str, valid: int, *, failed: bool = False, quarantined: bool = False) -> None:
        """A part has ended with this many valid leading blocks."""
        part = self._open.pop(part_id)
        part.valid, part.failed, part.quarantined = valid, failed, quarantined
        request_id = part.ticket.request_id
        parts = self._requests[request_id]
        if len(parts) == part.ticket.parts and all(other.valid is not None for other in parts):
            del self._requests[request_id]
            self._outcomes.append(compute_outcome(parts))

    def take_outcomes(self) -> list[Outcome]:
        """Requests whose last part has ended since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes
