"""What a real engine says of the way its KV travels."""

from __future__ import annotations

import pytest

from bidikv_runtime import contract
from e2e.engine.fixtures import Deployment, user

pytestmark = [pytest.mark.engine, pytest.mark.asyncio]


async def test_backend_provider_and_bandwidth_are_in_the_metrics(deployment: Deployment) -> None:
    """The engines read with UCX over TCP, see the environment in ``local.py``; each has met the other by now."""
    await deployment.turn(await deployment.history("transport", 1))
    for client, peer in ((deployment.p, deployment.d), (deployment.d, deployment.p)):
        metrics = await client.metrics()
        assert metrics.value(contract.METRIC_TRANSPORT_INFO, backend="UCX", provider="tcp") == 1
        assert metrics.value(contract.METRIC_TRANSPORT_INFO) == 1  # and nothing else
        assert metrics.value(contract.METRIC_PEER_BANDWIDTH, peer=peer.engine.source) > 1e6


async def test_the_probe_counts_as_no_read(deployment: Deployment) -> None:
    await deployment.turn([user("probe")])
    metrics = await deployment.d.metrics()
    reads = metrics.value(contract.METRIC_READ_SECONDS + "_count")
    assert metrics.value("vllm:nixl_xfer_time_seconds_count") == reads
