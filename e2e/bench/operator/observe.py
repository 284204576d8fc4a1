"""What a process used, and what an API server's audit log says about who asked for what."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bidikv_operator import names
from e2e.bench.processes import PROC, parse_stat

READS: Final = frozenset({"get", "list", "watch"})
LEASES: Final = "leases"
_STATUS_KIB: Final = {"VmRSS": "resident_bytes", "VmHWM": "peak_bytes"}


@dataclass(frozen=True)
class Usage:
    """Of one process since its start."""

    cpu_seconds: float
    resident_bytes: int
    peak_bytes: int


def parse_status(text: str) -> dict[str, int]:
    """Resident and peak bytes from ``/proc/PID/status`` (proc(5): in KiB)."""
    found = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key in _STATUS_KIB:
            found[_STATUS_KIB[key]] = int(value.split()[0]) * 1024
    return found


def observe_process(pid: int) -> Usage:
    folder = PROC / str(pid)
    cpu_seconds = parse_stat((folder / "stat").read_text())[1].cpu_s
    return Usage(cpu_seconds=cpu_seconds, **parse_status((folder / "status").read_text()))


@dataclass(frozen=True)
class Call:
    """One answered request of the operator."""

    verb: str
    resource: str
    """With the subresource, as ``bidikvinferences/status``."""
    status: int

    @property
    def is_write(self) -> bool:
        """Whether it counts as a write of the operator's work: leading writes its Lease."""
        return self.verb not in READS and self.resource != LEASES


def parse_call(event: Mapping[str, Any]) -> Call | None:
    """An audit event (audit.k8s.io/v1) as a call; None where it is not the operator's, or about no object."""
    reference = event.get("objectRef")
    if not event.get("userAgent", "").startswith(names.FIELD_MANAGER) or reference is None:
        return None
    resource = "/".join(part for part in (reference.get("resource"), reference.get("subresource")) if part)
    return Call(event["verb"], resource, event.get("responseStatus", {}).get("code", 0))


def count_calls(calls: Iterable[Call]) -> dict[str, dict[str, int]]:
    """Number of calls by verb and resource."""
    counted: dict[str, Counter[str]] = {}
    for call in calls:
        counted.setdefault(call.verb, Counter())[call.resource] += 1
    return {verb: dict(sorted(counts.items())) for verb, counts in sorted(counted.items())}


class AuditLog:
    """The operator's calls, from where the last look ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def take(self) -> list[Call]:
        """The calls that were answered since the last call."""
        return list(self._read())

    def _read(self) -> Iterator[Call]:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # being written
                self._offset += len(line)
                call = parse_call(json.loads(line))
                if call is not None:
                    yield call


def observe_load() -> float:
    """Mean number of processes that wanted a CPU over the last minute, the bench's own among them."""
    return os.getloadavg()[0]
