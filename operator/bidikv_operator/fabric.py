"""What the network between engines needs from a pod: EFA or TCP, as plain data.

GPUs and interfaces are handed out in the same proportion, so that a pod with half of the GPUs gets half of the
interfaces and two such pods fit on one instance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

EFA_RESOURCE: Final = "vpc.amazonaws.com/efa"
GPU_RESOURCE: Final = "nvidia.com/gpu"
HUGE_PAGES_RESOURCE: Final = "hugepages-2Mi"


@dataclass(frozen=True)
class InstanceType:
    """Accelerators and EFA interfaces of one EC2 instance."""

    gpus: int
    interfaces: int
    architecture: str = "amd64"
    pcie_roots: int | None = None
    """How many PCIe roots the GPUs and interfaces are spread over, evenly; None where GPUs and interfaces do not share
    roots, or nobody says so."""


# Interfaces: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html and, beside the GPUs' number,
# https://karpenter.sh/docs/tasks/dra/ (what the device drivers publish). GB200, of which the latter does not speak:
# https://github.com/aws-samples/awsome-distributed-training (nccl-tests-gb200.yaml) and
# https://docs.nvidia.com/dynamo/kubernetes-deployment/cloud-provider-guides/aws/efa-rdma-over-aws-fabric
# PCIe roots: p4d and p4de as listed in https://github.com/kubernetes-sigs/dranet (its example for EKS), where a pair on
# two roots reached half of the bandwidth of one on the same root; p5 and p5e in the page of Karpenter above (each GPU
# shares a root with four interfaces); p5en and p6-b200 from the number of PCIe switches in
# https://github.com/ai-dynamo/nixl (test/unit/utils/libfabric/libfabric_topology_test.cpp), which counts interfaces:
# that GPUs are spread likewise is inferred. A GB200's GPUs hang on NVLink, not beside interfaces.
INSTANCE_TYPES: Final[dict[str, InstanceType]] = {
    "p4d.24xlarge": InstanceType(gpus=8, interfaces=4, pcie_roots=4),
    "p4de.24xlarge": InstanceType(gpus=8, interfaces=4, pcie_roots=4),
    "p5.48xlarge": InstanceType(gpus=8, interfaces=32, pcie_roots=8),
    "p5e.48xlarge": InstanceType(gpus=8, interfaces=32, pcie_roots=8),
    "p5en.48xlarge": InstanceType(gpus=8, interfaces=16, pcie_roots=4),
    "p6-b200.48xlarge": InstanceType(gpus=8, interfaces=8, pcie_roots=4),
    "p6e-gb200.36xlarge": InstanceType(gpus=4, interfaces=4, architecture="arm64"),
}

EFA_ENV: Final[dict[str, str]] = {
    "FI_PROVIDER": "efa",
    # NIXL and vLLM fork; without it a fork may break registered memory on kernels before 5.13. There it also turns huge
    # pages off, on later kernels it has no effect (libfabric, prov/efa/src/efa_env.c and efa_fork_support.c).
    "FI_EFA_FORK_SAFE": "1",
}
TCP_ENV: Final[dict[str, str]] = {
    # No shared-memory transport: pods have IPC namespaces of their own, and UCX would pick it for two pods of one node.
    "UCX_TLS": "tcp,self",
}


def build_efa_env(instance_type: str | None, huge_pages_mebibytes: int) -> Mapping[str, str]:
    """Variables of libfabric's EFA provider (its manual page, fi_efa(7))."""
    env = dict(EFA_ENV)
    if instance_type in INSTANCE_TYPES:
        # Needless from libfabric 1.18 on; older ones copy through host memory without it. It ends the process where the
        # device has no RDMA, so it is left out where the kind of device is not known.
        env["FI_EFA_USE_DEVICE_RDMA"] = "1"
    if not huge_pages_mebibytes:
        env["FI_EFA_USE_HUGE_PAGE"] = "0"
    return env


def compute_interfaces(instance_type: str, gpus: int) -> int:
    """EFA interfaces of a pod with ``gpus`` GPUs on ``instance_type``: its share, rounded up, at least one.

    Raises:
        KeyError: the instance type is not in the table.
    """
    whole = INSTANCE_TYPES[instance_type]
    return max(1, math.ceil(whole.interfaces * gpus / whole.gpus))
