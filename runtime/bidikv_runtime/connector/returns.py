"""When the blocks of a finished request are needed again: learnt from how long it took for earlier ones.

Those gaps span orders of magnitude (a tool's answer in 0.2 s, a person's after ten minutes) and their shape is not
known, so they are counted in bins of logarithmic width. Four levels, each the prior of the next: everything; what the
request said about the next turn and whether its session has gone on without its blocks since (``bypassed``); also how
long the session and its context are; this session.

Invariant: probabilities lie strictly between 0 and 1; nothing observed makes an estimate infinite or undefined.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import log
from typing import Final, NamedTuple

FIRST_EDGE: Final = 0.1
EDGE_RATIO: Final = 3.0
NEVER_PRIOR: Final = 0.3
"""Chance, before anything is known, that blocks are not needed again; small enough to wait for the whole horizon."""
KIND_WEIGHT: Final = 8.0
"""The level above weighs as much as this many observations of a kind; likewise SESSION_WEIGHT."""
SESSION_WEIGHT: Final = 32.0
POOLED_MEMORY: Final = 1024.0
"""Observations after which old ones are halved; likewise SESSION_MEMORY."""
SESSION_MEMORY: Final = 64.0
TURN_BOUNDS: Final = (2, 4, 8, 32)
"""Turns at which a session becomes another kind."""
TOKEN_BOUNDS: Final = (2_000, 8_000, 32_000, 128_000)
"""Likewise, tokens of context."""


class Kind(NamedTuple):
    expect: str | None
    bypassed: bool
    turns: int
    """Position among ``TURN_BOUNDS``; -1 in a coarse kind."""
    tokens: int
    """Position among ``TOKEN_BOUNDS``; -1 in a coarse kind."""

    @property
    def coarse(self) -> Kind:
        return Kind(self.expect, self.bypassed, -1, -1)


def build_kind(expect: str | None, turns: int, tokens: int) -> Kind:
    """Of a request that has just finished."""
    return Kind(expect, False, bisect_right(TURN_BOUNDS, turns), bisect_right(TOKEN_BOUNDS, tokens))


@dataclass
class Gaps:
    """Counted gaps: one count per bin and, last, one for sessions that did not come back."""

    counts: list[float]
    total: float = 0.0

    def observe(self, position: int, memory: float) -> None:
        self.counts[position] += 1.0
        self.total += 1.0
        if self.total >= memory:
            self.counts = [count / 2 for count in self.counts]
            self.total /= 2


class Forecast:
    """For a session whose request has just ended; ages in seconds since then.

    Args:
        edges: upper ends of the bins.
        shares: probability of a return in each bin.
        never: probability of none.
    """

    __slots__ = ("_edges", "_later", "_rates", "_shares")

    def __init__(self, edges: Sequence[float], shares: Sequence[float], never: float) -> None:
        self._edges, self._shares = edges, shares
        self._later = list(accumulate(reversed(shares), initial=never))[::-1]
        """Probability of no return before each bin's start."""
        self._rates: dict[int, float] = {}

    def rate(self, age: float) -> float:
        """Returns per second of waiting if one waits on for as long as pays best, given no return yet.

        The best ratio, over all waiting times, of the probability of a return to the expected time until the return or
        the end of waiting: the Gittins index of the bet on this session (J. Gittins, "Bandit processes and dynamic
        allocation indices", 1979). It grows with the age where the return is due and falls where it is overdue, which
        neither the age (least recently used) nor the probability alone does. Computed where bins begin and interpolated
        on logarithmic scales in between, so that equal kinds are ordered by age within a bin too.
        """
        last = len(self._edges) - 1
        known = min(max(age, self._edges[0]), self._edges[last])
        high = min(bisect_right(self._edges, known), last)
        start, end = self._edges[high - 1], self._edges[high]
        share = log(known / start) / log(end / start)
        rate = self._bin_rate(high) ** (1 - share) * self._bin_rate(min(high + 1, last)) ** share
        return float(rate * known / max(age, known))

    def _bin_rate(self, first: int) -> float:
        best = self._rates.get(first)
        if best is None:
            best = returned = waited = 0.0
            start = self._edges[first - 1] if first else 0.0
            for i in range(first, len(self._shares)):
                returned += self._shares[i]
                waited += (self._edges[i] - start) * (self._later[i] + self._later[i + 1]) / 2
                start = self._edges[i]
                best = max(best, returned / waited)
            self._rates[first] = best
        return best

    def chance(self, age: float) -> float:
        """Probability of a return before the horizon, given none yet."""
        first = self._position(age)
        return 1.0 - self._later[-1] / self._later[first]

    def _position(self, age: float) -> int:
        return min(bisect_right(self._edges, age), len(self._shares) - 1)


