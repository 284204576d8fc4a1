"""A cost learnt online: seconds as a sum of non-negative coefficients times features (counts of work).

Made for times of a machine that does other things too: noisy by a factor, sometimes stalled, sometimes ten times faster
or slower from one minute to the next.

- Observations are kept in bins by magnitude, a few newest of each: many small ones do not push out the few large ones
  from which the slopes are learnt. Older ones weigh less, by half per half-life.
- The overall scale is the weighted median of observed over expected seconds: no share of outliers below a half moves
  it, and it follows a lasting change within a half-life.
- The coefficients minimise the relative error by least squares, first with Huber's weights (P. Huber, "Robust
  estimation of a location parameter", 1964), then without what lies far off. They are drawn to the prior's proportions
  with little weight: what the observations do not tell apart stays in proportion.

Invariants: coefficients are finite and not negative, so estimates grow with every feature; at most
``BINS x PER_BIN`` observations are kept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

Features = tuple[float, ...]

BINS: Final = 40
BIN_RATIO: Final = 2.0
SMALLEST_BIN_SECONDS: Final = 1e-6
PER_BIN: Final = 12
SHORTEST: Final = 1e-9
LONGEST: Final = 1e6
"""Seconds outside of these bounds are a clock's error."""
PRIOR_WEIGHT: Final = 0.02
HUBER_BOUND: Final = 0.3
"""Relative errors beyond this weigh in proportion instead of squared."""
STALLED: Final = 2.0
"""In the last passes, what took longer than expected by this many times the expected time does not count at all."""
PASSES: Final = 3
ROBUST_PASSES: Final = 2
FORGOTTEN_AGE: Final = 7.0
"""Half-lives after which an observation counts no more."""
DESCENTS: Final = 12
REFIT_SHARE: Final = 12
"""Observations are fitted anew when a half-life over this many have come: a fit takes 1 ms."""


class Fit:
    """One learnt cost.

    Args:
        prior: seconds per unit of each feature; all positive. Only proportions matter once there are observations.
        half_life: observations.
        least_weight: what an observation still counts when it is old, as long as no newer ones of its magnitude replace
            it. Not 0 where large ones are rare and the cost is not expected to change.
    """

    def __init__(self, prior: Features, half_life: float, least_weight: float = 0.0) -> None:
        self.coefficients = prior
        self.count = 0
        """Observations in all."""
        self._prior = prior
        self._half_life = half_life
        self._least_weight = least_weight
        self._bins: list[deque[tuple[int, Features, float]]] = [deque(maxlen=PER_BIN) for _ in range(BINS)]
        self._fitted = 0

    def observe(self, features: Features, seconds: float) -> None:
        """Work with these counts took so long. What cannot be (no work, no time, days) is ignored."""
        expected = _dot(self._prior, features)
        if not (SHORTEST <= seconds <= LONGEST and 0 < expected < math.inf and min(features) >= 0):
            return
        self.count += 1
        magnitude = math.log(max(1.0, expected / SMALLEST_BIN_SECONDS), BIN_RATIO)
        self._bins[min(BINS - 1, int(magnitude))].append((self.count, features, seconds))

    def estimate(self, features: Features) -> float:
        """Seconds that work with these counts takes."""
        new = self.count - self._fitted
        if new and (new >= self._half_life / REFIT_SHARE or self.count < self._half_life):
            self._refit()
        return _dot(self.coefficients, features)

    def rebase(self, prior: Features) -> None:
        """Take another prior, for the next fit; without observations it is the estimate."""
        self._prior = prior
        if not self.count:
            self.coefficients = prior

    def _refit(self) -> None:
        self._fitted = self.count
        observations = [
            (max(self._least_weight, 0.5 ** ((self.count - at) / self._half_life)), features, seconds)
            for kept in self._bins
            for at, features, seconds in kept
            if self._least_weight or self.count - at < FORGOTTEN_AGE * self._half_life
        ]
        scale = _weighted_median([(s / _dot(self._prior, f), w) for w, f, s in observations])
        units = tuple(scale * coefficient for coefficient in self._prior)
        rows = [(w, tuple(u * x for u, x in zip(units, f, strict=True)), s) for w, f, s in observations]
        size = len(units)
        factors = [1.0] * size
        for number in range(PASSES):
            products = [[PRIOR_WEIGHT if j == k else 0.0 for k in range(size)] for j in range(size)]
            targets = [PRIOR_WEIGHT] * size
            for weight, parts, seconds in rows:
                expected = _dot(factors, parts) or sum(parts)
                error = abs(seconds / expected - 1)
                if error > HUBER_BOUND:
                    if error > STALLED and number >= ROBUST_PASSES:
                        continue
                    weight *= HUBER_BOUND / error
                weight /= expected * expected
                for j, part in enumerate(parts):
                    part *= weight
                    targets[j] += part * seconds
                    row = products[j]
                    for k in range(j + 1):
                        row[k] += part * parts[k]
            for j in range(size):
                for k in range(j):
                    products[k][j] = products[j][k]
            factors = _solve(products, targets, factors)
        self.coefficients = tuple(factor * unit for factor, unit in zip(factors, units, strict=True))


def _solve(products: list[list[float]], targets: list[float], start: list[float]) -> list[float]:
    """Non-negative least squares by coordinate descent; the prior keeps the matrix positive definite."""
    solution = list(start)
    for _ in range(DESCENTS):
        for j, row in enumerate(products):
            others = sum(row[k] * solution[k] for k in range(len(solution)) if k != j)
            solution[j] = max(0.0, (targets[j] - others) / row[j])
    return solution


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))


def _weighted_median(values: list[tuple[float, float]]) -> float:
    values.sort()
    half, total = sum(weight for _, weight in values) / 2, 0.0
    for value, weight in values:
        total += weight
        if total >= half:
            return value
    return values[-1][0]
