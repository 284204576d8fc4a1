"""The Debian packages that the cluster and its images need, installed once when they are missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from e2e.cluster.progress import ClusterError, run_logged

CLUSTER_PACKAGES: Final = (
    "conntrack",  # kube-proxy drops stale flows with it
    "containerd",
    "containernetworking-plugins",
    "ethtool",
    "iproute2",
    "iptables",  # kubelet and CNI plugins look for it
    "kmod",
    "mount",
    "nftables",  # kube-proxy's rules
    "runc",
    "socat",
    "util-linux",  # unshare, nsenter
)
IMAGE_PACKAGES: Final = ("mmdebstrap",)
INSTALL_LIMIT_SECONDS: Final = 900.0


def observe_missing(packages: Iterable[str]) -> list[str]:
    """Those of ``packages`` that dpkg does not list as installed."""
    wanted = sorted(packages)
    result = subprocess.run(
        ["dpkg-query", "--show", "--showformat=${Package} ${db:Status-Status}\n", *wanted],
        capture_output=True,
        text=True,
        check=False,  # it fails when any of them is unknown, and lists the others all the same
        timeout=60,
    )
    installed = {line.split()[0] for line in result.stdout.splitlines() if line.split()[1:] == ["installed"]}
    return [name for name in wanted if name not in installed]


def apply_packages(packages: Iterable[str], logs: Path) -> None:
    """Install what is missing with one ``apt-get update`` and one ``apt-get install``."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-query") is None:
        raise ClusterError(
            "the local cluster installs Debian packages and found no apt-get: run it on Debian or Ubuntu, "
            "or point KUBECONFIG at a cluster of yours"
        )
    missing = observe_missing(packages)
    if not missing:
        return
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    run_logged(
        ["apt-get", "update"],
        what="Updating the package lists",
        log=logs / "apt-update.log",
        limit_seconds=INSTALL_LIMIT_SECONDS,
        environment=environment,
    )
    run_logged(
        ["apt-get", "install", "--yes", "--no-install-recommends", *missing],
        what=f"Installing {' '.join(missing)}",
        log=logs / "apt-install.log",
        limit_seconds=INSTALL_LIMIT_SECONDS,
        environment=environment,
    )
