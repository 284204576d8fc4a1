"""The machine-wide settings that every kubelet changes: kept before the cluster starts, put back when it is down.

Everything else that the cluster sets lies in network namespaces of its own.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Final

ROOT: Final = Path("/proc/sys")
CHANGED_BY_KUBELET: Final = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
"""As listed in k8s.io/component-helpers/node/util/sysctl."""


def save_sysctls(file: Path, root: Path = ROOT) -> None:
    """Write the present values to ``file``, unless it is there already: then those of now are a cluster's."""
    if file.exists():
        return
    values = {}
    for name in CHANGED_BY_KUBELET:
        with contextlib.suppress(OSError):
            values[name] = (root / name).read_text().strip()
    file.write_text(json.dumps(values))


def restore_sysctls(file: Path, root: Path = ROOT) -> None:
    """Put the values of ``file`` back and remove it; nothing to do when there is none."""
    if not file.exists():
        return
    for name, value in json.loads(file.read_text()).items():
        with contextlib.suppress(OSError):
            if (root / name).read_text().strip() != value:
                (root / name).write_text(value)
    file.unlink()
