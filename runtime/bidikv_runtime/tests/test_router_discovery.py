"""Discovery against a stand-in for the API server: list, watch, expiry, failures."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from bidikv_runtime.contract import RouterConfig
from bidikv_runtime.router.choice.endpoints import Pools
from bidikv_runtime.router.control import discovery
from bidikv_runtime.router.control.discovery import ApiServer, EndpointSlice, EndpointWatch, build_pools

WAIT_SECONDS = 10.0
CONFIG = RouterConfig(namespace="ns", prefill_service="p", decode_service="d", served_model_name="m", engine_port=8000)


def slice_of(name: str, service: str, *endpoints: tuple[str, dict[str, bool]], version: int = 1) -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": "ns",
            "resourceVersion": str(version),
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}],
        "endpoints": [
            {"addresses": [host], "conditions": conditions, "nodeName": "n", "targetRef": {"kind": "Pod", "name": "x"}}
            for host, conditions in endpoints
        ],
    }


READY = {"ready": True, "serving": True, "terminating": False}
DRAINING = {"ready": False, "serving": True, "terminating": True}
STARTING = {"ready": False, "serving": False, "terminating": False}


def pools_of(*slices: dict[str, Any]) -> Pools:
    return build_pools([msgspec.convert(item, EndpointSlice) for item in slices], CONFIG)


def hosts(pools: Pools) -> tuple[list[str], list[str], list[str]]:
    return tuple([e.host for e in group] for group in (pools.ready_prefill, pools.ready_decode, pools.serving_decode))  # type: ignore[return-value]


def test_a_snapshot_of_both_services() -> None:
    pools = pools_of(
        slice_of("p-1", "p", ("10.0.0.1", READY), ("10.0.0.2", STARTING)),
        slice_of("d-1", "d", ("10.0.1.2", READY), ("10.0.1.1", DRAINING)),
        slice_of("d-2", "d", ("10.0.1.3", READY)),
        slice_of("other", "x", ("10.9.9.9", READY)),
    )
    assert hosts(pools) == (["10.0.0.1"], ["10.0.1.2", "10.0.1.3"], ["10.0.1.1", "10.0.1.2", "10.0.1.3"])
    assert pools.decode[0].address == "10.0.1.1:8000"
    assert pools.decode[0].lookup == "10.0.1.1:5700"


def test_an_engine_has_a_zone_a_name_and_the_configured_ports() -> None:
    item = slice_of("d-1", "d", ("10.0.1.1", READY), ("10.0.1.2", READY))
    item["endpoints"][0]["zone"] = "eu-1a"
    item["endpoints"][1]["zone"] = item["endpoints"][1]["targetRef"] = None
    one, other = pools_of(item).decode
    assert (one.zone, one.name, one.port, one.lookup_port, one.state_port) == ("eu-1a", "x", 8000, 5700, 5800)
    assert (other.zone, other.name) == ("", "")


def test_each_data_parallel_rank_is_an_engine() -> None:
    config = replace(CONFIG, decode_ranks=2)
    slices = (slice_of("p-1", "p", ("10.0.0.1", READY)), slice_of("d-1", "d", ("10.0.1.1", READY)))
    pools = build_pools([msgspec.convert(item, EndpointSlice) for item in slices], config)
    assert [e.address for e in pools.ready_decode] == ["10.0.1.1:8000#0", "10.0.1.1:8000#1"]
    assert [(e.port, e.lookup, e.state_port) for e in pools.decode] == [
        (8000, "10.0.1.1:5700", 5800),
        (8000, "10.0.1.1:5701", 5801),
    ]
    assert [e.address for e in pools.prefill] == ["10.0.0.1:8000"]


@pytest.mark.parametrize(
    ("conditions", "ready", "serving"),
    [({}, True, True), ({"ready": True}, True, True), ({"ready": False}, False, False), (DRAINING, False, True)],
)
def test_missing_conditions_have_the_documented_defaults(
    conditions: dict[str, bool], ready: bool, serving: bool
) -> None:
    pools = pools_of(slice_of("d-1", "d", ("10.0.1.1", conditions)))
    assert (bool(pools.ready_decode), bool(pools.serving_decode)) == (ready, serving)


def test_an_address_in_two_slices_counts_once_and_as_the_better_one() -> None:
    for order in (1, -1):
        slices = [
            slice_of("d-1", "d", ("10.0.1.1", STARTING)),
            slice_of("d-2", "d", ("10.0.1.1", READY)),
        ][::order]
        assert hosts(pools_of(*slices)) == ([], ["10.0.1.1"], ["10.0.1.1"])


def test_null_endpoints_and_labels() -> None:
    item = slice_of("d-1", "d")
    item["endpoints"] = None
    unlabelled = slice_of("d-2", "d", ("10.0.1.1", READY))
    unlabelled["metadata"]["labels"] = None
    assert pools_of(item, unlabelled) == Pools()


@dataclass
class FakeApiServer:
    """Lists what ``slices`` holds; each watch streams what the test puts into ``events``."""

    slices: list[dict[str, Any]] = field(default_factory=list)
    version: int = 1
    events: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    """Lines for the running watch; None ends it."""
    lists: int = 0
    watched_versions: list[str] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    """Statuses for the next lists."""
    expired: set[str] = field(default_factory=set)
    tokens: list[str | None] = field(default_factory=list)
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.path == "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices"
        assert request.query["labelSelector"] == "kubernetes.io/service-name in (p,d)"
        self.tokens.append(request.headers.get("authorization"))
        if "watch" not in request.query:
            self.lists += 1
            if self.failures:
                return web.Response(status=self.failures.pop(0))
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": self.slices})
        version = request.query["resourceVersion"]
        self.watched_versions.append(version)
        if version in self.expired:
            return web.json_response({"kind": "Status", "code": 410}, status=410)
        response = web.StreamResponse()
        await response.prepare(request)
        while (line := await self.events.get()) is not None:
            await response.write(line)
            if b'"object"' not in line or b'"ERROR"' in line:
                break  # the API server ends a watch after an error; so must a broken line, or it takes later events
        return response

    def emit(self, kind: str, item: dict[str, Any]) -> None:
        self.events.put_nowait(json.dumps({"type": kind, "object": item}).encode() + b"\n")


@contextlib.asynccontextmanager
async def watching(
    api: FakeApiServer, token_file: Path | None = None
) -> AsyncIterator[asyncio.Queue[tuple[list[str], list[str], list[str]]]]:
    """A running watch; the queue gets every reported snapshot as lists of hosts."""
    app = web.Application()
    app.router.add_get("/{path:.*}", api.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    reported: asyncio.Queue[tuple[list[str], list[str], list[str]]] = asyncio.Queue()
    watch = EndpointWatch(
        ApiServer(f"http://127.0.0.1:{port}", token_file), CONFIG, lambda pools: reported.put_nowait(hosts(pools))
    )
    task = asyncio.create_task(watch.run())
    try:
        yield reported
        assert not task.done(), "the watch ended"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        api.events.put_nowait(None)
        await runner.cleanup()


async def soon(queue: asyncio.Queue[Any]) -> Any:
    return await asyncio.wait_for(queue.get(), WAIT_SECONDS)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_BACKOFF_SECONDS", (0.01, 0.05))


async def test_changes_are_followed() -> None:
    api = FakeApiServer(slices=[slice_of("p-1", "p", ("10.0.0.1", READY)), slice_of("d-1", "d", ("10.0.1.1", READY))])
    async with watching(api) as reported:
        assert await soon(reported) == (["10.0.0.1"], ["10.0.1.1"], ["10.0.1.1"])
        api.emit("ADDED", slice_of("d-2", "d", ("10.0.1.2", READY), version=2))
        assert await soon(reported) == (["10.0.0.1"], ["10.0.1.1", "10.0.1.2"], ["10.0.1.1", "10.0.1.2"])
        api.emit("MODIFIED", slice_of("d-1", "d", ("10.0.1.1", DRAINING), version=3))
        assert await soon(reported) == (["10.0.0.1"], ["10.0.1.2"], ["10.0.1.1", "10.0.1.2"])
        api.emit("DELETED", slice_of("d-1", "d", ("10.0.1.1", DRAINING), version=4))
        assert await soon(reported) == (["10.0.0.1"], ["10.0.1.2"], ["10.0.1.2"])
    assert api.lists == 1


async def test_a_watch_that_ends_continues_where_it_was() -> None:
    api = FakeApiServer(slices=[slice_of("d-1", "d", ("10.0.1.1", READY))])
    async with watching(api) as reported:
        await soon(reported)
        api.emit("BOOKMARK", {"kind": "EndpointSlice", "metadata": {"resourceVersion": "77"}})
        api.events.put_nowait(None)
        api.emit("ADDED", slice_of("d-2", "d", ("10.0.1.2", READY), version=78))
        assert (await soon(reported))[1] == ["10.0.1.1", "10.0.1.2"]
    assert api.lists == 1
    assert api.watched_versions == ["1", "77"]


@pytest.mark.parametrize("in_stream", [True, False])
async def test_an_expired_version_is_listed_again(in_stream: bool) -> None:
    api = FakeApiServer(slices=[slice_of("d-1", "d", ("10.0.1.1", READY))])
    async with watching(api) as reported:
        await soon(reported)
        api.slices, api.version = [slice_of("d-1", "d", ("10.0.1.5", READY))], 90
        if in_stream:
            api.emit("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})
        else:
            api.expired.add("1")
            api.events.put_nowait(None)
        assert (await soon(reported))[1] == ["10.0.1.5"]  # what vanished meanwhile is gone
        api.emit("ADDED", slice_of("d-2", "d", ("10.0.1.6", READY), version=91))
        assert (await soon(reported))[1] == ["10.0.1.5", "10.0.1.6"]
    assert api.watched_versions[-1] == "90"


async def test_versions_that_expire_at_once_are_not_listed_without_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def draw(low: float, high: float) -> float:
        pauses.append(high)
        return high

    monkeypatch.setattr("random.uniform", draw)
    api = FakeApiServer(slices=[slice_of("d-1", "d", ("10.0.1.1", READY))], expired={"1"})
    async with watching(api), asyncio.timeout(WAIT_SECONDS):
        while api.lists < 4:  # noqa: ASYNC110 -- the stand-in announces nothing
            await asyncio.sleep(0.001)
        assert len(pauses) >= 3


@pytest.mark.parametrize("line", [b"not json\n", b'{"type":"ERROR","object":{"code":500}}\n'])
async def test_failures_keep_the_last_snapshot_and_are_tried_again(line: bytes) -> None:
    api = FakeApiServer(slices=[slice_of("d-1", "d", ("10.0.1.1", READY))])
    async with watching(api) as reported:
        await soon(reported)
        api.failures = [503, 403]
        api.events.put_nowait(line)
        api.slices = [slice_of("d-1", "d", ("10.0.1.1", READY), ("10.0.1.2", READY))]
        assert (await soon(reported))[1] == ["10.0.1.1", "10.0.1.2"]  # never an empty one in between
    assert api.lists == 4


async def test_a_slice_may_be_longer_than_any_buffer() -> None:
    api = FakeApiServer()
    async with watching(api) as reported:
        await soon(reported)
        many = [(f"10.1.{number // 250}.{number % 250}", READY) for number in range(3000)]
        api.emit("ADDED", slice_of("d-1", "d", *many))
        assert len((await soon(reported))[1]) == 3000


async def test_the_token_is_read_for_every_request(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("one\n")
    api = FakeApiServer()
    async with watching(api, token) as reported:
        await soon(reported)
        token.write_text("two\n")
        api.emit("ERROR", {"kind": "Status", "code": 410})
        api.slices = [slice_of("d-1", "d", ("10.0.1.1", READY))]
        await soon(reported)
    assert {"Bearer one", "Bearer two"} == set(api.tokens)


def test_outside_of_a_pod_the_error_names_the_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match="--static-prefill"):
        ApiServer.in_cluster()
