"""Bring the cluster up, tell how it is, take it down.

``up`` compares what it would make with what runs: equal and healthy, it does nothing; anything else is taken down and made
anew, data included. So a crash, a reboot, a killed process or a changed configuration all have the same remedy.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from e2e.cluster import configuration, machines, namespaces, network
from e2e.cluster.api import Kubectl, find_problem, parse_node_states, wait_until_fine
from e2e.cluster.cgroups import apply_cgroup, remove_cgroups
from e2e.cluster.containerd import apply_images, find_snapshotter
from e2e.cluster.packages import CLUSTER_PACKAGES, apply_packages
from e2e.cluster.paths import Paths, find_external_kubeconfig, find_tool
from e2e.cluster.progress import ClusterError, read_tail, say
from e2e.cluster.toolchain import KUBERNETES_VERSION, apply_programs
from e2e.cluster.topology import CONTROL_PLANE, DEVICES, Node, Topology, build_topology
from e2e.images.oci import Image, build_documents, find_architecture, write_layer

API_LIMIT_SECONDS: Final = 90.0
NODES_LIMIT_SECONDS: Final = 120.0
LOCK_LIMIT_SECONDS: Final = 600.0
FORMAT: Final = "1"
"""Raised when the way a cluster is started changes and its specs do not show it."""

KUBELET_SYSCTLS: Final = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
"""Settings of the whole machine that every kubelet sets (k8s.io/component-helpers/node/util/sysctl)."""


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


def check_external(paths: Paths, kubeconfig: str) -> str:
    """The version of the user's cluster; ``ClusterError`` when its API does not answer."""
    kubectl = Kubectl(find_tool("kubectl", paths), kubeconfig, own_network=False)
    version = json.loads(kubectl.run("version", "--output=json", "--request-timeout=20s"))
    return str(version["serverVersion"]["gitVersion"])


def up(paths: Paths, topology: Topology) -> None:
    """Make the cluster run and be healthy."""
    if os.geteuid() != 0:
        raise ClusterError(
            "the local cluster needs root (namespaces, mounts): run as root or point KUBECONFIG at a cluster"
        )
    began = time.monotonic()
    with hold_lock(paths):
        apply_packages(CLUSTER_PACKAGES, paths.logs)
        programs = apply_programs(paths)
        fingerprint = compute_fingerprint(topology, paths, programs)
        if observe_problem(paths, topology, fingerprint) is None:
            say(f"The cluster is up and unchanged ({time.monotonic() - began:.1f} s).")
            return
        _remove_everything(paths)
        began_start = time.monotonic()
        try:
            _start(paths, topology, programs, fingerprint)
        except BaseException as failure:
            _show_logs(paths, failure)
            raise
        say(f"The cluster is up: started in {time.monotonic() - began_start:.1f} s.")


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
    parts += [file for file in _render_control_plane(topology, paths).values()]
    parts.append(json.dumps(configuration.build_manifests(topology)))
    for node in topology.nodes:
        parts.append(machines.build_node(node, paths, programs, []).to_json())
        parts += _render_node(node, topology, paths, pause_image="pause").values()
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def observe_problem(paths: Paths, topology: Topology, fingerprint: str | None = None) -> str | None:
    """Why the running cluster is not the wanted one in good health; None when it is."""
    try:
        written = paths.fingerprint.read_text()
    except FileNotFoundError:
        return "the cluster is not up; run `make cluster-up`"
    if fingerprint is not None and written != fingerprint:
        return "the cluster was made from another configuration"
    running = namespaces.observe_units()
    for machine in topology.machines:
        if machine.name not in running:
            return f"{machine.name} does not run"
    return _observe_api_problem(paths, topology)


def _observe_api_problem(paths: Paths, topology: Topology) -> str | None:
    kubectl = Kubectl(find_tool("kubectl", paths), str(paths.kubeconfig))
    try:
        kubectl.run("get", "--raw=/readyz", "--request-timeout=5s")
        states = parse_node_states(kubectl.get("nodes", "--request-timeout=5s"))
    except ClusterError as failure:
        return str(failure)
    return find_problem(states, [node.name for node in topology.nodes], DEVICES)


def find_running_topology(paths: Paths, wanted: Topology) -> Topology:
    """The topology of the cluster that runs, which may have another number of nodes; ``wanted`` when none does."""
    count = len([name for name in namespaces.observe_units() if name != CONTROL_PLANE])
    if not paths.fingerprint.exists() or count == 0:
        return wanted
    return build_topology(count, wanted.network)


def _remove_everything(paths: Paths) -> None:
    namespaces.stop_units()
    network.remove_network()
    remove_cgroups()
    _restore_sysctls(paths)
    if paths.run.exists():
        shutil.rmtree(paths.run)


