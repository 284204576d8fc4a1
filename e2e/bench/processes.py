"""Process groups of engines: their CPU time and memory as the kernel tells, and their end with the bench's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
PROC: Final = Path("/proc")
Guard = Callable[[int], None]
_GUARDIAN: Final = """
import os, signal, sys
for group in {int(line) for line in sys.stdin}:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


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


@contextmanager
def guardian() -> Iterator[Guard]:
    """Gives a function that names a process group which must not outlive this process, however it ends.

    A frozen engine handles no signal but SIGKILL, and nobody sends that when the bench itself was killed: so a process
    beside it waits for the end of a pipe.
    """
    with subprocess.Popen([sys.executable, "-c", _GUARDIAN], stdin=subprocess.PIPE, start_new_session=True) as process:
        pipe = process.stdin
        assert pipe is not None

        def guard(group: int) -> None:
            pipe.write(f"{group}\n".encode())
            pipe.flush()

        try:
            yield guard
        finally:
            process.kill()  # a regular end stops the engines itself, and a number may be used again
