"""One set of engines on this machine at a time: runs that want engines take turns.

An engine takes 1.5 to 3 GB and all the cores that there are; two test runs at once end each other's engines for want of
memory. A process takes the turn with its first engine and gives it back with its last one, or by ending; what it starts
itself shares its turn.
"""

from __future__ import annotations

import fcntl
import os
import time
from typing import IO, Final

from e2e.cluster.paths import find_paths
from e2e.cluster.progress import say

HELD: Final = "BIDIKV_ENGINES_TURN"
"""Set in the environment of whatever the holder starts."""
WAIT_SECONDS: Final = 3600.0

_file: IO[str] | None = None
_engines = 0


class TurnError(RuntimeError):
    """Others have kept their engines for too long."""


def take() -> None:
    """An engine is about to start.

    Raises:
        TurnError: another run has had engines for an hour.
    """
    global _file, _engines
    _engines += 1
    if _engines > 1 or HELD in os.environ:
        return
    path = find_paths().cache / "engines.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+")
    deadline, told = time.monotonic() + WAIT_SECONDS, False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                _engines -= 1
                raise TurnError(f"other processes hold {path}: stop the engines of other test runs") from None
            if not told:
                told = True
                say("Waiting for the engines of another run to end.")
            time.sleep(0.5)
    _file = file
    os.environ[HELD] = str(os.getpid())


def give_back() -> None:
    """An engine has ended."""
    global _file, _engines
    _engines -= 1
    if _engines == 0 and _file is not None:
        del os.environ[HELD]
        _file.close()
        _file = None
