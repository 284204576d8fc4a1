"""Names and addresses of the cluster, computed from one network and the number of nodes. Pure.

Inside the cluster's network (a /16): the first /24 joins the machines (the host's bridge address is .1, the control
plane .10, node i .11+i), a /24 from the 64th on belongs to the pods of each node, and a /20 at the middle to Services.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final

DEFAULT_NETWORK: Final = "10.213.0.0/16"
NETWORK_VARIABLE: Final = "BIDIKV_CLUSTER_NETWORK"
BRIDGE: Final = "bidikv0"
CONTROL_PLANE: Final = "bidikv-cp"
REGION: Final = "us-local-1"
INSTANCE_TYPE: Final = "p5en.48xlarge"
DEVICES: Final = {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 16}
"""What a P5en node offers to the scheduler; served by a device plugin that has no hardware behind it."""
CLUSTER_DOMAIN: Final = "cluster.local"
MAX_NODES: Final = 8


@dataclass(frozen=True)
class Machine:
    """One unit: a network namespace ``name`` with ``address`` on the bridge."""

    name: str
    address: str


@dataclass(frozen=True)
class Node(Machine):
    """A machine that runs pods."""

    zone: str
    pod_network: str
    region: str = REGION
    instance_type: str = INSTANCE_TYPE


@dataclass(frozen=True)
class Topology:
    """Every address of the cluster."""

    network: str
    bridge_address: str
    prefix_length: int
    """Of the machines' own subnet."""
    control_plane: Machine
    nodes: tuple[Node, ...]
    pod_network: str
    """Covers the pod networks of all nodes."""
    service_network: str
    api_service_address: str
    dns_service_address: str

    @property
    def machines(self) -> tuple[Machine, ...]:
        return (self.control_plane, *self.nodes)

    @property
    def dns_ready_url(self) -> str:
        return f"http://{self.control_plane.address}:8181/ready"

    @property
    def api_url(self) -> str:
        return f"https://{self.control_plane.address}:6443"


def build_topology(node_count: int, network: str = DEFAULT_NETWORK) -> Topology:
    """The addresses of a cluster of ``node_count`` nodes inside ``network``.

    Raises ``ValueError`` when the count is not 1 to 8 or the network is not an IPv4 /16.
    """
    if not 1 <= node_count <= MAX_NODES:
        raise ValueError(f"nodes: {node_count} is not between 1 and {MAX_NODES}")
    try:
        whole = ipaddress.IPv4Network(network)
    except ValueError as invalid:
        raise ValueError(f"{NETWORK_VARIABLE}: {invalid}; give an IPv4 network such as {DEFAULT_NETWORK}") from None
    if whole.prefixlen != 16:
        raise ValueError(f"{NETWORK_VARIABLE}: {network} is not a /16; give a network such as {DEFAULT_NETWORK}")
    subnets = list(whole.subnets(new_prefix=24))
    machines, pods = subnets[0], subnets[64]
    services = next(
        part for part in whole.subnets(new_prefix=20) if part.network_address == subnets[128].network_address
    )
    nodes = tuple(
        Node(
            name=f"bidikv-{letter}",
            address=str(machines[11 + index]),
            zone=f"{REGION}{letter}",
            pod_network=str(subnets[64 + index]),
        )
        for index, letter in enumerate("abcdefgh"[:node_count])
    )
    return Topology(
        network=str(whole),
        bridge_address=str(machines[1]),
        prefix_length=machines.prefixlen,
        control_plane=Machine(CONTROL_PLANE, str(machines[10])),
        nodes=nodes,
        pod_network=str(pods.supernet(new_prefix=20)),
        service_network=str(services),
        api_service_address=str(services[1]),
        dns_service_address=str(services[10]),
    )
