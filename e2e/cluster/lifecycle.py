"""Bring the cluster up and take it down.

``up`` compares what it would make with what runs: equal and healthy, it does nothing; anything else is taken down and
made anew, data included. So a crash, a reboot, a killed process or a changed configuration all have the same remedy.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from e2e.cluster import configuration, health, machines, namespaces, network
from e2e.cluster.certificates import write_certificates
from e2e.cluster.cgroups import apply_cgroup, remove_cgroups
from e2e.cluster.containerd import apply_images, find_snapshotter
from e2e.cluster.nodes import wait_until_fine
from e2e.cluster.packages import CLUSTER_PACKAGES, apply_packages
from e2e.cluster.paths import Paths
from e2e.cluster.progress import ClusterError, read_tail, say
from e2e.cluster.sysctls import restore_sysctls, save_sysctls
from e2e.cluster.toolchain import apply_programs
from e2e.cluster.topology import CONTROL_PLANE, Node, Topology
from e2e.cluster.unit import UnitSpec
from e2e.images.oci import Image, build_documents, find_architecture, write_layer

RECOVERY_SECONDS: Final = 45.0
API_LIMIT_SECONDS: Final = 90.0
NODES_LIMIT_SECONDS: Final = 120.0
LOCK_LIMIT_SECONDS: Final = 600.0
FORMAT: Final = "1"
"""Raised when the way a cluster is started changes and its specs do not show it."""


@contextlib.contextmanager
def hold_lock(paths: Paths) -> Iterator[None]:
    """One ``up`` or ``down`` at a time."""
    paths.cache.mkdir(parents=True, exist_ok=True)
    with paths.lock.open("w") as file:
        deadline = time.monotonic() + LOCK_LIMIT_SECONDS
        announced = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ClusterError(f"another `up` or `down` holds {paths.lock}; wait for it or end it") from None
                if not announced:
                    say("Waiting for another `up` or `down` to end ...")
                    announced = True
                time.sleep(0.5)
        yield


def up(paths: Paths, topology: Topology) -> None:
    """Make the cluster run and be healthy; ``ClusterError`` when it does not become so, with the ends of its logs."""
    if os.geteuid() != 0:
        raise ClusterError(
            "the local cluster needs root (namespaces, mounts): run as root or point KUBECONFIG at a cluster"
        )
    began = time.monotonic()
    with hold_lock(paths):
        apply_packages(CLUSTER_PACKAGES, paths.logs)
        programs = apply_programs(paths)
        fingerprint = compute_fingerprint(topology, paths, programs)
        problem = _observe_lasting_problem(paths, topology, fingerprint)
        if problem is None:
            say(f"The cluster is up and unchanged ({time.monotonic() - began:.1f} s).")
            return
        if paths.run.exists():
            say(f"Starting anew: {problem}")
        network.check_routes(topology)
        _remove_everything(paths)
        began = time.monotonic()
        try:
            _start(paths, topology, programs, fingerprint)
        except Exception:
            _show_logs(paths)
            raise
        say(f"The cluster is up: started in {time.monotonic() - began:.1f} s.")


def down(paths: Paths) -> None:
    """End every process of the cluster and remove what it left on this machine; builds and images stay in the cache."""
    if os.geteuid() != 0:
        raise ClusterError("stopping the local cluster needs root: run as root")
    with hold_lock(paths):
        _remove_everything(paths)


def compute_fingerprint(topology: Topology, paths: Paths, programs: Mapping[str, Path]) -> str:
    """A hash over everything that decides what runs."""
    parts = [FORMAT, repr(topology), json.dumps({name: path.name for name, path in programs.items()}, sort_keys=True)]
    parts.append(machines.build_control_plane(topology, paths, programs, []).to_json())
    parts += _render_control_plane(topology, paths).values()
    parts.append(json.dumps(configuration.build_manifests(topology)))
    for node in topology.nodes:
        parts.append(machines.build_node(node, paths, programs, []).to_json())
        parts += _render_node(node, topology, paths, pause_image="").values()
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _observe_lasting_problem(paths: Paths, topology: Topology, fingerprint: str) -> str | None:
    """Why a new start is needed. A program that ended is started again by its machine: it gets the time for that."""
    if problem := health.observe_missing_part(paths, topology, fingerprint):
        return problem
    try:
        wait_until_fine(partial(health.observe_problem, paths, topology), limit_seconds=RECOVERY_SECONDS)
    except ClusterError as failure:
        return str(failure)
    return None


def _remove_everything(paths: Paths) -> None:
    namespaces.stop_units()
    network.remove_network()
    remove_cgroups()
    restore_sysctls(paths.sysctls)
    if paths.run.exists():
        shutil.rmtree(paths.run)


def _start(paths: Paths, topology: Topology, programs: Mapping[str, Path], fingerprint: str) -> None:
    paths.run.mkdir(parents=True, mode=0o700)
    save_sysctls(paths.sysctls)
    network.apply_network(topology)
    write_certificates(paths, topology, programs["kube"])
    pause_name, pause = _write_pause_image(paths, programs["pause"])
    _start_unit(
        machines.build_control_plane(topology, paths, programs, apply_cgroup(CONTROL_PLANE)),
        paths,
        _render_control_plane(topology, paths),
    )
    for node in topology.nodes:
        _start_unit(
            machines.build_node(node, paths, programs, apply_cgroup(node.name)),
            paths,
            _render_node(node, topology, paths, pause_image=pause_name),
        )
    for node in topology.nodes:
        containerd = paths.containerd_socket(node.name)
        wait_until_fine(partial(_observe_deaf, containerd), limit_seconds=API_LIMIT_SECONDS)
        apply_images(containerd, [((pause_name,), pause)])
    kubectl = health.build_kubectl(paths)
    wait_until_fine(partial(health.observe_unready_api, kubectl), limit_seconds=API_LIMIT_SECONDS)
    kubectl.apply(*configuration.build_manifests(topology))
    wait_until_fine(partial(health.observe_api_problem, paths, topology), limit_seconds=NODES_LIMIT_SECONDS)
    paths.fingerprint.write_text(fingerprint)


def _start_unit(spec: UnitSpec, paths: Paths, files: Mapping[str, str]) -> None:
    folder = paths.unit(spec.name)
    Path(spec.log_folder).mkdir(parents=True)
    for target, source in spec.mounts.items():
        Path(target).mkdir(parents=True, exist_ok=True)
        Path(source).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    namespaces.start_unit(spec, folder)


def _observe_deaf(path: Path) -> str | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(str(path))
        except OSError as failure:
            return f"containerd does not listen on {path}: {failure}"
    return None


def _render_control_plane(topology: Topology, paths: Paths) -> dict[str, str]:
    return {
        "audit-policy.json": configuration.render_audit_policy(),
        "Corefile": configuration.render_corefile(topology, machines.kubeconfig_path(paths, "coredns")),
    }


def _render_node(node: Node, topology: Topology, paths: Paths, *, pause_image: str) -> dict[str, str]:
    unit, containerd = paths.unit(node.name), paths.containerd_socket(node.name)
    kube_proxy = machines.kubeconfig_path(paths, "kube-proxy")
    return {
        "kubelet.json": configuration.render_kubelet(
            node, topology, unit=unit, socket=containerd, authority=paths.certificates / "ca.crt"
        ),
        "kube-proxy.json": configuration.render_kube_proxy(node, topology, kube_proxy),
        "containerd.toml": configuration.render_containerd(
            unit, containerd, pause_image, snapshotter=find_snapshotter(paths.cache)
        ),
        "cni/10-bidikv.conflist": configuration.render_cni(node),
        "resolv.conf": configuration.render_resolv_conf(topology),
    }


def _write_pause_image(paths: Paths, program: Path) -> tuple[str, Image]:
    folder = paths.run / "pause"
    folder.mkdir()
    shutil.copy(program, folder / "pause")
    layer = write_layer(paths.run / "pause.tar", {"bin": folder})
    image = Image(layers=(layer,), entrypoint=("/bin/pause",), user="65535:65535")
    return f"docker.io/bidikv/pause:{build_documents(image, find_architecture()).tag}", image


def _show_logs(paths: Paths) -> None:
    for log in sorted(paths.run.glob("bidikv-*/log/*.log")):
        if tail := read_tail(log, lines=6):
            say(f"--- the end of {log}\n{tail}")
