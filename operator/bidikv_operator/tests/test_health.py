"""Liveness, readiness and metrics, over HTTP on loopback."""

from __future__ import annotations

import dataclasses

import aiohttp
import pytest

from bidikv_operator.health import HealthServer, Pulse, find_faults
from bidikv_operator.metrics import Metrics

WELL = Pulse(
    is_leader=True,
    queue_fault=None,
    oldest_key_seconds=1,
    watch_age_seconds=200,
    lease_idle_seconds=1,
    is_stopping=False,
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"queue_fault": "a worker died"}, "a worker died"),
        ({"oldest_key_seconds": 601}, "waited 601 s for a worker"),
        ({"watch_age_seconds": 901}, "a watch has not been renewed"),
        ({"lease_idle_seconds": 61}, "the lease has not been attended to"),
    ],
)
def test_faults(change: dict[str, object], words: str) -> None:
    (fault,) = find_faults(dataclasses.replace(WELL, **change))  # type: ignore[arg-type]
    assert words in fault


def test_a_waiting_candidate_is_well() -> None:
    assert find_faults(WELL) == []
    assert find_faults(dataclasses.replace(WELL, is_leader=False, watch_age_seconds=9999)) == []


async def test_pages() -> None:
    pulse, metrics, refreshed = [WELL], Metrics(), []
    metrics.record_write("PATCH", "Service")
    server = HealthServer(lambda: pulse[0], lambda: refreshed.append(1), metrics)
    port = await server.start("127.0.0.1", 0)

    async def get(session: aiohttp.ClientSession, page: str) -> tuple[int, str]:
        async with session.get(f"http://127.0.0.1:{port}/{page}") as response:
            return response.status, await response.text()

    async with aiohttp.ClientSession() as session:
        assert await get(session, "healthz") == (200, "ok\n")
        assert await get(session, "readyz") == (200, "ok, leading\n")
        status, text = await get(session, "metrics")
        assert status == 200
        assert 'bidikv_operator_writes_total{kind="Service",verb="PATCH"} 1.0' in text
        assert refreshed
        pulse[0] = dataclasses.replace(WELL, is_leader=False, queue_fault="a worker died", is_stopping=True)
        assert await get(session, "healthz") == (500, "a worker died\n")
        assert await get(session, "readyz") == (503, "stopping\n")
    await server.stop()
