from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from e2e.cluster.unit import ProgramSpec, RestartBudget, UnitSpec, observe_ready

CHECKOUT = Path(__file__).parents[3]
LIMIT_SECONDS = 30.0
RUN_UNIT = "import sys; from pathlib import Path; from e2e.cluster.unit import Unit, parse_unit_spec; "
RUN_UNIT += "sys.exit(Unit(parse_unit_spec(Path(sys.argv[1]).read_text())).run())"


def start_unit(folder: Path, *programs: ProgramSpec) -> subprocess.Popen[str]:
    spec = UnitSpec("test", str(folder), mounts={}, temporary=[], cgroups=[], programs=list(programs))
    (folder / "unit.json").write_text(spec.to_json())
    return subprocess.Popen(
        [sys.executable, "-c", RUN_UNIT, str(folder / "unit.json")], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    )


def wait_for_lines(file: Path, count: int) -> list[str]:
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) >= count:
            return lines
        time.sleep(0.02)
    raise AssertionError(f"{file} has fewer than {count} lines")


def end(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LIMIT_SECONDS)
    return output


def test_programs_start_in_order_when_the_one_before_is_ready(tmp_path: Path) -> None:
    socket = tmp_path / "socket"
    slow = "import socket, sys, time; time.sleep(0.3); s = socket.socket(socket.AF_UNIX); "
    slow += "s.bind(sys.argv[1]); s.listen(); time.sleep(60)"
    process = start_unit(
        tmp_path,
        ProgramSpec("first", [sys.executable, "-c", slow, str(socket)], ready=f"unix:{socket}"),
        ProgramSpec("second", ["sh", "-c", f"test -S {socket} && echo after; exec sleep 60"]),
    )
    try:
        assert wait_for_lines(tmp_path / "second.log", 1) == ["after"]
    finally:
        output = end(process)
    for pid in [int(line.rsplit(" ", 1)[1]) for line in output.splitlines() if " started as " in line]:
        os.kill(pid, signal.SIGKILL)  # outside of a PID namespace of its own nothing ends them
    assert process.returncode == 0


def test_an_ended_program_is_started_again(tmp_path: Path) -> None:
    process = start_unit(tmp_path, ProgramSpec("brief", ["sh", "-c", "echo once"]))
    try:
        assert wait_for_lines(tmp_path / "brief.log", 2)[:2] == ["once", "once"]
    finally:
        output = end(process)
    assert "brief ended (0); starting it again in 1 s" in output


def test_environment_of_the_caller_stays_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    process = start_unit(tmp_path, ProgramSpec("env", ["env"], environment={"OWN": "1"}))
    try:
        lines = wait_for_lines(tmp_path / "env.log", 3)
    finally:
        end(process)
    assert {line.split("=")[0] for line in lines} == {"PATH", "HOME", "OWN"}


def test_restarts_slow_down_and_end() -> None:
    budget = RestartBudget(limit=7, window_seconds=600)
    assert [budget.spend(float(moment)) for moment in range(8)] == [1, 2, 4, 8, 16, 30, 30, None]


def test_old_restarts_are_forgotten() -> None:
    budget = RestartBudget(limit=2, window_seconds=10)
    assert [budget.spend(moment) for moment in (0.0, 1.0, 11.5, 12.0, 13.0)] == [1, 2, 1, 2, None]


def test_nothing_listens(tmp_path: Path) -> None:
    assert not observe_ready(f"unix:{tmp_path}/none")
    assert not observe_ready("tcp:127.0.0.1:1")
