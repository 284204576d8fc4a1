"""What the kernel knows of an engine's processes: CPU time and resident memory, summed over its process group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
PROC: Final = Path("/proc")


@dataclass(frozen=True)
class Usage:
    """Of one process or the sum of several; ended children that were waited for are not included."""

    cpu_s: float = 0.0
    resident_bytes: int = 0


def parse_stat(line: str) -> tuple[int, Usage]:
    """Process group and usage from ``/proc/PID/stat`` (proc(5): fields 5, 14, 15 and 24).

    The second field is the program's name in brackets and may itself hold blanks and brackets.
    """
    fields = line.rpartition(")")[2].split()
    cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND
    return int(fields[2]), Usage(cpu_s, int(fields[21]) * PAGE_BYTES)


def observe_group(group: int) -> Usage:
    """Usage of all processes in a group; zero when there are none. Shared pages count once per process."""
    total = Usage()
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            own, usage = parse_stat((entry / "stat").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended since the listing
        if own == group:
            total = Usage(total.cpu_s + usage.cpu_s, total.resident_bytes + usage.resident_bytes)
    return total


def observe_available_bytes() -> int:
    """Memory that new processes can have without swapping (proc(5), MemAvailable)."""
    for line in (PROC / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{PROC / 'meminfo'} has no line MemAvailable: this needs Linux 3.14 or newer")
