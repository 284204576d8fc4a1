"""CPU time and memory of process groups, as the kernel tells them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from e2e.bench.processes import PAGE_BYTES, TICKS_PER_SECOND, observe_available_bytes, observe_group, parse_stat
from e2e.install import ROOT

LINE = (
    "77 (a) (b c) S 1 4242 4242 0 -1 4194304 900 0 0 0 150 50 9 9 20 0 3 0 100 1000000 300 18446744073709551615 "
    "1 1 0 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0"
)


def test_stat_of_a_program_whose_name_has_brackets_and_blanks() -> None:
    group, usage = parse_stat(LINE)
    assert group == 4242
    assert usage.cpu_s == 200 / TICKS_PER_SECOND
    assert usage.resident_bytes == 300 * PAGE_BYTES


def test_a_group_is_all_of_its_processes_and_no_other() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    command = [sys.executable, "-c", burn]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        usage = observe_group(process.pid)
        process.communicate(b"\n")
    assert 0.25 < usage.cpu_s < 1.0
    assert 1 << 20 < usage.resident_bytes < 1 << 30
    assert observe_group(process.pid).cpu_s == 0
    assert observe_group(os.getpgid(0)).resident_bytes > 0


def test_available_memory_is_part_of_the_machine() -> None:
    pages = os.sysconf("SC_PHYS_PAGES")
    assert 0 < observe_available_bytes() < pages * PAGE_BYTES


def test_a_frozen_group_ends_with_the_process_that_guards_it() -> None:
    """The guarding process is killed, so nothing of its own code runs at its end."""
    code = """
import os, signal, subprocess, sys
from e2e.bench.processes import guardian
with guardian() as guard:
    frozen = subprocess.Popen(["sleep", "600"], start_new_session=True)
    os.killpg(frozen.pid, signal.SIGSTOP)
    guard(frozen.pid)
    print(frozen.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    group = int(done.stdout)
    deadline = time.monotonic() + 30
    while observe_group(group).resident_bytes:
        assert time.monotonic() < deadline, f"group {group} is still there"
        time.sleep(0.02)