def _start(paths: Paths, topology: Topology, programs: Mapping[str, Path], fingerprint: str) -> None:
    paths.run.mkdir(parents=True, mode=0o700)
    _save_sysctls(paths)
    network.apply_network(topology)
    _write_certificates(paths, topology, programs["kube"])
    pause_name, pause = _write_pause_image(paths, programs["pause"])
    _write_unit(
        machines.build_control_plane(topology, paths, programs, apply_cgroup(CONTROL_PLANE)),
        paths,
        _render_control_plane(topology, paths),
    )
    for node in topology.nodes:
        for folder in machines.PRIVATE_FOLDERS:
            Path(folder).mkdir(parents=True, exist_ok=True)
        _write_unit(
            machines.build_node(node, paths, programs, apply_cgroup(node.name)),
            paths,
            _render_node(node, topology, paths, pause_image=pause_name),
        )
    for node in topology.nodes:
        containerd = paths.containerd_socket(node.name)
        wait_until_fine(lambda path=containerd: _observe_socket(path), limit_seconds=API_LIMIT_SECONDS)  # type: ignore[misc]
        apply_images(containerd, [((pause_name,), pause)])
    kubectl = Kubectl(find_tool("kubectl", paths), str(paths.kubeconfig))
    wait_until_fine(lambda: _observe_ready(kubectl), limit_seconds=API_LIMIT_SECONDS)
    kubectl.apply(configuration.build_manifests(topology))
    wait_until_fine(lambda: _observe_api_problem(paths, topology), limit_seconds=NODES_LIMIT_SECONDS)
    paths.fingerprint.write_text(fingerprint)


def _observe_socket(path: Path) -> str | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(str(path))
        except OSError as failure:
            return f"containerd does not listen on {path}: {failure}"
    return None


def _observe_ready(kubectl: Kubectl) -> str | None:
    try:
        kubectl.run("get", "--raw=/readyz", "--request-timeout=5s")
    except ClusterError as failure:
        return str(failure)
    return None


def _render_control_plane(topology: Topology, paths: Paths) -> dict[str, str]:
    return {
        "audit-policy.json": configuration.render_audit_policy(),
        "Corefile": configuration.render_corefile(topology, machines.kubeconfig_path(paths, "coredns")),
    }


def _render_node(node: Node, topology: Topology, paths: Paths, *, pause_image: str) -> dict[str, str]:
    unit, containerd = paths.unit(node.name), paths.containerd_socket(node.name)
    authority = paths.certificates / "ca.crt"
    return {
        "kubelet.json": configuration.render_kubelet(node, topology, unit=unit, socket=containerd, authority=authority),
        "kube-proxy.json": configuration.render_kube_proxy(
            node, topology, machines.kubeconfig_path(paths, "kube-proxy")
        ),
        "containerd.toml": configuration.render_containerd(
            unit, containerd, pause_image, snapshotter=find_snapshotter(paths.cache)
        ),
        "cni/10-bidikv.conflist": configuration.render_cni(node),
        "resolv.conf": configuration.render_resolv_conf(topology),
    }


def _write_unit(spec: machines.UnitSpec, paths: Paths, files: Mapping[str, str]) -> None:
    folder = paths.unit(spec.name)
    Path(spec.log_folder).mkdir(parents=True)
    for source in spec.mounts.values():
        Path(source).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    namespaces.start_unit(spec, folder)


def _write_certificates(paths: Paths, topology: Topology, kube: Path) -> None:
    paths.certificates.mkdir()
    file = paths.certificates / "kubeadm.yaml"
    file.write_text(configuration.render_kubeadm(topology, paths.certificates, KUBERNETES_VERSION))

    def kubeadm(*arguments: str) -> str:
        result = subprocess.run(
            [str(kube), "kubeadm", *arguments, f"--config={file}"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if result.returncode != 0:
            raise ClusterError(f"kubeadm {' '.join(arguments)} failed: {result.stderr.strip()}")
        return result.stdout

    kubeadm("init", "phase", "certs", "all")
    for name, (user, group) in machines.build_users(topology).items():
        groups = [f"--org={group}"] if group else []
        target = machines.kubeconfig_path(paths, name)
        target.touch(mode=0o600)
        target.write_text(kubeadm("kubeconfig", "user", f"--client-name={user}", *groups))


def _write_pause_image(paths: Paths, program: Path) -> tuple[str, Image]:
    folder = paths.run / "pause"
    folder.mkdir()
    shutil.copy(program, folder / "pause")
    layer = write_layer(paths.run / "pause.tar", {"bin": folder})
    image = Image(layers=(layer,), entrypoint=("/bin/pause",), user="65535:65535")
    return f"docker.io/bidikv/pause:{build_documents(image, find_architecture()).tag}", image


def _save_sysctls(paths: Paths) -> None:
    if paths.sysctls.exists():
        return  # of a cluster that was not taken down: the values of now are its own
    values = {}
    for name in KUBELET_SYSCTLS:
        with contextlib.suppress(OSError):
            values[name] = Path("/proc/sys", name).read_text().strip()
    paths.sysctls.write_text(json.dumps(values))


def _restore_sysctls(paths: Paths) -> None:
    if not paths.sysctls.exists():
        return
    for name, value in json.loads(paths.sysctls.read_text()).items():
        file = Path("/proc/sys", name)
        with contextlib.suppress(OSError):
            if file.read_text().strip() != value:
                file.write_text(value)
    paths.sysctls.unlink()


def _show_logs(paths: Paths, failure: BaseException) -> None:
    if isinstance(failure, KeyboardInterrupt):
        return
    for log in sorted(paths.run.glob("bidikv-*/log/*.log")):
        if tail := read_tail(log, lines=6):
            say(f"--- the end of {log}\n{tail}")
