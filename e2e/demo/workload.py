"""What the demo asks: interleaved agent conversations, and the other users' traffic between their turns. Pure.

The demo's model reads one token per character, so lengths here are tokens.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

CONVERSATIONS = 3
TURNS = 5
TURN_TOKENS = 1960
"""New characters of a user's message; with the template and the last answer about 2,000 new tokens a turn."""
ANSWER_TOKENS = 32
NEW_TOKENS_PER_TURN = 2000
ALPHABET = string.ascii_letters + string.digits + " .,;:-"


def user_text(*seed: object, length: int = TURN_TOKENS) -> str:
    """Text of ``length`` characters that depends on ``seed`` alone."""
    source = random.Random("/".join(map(str, seed)))
    return "".join(source.choices(ALPHABET, k=length))


def other_requests(turn: int, prefill_cache_tokens: int) -> int:
    """Unrelated one-turn requests of ``NEW_TOKENS_PER_TURN`` before ``turn`` (1-based), so that prefill forgets.

    Prefill's cache evicts the least recently used blocks. Between two turns of one conversation it computes the
    previous turn of the other conversations, and these requests; together they must fill the cache.
    """
    if turn == 1:
        return 0
    from_conversations = (CONVERSATIONS - 1) * (turn - 1) * NEW_TOKENS_PER_TURN
    return max(0, -(-(prefill_cache_tokens - from_conversations) // NEW_TOKENS_PER_TURN))


@dataclass(frozen=True)
class Measured:
    """One turn of one conversation."""

    conversation: int
    turn: int
    prompt_tokens: int
    ttft_s: float
    text: str
    reused_tokens: int
    """Tokens whose KV prefill read from decode."""
    prefill_hit_tokens: int
    """Tokens that prefill still held itself."""
