"""Counts of a soak, and whether it held. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

WARM_UP_SHARE: Final = 0.3
"""Of an engine's samples that are ignored: caches and pools fill up first."""
SLOPE_SECONDS: Final = 180.0
"""A slope is told from at least as long a series; on a shorter one noise is larger than any growth."""
GROWTH_LIMIT_MIB_PER_MINUTE: Final = 8.0
"""Of an engine's resident memory, over what the monolith grows by in the same run (vLLM's own caches go on filling for
minutes): a lost transfer buffer per read is far above, allocators' noise below."""


@dataclass
class Tally:
    """What happened; filled while the soak runs."""

    requests: int = 0
    """Turns sent, branches counted apart."""
    completed: int = 0
    left: int = 0
    """Turns that the client left on purpose."""
    compared: int = 0
    """Choices compared with the monolith's."""
    same: int = 0
    ties: int = 0
    wrong: int = 0
    hung: int = 0
    prefilled_again: int = 0
    """Decode refused a hand-over, and the retry went on."""
    errors_while_down: Counter[str] = field(default_factory=Counter)
    """By kind; the request was under way while one of its engines was killed or starting."""
    errors: Counter[str] = field(default_factory=Counter)
    """By kind; nothing excuses them."""
    disturbances: Counter[str] = field(default_factory=Counter)
    worst_distance: float = 0.0
    """Of log-probabilities, among the answers that are right."""


@dataclass(frozen=True)
class Rest:
    """An engine after the last request."""

    engine: str
    alive: bool
    leaked_blocks: int
    """Blocks that are still in use."""
    quarantined_blocks: int | None
    """None when the engine does not tell."""
    cache_reset: bool
    """Whether vLLM could empty the prefix cache, which needs every block to be free."""


def compute_slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Least-squares slope of value over seconds; None of fewer than two different times."""
    count = len(points)
    if count < 2:
        return None
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    below = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / below if below else None


def compute_growth(points: Sequence[tuple[float, int]]) -> float | None:
    """Growth of resident memory in MiB a minute after the warm-up; None when the series is too short to tell.

    Args:
        points: seconds and resident bytes of one life of an engine.
    """
    warm = points[int(len(points) * WARM_UP_SHARE) :]
    if not warm or warm[-1][0] - warm[0][0] < SLOPE_SECONDS:
        return None
    slope = compute_slope([(x, float(y)) for x, y in warm])
    return None if slope is None else slope * 60 / (1 << 20)


class Counters:
    """Counters summed over the lives of an engine: a restart begins at zero, which shows as a fall."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], float] = {}
        self.totals: dict[str, float] = {}

    def add(self, engine: str, values: Mapping[str, float]) -> None:
        """One scrape of an engine."""
        for name, value in values.items():
            last = self._last.get((engine, name), 0.0)
            self.totals[name] = self.totals.get(name, 0.0) + (value - last if value >= last else value)
            self._last[engine, name] = value


def find_faults(
    tally: Tally, rest: Sequence[Rest], growth: Mapping[str, float], baseline: float, reused_tokens: float
) -> list[str]:
    """Why the soak did not hold; empty when it did. ``growth`` by engine, and ``baseline`` of the monolith: MiB a
    minute."""
    faults = []
    if tally.wrong:
        faults.append(f"{tally.wrong} answers differ from the monolith's")
    if tally.hung:
        faults.append(f"{tally.hung} requests hung")
    if tally.errors:
        faults.append(f"errors without a cause: {dict(tally.errors)}")
    if not tally.compared:
        faults.append("no answer was compared, so nothing was shown")
    if not reused_tokens:
        faults.append("nothing was reused, so nothing was shown")
    for engine in rest:
        if not engine.alive:
            faults.append(f"{engine.engine} does not answer any more")
        elif engine.leaked_blocks or not engine.cache_reset:
            faults.append(f"{engine.engine} still has {engine.leaked_blocks} blocks in use when idle")
        if engine.quarantined_blocks:
            faults.append(f"{engine.engine} still has {engine.quarantined_blocks} blocks in quarantine")
    faults += [
        f"{engine} grew by {rate:.1f} MiB a minute, the monolith by {baseline:.1f}"
        for engine, rate in growth.items()
        if rate > GROWTH_LIMIT_MIB_PER_MINUTE + max(0.0, baseline)
    ]
    return faults


def build_summary(result: Mapping[str, Any]) -> str:
    """The result for people."""
    tally = result["tally"]
    lines = [
        f"{result['seconds']:.0f} s, seed {result['seed']}: {tally['requests']} requests, "
        f"{tally['completed']} completed, {tally['left']} left by the client",
        f"compared {tally['compared']}: {tally['same']} the same, {tally['ties']} tied, {tally['wrong']} wrong; "
        f"{tally['hung']} hung",
        f"disturbances {tally['disturbances']}, errors while an engine was down {tally['errors_while_down']}, "
        f"other errors {tally['errors']}",
        f"reused {result['counters'].get('bidikv_reused_tokens_total', 0):,.0f} tokens",
        "blocks in use at rest: " + ", ".join(f"{r['engine']} {r['leaked_blocks']}" for r in result["rest"]),
        "growth in MiB a minute: "
        + (", ".join(f"{name} {rate:+.1f}" for name, rate in result["growth"].items()) or "run too short to tell")
        + f"; the monolith {result['growth_of_the_monolith']:+.1f}",
    ]
    lines += [f"FAULT: {fault}" for fault in result["faults"]] or ["held"]
    return "\n".join(lines)
