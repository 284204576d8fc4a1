"""What an engine's preStop hook runs: stay until nothing would be lost with the engine, or until a deadline.

    python3 -m bidikv_runtime.drain --leave-seconds 10 --seconds 120

A stopping pod leaves its EndpointSlices at once, but routers see that a moment later: first ``--leave-seconds`` pass.
Then the engine's own report (``contract.EngineReport``) is read once a second until it has no requests, and other
engines have read the KV of its sessions and of its finished prefills. SIGTERM comes when this process ends. An engine
that no router has told lately that its sessions will be read (reuse is OneWay, it is the last one of its release, the
routers are gone) reports no unread ones.

Invariants: it ends within ``--leave-seconds`` and ``--seconds`` together (``LATE_SECONDS`` more if an answer hangs),
and with status 0: a hook that fails only leaves an event behind. An engine that does not answer (it starts, it has
died) has nothing to be waited for. Standard library only, as it runs in the image of the engine.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from bidikv_runtime import contract

LOOK_SECONDS: Final = 1.0
"""Between two looks."""
ANSWER_SECONDS: Final = 2.0
"""For one report."""
LATE_SECONDS: Final = 2.0
TRIES: Final = 3
"""Looks in a row without an answer, after which the engine counts as gone."""
QUIET_LOOKS: Final = 2
"""Looks in a row that have to find nothing: of several ranks that read a session's KV only the first one is noticed."""
MOST_BYTES: Final = 1 << 20
MOST_SECONDS: Final = 86_400
PROC: Final = Path("/proc")


@dataclass(frozen=True)
class Left:
    """What would be lost with the engine now, over all its ranks."""

    requests: int = 0
    sessions: int = 0
    handovers: int = 0

    def __bool__(self) -> bool:
        return bool(self.requests or self.sessions or self.handovers)

    def __add__(self, other: Left) -> Left:
        return Left(self.requests + other.requests, self.sessions + other.sessions, self.handovers + other.handovers)

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {self.sessions} sessions and {self.handovers} finished prefills that no other "
            "engine has read"
        )


class NoAnswer(Exception):
    """The engine gave no report; the message says why."""


@dataclass(frozen=True)
class Engine:
    """Where its ranks report."""

    host: str
    port: int
    """Of the first rank; the others' count up by one."""
    ranks: int
    token_file: str
    """Empty: no token."""

    def look(self) -> Left:
        """What is left on all ranks.

        Raises:
            NoAnswer: one of them did not report.
        """
        return sum((self._look_at(self.port + rank) for rank in range(self.ranks)), Left())

    def _look_at(self, port: int) -> Left:
        connection = http.client.HTTPConnection(self.host, port, timeout=ANSWER_SECONDS)
        try:
            connection.request("GET", f"{contract.REPORT_PATH}?sessions=0", headers=self._build_headers())
            response = connection.getresponse()
            body = response.read(MOST_BYTES)
            if response.status != http.HTTPStatus.OK:
                raise NoAnswer(f"port {port} answers {response.status}")
            return parse_report(body)
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"port {port}: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def _build_headers(self) -> dict[str, str]:
        # Read anew each time: tokens rotate.
        lines = Path(self.token_file).read_text().split() if self.token_file else []
        return {"Authorization": f"Bearer {lines[0]}"} if lines else {}


def parse_report(body: bytes) -> Left:
    """What a report says is left.

    Raises:
        NoAnswer: it is no report.
    """
    try:
        report = json.loads(body)
        requests, sessions, handovers = (
            int(report[key]) for key in ("requests", "unread_sessions", "unread_handovers")
        )
    except (ValueError, TypeError, KeyError) as error:
        raise NoAnswer(f"its report cannot be understood: {error!r}") from error
    return Left(requests, sessions, handovers)


def drain(engine: Engine, *, leave_seconds: float, seconds: float) -> str:
    """Wait; returns one sentence about how it ended."""
    began = time.monotonic()
    left, failures, quiet = Left(), 0, 0
    while True:
        try:
            left = engine.look()
        except NoAnswer as reason:
            failures, quiet = failures + 1, 0
            if failures >= TRIES:
                return f"the engine does not answer ({reason}): nothing to wait for"
        else:
            failures = 0
            quiet = 0 if left else quiet + 1
        passed = time.monotonic() - began
        if quiet >= QUIET_LOOKS and passed >= leave_seconds:
            return f"nothing is left after {passed:.0f} s"
        if passed >= leave_seconds + seconds:
            return f"the time of {leave_seconds + seconds:g} s is over with {left}"
        time.sleep(min(LOOK_SECONDS, leave_seconds + seconds - passed))


def tell(line: str, *, in_pod: bool) -> None:
    """Write a line; in a pod also into the container's log, as nobody sees what a hook itself writes.

    The log is the standard output of the container's first process: in a process namespace that the pod shares, the
    first one that sees the same files.
    """
    text = f"INFO bidikv.drain {line}\n"
    sys.stdout.write(text)
    files = os.readlink(PROC / "self/ns/mnt")
    for process in sorted(int(item.name) for item in PROC.iterdir() if item.name.isdigit()) if in_pod else ():
        with contextlib.suppress(OSError):  # of another user, or just gone
            if os.readlink(PROC / f"{process}/ns/mnt") == files:
                with open(PROC / f"{process}/fd/1", "ab", buffering=0) as log:
                    log.write(text.encode())
                return


def parse_seconds(text: str) -> float:
    """A duration on the command line."""
    seconds = float(text)
    if not 0 <= seconds <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to {MOST_SECONDS}")
    return seconds


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bidikv_runtime.drain", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--leave-seconds", type=parse_seconds, default=10.0, help="until every router knows that the pod stops"
    )
    parser.add_argument("--seconds", type=parse_seconds, default=120.0, help="how long to wait after that, at most")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks of the engine")
    parser.add_argument("--state-port", type=int, default=contract.STATE_PORT, help="of the first rank's reports")
    return parser


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Entry point."""
    given = build_parser().parse_args(arguments)

    def give_up(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("the engine's answer takes longer than there is time")

    # Whatever an answer does: the kubelet's time for the hook is the pod's whole time to stop.
    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, given.leave_seconds + given.seconds + LATE_SECONDS)
    engine = Engine(
        host=environment.get(contract.ENV_LOOKUP_HOST) or "127.0.0.1",
        port=given.state_port,
        ranks=given.ranks,
        token_file=environment.get(contract.ENV_TOKEN_FILE, ""),
    )
    try:
        sentence = drain(engine, leave_seconds=given.leave_seconds, seconds=given.seconds)
    except Exception as error:
        sentence = f"not done: {error!r}"
    with contextlib.suppress(Exception):
        tell(sentence, in_pod="KUBERNETES_SERVICE_HOST" in environment)
    return 0


if __name__ == "__main__":
    sys.exit(main())
