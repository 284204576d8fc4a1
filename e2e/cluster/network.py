"""The cluster's network: a bridge, a network namespace per machine, routes. No rule of the host's firewall is touched.

The namespaces have no default route and the host forwards nothing for them, so no packet of the cluster can leave the
machine. Service addresses that no rule of kube-proxy claims end at a node's loopback.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Final

from e2e.cluster.progress import ClusterError
from e2e.cluster.topology import BRIDGE, NETWORK_VARIABLE, Machine, Topology

NAMESPACES: Final = Path("/run/netns")
LINK: Final = "eth0"


def _ip(*arguments: str) -> str:
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, timeout=30)
    if result.returncode != 0:
        raise ClusterError(f"`ip {' '.join(arguments)}` failed: {result.stderr.strip()}")
    return result.stdout


def find_route_conflict(routes: list[dict[str, Any]], network: str) -> str | None:
    """The destination of a route (of ``ip -json route``) that overlaps ``network`` and is not the cluster's own."""
    wanted = IPv4Network(network)
    for route in routes:
        destination = route.get("dst", "default")
        if destination == "default" or route.get("dev") == BRIDGE:
            continue
        if IPv4Network(destination, strict=False).overlaps(wanted):
            return str(destination)
    return None


def check_routes(topology: Topology) -> None:
    """``ClusterError`` when the cluster's network is in use on this machine for something else."""
    routes = json.loads(_ip("-4", "-json", "route", "show", "table", "all") or "[]")
    conflict = find_route_conflict(routes, topology.network)
    if conflict:
        raise ClusterError(
            f"{NETWORK_VARIABLE}: this machine routes {conflict}, which overlaps the cluster's {topology.network}; "
            f"set {NETWORK_VARIABLE} to a free /16"
        )


def apply_network(topology: Topology) -> None:
    """Bridge, namespaces, links and routes; expects none of them to exist (``remove_network`` comes first)."""
    _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("address", "add", f"{topology.bridge_address}/{topology.prefix_length}", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    for machine in topology.machines:
        _apply_machine(machine, topology)
    for node in topology.nodes:
        _ip("route", "add", node.pod_network, "via", node.address, "dev", BRIDGE)
    _ip("route", "add", topology.service_network, "via", topology.nodes[0].address, "dev", BRIDGE)


def _apply_machine(machine: Machine, topology: Topology) -> None:
    name = machine.name
    _ip("netns", "add", name)
    _ip("link", "add", name, "type", "veth", "peer", "name", LINK, "netns", name)
    _ip("link", "set", name, "master", BRIDGE, "up")
    _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", name, "address", "add", f"{machine.address}/{topology.prefix_length}", "dev", LINK)
    _ip("-n", name, "link", "set", LINK, "up")
    for node in topology.nodes:
        if node.name != name:
            _ip("-n", name, "route", "add", node.pod_network, "via", node.address)
    if machine in topology.nodes:
        # kube-proxy translates a Service's address before this route is taken; what it does not claim dies on loopback.
        _ip("-n", name, "route", "add", topology.service_network, "dev", "lo", "src", machine.address)
        _write_sysctl(name, "net.ipv4.ip_forward", "1")
    else:
        _ip("-n", name, "route", "add", topology.service_network, "via", topology.nodes[0].address)


def _write_sysctl(namespace: str, key: str, value: str) -> None:
    command = ["ip", "netns", "exec", namespace, "sysctl", "-q", "-w", f"{key}={value}"]
    subprocess.run(command, check=True, capture_output=True, timeout=30)


def observe_namespaces() -> list[str]:
    """Names of the cluster's network namespaces on this host, whichever topology made them."""
    return sorted(path.name for path in NAMESPACES.glob("bidikv-*"))


def observe_processes(namespace: str) -> list[int]:
    """Process ids (of the host) whose network namespace is this one; pods with their own are not among them."""
    with contextlib.suppress(ClusterError):
        return [int(pid) for pid in _ip("netns", "pids", namespace).split()]
    return []


def _links() -> Iterator[str]:
    for link in json.loads(_ip("-json", "link", "show") or "[]"):
        name = str(link["ifname"])
        if name == BRIDGE or (name.startswith("bidikv-") and link.get("link_type") == "ether"):
            yield name


def remove_network() -> None:
    """Remove every namespace, link and (with them) route of the cluster; nothing to do when there is none."""
    for namespace in observe_namespaces():
        _ip("netns", "delete", namespace)
    for link in list(_links()):
        # A link goes away by itself with the other end's namespace, perhaps at this very moment.
        with contextlib.suppress(ClusterError):
            _ip("link", "delete", link)
