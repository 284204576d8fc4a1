"""What really moves the KV: NIXL's backend, the provider below it, and whether that is what one would expect.

NIXL 1.5.1 tells which backends an agent has, and nothing of what they use: LIBFABRIC takes the first of the providers
cxi, efa, tcp and sockets that libfabric offers, UCX whatever ``UCX_TLS`` allows, and both say so at most in a log. So
the provider is taken from the kernel: a process that moves bytes by RDMA has the devices open, one that has none open
cannot. The bandwidth that is measured at the first contact with each peer (``bandwidth``) is the proof.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

LIBFABRIC: Final = "LIBFABRIC"
UCX: Final = "UCX"
EFA_DRIVER: Final = "efa"
UNKNOWN: Final = "unknown"
SPOKEN_OF: Final = ("UCX_TLS", "UCX_NET_DEVICES", "FI_PROVIDER")
"""Environment variables that decide what is used."""


@dataclass(frozen=True)
class TransportInfo:
    """What one rank reads with."""

    backend: str
    """NIXL's backend, for example UCX or LIBFABRIC."""
    provider: str
    """What the backend moves bytes with: efa, cxi, rdma (another RDMA device) or tcp; ``unknown`` if that cannot be
    told."""
    detail: str
    warning: str | None = None
    """One sentence, when KV moves slower than the configuration makes one expect."""


class Device(NamedTuple):
    """A network device that this process has open past the kernel's network stack."""

    name: str
    driver: str


def list_open_devices(
    descriptors: Path = Path("/proc/self/fd"), system: Path = Path("/sys/class/infiniband_verbs")
) -> list[Device]:
    """The RDMA and Slingshot devices that this process has open.

    Args:
        descriptors: folder of links to the process's open files.
        system: folder in which the kernel describes its verbs devices.
    """
    names = set[str]()
    for descriptor in list(descriptors.iterdir()):
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue  # closed meanwhile
        if target.startswith(("/dev/infiniband/uverbs", "/dev/cxi")):
            names.add(target.rpartition("/")[2])
    return [Device(name, _find_driver(name, system)) for name in sorted(names)]


def _find_driver(name: str, system: Path) -> str:
    if name.startswith("cxi"):
        return "cxi"
    try:
        return Path(os.readlink(system / name / "device" / "driver")).name
    except OSError:
        return UNKNOWN


def describe_transport(
    configured: Sequence[str], instantiated: Sequence[str], environment: Mapping[str, str], devices: Sequence[Device]
) -> TransportInfo:
    """What this rank reads with.

    Args:
        configured: backends of ``kv_connector_extra_config``.
        instantiated: backends that the NIXL agent has.
        environment: of this process.
        devices: network devices that this process has open (``list_open_devices``).
    """
    wanted = configured[0] if configured else UCX
    backend = wanted if wanted in instantiated else next(iter(instantiated), "none")
    provider = _find_provider(backend, environment, devices)
    opened = ", ".join(f"{device.name} ({device.driver})" for device in devices) or "none"
    settings = [f"{name}={environment[name]}" for name in SPOKEN_OF if name in environment]
    detail = "; ".join([f"RDMA devices open: {opened}", *settings])
    return TransportInfo(backend, provider, detail, _find_warning(wanted, backend, provider, environment, devices))


def _find_provider(backend: str, environment: Mapping[str, str], devices: Sequence[Device]) -> str:
    drivers = {device.driver for device in devices}
    for driver in ("cxi", EFA_DRIVER):
        if driver in drivers:
            return driver
    if devices:
        return "rdma"
    transports = environment.get("UCX_TLS", "all").split(",")
    if backend == LIBFABRIC or (backend == UCX and {"all", "tcp"} & set(transports)):
        return "tcp"
    return UNKNOWN


def _find_warning(
    wanted: str, backend: str, provider: str, environment: Mapping[str, str], devices: Sequence[Device]
) -> str | None:
    if backend != wanted:
        return f"NIXL reads with {backend} although {wanted} is configured: use an image whose NIXL has {wanted}"
    if backend == LIBFABRIC and provider not in ("efa", "cxi"):
        expected = environment.get("FI_PROVIDER", "efa")
        if expected == "efa":
            return (
                f"LIBFABRIC reads over {provider} instead of efa, because this process has no EFA device open: request "
                "vpc.amazonaws.com/efa for the pod and use an image with the EFA software"
            )
    if backend == UCX and provider == EFA_DRIVER:
        return (
            "UCX reads over EFA, which it only emulates RDMA on: set the fabric to EFA, which reads with LIBFABRIC, or "
            "give the pod no EFA device"
        )
    return None
