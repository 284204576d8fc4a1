"""The configuration files of the cluster's programs, rendered from the topology. Pure: text in, text out.

JSON stands for YAML wherever a program reads YAML: every JSON document is one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from e2e.cluster.topology import CLUSTER_DOMAIN, Node, Topology

CNI_BINARIES: Final = "/usr/lib/cni"
"""Where Debian's containernetworking-plugins lie."""
SYNC_SECONDS: Final = 10
"""A kubelet looks at each pod again after this to 1.5 times this (its default is 60), and only then mounts what has
changed in a Secret: tests that change one wait for it."""


def _document(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def render_kubeadm(topology: Topology, certificates: Path, version: str) -> str:
    """Input of kubeadm's certificate and kubeconfig phases; nothing else of kubeadm is used."""
    initial = {
        "apiVersion": "kubeadm.k8s.io/v1beta4",
        "kind": "InitConfiguration",
        "localAPIEndpoint": {"advertiseAddress": topology.control_plane.address, "bindPort": 6443},
        "nodeRegistration": {"name": topology.control_plane.name, "criSocket": "unix:///run/none.sock"},
    }
    cluster = {
        "apiVersion": "kubeadm.k8s.io/v1beta4",
        "kind": "ClusterConfiguration",
        "clusterName": "bidikv",
        "kubernetesVersion": version,
        "certificatesDir": str(certificates),
        "encryptionAlgorithm": "ECDSA-P256",
        "networking": {"serviceSubnet": topology.service_network, "dnsDomain": CLUSTER_DOMAIN},
        # An etcd that kubeadm does not manage: it then makes no certificates for one.
        "etcd": {"external": {"endpoints": ["http://127.0.0.1:2379"]}},
    }
    return f"{_document(initial)}---\n{_document(cluster)}"


def render_audit_policy() -> str:
    """Every write is logged once, when it is answered, without its body; reads and the nodes' heartbeats are not."""
    return _document(
        {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "rules": [
                {"level": "None", "verbs": ["get", "list", "watch"]},
                {
                    "level": "None",
                    "userGroups": ["system:nodes"],
                    "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}],
                },
                {
                    "level": "None",
                    "users": ["system:kube-controller-manager", "system:kube-scheduler", "system:apiserver"],
                    "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}],
                },
                {"level": "Metadata"},
            ],
        }
    )


def render_kubelet(node: Node, topology: Topology, *, unit: Path, socket: Path, authority: Path) -> str:
    """KubeletConfiguration of a node. ``failCgroupV1`` false: 1.35 refuses cgroup v1 otherwise."""
    return _document(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": node.address,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(authority)},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{node.name}",
            "cgroupsPerQOS": True,
            "clusterDNS": [topology.dns_service_address],
            "clusterDomain": CLUSTER_DOMAIN,
            "containerRuntimeEndpoint": f"unix://{socket}",
            "enforceNodeAllocatable": [],
            # Images are never pulled: one that is collected never comes back. The host's disk is not the pods' affair.
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "failCgroupV1": False,
            "failSwapOn": False,
            "resolvConf": str(unit / "resolv.conf"),
            "syncFrequency": f"{SYNC_SECONDS}s",
            "volumePluginDir": str(unit / "volume-plugins"),
        }
    )


def render_resolv_conf(topology: Topology) -> str:
    """For pods with ``dnsPolicy: Default``: the host's resolvers are out of their reach."""
    return f"nameserver {topology.dns_service_address}\n"


def render_kube_proxy(node: Node, topology: Topology, kubeconfig: Path) -> str:
    """KubeProxyConfiguration: nftables; no sysctl of the conntrack table, which belongs to the host."""
    return _document(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "bindAddress": node.address,
            "clusterCIDR": topology.pod_network,
            # Traffic to a Service from outside the pods (the host, the API server) is masqueraded: its answers come
            # back through the node that translated it.
            "detectLocalMode": "ClusterCIDR",
            "hostnameOverride": node.name,
            "clientConnection": {"kubeconfig": str(kubeconfig)},
            "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            "healthzBindAddress": f"{node.address}:10256",
            "metricsBindAddress": f"{node.address}:10249",
        }
    )


def render_containerd(unit: Path, socket: Path, pause_image: str, *, snapshotter: str) -> str:
    """containerd's configuration: its root, state and socket belong to the unit, never to the system's containerd.

    ``restrict_oom_score_adj``: without CAP_SYS_RESOURCE runc cannot lower a score and fails with "can't get final
    child's PID from pipe: EOF".
    """
    return f"""\
version = 2
root = "{unit}/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.internal.v1.opt",
  "io.containerd.internal.v1.tracing",
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
  "io.containerd.tracing.processor.v1.otlp",
]

[grpc]
address = "{socket}"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause_image}"
restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "{snapshotter}"
default_runtime_name = "runc"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{CNI_BINARIES}"
conf_dir = "{unit}/cni"
"""


def render_cni(node: Node) -> str:
    """Pods are routed, not bridged: between two pods of a node too every packet passes kube-proxy's rules."""
    return _document(
        {
            "cniVersion": "1.0.0",
            "name": "bidikv",
            "plugins": [
                {
                    "type": "ptp",
                    "ipMasq": False,
                    "mtu": 1500,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": "/run/cni-addresses",
                        "ranges": [[{"subnet": node.pod_network}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                }
            ],
        }
    )


def render_corefile(topology: Topology, kubeconfig: Path) -> str:
    """Names of the cluster only; any other does not exist: there is nothing beyond to forward a query to."""
    address = topology.control_plane.address
    return f"""\
.:53 {{
    bind {address}
    errors
    health {address}:8080
    ready {address}:8181
    prometheus {address}:9153
    cache 5
    loadbalance
    kubernetes {CLUSTER_DOMAIN} in-addr.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
        ttl 5
    }}
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""


def build_manifests(topology: Topology) -> list[dict[str, Any]]:
    """Objects that make the cluster whole: the DNS Service, and rights of CoreDNS and of the API server on kubelets."""
    dns_ports = [("dns", "UDP"), ("dns-tcp", "TCP")]
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}},
            "spec": {
                "clusterIP": topology.dns_service_address,
                "ports": [{"name": name, "protocol": protocol, "port": 53} for name, protocol in dns_ports],
            },
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": "kube-dns-control-plane",
                "namespace": "kube-system",
                "labels": {"kubernetes.io/service-name": "kube-dns"},
            },
            "addressType": "IPv4",
            "endpoints": [{"addresses": [topology.control_plane.address], "conditions": {"ready": True}}],
            "ports": [{"name": name, "protocol": protocol, "port": 53} for name, protocol in dns_ports],
        },
        _role_binding("bidikv:kubelet-api", "system:kubelet-api-admin", "kube-apiserver-kubelet-client"),
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "bidikv:coredns"},
            "rules": [
                {
                    "apiGroups": [""],
                    "resources": ["endpoints", "services", "pods", "namespaces"],
                    "verbs": ["list", "watch"],
                },
                {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
            ],
        },
        _role_binding("bidikv:coredns", "bidikv:coredns", "coredns"),
    ]


def _role_binding(name: str, role: str, user: str) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    }
