from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e.cluster.topology import MAX_NODES, build_topology


def test_two_nodes_in_the_default_network() -> None:
    topology = build_topology(2)
    assert [(node.name, node.address, node.zone, node.pod_network) for node in topology.nodes] == [
        ("bidikv-a", "10.213.0.11", "us-local-1a", "10.213.64.0/24"),
        ("bidikv-b", "10.213.0.12", "us-local-1b", "10.213.65.0/24"),
    ]
    assert topology.api_url == "https://10.213.0.10:6443"
    assert topology.service_network == "10.213.128.0/20"
    assert topology.api_service_address == "10.213.128.1"
    assert topology.dns_service_address == "10.213.128.10"


@given(
    count=st.integers(1, MAX_NODES), network=st.integers(0, 0xFFFF).map(lambda high: f"{IPv4Address(high << 16)}/16")
)
def test_nothing_overlaps_and_everything_is_inside(count: int, network: str) -> None:
    topology = build_topology(count, network)
    machines = IPv4Network(f"{topology.bridge_address}/{topology.prefix_length}", strict=False)
    parts = [machines, IPv4Network(topology.service_network), *(IPv4Network(n.pod_network) for n in topology.nodes)]
    assert all(part.subnet_of(IPv4Network(network)) for part in parts)
    assert not any(one.overlaps(other) for one, other in combinations(parts, 2))
    assert all(IPv4Network(node.pod_network).subnet_of(IPv4Network(topology.pod_network)) for node in topology.nodes)
    addresses = [topology.bridge_address, *(machine.address for machine in topology.machines)]
    assert all(IPv4Address(address) in machines for address in addresses)
    assert len(set(addresses)) == count + 2


@pytest.mark.parametrize(
    ("count", "network", "sentence"),
    [
        (0, "10.213.0.0/16", "nodes: 0 is not between 1 and 8"),
        (9, "10.213.0.0/16", "nodes: 9 is not between 1 and 8"),
        (2, "10.213.0.0/20", "10.213.0.0/20 is not a /16"),
        (2, "10.213.0.1/16", "has host bits set; give an IPv4 network such as 10.213.0.0/16"),
        (2, "fd00::/16", "give an IPv4 network such as 10.213.0.0/16"),
    ],
)
def test_refused(count: int, network: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build_topology(count, network)
