"""CPU time as the scheduler counts it, in nanoseconds, and how much of the machine others use.

``/proc/PID/stat`` counts in ticks of 10 ms, too coarse for a second of requests; ``schedstat`` counts run time exactly,
but per thread, and forgets threads that ended: routers keep theirs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from e2e.bench.processes import PROC, TICKS_PER_SECOND, parse_stat

_BUSY_FIELDS: Final = (0, 1, 2, 5, 6, 7)
"""Of the line ``cpu`` in /proc/stat (proc(5)): user, nice, system, irq, softirq, steal. Guests are within user."""


def parse_run_time(text: str) -> float:
    """Seconds on a CPU from a ``schedstat`` (first field, nanoseconds)."""
    return int(text.split()[0]) / 1e9


def parse_busy_seconds(text: str) -> float:
    """CPU seconds that the whole machine has spent on anything, time stolen by the host included, from /proc/stat."""
    line = next(line for line in text.splitlines() if line.startswith("cpu "))
    fields = line.split()[1:]
    return sum(int(fields[index]) for index in _BUSY_FIELDS) / TICKS_PER_SECOND


def observe_tree(root: int) -> list[int]:
    """The process ``root`` and its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    tree = [root]
    for number in tree:
        tree += children.get(number, ())
    return tree


@dataclass(frozen=True)
class TreeUsage:
    """Of a process and its descendants."""

    cpu_seconds: float
    resident_bytes: int


def observe_usage(root: int) -> TreeUsage:
    """What the process ``root`` and its descendants have used."""
    cpu, resident = 0.0, 0
    for number in observe_tree(root):
        folder = PROC / str(number)
        try:
            resident += parse_stat((folder / "stat").read_text())[1].resident_bytes
            cpu += sum(_read_run_time(thread) for thread in (folder / "task").iterdir())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return TreeUsage(cpu, resident)


def _read_run_time(thread: Path) -> float:
    try:
        return parse_run_time((thread / "schedstat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def observe_busy_seconds() -> float:
    """See :func:`parse_busy_seconds`."""
    return parse_busy_seconds((PROC / "stat").read_text())


def choose_cores() -> tuple[int, int]:
    """The core of the router and the core of everything else.

    Raises:
        RuntimeError: this process may use one core only.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        raise RuntimeError("the bench needs two cores: one for the router, one for its clients and engines")
    return allowed[0], allowed[1]
