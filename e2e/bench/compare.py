"""Whether an answer is the one that an engine which reuses nothing gives. Pure.

Tokens alone are no proof: a random model's greedy token often stays the same under other KV. Nor is a different token a
fault by itself: where two tokens are equally likely up to rounding, either may come first. Hence three verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from e2e.engine.client import Completion

TOLERANCE: Final = 1e-3
"""Of log-probabilities in float32. KV that one engine decoded and another prefilled differs by up to 6e-5; KV of other
tokens gives 0.3 and more."""


class Verdict(Enum):
    SAME = "same"
    TIE = "tie"
    """Equal up to a position where the two likeliest tokens are closer than the tolerance, in both."""
    WRONG = "wrong"


@dataclass(frozen=True)
class Comparison:
    verdict: Verdict
    agreeing: int
    """Leading tokens that are equal."""
    distance: float
    """Largest difference of a log-probability at those positions; infinite where one's likeliest token is not among the
    other's five."""


def compute_distance(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Largest difference between the log-probabilities of one position."""
    if not first or not second or max(first, key=first.__getitem__) not in second:
        return float("inf")
    return max(abs(first[token] - second[token]) for token in first.keys() & second.keys())


def compute_lead(position: Mapping[str, float]) -> float:
    """By how much the likeliest token leads the next one."""
    best, second = sorted(position.values(), reverse=True)[:2]
    return best - second


def compare(got: Completion, expected: Completion, tolerance: float = TOLERANCE) -> Comparison:
    """Compare two greedy answers to the same request, with the five likeliest tokens at each position."""
    pairs = list(zip(got.tokens, expected.tokens, strict=False))
    agreeing = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    a, b = got.top_logprobs, expected.top_logprobs
    if len(a) < len(got.tokens) or len(b) < len(expected.tokens):
        return Comparison(Verdict.WRONG, agreeing, float("inf"))
    distance = max((compute_distance(a[i], b[i]) for i in range(agreeing)), default=0.0)
    if distance > tolerance:
        return Comparison(Verdict.WRONG, agreeing, distance)
    if agreeing == len(got.tokens) == len(expected.tokens):
        same = got.text == expected.text and got.finish_reason == expected.finish_reason
        return Comparison(Verdict.SAME if same else Verdict.WRONG, agreeing, distance)
    tied = agreeing < len(pairs) and max(compute_lead(a[agreeing]), compute_lead(b[agreeing])) <= tolerance
    return Comparison(Verdict.TIE if tied else Verdict.WRONG, agreeing, distance)
