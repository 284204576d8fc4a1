"""How long a turn takes on each path beyond computing its prompt, and how many tokens a body has; learnt online, pure.

The time for computing follows from tokens and the engines' reported speeds. What comes on top (requests, rendering and
tokenising, look-ups, transfers) depends on the path and on the prompt's length. Each path keeps a moving average per
class of length; a class without observations borrows from the nearest one that has some.
"""

from __future__ import annotations

import math
from typing import Final

_SHARE: Final = 0.1
"""Weight of a new observation."""
_CLASSES: Final = 12
"""Class ``n`` holds prompts of ``4 ** n`` tokens to four times as many: 12 classes reach 16 million."""
_LONGEST: Final = 60.0
"""Seconds; a longer observation counts as this, or one stalled engine would decide for minutes."""
ASSUMED_TOKENS_PER_BYTE: Final = 0.5
"""Before anything is known: twice what chats in English have, so that a prompt that counts as short is short."""


class Overheads:
    """Of one path."""

    __slots__ = ("_averages", "_lenders")

    def __init__(self) -> None:
        self._averages = [math.nan] * _CLASSES
        self._lenders = list(range(_CLASSES))
        """Whose average each class uses."""

    def observe(self, prompt_tokens: int, seconds: float) -> None:
        """A turn took ``seconds`` more than its prompt's computation was expected to."""
        seconds = min(max(seconds, 0.0), _LONGEST)
        averages, own = self._averages, _classify(prompt_tokens)
        known = averages[own]
        if math.isnan(known):
            averages[own] = seconds
            observed = [other for other in range(_CLASSES) if not math.isnan(averages[other])]
            self._lenders = [min(observed, key=lambda o: abs(o - each)) for each in range(_CLASSES)]
        else:
            averages[own] = known + _SHARE * (seconds - known)

    def estimate(self, prompt_tokens: int) -> float:
        """Seconds; nan while nothing was observed."""
        return self._averages[self._lenders[_classify(prompt_tokens)]]


def _classify(tokens: int) -> int:
    return min(max(tokens.bit_length() - 1, 0) // 2, _CLASSES - 1)


class TokensPerByte:
    """How many tokens a byte of a request's body makes, on average."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = math.nan

    def observe(self, body_bytes: int, prompt_tokens: int) -> None:
        """A body of ``body_bytes`` had a prompt of ``prompt_tokens``."""
        if body_bytes <= 0 or prompt_tokens <= 0:
            return
        ratio = prompt_tokens / body_bytes
        self.value = ratio if math.isnan(self.value) else self.value + _SHARE * (ratio - self.value)

    def estimate(self, body_bytes: int) -> int:
        """Tokens of the prompt of a body about which nothing else is known."""
        ratio = self.value
        return math.ceil(body_bytes * (ASSUMED_TOKENS_PER_BYTE if math.isnan(ratio) else ratio))
