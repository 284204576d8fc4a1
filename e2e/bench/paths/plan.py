"""What is asked: turns that add little or much to a history, on every path. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LOCAL: Final = "local"
BIDIRECTIONAL: Final = "bidirectional"
PLAIN: Final = "plain"
FORCED: Final = (LOCAL, BIDIRECTIONAL, PLAIN)
CHOSEN: Final = "chosen"
"""No path is asked for."""
VARIANTS: Final = (*FORCED, CHOSEN)


@dataclass(frozen=True)
class Sizes:
    """Tokens and counts of a run."""

    histories: tuple[int, ...] = (2000, 8000)
    new: tuple[int, ...] = (30, 150, 600)
    """Of a turn, the template's included."""
    answer: int = 16
    rounds: int = 5
    beside: tuple[int, ...] = (150, 512)
    """New tokens of turns that are computed beside a stream."""
    beside_history: int = 2000
    stream_history: int = 500
    quiet_seconds: float = 1.5
    """Watched before each of these turns, to compare with, and for routers to learn of the stream."""


QUICK: Final = Sizes(histories=(600,), new=(30, 150), answer=4, rounds=1, beside=(150,), beside_history=600)


@dataclass(frozen=True)
class Sample:
    """One turn."""

    round: int
    history: int
    """As planned; ``prompt_tokens`` is exact."""
    new: int
    variant: str
    path: str
    """That the router took."""
    reason: str
    prompt_tokens: int
    first_token_s: float
    """From the request to the first token at the client."""


@dataclass(frozen=True)
class Gap:
    """A turn beside a stream of the same decode engine, and what became of the stream."""

    round: int
    new: int
    variant: str
    path: str
    reason: str
    first_token_s: float
    quiet_gap_s: float
    """Longest time between two tokens of the stream just before."""
    gap_s: float
    """The same from the turn's request to its first token."""
