"""Start and end units: a first process in new namespaces, and everything below it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from e2e.cluster.network import NAMESPACES, observe_namespaces, observe_processes
from e2e.cluster.progress import ClusterError
from e2e.cluster.unit import UnitSpec

STOP_LIMIT_SECONDS: Final = 30.0
UNIT_MODULE: Final = "e2e.cluster.unit"
CHECKOUT: Final = Path(__file__).parents[2]


def start_unit(spec: UnitSpec, folder: Path) -> None:
    """Start a unit in the network namespace of its name; it runs on when this process ends.

    nsenter rather than ``ip netns exec``: the latter mounts /sys anew and hides the cgroup hierarchies.
    """
    file = folder / "unit.json"
    file.write_text(spec.to_json())
    command = [
        "nsenter",
        f"--net={NAMESPACES / spec.name}",
        "unshare",
        "--mount",
        "--propagation=private",
        "--pid",
        "--fork",
        "--kill-child=SIGKILL",
        "--mount-proc",
        "--uts",
        "--ipc",
        sys.executable,
        "-m",
        UNIT_MODULE,
        str(file),
    ]
    with Path(spec.log_folder, "unit.log").open("ab") as log:
        subprocess.Popen(
            command,
            cwd=CHECKOUT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def observe_units() -> dict[str, int]:
    """Name -> process id (of the host) of each unit's first process, found in /proc: no file can be stale."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if UNIT_MODULE.encode() not in words:
                continue
            status = (folder / "status").read_text()
        except OSError:
            continue  # it ended meanwhile
        # NSpid lists the process's id in each nested PID namespace: a first process is 1 in the innermost. The others
        # with these words are nsenter and unshare, which wait for it.
        ids = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
        if len(ids) > 1 and ids[-1] == "1":
            found[Path(os.fsdecode(words[words.index(UNIT_MODULE.encode()) + 1])).parent.name] = int(folder.name)
    return found


def stop_units() -> None:
    """End every process of every unit on this host, whatever started it and whatever state it is in.

    Killing a first process makes the kernel kill its whole PID namespace, pods and container shims included, and it is
    gone only when they are. Processes that entered a unit's network by other ways (a debugging shell) end too.
    """
    deadline = time.monotonic() + STOP_LIMIT_SECONDS
    while True:
        first = set(observe_units().values())
        others = {pid for name in observe_namespaces() for pid in observe_processes(name)} - {os.getpid()}
        if not first and not others:
            return
        for pid in first or others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise ClusterError(
                f"processes {sorted(first | others)} of the cluster do not end; see `ps -fp` for what they wait on"
            )
        time.sleep(0.05)
