"""A cgroup of its own for each unit, in every hierarchy of the host: cgroup v1, v2, or the hybrid of both.

Two kubelets on one host need it: each takes the pod cgroups below its root that it does not know for leftovers and
removes them. The unit's daemons live in the leaf ``daemons``, apart from the pods, as cgroup v2 demands.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

from e2e.cluster.progress import ClusterError

MOUNT: Final = Path("/sys/fs/cgroup")
PREFIX: Final = "bidikv-"
LEAF: Final = "daemons"
REMOVE_LIMIT_SECONDS: Final = 10.0


def observe_hierarchies(mount: Path = MOUNT) -> list[Path]:
    """The roots of the hierarchies with controllers: the mount itself on cgroup v2, else one folder per controller."""
    if (mount / "cgroup.controllers").exists():
        return [mount]
    # Links such as cpu -> cpu,cpuacct name a hierarchy twice; "unified" of the hybrid layout holds no controllers.
    return sorted(
        path
        for path in mount.iterdir()
        if path.is_dir() and not path.is_symlink() and path.name != "unified" and (path / "cgroup.procs").exists()
    )


def apply_cgroup(name: str, mount: Path = MOUNT) -> list[str]:
    """Create the unit's cgroup and its leaf in each hierarchy; the leaves' paths."""
    leaves = []
    for hierarchy in observe_hierarchies(mount):
        if (hierarchy / "cgroup.controllers").exists():
            _delegate(hierarchy)
        for folder in (hierarchy / name, hierarchy / name / LEAF):
            folder.mkdir(exist_ok=True)
            for setting in ("cpuset.cpus", "cpuset.mems"):
                # On v1 a new cpuset is empty and accepts no process until it is filled.
                file = folder / setting
                if hierarchy != mount and file.exists() and not file.read_text().strip():
                    file.write_text((folder.parent / setting).read_text())
        if (hierarchy / "cgroup.controllers").exists():
            _delegate(hierarchy / name)
        leaves.append(str(hierarchy / name / LEAF))
    return leaves


def _delegate(folder: Path) -> None:
    """Let the children of a v2 cgroup use every controller that it has."""
    for controller in (folder / "cgroup.controllers").read_text().split():
        # One controller that cannot be delegated (cpu beside real-time processes) must not keep the others from it.
        with contextlib.suppress(OSError):
            (folder / "cgroup.subtree_control").write_text(f"+{controller}")


def remove_cgroups(mount: Path = MOUNT) -> None:
    """Remove every cgroup of the cluster; its processes must have ended."""
    deadline = time.monotonic() + REMOVE_LIMIT_SECONDS
    for hierarchy in [*observe_hierarchies(mount), mount / "unified"]:
        for root in hierarchy.glob(f"{PREFIX}*"):
            while not _remove_tree(root):
                # The kernel lets go of a cgroup shortly after its last process.
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"{root} cannot be removed: processes {_observe_processes(root)} still run in it"
                    )
                time.sleep(0.05)


def _remove_tree(root: Path) -> bool:
    folders = sorted((path for path in [root, *root.rglob("*")] if path.is_dir()), reverse=True)
    removed = True
    for folder in folders:
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            removed = False
    return removed


def _observe_processes(root: Path) -> str:
    found: list[str] = []
    for file in root.rglob("cgroup.procs"):
        with contextlib.suppress(OSError):
            found += file.read_text().split()
    return " ".join(found) or "(none)"
