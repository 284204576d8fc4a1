"""Claims of GPUs and EFA interfaces, allocated by the real scheduler on a P5en as its device drivers would publish it.

The drivers themselves are missing, so the pods are placed and never start: what is tested is that the claims that the
operator builds can be met, and are met by devices of one PCIe root each.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from bidikv_operator.build import build_all
from bidikv_operator.build.devices import PCIE_ROOT
from bidikv_operator.tests.samples import make_resource, resolve
from e2e.kubectl import Kubectl, eventually

pytestmark = pytest.mark.cluster

GPU_DRIVER, EFA_DRIVER = "gpu.e2e.bidikv.io", "efa.e2e.bidikv.io"
"""Of our own, so that nothing else on the cluster takes these devices; the classes below select by them."""
POOL = "claims"
ROOTS = [f"pci0000:{number}0" for number in range(1, 5)]
Object = dict[str, Any]


def build_slice(driver: str, node: str, per_root: int) -> Object:
    """``per_root`` devices on each of a P5en's four PCIe roots, in an order that has nothing to do with the roots."""
    devices = [
        {"name": f"device-{index}", "attributes": {PCIE_ROOT: {"string": ROOTS[index % len(ROOTS)]}}}
        for index in range(per_root * len(ROOTS))
    ]
    pool = {"name": f"{POOL}-{node}", "generation": 1, "resourceSliceCount": 1}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{driver}-{node}"},
        "spec": {"driver": driver, "nodeName": node, "pool": pool, "devices": devices},
    }


def build_class(driver: str) -> Object:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": driver},
        "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{driver}'"}}]},
    }


@pytest.fixture
def node(cluster: Kubectl) -> Iterator[str]:
    """A node that offers 8 GPUs and 16 interfaces to claims."""
    name: str = cluster.find("nodes")[0]["metadata"]["name"]
    offered = [
        build_class(GPU_DRIVER),
        build_class(EFA_DRIVER),
        build_slice(GPU_DRIVER, name, 2),
        build_slice(EFA_DRIVER, name, 4),
    ]
    cluster.apply(*offered)
    yield name
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": offered})
    cluster.run("delete", "--ignore-not-found", "--filename=-", stdin=listed)


def apply_engines(namespace: Kubectl, decode_replicas: int) -> None:
    """The engines' Deployments with their claims, without the operator: the images need not exist."""
    resource = make_resource(
        fabric={
            "type": "EFA",
            "instanceType": "p5en.48xlarge",
            "devices": "ResourceClaim",
            "deviceClasses": {"gpu": GPU_DRIVER, "efa": EFA_DRIVER},
            "hugePagesMebibytes": 0,
        },
        prefill={"replicas": 1, "tensorParallelSize": 4, "resources": {"cpu": "10m"}},
        decode={"replicas": decode_replicas, "tensorParallelSize": 2, "resources": {"cpu": "10m"}},
        router={"replicas": 0},
    )
    resource["metadata"]["namespace"] = namespace.namespace
    resolved = resolve(resource)
    wanted = ("ServiceAccount", "ResourceClaimTemplate", "Deployment")
    manifests = [manifest for kind, manifest in build_all(resolved) if kind.kind in wanted]
    for manifest in manifests:
        del manifest["metadata"]["ownerReferences"]
    namespace.apply(*manifests)


def devices_of(claim: Object) -> list[tuple[str, str]]:
    allocation = claim.get("status", {}).get("allocation", {})
    return [(result["driver"], result["device"]) for result in allocation.get("devices", {}).get("results", [])]


def root_of(device: str) -> str:
    return ROOTS[int(device.removeprefix("device-")) % len(ROOTS)]


def test_each_group_lies_on_one_pcie_root_and_the_node_is_used_up(namespace: Kubectl, node: str) -> None:
    """4 + 2 + 2 GPUs with twice as many interfaces are a whole P5en; a further pod has to wait."""
    apply_engines(namespace, decode_replicas=2)

    def allocated() -> list[Object] | None:
        claims = [claim for claim in namespace.find("resourceclaims") if devices_of(claim)]
        return claims if len(claims) >= 8 else None

    claims = eventually(allocated, "eight groups of devices to be allocated", timeout=90)
    assert len(claims) == 8
    taken: Counter[tuple[str, str]] = Counter()
    for claim in claims:
        devices = devices_of(claim)
        assert Counter(driver for driver, _ in devices) == {GPU_DRIVER: 1, EFA_DRIVER: 2}
        assert len({root_of(device) for _, device in devices}) == 1, "a GPU's interfaces are on its root"
        taken.update(devices)
    assert set(taken.values()) == {1}, "no device is given away twice"

    # Not before: three pods of decode and none of prefill would leave a quarter of the node unused.
    apply_engines(namespace, decode_replicas=3)

    def waiting() -> list[Object] | None:
        pods = namespace.find("pods")
        placed = [pod for pod in pods if pod["spec"].get("nodeName")]
        return pods if len(pods) == 4 and len(placed) == 3 else None

    pods = eventually(waiting, "three pods to be placed and a fourth one to wait", timeout=60)
    assert {pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")} == {node}
