"""Where things lie: the cache that outlives a cluster, and the run folder that is the cluster's state."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from e2e.cluster.progress import ClusterError

CACHE_VARIABLE: Final = "BIDIKV_CACHE"
SOCKET_PATH_LIMIT: Final = 107
"""Bytes of a Unix socket's path (sun_path less its terminator)."""


@dataclass(frozen=True)
class Paths:
    """The folders below one cache folder."""

    cache: Path

    @property
    def binaries(self) -> Path:
        return self.cache / "bin"

    @property
    def logs(self) -> Path:
        """Logs of builds and installations."""
        return self.cache / "log"

    @property
    def images(self) -> Path:
        return self.cache / "images"

    @property
    def run(self) -> Path:
        """State of the running cluster; removed by ``down``."""
        return self.cache / "cluster"

    @property
    def lock(self) -> Path:
        return self.cache / "cluster.lock"

    @property
    def kubeconfig(self) -> Path:
        return self.run / "kubeconfig"

    @property
    def audit_log(self) -> Path:
        return self.run / "audit.log"

    @property
    def fingerprint(self) -> Path:
        """Written when the cluster is up: what it was made from."""
        return self.run / "fingerprint"

    @property
    def sysctls(self) -> Path:
        """The host's values of the settings that a kubelet changes, to be put back by ``down``."""
        return self.cache / "cluster-sysctls.json"

    @property
    def certificates(self) -> Path:
        return self.run / "pki"

    def unit(self, name: str) -> Path:
        return self.run / name

    def containerd_socket(self, node: str) -> Path:
        return self.unit(node) / "containerd.sock"


def find_paths(environment: Mapping[str, str] | None = None) -> Paths:
    """The paths below ``BIDIKV_CACHE`` or ``~/.cache/bidikv``; ``ClusterError`` when a socket's would be too long."""
    environment = os.environ if environment is None else environment
    configured = environment.get(CACHE_VARIABLE)
    paths = Paths(Path(configured).absolute() if configured else Path.home() / ".cache" / "bidikv")
    socket = paths.containerd_socket("bidikv-cp")
    if len(os.fsencode(socket)) > SOCKET_PATH_LIMIT:
        raise ClusterError(
            f"{CACHE_VARIABLE}: {paths.cache} is too long, {socket} passes the {SOCKET_PATH_LIMIT} bytes of a socket's "
            f"path; set {CACHE_VARIABLE} to a shorter folder"
        )
    return paths


def find_external_kubeconfig(paths: Paths, environment: Mapping[str, str] | None = None) -> str | None:
    """The user's ``KUBECONFIG`` when it names another cluster than ours: then nothing is started or stopped here."""
    environment = os.environ if environment is None else environment
    configured = environment.get("KUBECONFIG", "").strip()
    if not configured:
        return None
    if Path(configured).absolute() == paths.kubeconfig:
        return None
    return configured


def exempt_from_proxy(network: str, environment: MutableMapping[str, str] | None = None) -> None:
    """Add ``network`` to the ``NO_PROXY`` of programs started from here: no proxy leads to this machine's addresses."""
    environment = os.environ if environment is None else environment
    for name in ("NO_PROXY", "no_proxy"):
        exempt = [entry for entry in environment.get(name, "").split(",") if entry]
        if network not in exempt:
            environment[name] = ",".join([*exempt, network])


def find_tool(name: str, paths: Paths) -> str:
    """``kubectl`` or ``helm``: the one that this project built, else the user's; ``ClusterError`` without any."""
    built = paths.binaries / name
    if built.exists():
        return str(built)
    installed = shutil.which(name)
    if installed is None:
        raise ClusterError(f"{name} is neither in {paths.binaries} nor on PATH: install it or run `make cluster-up`")
    return installed
