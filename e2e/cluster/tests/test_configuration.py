from __future__ import annotations

import json
from ipaddress import IPv4Network
from pathlib import Path

import yaml

from e2e.cluster import configuration, machines
from e2e.cluster.paths import Paths
from e2e.cluster.topology import CONTROL_PLANE, build_topology
from e2e.cluster.unit import parse_unit_spec

TOPOLOGY = build_topology(2)
PATHS = Paths(Path("/cache"))
PROGRAMS = {"kube": Path("/cache/bin/kube-1"), "coredns": Path("/cache/bin/coredns-1")}


def test_each_node_has_cgroups_addresses_and_sockets_of_its_own() -> None:
    specs = [machines.build_node(node, PATHS, PROGRAMS, []) for node in TOPOLOGY.nodes]
    kubelets = [
        json.loads(
            configuration.render_kubelet(
                node,
                TOPOLOGY,
                unit=PATHS.unit(node.name),
                socket=PATHS.containerd_socket(node.name),
                authority=Path("/ca"),
            )
        )
        for node in TOPOLOGY.nodes
    ]
    for key in ("address", "cgroupRoot", "containerRuntimeEndpoint", "resolvConf", "volumePluginDir"):
        assert len({kubelet[key] for kubelet in kubelets}) == 2, key
    assert not set(specs[0].mounts.values()) & set(specs[1].mounts.values())
    networks = [
        json.loads(configuration.render_cni(node))["plugins"][0]["ipam"]["ranges"][0][0]["subnet"]
        for node in TOPOLOGY.nodes
    ]
    assert not IPv4Network(networks[0]).overlaps(IPv4Network(networks[1]))


def test_kubelet_admits_no_anonymous_user_and_never_collects_images() -> None:
    node = TOPOLOGY.nodes[0]
    kubelet = json.loads(
        configuration.render_kubelet(node, TOPOLOGY, unit=Path("/u"), socket=Path("/s"), authority=Path("/ca"))
    )
    assert kubelet["authentication"]["anonymous"] == {"enabled": False}
    assert kubelet["authorization"] == {"mode": "Webhook"}
    assert kubelet["imageGCHighThresholdPercent"] == 100
    assert kubelet["clusterDNS"] == [TOPOLOGY.dns_service_address]


def test_node_labels_name_zone_and_instance_type() -> None:
    node = TOPOLOGY.nodes[1]
    kubelet = next(p for p in machines.build_node(node, PATHS, PROGRAMS, []).programs if p.name == "kubelet")
    labels = next(word for word in kubelet.command if word.startswith("--node-labels="))
    assert "topology.kubernetes.io/zone=us-local-1b" in labels
    assert "node.kubernetes.io/instance-type=p5en.48xlarge" in labels


def test_control_plane_listens_on_its_own_address_only() -> None:
    spec = machines.build_control_plane(TOPOLOGY, PATHS, PROGRAMS, [])
    commands = {program.name: program.command for program in spec.programs}
    address = TOPOLOGY.control_plane.address
    for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler"):
        assert f"--bind-address={address}" in commands[name]
    assert f"--audit-log-path={PATHS.audit_log}" in commands["kube-apiserver"]
    assert f"bind {address}" in configuration.render_corefile(TOPOLOGY, Path("/k"))
    assert spec.programs[0].name == "etcd"  # before the API server, which ends without it


def test_audit_policy_logs_writes_and_no_reads() -> None:
    policy = json.loads(configuration.render_audit_policy())
    assert policy["rules"][0] == {"level": "None", "verbs": ["get", "list", "watch"]}
    assert policy["rules"][-1] == {"level": "Metadata"}
    silent = [rule for rule in policy["rules"][1:-1] if rule["level"] == "None"]
    # Only heartbeats of the cluster's own parts may be silent: a workload's leases are writes that tests look for.
    assert all({"users", "userGroups"} & set(rule) for rule in silent)
    assert all(resource["resources"] == ["leases"] for rule in silent for resource in rule["resources"])


def test_kubeadm_input_is_two_documents() -> None:
    text = configuration.render_kubeadm(TOPOLOGY, Path("/pki"), "v1.35.4")
    initial, cluster = yaml.safe_load_all(text)
    assert initial["localAPIEndpoint"]["advertiseAddress"] == TOPOLOGY.control_plane.address
    assert cluster["networking"]["serviceSubnet"] == TOPOLOGY.service_network
    assert cluster["certificatesDir"] == "/pki"


def test_every_kubelet_has_its_own_user() -> None:
    users = machines.build_users(TOPOLOGY)
    assert users["kubelet-bidikv-a"] == ("system:node:bidikv-a", "system:nodes")
    assert users["kubelet-bidikv-b"] == ("system:node:bidikv-b", "system:nodes")
    assert [name for name, (_, group) in users.items() if group == "system:masters"] == ["admin"]
    assert machines.kubeconfig_path(PATHS, "admin") == PATHS.kubeconfig


def test_dns_service_leads_to_coredns() -> None:
    manifests = configuration.build_manifests(TOPOLOGY)
    service = next(item for item in manifests if item["kind"] == "Service")
    endpoints = next(item for item in manifests if item["kind"] == "EndpointSlice")
    assert service["spec"]["clusterIP"] == TOPOLOGY.dns_service_address
    assert endpoints["endpoints"][0]["addresses"] == [TOPOLOGY.control_plane.address]
    assert endpoints["metadata"]["labels"]["kubernetes.io/service-name"] == service["metadata"]["name"]


def test_unit_spec_survives_its_file() -> None:
    spec = machines.build_control_plane(TOPOLOGY, PATHS, PROGRAMS, ["/sys/fs/cgroup/cpu/bidikv-cp/daemons"])
    assert parse_unit_spec(spec.to_json()) == spec
    assert spec.name == CONTROL_PLANE
