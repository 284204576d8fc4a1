"""Which programs make up the control plane and a node, with their arguments, as unit specs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from e2e.cluster.paths import Paths
from e2e.cluster.topology import CONTROL_PLANE, DEVICES, Node, Topology
from e2e.cluster.unit import ProgramSpec, UnitSpec

PRIVATE_FOLDERS = {"/var/lib/kubelet": "kubelet", "/var/lib/cni": "cni-cache", "/var/log": "log"}
"""Folders of the host that a node must not share: fixed paths of kubelet (device plugins), CNI and container logs."""


def build_users(topology: Topology) -> dict[str, tuple[str, str | None]]:
    """Kubeconfig name -> user and group of its certificate."""
    users: dict[str, tuple[str, str | None]] = {
        "admin": ("kubernetes-admin", "system:masters"),
        "controller-manager": ("system:kube-controller-manager", None),
        "scheduler": ("system:kube-scheduler", None),
        "coredns": ("coredns", None),
        "kube-proxy": ("system:kube-proxy", None),
    }
    for node in topology.nodes:
        users[f"kubelet-{node.name}"] = (f"system:node:{node.name}", "system:nodes")
    return users


def kubeconfig_path(paths: Paths, user: str) -> Path:
    return paths.kubeconfig if user == "admin" else paths.certificates / f"{user}.kubeconfig"


def build_control_plane(topology: Topology, paths: Paths, programs: Mapping[str, Path], cgroups: list[str]) -> UnitSpec:
    """etcd, API server, controllers, scheduler and CoreDNS, on one address of the bridge."""
    unit = paths.unit(CONTROL_PLANE)
    pki = paths.certificates
    kube = str(programs["kube"])
    address = topology.control_plane.address
    api_server = [
        f"--advertise-address={address}",
        f"--bind-address={address}",
        "--secure-port=6443",
        "--allow-privileged=true",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--audit-log-path={paths.audit_log}",
        f"--audit-policy-file={unit}/audit-policy.json",
        "--audit-log-maxsize=200",
        "--audit-log-maxbackup=2",
        f"--client-ca-file={pki}/ca.crt",
        "--etcd-servers=http://127.0.0.1:2379",
        f"--kubelet-client-certificate={pki}/apiserver-kubelet-client.crt",
        f"--kubelet-client-key={pki}/apiserver-kubelet-client.key",
        "--kubelet-preferred-address-types=InternalIP",
        f"--proxy-client-cert-file={pki}/front-proxy-client.crt",
        f"--proxy-client-key-file={pki}/front-proxy-client.key",
        f"--requestheader-client-ca-file={pki}/front-proxy-ca.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={pki}/sa.pub",
        f"--service-account-signing-key-file={pki}/sa.key",
        f"--service-cluster-ip-range={topology.service_network}",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
    ]
    controllers = [
        f"--kubeconfig={kubeconfig_path(paths, 'controller-manager')}",
        f"--authentication-kubeconfig={kubeconfig_path(paths, 'controller-manager')}",
        f"--authorization-kubeconfig={kubeconfig_path(paths, 'controller-manager')}",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
        f"--root-ca-file={pki}/ca.crt",
        f"--service-account-private-key-file={pki}/sa.key",
        "--use-service-account-credentials=true",
        f"--bind-address={address}",
        "--leader-elect=false",
    ]
    scheduler = [
        f"--kubeconfig={kubeconfig_path(paths, 'scheduler')}",
        f"--authentication-kubeconfig={kubeconfig_path(paths, 'scheduler')}",
        f"--authorization-kubeconfig={kubeconfig_path(paths, 'scheduler')}",
        f"--bind-address={address}",
        "--leader-elect=false",
    ]
    return UnitSpec(
        name=CONTROL_PLANE,
        log_folder=str(unit / "log"),
        mounts={},
        temporary=["/run"],
        cgroups=cgroups,
        programs=[
            ProgramSpec("etcd", [kube, "etcd", f"--data-dir={unit}/etcd"], ready="tcp:127.0.0.1:2379"),
            ProgramSpec(
                "kube-apiserver",
                [kube, "kube-apiserver", *api_server],
                ready=f"{topology.api_url}/readyz",
                ready_authority=str(pki / "ca.crt"),
            ),
            ProgramSpec("kube-controller-manager", [kube, "kube-controller-manager", *controllers]),
            ProgramSpec("kube-scheduler", [kube, "kube-scheduler", *scheduler]),
            ProgramSpec(
                "coredns",
                [str(programs["coredns"]), "-conf", str(unit / "Corefile")],
                ready=topology.dns_ready_url,
            ),
        ],
    )


def build_node(node: Node, paths: Paths, programs: Mapping[str, Path], cgroups: list[str]) -> UnitSpec:
    """containerd, kubelet, kube-proxy and the device plugin of one node."""
    unit = paths.unit(node.name)
    kube = str(programs["kube"])
    labels = {
        "topology.kubernetes.io/zone": node.zone,
        "topology.kubernetes.io/region": node.region,
        "node.kubernetes.io/instance-type": node.instance_type,
    }
    kubelet = [
        f"--config={unit}/kubelet.json",
        f"--kubeconfig={kubeconfig_path(paths, f'kubelet-{node.name}')}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
        f"--node-labels={','.join(f'{key}={value}' for key, value in labels.items())}",
    ]
    devices = [f"--resource={name}={count}" for name, count in DEVICES.items()]
    return UnitSpec(
        name=node.name,
        log_folder=str(unit / "log"),
        mounts={target: str(unit / folder) for target, folder in PRIVATE_FOLDERS.items()},
        temporary=["/run"],
        cgroups=cgroups,
        programs=[
            ProgramSpec(
                "containerd",
                ["containerd", f"--config={unit}/containerd.toml"],
                ready=f"unix:{paths.containerd_socket(node.name)}",
            ),
            ProgramSpec("kube-proxy", [kube, "kube-proxy", f"--config={unit}/kube-proxy.json"]),
            ProgramSpec("fake-devices", [kube, "fake-devices", *devices]),
            ProgramSpec("kubelet", [kube, "kubelet", *kubelet]),
        ],
    )
