"""A read as scheduler and workers speak of it: one ticket for each part, one report for each part that was read.

A request's match may be joined from several sources. Each part is a read of its own to vLLM's code, known by a part id;
only the scheduler side and the end of a read see the request as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from bidikv_runtime.connector.sources import Source


def build_part_id(request_id: str, part: int) -> str:
    """Name of a part among the reads; the first part goes by the request's own name."""
    return request_id if part == 0 else f"{request_id}/{part}"


@dataclass(frozen=True)
class Ticket:
    """All that the question VALIDATE needs for one part of a request's read; pickled to every worker."""

    request_id: str
    parts: int
    """How many parts the request's read has in all."""
    offset: int
    """Position of this part's first block among the blocks that the request reads."""
    source: Source
    epoch: int
    blocks: tuple[int, ...]
    publications: tuple[int, ...]
    session: str = ""
    """Of the request; empty when it has none."""


@dataclass(frozen=True)
class ReadReport:
    """One part that one rank has read, for the cost model."""

    source: Source
    bytes: int
    descriptors: int
    """How many pieces NIXL made of it, after joining what lies side by side at both ends."""
    seconds: float
    """From the start of the transfer (not of the handshake) until the worker saw that it had ended."""
    slack: float = 0.0
    """It may have ended up to so many seconds earlier: the worker looks once a step."""
