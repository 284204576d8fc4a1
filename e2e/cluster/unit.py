"""The first process of a unit: ``python -m e2e.cluster.unit SPEC`` inside new namespaces.

It makes the unit's mounts, starts its programs one after another (each when the one before is ready), starts one again
that ended, and collects orphans. It is PID 1 of its namespace: when it ends, for whatever reason, the kernel ends
everything else in the unit, pods included, and with the last process the unit's mounts are gone. Standard library only,
so that it starts quickly and needs nothing of the checkout but itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

RESTART_DELAY_SECONDS: Final = 1.0
RESTART_DELAY_LIMIT_SECONDS: Final = 30.0
RESTART_BUDGET: Final = 10
"""Restarts of one program within the window; one more ends the unit."""
RESTART_WINDOW_SECONDS: Final = 600.0
READY_LIMIT_SECONDS: Final = 90.0
STARTING_TICK_SECONDS: Final = 0.05
RUNNING_TICK_SECONDS: Final = 30.0


@dataclass(frozen=True)
class ProgramSpec:
    """A program of a unit. ``ready`` is ``""``, ``unix:PATH``, ``tcp:HOST:PORT`` or a URL that answers 200."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    ready: str = ""
    ready_authority: str = ""
    """Certificate file that an ``https://`` check trusts."""


@dataclass(frozen=True)
class UnitSpec:
    """What a unit is made of. ``mounts`` maps a target folder to the folder that appears there."""

    name: str
    log_folder: str
    mounts: dict[str, str]
    temporary: list[str]
    """Folders that get a tmpfs of the unit's own."""
    cgroups: list[str]
    """cgroup folders that this process joins."""
    programs: list[ProgramSpec]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"


def parse_unit_spec(text: str) -> UnitSpec:
    document: dict[str, Any] = json.loads(text)
    programs = [ProgramSpec(**program) for program in document.pop("programs")]
    return UnitSpec(programs=programs, **document)


class RestartBudget:
    """Counts restarts inside a sliding window; each waits twice as long as the one before."""

    def __init__(self, limit: int = RESTART_BUDGET, window_seconds: float = RESTART_WINDOW_SECONDS) -> None:
        self._limit = limit
        self._window = window_seconds
        self._times: list[float] = []

    def spend(self, now: float) -> float | None:
        """Seconds to wait before one more restart, asked for at ``now``; None when the budget is used up."""
        self._times = [moment for moment in self._times if now - moment < self._window]
        self._times.append(now)
        if len(self._times) > self._limit:
            return None
        return min(RESTART_DELAY_SECONDS * 2.0 ** (len(self._times) - 1), RESTART_DELAY_LIMIT_SECONDS)


def observe_ready(check: str, authority: str = "") -> bool:
    """Whether a check (see ``ProgramSpec``) succeeds now, within 2 s."""
    kind, _, rest = check.partition(":")
    try:
        if kind == "unix":
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(1)
                client.connect(rest)
        elif kind == "tcp":
            host, _, port = rest.rpartition(":")
            socket.create_connection((host, int(port)), timeout=1).close()
        elif kind in ("http", "https"):
            trust = ssl.create_default_context(cafile=authority or None)
            # No proxy of the user's environment may come between.
            opener = urllib.request.build_opener(
                urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust)
            )
            opener.open(check, timeout=2).close()
    except (OSError, urllib.error.URLError):
        return False
    return True


class Unit:
    """Runs the programs of one spec until a stop signal or an exhausted budget."""

    def __init__(self, spec: UnitSpec) -> None:
        self._spec = spec
        self._waiting = list(spec.programs)
        self._running: dict[int, ProgramSpec] = {}
        self._due: list[tuple[float, ProgramSpec]] = []
        self._budgets = {program.name: RestartBudget() for program in spec.programs}
        self._starting: tuple[ProgramSpec, float] | None = None

    def run(self) -> int:
        """Serve; the exit status of the unit."""
        signals = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        while True:
            now = time.monotonic()
            if not self._advance(now):
                return 1
            received = signal.sigtimedwait(signals, self._compute_pause(now))
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._log("stopping")
                return 0
            if not self._collect(time.monotonic()):
                return 1

    def _compute_pause(self, now: float) -> float:
        if self._starting is not None:
            return STARTING_TICK_SECONDS
        return max(0.0, min([RUNNING_TICK_SECONDS, *(moment - now for moment, _ in self._due)]))

    def _advance(self, now: float) -> bool:
        """Start what is due; False when a program did not become ready in time."""
        for moment, program in list(self._due):
            if moment <= now:
                self._due.remove((moment, program))
                self._start(program)
        if self._starting is not None:
            program, limit = self._starting
            if observe_ready(program.ready, program.ready_authority):
                self._log(f"{program.name} is ready")
                self._starting = None
            elif now > limit:
                self._log(f"{program.name} was not ready within {READY_LIMIT_SECONDS:.0f} s ({program.ready})")
                return False
        while self._starting is None and self._waiting:
            program = self._waiting.pop(0)
            self._start(program)
            if program.ready:
                self._starting = (program, now + READY_LIMIT_SECONDS)
        return True

    def _start(self, program: ProgramSpec) -> None:
        log = os.path.join(self._spec.log_folder, f"{program.name}.log")
        # PATH is the caller's; nothing else of the caller's environment (proxies, say) reaches the cluster.
        pid = os.posix_spawnp(
            program.command[0],
            program.command,
            {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/root", **program.environment},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsigmask=[],
            setpgroup=0,
        )
        self._running[pid] = program
        self._log(f"{program.name} started as {pid}")

    def _collect(self, now: float) -> bool:
        """Collect every ended child; False when a program has used up its restarts."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return True
            program = self._running.pop(pid, None)
            if program is None:
                continue
            code = os.waitstatus_to_exitcode(status)
            delay = self._budgets[program.name].spend(now)
            if delay is None:
                self._log(f"{program.name} ended ({code}) more than {RESTART_BUDGET} times; the unit ends")
                return False
            self._log(f"{program.name} ended ({code}); starting it again in {delay:.0f} s")
            self._due.append((now + delay, program))

    def _log(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self._spec.name}: {text}", flush=True)


def write_namespace(spec: UnitSpec) -> None:
    """Join the unit's cgroups and make its mounts; runs once, in the new namespaces."""
    for cgroup in spec.cgroups:
        Path(cgroup, "cgroup.procs").write_text("0")  # 0 is the writer itself, in whatever PID namespace
    socket.sethostname(spec.name)
    os.chdir("/")
    # Shared within the unit only: pods with mount propagation work, and nothing reaches the host.
    subprocess.run(["mount", "--make-rshared", "/"], check=True)
    for target, source in spec.mounts.items():
        subprocess.run(["mount", "--bind", source, target], check=True)
    for target in spec.temporary:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", target], check=True)


def main() -> int:
    spec = parse_unit_spec(Path(sys.argv[1]).read_text())
    write_namespace(spec)
    return Unit(spec).run()


if __name__ == "__main__":
    sys.exit(main())
