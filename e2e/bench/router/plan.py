"""Rows of the bench: which load, against which targets; pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from e2e.bench.router.targets import DIRECT, LOCAL, OURS, PEER, TOKENS, TOY_PROXY

SMALL, MEDIUM, LARGE = 1_500, 100_000, 1_000_000
BYTES_PER_TOKEN: Final = 4
QUICK_SECONDS: Final = 0.4


@dataclass(frozen=True)
class Row:
    """A load and who gets it."""

    name: str
    body_bytes: int
    connections: int
    seconds: float
    targets: tuple[str, ...]
    chunks: int = 0
    """Server-sent events of decode's answer; 0: one JSON object, and the request does not ask for a stream."""
    gap_us: int = 0
    """Between two of these."""

    ramp_seconds: float = 0
    """Over which the connections' first requests are spread."""

    @property
    def stream(self) -> bool:
        return self.chunks > 0


BOTH: Final = (OURS, PEER)
ROWS: Final = (
    Row("small c=1", SMALL, 1, 1.0, BOTH),
    Row("small c=32", SMALL, 32, 1.5, (*BOTH, TOY_PROXY, LOCAL)),
    Row("small c=256", SMALL, 256, 1.5, BOTH),
    # A few events: the time to the first is what counts, and every run needs many of them.
    Row("100 KB stream c=1", MEDIUM, 1, 1.0, (*BOTH, DIRECT), chunks=4, gap_us=1000),
    Row("100 KB c=16", MEDIUM, 16, 1.5, (*BOTH, TOKENS), chunks=50),
    Row("1 MB stream c=1", LARGE, 1, 1.5, (*BOTH, TOY_PROXY, DIRECT), chunks=4, gap_us=1000),
    Row("1 MB c=8", LARGE, 8, 2.0, (*BOTH, TOKENS), chunks=50),
    Row("64 streams", SMALL, 64, 2.5, BOTH, chunks=50, gap_us=5000, ramp_seconds=0.25),
    # In step: every 250 ms all of them ask at once.
    Row("64 streams at once", SMALL, 64, 2.5, BOTH, chunks=50, gap_us=5000),
)
MEMORY: Final = "memory"
"""Not a row of rounds: one long run of ours."""
MEMORY_WARM_UP: Final = 500
MEMORY_REQUESTS: Final = 5_000
MEMORY_CONNECTIONS: Final = 8


def select_rows(names: Sequence[str], targets: Sequence[str], *, quick: bool) -> list[Row]:
    """The rows called ``names`` (all without any) with those of ``targets`` that they are for.

    Raises:
        ValueError: a name is unknown.
    """
    known = {row.name: row for row in ROWS}
    for name in names:
        if name not in known:
            raise ValueError(f"there is no row {name!r}; the rows are: {', '.join(known)}")
    selected = []
    for row in (known[name] for name in names) if names else ROWS:
        # What is not one of the fixed targets is another version of ours: it goes wherever ours goes.
        wanted = tuple(t for t in targets if t in row.targets or (t not in _FIXED and OURS in row.targets))
        if wanted:
            selected.append(replace(row, targets=wanted, seconds=QUICK_SECONDS if quick else row.seconds))
    return selected


_FIXED: Final = (OURS, PEER, TOY_PROXY, LOCAL, TOKENS, DIRECT)


def shuffle(items: Sequence[str], source: random.Random) -> list[str]:
    """A new list in random order."""
    return source.sample(list(items), len(items))
