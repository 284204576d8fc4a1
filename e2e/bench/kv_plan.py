"""What ``make bench-kv`` asks: conversations whose turns add much or little to a growing history. Pure.

The model reads one token per character, so lengths are exact. One conversation alternates a large turn and a small
turn: its history grows through all sizes of interest, and both kinds of turn are measured at each of them.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

ALPHABET: Final = string.ascii_letters + string.digits + " .,;:-"
TEMPLATE_TOKENS: Final = 22
"""Of a turn's new tokens those that the user did not write: the end of the answer before and the chat template."""
LARGE: Final = "large"
SMALL: Final = "small"


@dataclass(frozen=True)
class Sizes:
    """Tokens and counts of a run."""

    large: int = 2000
    small: int = 150
    answer: int = 32
    steps: int = 5
    """Pairs of a large and a small turn in a conversation: 5 of 2,000 and 150 reach 10,750 tokens."""
    rounds: int = 3
    """Conversations per data type; each is one paired comparison of all set-ups."""
    held_sessions: int = 8
    held_tokens: int = 1000
    """Prompt length of the sessions that an idle decode engine holds."""
    idle_s: float = 25.0
    lookup_blocks: int = 750
    lookup_repeats: int = 10


QUICK: Final = Sizes(
    large=400,
    small=150,
    answer=8,
    steps=2,
    rounds=1,
    held_sessions=2,
    held_tokens=200,
    idle_s=4.0,
    lookup_blocks=40,
    lookup_repeats=3,
)


@dataclass(frozen=True)
class PlannedTurn:
    number: int
    """1-based."""
    kind: str
    """``LARGE`` or ``SMALL``."""
    new_tokens: int
    text: str


def build_text(seed: str, length: int) -> str:
    """Text of ``length`` tokens that depends on ``seed`` alone; another seed shares no prefix worth a block."""
    return "".join(random.Random(seed).choices(ALPHABET, k=length))


def build_conversation(seed: str, sizes: Sizes) -> list[PlannedTurn]:
    """The turns of one conversation."""
    turns = []
    for number in range(1, 2 * sizes.steps + 1):
        kind = LARGE if number % 2 else SMALL
        tokens = sizes.large if kind == LARGE else sizes.small
        turns.append(PlannedTurn(number, kind, tokens, build_text(f"{seed}/{number}", tokens - TEMPLATE_TOKENS)))
    return turns


def choose_order(names: Sequence[str], round_number: int, turn: int) -> list[str]:
    """The set-ups in the order of this turn: rotated, so that no set-up is always first after the machine changed."""
    shift = (round_number + turn) % len(names)
    return [*names[shift:], *names[:shift]]
