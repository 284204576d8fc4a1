"""Run a command that may take minutes: say what runs, that it still runs, and how it ended.

The command's output goes to a log file; its end is shown when the command fails.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

HEARTBEAT_SECONDS: Final = 15.0
TAIL_LINES: Final = 20


class ClusterError(Exception):
    """One sentence for the user: what failed and what to do about it."""


def say(text: str) -> None:
    print(text, flush=True)


def read_tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, indented; empty when there is none."""
    try:
        content = path.read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(f"    {line}" for line in content.splitlines()[-lines:])


def run_logged(
    command: Sequence[str],
    *,
    what: str,
    log: Path,
    limit_seconds: float,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run ``command``, its output in ``log``, a line each 15 s; ``ClusterError`` when it fails or passes its limit."""
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    say(f"{what} ...")
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        except FileNotFoundError as missing:
            raise ClusterError(f"{what}: the program {command[0]} is not installed") from missing
        try:
            while True:
                try:
                    code = process.wait(HEARTBEAT_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    elapsed = time.monotonic() - began
                    if elapsed > limit_seconds:
                        raise ClusterError(
                            f"{what}: not finished after {elapsed:.0f} s; its output is in {log}"
                        ) from None
                    say(f"  {what}: still running, {elapsed:.0f} s")
        except BaseException:
            process.kill()
            process.wait()
            raise
    if code != 0:
        raise ClusterError(f"{what}: exit status {code}; the end of {log}:\n{read_tail(log)}")
    say(f"  {what}: done in {time.monotonic() - began:.1f} s")
