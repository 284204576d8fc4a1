"""Faults on demand in a test's engine, agreed on by the test and the connector that it loads.

Each fault holds a read at one point until the test lets go, so a test does its damage in between without racing. The
test writes ``Faults`` to a file; the engine appends a line to the file beside it when it holds a request.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

FAULTS_FILE: Final = "BIDIKV_TEST_FAULTS"
"""Environment variable with the file's path."""


@dataclass(frozen=True)
class Faults:
    hold_reads: bool = False
    """Between LOOKUP and READ."""
    hold_validations: bool = False
    """Between READ and VALIDATE."""
    freeze_on_read: int = 0
    """Stop the processes of this group as soon as a transfer is posted: a peer that hangs in the middle of a read."""
    trust_reads: bool = False
    """Use what was read without validation: shows what the protocol protects from."""

    @staticmethod
    def read(path: Path) -> Faults:
        """None before the test has written any."""
        return Faults(**json.loads(path.read_text())) if path.exists() else Faults()

    def write(self, path: Path) -> None:
        """Replace the file at once, so that the engine never sees half of it."""
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self)))
        fresh.rename(path)


def events_file(path: Path) -> Path:
    """Where the engine says what it holds: lines that begin with ``read``, ``validation`` or ``frozen``."""
    return path.with_suffix(".events")
