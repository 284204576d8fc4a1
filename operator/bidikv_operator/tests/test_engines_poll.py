"""The poller against HTTP servers of this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from bidikv_operator.cache import Key, ObjectCache
from bidikv_operator.engines.facts import Expectation, FactStore
from bidikv_operator.engines.poll import AT_ONCE, MAXIMUM_BYTES, EnginePoller, fetch_report
from bidikv_operator.engines.targets import Target, choose_targets
from bidikv_operator.kinds import INFERENCE, POD
from bidikv_operator.names import Role
from bidikv_operator.resolved import ResolvedFabric
from bidikv_operator.tests.engine_samples import make_pod, make_report
from bidikv_operator.tests.samples import make_resource
from bidikv_runtime.contract import EngineReport, TransportReport

Object = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
DEADLINE = 30.0
EXPECTATION = Expectation({"prefill": 1, "decode": 1}, ResolvedFabric(type="TCP"), 60)


class Engines:
    """One port that stands for the report ports of all engines."""

    def __init__(self) -> None:
        self.answer: Handler = self.tell
        self.report = make_report()
        self.requests: list[web.Request] = []
        self.open = self.most_open = 0
        self.port = 0
        self._runner = web.ServerRunner(web.Server(self._handle))

    async def start(self) -> None:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def tell(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self.report))

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(request, web.BaseRequest)
        self.requests.append(request)  # type: ignore[arg-type]
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self.answer(request)  # type: ignore[arg-type]
        finally:
            self.open -= 1

    def target(self) -> Target:
        return Target("p", "uid-p", "prefill", "127.0.0.1", report_port=self.port)

    def choose(self, pods: Iterable[Mapping[str, Any]], ranks: Mapping[Role, int]) -> tuple[Target, ...]:
        """As the product chooses, but at this port."""
        return tuple(replace(target, host="127.0.0.1", report_port=self.port) for target in choose_targets(pods, ranks))


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    started = Engines()
    await started.start()
    yield started
    await started.stop()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.5)) as opened:
        yield opened


async def test_a_report_is_asked_for_without_sessions_and_with_the_token(
    engines: Engines, session: aiohttp.ClientSession
) -> None:
    engines.report = make_report(TransportReport("UCX", "tcp", read_bytes=5), unreachable=("10.0.0.9:5700",))
    assert await fetch_report(session, engines.target(), "secret") == engines.report
    assert await fetch_report(session, engines.target(), None) == engines.report
    first, second = engines.requests
    assert first.path_qs == "/report?sessions=0"
    assert first.headers["Authorization"] == "Bearer secret"
    assert "Authorization" not in second.headers


def answer(status: int = 200, body: bytes = b"") -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body, headers={"Location": "http://127.0.0.1:1/"})

    return handle


async def hang(request: web.Request) -> web.Response:
    await asyncio.sleep(5)
    return web.Response()


async def drip(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(100):
        await response.write(b" ")
        await asyncio.sleep(0.1)
    return response


REPORT = asdict(make_report())


@pytest.mark.parametrize(
    ("handler", "fault"),
    [
        (answer(401), "refused"),
        (answer(403), "refused"),
        (answer(404), "malformed"),
        (answer(500), "silent"),
        (answer(302), "silent"),
        (hang, "silent"),
        (drip, "silent"),
        (answer(body=b""), "malformed"),
        (answer(body=b"\xff\xfe"), "malformed"),
        (answer(body=b"[]"), "malformed"),
        (answer(body=msgspec.json.encode({**REPORT, "requests": "many"})), "malformed"),
        (answer(body=msgspec.json.encode({**REPORT, "version": 2})), "malformed"),
        (answer(body=msgspec.json.encode({**REPORT, "engine": "x" * MAXIMUM_BYTES})), "malformed"),
    ],
)
async def test_faults(engines: Engines, session: aiohttp.ClientSession, handler: Handler, fault: str) -> None:
    engines.answer = handler
    assert await fetch_report(session, engines.target(), None) == fault


async def test_nobody_listens(engines: Engines, session: aiohttp.ClientSession) -> None:
    await engines.stop()
    assert await fetch_report(session, engines.target(), None) == "silent"


async def test_a_newer_engine_may_say_more(engines: Engines, session: aiohttp.ClientSession) -> None:
    engines.answer = answer(body=msgspec.json.encode({**REPORT, "colour": "blue"}))
    assert await fetch_report(session, engines.target(), None) == make_report()


class Rig:
    def __init__(self, engines: Engines) -> None:
        self.engines, self.cache = engines, ObjectCache()
        self.store = FactStore(choose=engines.choose)
        self.named: list[Key] = []
        self.refused: list[Key] = []
        self.results: list[str] = []
        self.poller = EnginePoller(
            self.store,
            self.cache,
            self.named.append,
            lambda key: f"token of {key}",
            period_seconds=0.05,
            on_refused=self.refused.append,
            on_poll=self.results.append,
        )

    def add(self, name: str) -> Key:
        """A resource with a prefill and a decode engine."""
        key = Key("team", name)
        self.cache.put(INFERENCE, make_resource(name=name))
        for role in ("prefill", "decode"):
            pod = make_pod(f"{name}-{role}", role, labels={"serving.bidikv.io/owner": name})
            self.cache.put(POD, pod)
        self.store.expect(key, EXPECTATION)
        return key

    async def until(self, condition: Callable[[], bool]) -> None:
        """Poll until ``condition`` holds."""
        async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self.poller.run())
            while not condition():  # noqa: ASYNC110 -- the poller tells nobody
                await asyncio.sleep(0.01)
            task.cancel()


@pytest.fixture
def rig(engines: Engines) -> Rig:
    return Rig(engines)


async def test_resources_are_named_when_something_changed(rig: Rig) -> None:
    keys = {rig.add("a"), rig.add("b")}
    await rig.until(lambda: len(rig.engines.requests) >= 20)
    assert len(rig.named) == 2
    assert set(rig.named) == keys
    assert {request.headers["Authorization"] for request in rig.engines.requests} == {
        "Bearer token of team/a",
        "Bearer token of team/b",
    }
    rig.engines.report = make_report(TransportReport("UCX", "tcp", read_bytes=1))
    await rig.until(lambda: len(rig.named) >= 4)
    assert set(rig.named[2:]) == keys
    assert set(rig.results) == {"answered"}


async def test_engines_that_refuse_are_told_of(rig: Rig) -> None:
    key = rig.add("a")
    rig.engines.answer = answer(401)
    await rig.until(lambda: len(rig.refused) >= 2)
    assert set(rig.refused) == {key}
    assert set(rig.results) == {"refused"}
    assert [one.fault for one in rig.store.observe(key, rig.cache.pods(key))] == ["refused", "refused"]


async def test_slow_engines_hold_up_nobody_and_are_asked_once_at_a_time(rig: Rig) -> None:
    slow, quick = rig.add("slow"), rig.add("quick")
    release = asyncio.Event()

    async def wait_or_tell(request: web.Request) -> web.Response:
        if str(slow) in request.headers["Authorization"]:
            await release.wait()
        return await rig.engines.tell(request)

    rig.engines.answer = wait_or_tell
    asked: list[str] = []

    def count(key: Key) -> int:
        asked[:] = [request.headers["Authorization"] for request in rig.engines.requests]
        return sum(str(key) in header for header in asked)

    await rig.until(lambda: count(quick) >= 10)
    assert count(slow) == 2
    release.set()


async def test_no_more_are_asked_at_once_than_there_are_places(rig: Rig) -> None:
    for number in range(AT_ONCE):
        rig.add(f"r{number}")

    async def tell_late(request: web.Request) -> web.Response:
        await asyncio.sleep(0.05)
        return await rig.engines.tell(request)

    rig.engines.answer = tell_late
    await rig.until(lambda: len(set(rig.named)) == AT_ONCE)
    assert 1 < rig.engines.most_open <= AT_ONCE


async def test_a_fault_over_one_resource_ends_nothing(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = rig.add("bad"), rig.add("good")

    def token(key: Key) -> str | None:
        if key == bad:
            raise RuntimeError("no token")
        return None

    rig.poller._token = token
    await rig.until(lambda: good in rig.named)
    assert "no token" in caplog.text


async def test_without_resources_it_waits(rig: Rig) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await rig.poller.run()
    assert rig.engines.requests == []


def test_reports_are_what_engines_send() -> None:
    """The poller's decoder takes the contract's type as a whole."""
    report = make_report(TransportReport("UCX", "tcp"), unreachable=("a",), reached=("b",), held_sessions=3)
    assert msgspec.json.decode(msgspec.json.encode(report), type=EngineReport) == report
