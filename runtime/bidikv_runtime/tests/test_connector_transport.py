"""What moves the KV is told from the agent's backends, the environment and the devices that the process has open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from bidikv_runtime.connector.transport import Device, describe_transport, list_open_devices

EFA = [Device("uverbs0", "efa"), Device("uverbs1", "efa")]
MELLANOX = [Device("uverbs0", "mlx5_core")]
OPERATOR_EFA = {"FI_PROVIDER": "efa"}


@pytest.mark.parametrize(
    ("configured", "instantiated", "environment", "devices", "backend", "provider", "warning"),
    [
        pytest.param(["UCX"], ["UCX"], {"UCX_TLS": "tcp,self"}, [], "UCX", "tcp", None, id="UCX over TCP"),
        pytest.param(["UCX"], ["UCX"], {}, [], "UCX", "tcp", None, id="UCX, no choice made"),
        pytest.param([], ["UCX"], {}, [], "UCX", "tcp", None, id="no backend configured"),
        pytest.param(["UCX"], ["UCX"], {}, MELLANOX, "UCX", "rdma", None, id="UCX over InfiniBand or RoCE"),
        pytest.param(["UCX"], ["UCX"], {"UCX_TLS": "shm"}, [], "UCX", "unknown", None, id="UCX, something else"),
        pytest.param(["UCX"], ["UCX"], {}, EFA, "UCX", "efa", "only emulates RDMA", id="UCX over EFA"),
        pytest.param(
            ["LIBFABRIC"], ["LIBFABRIC"], OPERATOR_EFA, EFA, "LIBFABRIC", "efa", None, id="LIBFABRIC over EFA"
        ),
        pytest.param(
            ["LIBFABRIC"], ["LIBFABRIC"], {}, [], "LIBFABRIC", "tcp", "over tcp instead of efa", id="LIBFABRIC over TCP"
        ),
        pytest.param(
            ["LIBFABRIC"], ["LIBFABRIC"], {"FI_PROVIDER": "tcp"}, [], "LIBFABRIC", "tcp", None, id="TCP as wanted"
        ),
        pytest.param(
            ["LIBFABRIC"], ["LIBFABRIC"], {}, [Device("cxi0", "cxi")], "LIBFABRIC", "cxi", None, id="Slingshot"
        ),
        pytest.param(
            ["LIBFABRIC", "UCX"],
            ["UCX"],
            {},
            EFA,
            "UCX",
            "efa",
            "although LIBFABRIC is configured",
            id="another backend",
        ),
        pytest.param(["LIBFABRIC"], [], {}, [], "none", "unknown", "although LIBFABRIC", id="no backend at all"),
    ],
)
def test_transport(
    configured: Sequence[str],
    instantiated: Sequence[str],
    environment: Mapping[str, str],
    devices: Sequence[Device],
    backend: str,
    provider: str,
    warning: str | None,
) -> None:
    info = describe_transport(configured, instantiated, environment, devices)
    assert (info.backend, info.provider) == (backend, provider)
    if warning is None:
        assert info.warning is None
    else:
        assert warning in (info.warning or "")


def test_detail_names_devices_and_settings() -> None:
    environment = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "HOME": "/"}
    assert describe_transport(["UCX"], ["UCX"], environment, EFA).detail == (
        "RDMA devices open: uverbs0 (efa), uverbs1 (efa); UCX_TLS=tcp,self; UCX_NET_DEVICES=lo"
    )
    assert describe_transport(["UCX"], ["UCX"], {}, []).detail == "RDMA devices open: none"


def test_devices_are_those_that_the_process_has_open(tmp_path: Path) -> None:
    descriptors, system = tmp_path / "fd", tmp_path / "infiniband_verbs"
    descriptors.mkdir()
    for number, target in enumerate(
        ["/dev/null", "socket:[1]", "/dev/infiniband/uverbs1", "/dev/infiniband/uverbs0", "/dev/infiniband/uverbs1"]
    ):
        (descriptors / str(number)).symlink_to(target)
    (descriptors / "9").symlink_to("/dev/cxi0")
    (descriptors / "10").write_text("not a link")
    for name in ("uverbs0", "uverbs2"):
        (system / name / "device").mkdir(parents=True)
        (system / name / "device" / "driver").symlink_to("../../../../bus/pci/drivers/efa")
    assert list_open_devices(descriptors, system) == [
        Device("cxi0", "cxi"),
        Device("uverbs0", "efa"),
        Device("uverbs1", "unknown"),
    ]


def test_this_process_has_none_open() -> None:
    assert list_open_devices() == []
