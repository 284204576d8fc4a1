"""Certificates and kubeconfigs of the cluster, made by kubeadm's own phases."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from e2e.cluster import configuration, machines
from e2e.cluster.paths import Paths
from e2e.cluster.progress import ClusterError
from e2e.cluster.toolchain import KUBERNETES_VERSION
from e2e.cluster.topology import Topology

CALL_LIMIT_SECONDS: Final = 60


def write_certificates(paths: Paths, topology: Topology, kube: Path) -> None:
    """The authorities, every component's certificate, and a kubeconfig for each of the cluster's users."""
    paths.certificates.mkdir()
    file = paths.certificates / "kubeadm.yaml"
    file.write_text(configuration.render_kubeadm(topology, paths.certificates, KUBERNETES_VERSION))
    _kubeadm(kube, file, "init", "phase", "certs", "all")
    for name, (user, group) in machines.build_users(topology).items():
        groups = [f"--org={group}"] if group else []
        target = machines.kubeconfig_path(paths, name)
        target.touch(mode=0o600)
        target.write_text(_kubeadm(kube, file, "kubeconfig", "user", f"--client-name={user}", *groups))


def _kubeadm(kube: Path, configuration_file: Path, *arguments: str) -> str:
    result = subprocess.run(
        [str(kube), "kubeadm", *arguments, f"--config={configuration_file}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=CALL_LIMIT_SECONDS,
    )
    if result.returncode != 0:
        raise ClusterError(f"kubeadm {' '.join(arguments)} failed: {result.stderr.strip()}")
    return result.stdout
