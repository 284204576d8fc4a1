"""What the network between engines needs from a pod: EFA or TCP, as plain data.

Figures of instance types are those of EC2's documentation (accelerators and EFA interfaces per instance). GPUs and
interfaces are handed out in the same proportion, so that a pod with half of the GPUs gets half of the interfaces and
two such pods fit on one instance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

EFA_RESOURCE: Final = "vpc.amazonaws.com/efa"
GPU_RESOURCE: Final = "nvidia.com/gpu"
HUGE_PAGES_RESOURCE: Final = "hugepages-2Mi"
EFA_HUGE_PAGES: Final = "5Gi"
"""The EFA provider of libfabric pre-allocates 5128 pages of 2 MiB per node; 5120 MiB (canonically 5Gi) serve a pod."""


@dataclass(frozen=True)
class InstanceType:
    """Accelerators and EFA interfaces of one EC2 instance."""

    gpus: int
    interfaces: int


INSTANCE_TYPES: Final[dict[str, InstanceType]] = {
    "p4d.24xlarge": InstanceType(gpus=8, interfaces=4),
    "p4de.24xlarge": InstanceType(gpus=8, interfaces=4),
    "p5.48xlarge": InstanceType(gpus=8, interfaces=32),
    "p5e.48xlarge": InstanceType(gpus=8, interfaces=32),
    "p5en.48xlarge": InstanceType(gpus=8, interfaces=16),
    "p6-b200.48xlarge": InstanceType(gpus=8, interfaces=8),
    "p6e-gb200.36xlarge": InstanceType(gpus=4, interfaces=4),
}

EFA_ENV: Final[dict[str, str]] = {
    "FI_PROVIDER": "efa",
    # Needless from libfabric 1.18 on and harmless there; older ones copy through host memory without it.
    "FI_EFA_USE_DEVICE_RDMA": "1",
    # NIXL and vLLM fork; without it a fork may break registered memory on kernels before 5.15.
    "FI_EFA_FORK_SAFE": "1",
}
TCP_ENV: Final[dict[str, str]] = {
    # No shared-memory transport: pods have IPC namespaces of their own, and UCX would pick it for two pods of one node.
    "UCX_TLS": "tcp,self",
}


def compute_interfaces(instance_type: str, gpus: int) -> int:
    """EFA interfaces of a pod with ``gpus`` GPUs on ``instance_type``: its share, rounded up, at least one.

    Raises:
        KeyError: the instance type is not in the table.
    """
    whole = INSTANCE_TYPES[instance_type]
    return max(1, math.ceil(whole.interfaces * gpus / whole.gpus))