@dataclass
class Returns:
    """What was learnt of all sessions.

    Args:
        horizon: seconds; a later return is none.
    """

    horizon: float
    edges: list[float] = field(init=False)
    """Upper ends of the bins, in seconds; the last is the horizon."""
    _everything: Gaps = field(init=False)
    _kinds: dict[Kind, Gaps] = field(default_factory=dict)
    """Bounded: kinds are few."""

    def __post_init__(self) -> None:
        self.edges, edge = [], FIRST_EDGE
        while edge < self.horizon:
            self.edges.append(edge)
            edge *= EDGE_RATIO
        self.edges.append(self.horizon)
        bins = len(self.edges)
        self._everything = Gaps([(1 - NEVER_PRIOR) / bins] * bins + [NEVER_PRIOR], 1.0)

    def build_history(self) -> Gaps:
        """Nothing known yet of a session."""
        return Gaps([0.0] * (len(self.edges) + 1))

    def observe(self, kind: Kind, history: Gaps, gap: float | None) -> None:
        """Blocks of this kind were needed again after ``gap`` seconds, or (None) not within the horizon."""
        position = len(self.edges) if gap is None else min(bisect_right(self.edges, gap), len(self.edges))
        self._everything.observe(position, POOLED_MEMORY)
        for level in (kind.coarse, kind):
            self._kinds.setdefault(level, self.build_history()).observe(position, POOLED_MEMORY)
        if not kind.bypassed:
            history.observe(position, SESSION_MEMORY)

    def forecast(self, kind: Kind, history: Gaps) -> Forecast:
        """What to expect of blocks of this kind, of a session with this history."""
        shares = [count / self._everything.total for count in self._everything.counts]
        levels = [(self._kinds.get(kind.coarse), KIND_WEIGHT), (self._kinds.get(kind), KIND_WEIGHT)]
        if not kind.bypassed:
            levels.append((history, SESSION_WEIGHT))
        for gaps, weight in levels:
            if gaps is not None and gaps.total:
                total = gaps.total + weight
                shares = [(count + weight * share) / total for count, share in zip(gaps.counts, shares, strict=True)]
        never = shares.pop()
        return Forecast(self.edges, shares, never)

    def describe(self) -> dict[str, object]:
        """Chance of a return and the median gap, by kind; for the JSON state. Any thread may call it."""
        kinds: dict[str, object] = {}
        for kind, gaps in sorted(self._kinds.items(), key=str):
            counts = list(gaps.counts)
            total = sum(counts)
            if kind.turns >= 0 or not total:
                continue
            returned = total - counts[-1]
            sums = list(accumulate(counts[:-1]))
            median = self.edges[min(bisect_right(sums, returned / 2), len(sums) - 1)] if returned > 0 else None
            kinds[(kind.expect or "unknown") + ("/bypassed" if kind.bypassed else "")] = {
                "observations": round(total, 1),
                "returned": round(returned / total, 3),
                "median_seconds_at_most": None if median is None else round(median, 2),
            }
        return kinds
