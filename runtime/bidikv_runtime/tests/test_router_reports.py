"""Polling of engines' reports and probing of their health, against mock engines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from bidikv_runtime.contract import ENV_TOKEN_FILE, EngineReport
from bidikv_runtime.router.choice.endpoints import Endpoint, Pools
from bidikv_runtime.router.control.probes import Prober
from bidikv_runtime.router.control.reports import ReportPoller
from bidikv_runtime.router.control.token_file import TokenFile
from bidikv_runtime.router.http.deadlines import Deadlines
from bidikv_runtime.router.http.pool import UpstreamPool
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.router.observe.engine_view import EngineView
from bidikv_runtime.tests.choice_rig import FleetRig, held, report, sessions
from bidikv_runtime.tests.router_engine import WAIT_SECONDS, Exchange, MockEngine, answer_with, hang, running_engines

QUICK: dict[str, Any] = {"report_seconds": 0.01, "report_idle_seconds": 0.01, "breaker_seconds": 0.0}
LONG = 3600.0


def reporting(engine: MockEngine) -> Endpoint:
    return Endpoint("127.0.0.1", engine.port, engine.lookup_port, state_port=engine.port)


def answer_report(content: EngineReport) -> Any:
    return answer_with(200, asdict(content))


@dataclass
class Control:
    """A fleet, whose clock the test moves, with what keeps it informed."""

    rig: FleetRig
    decode: list[MockEngine]
    prefill: MockEngine

    def view(self, engine: MockEngine) -> EngineView:
        return next(v for v in self.rig.fleet.describe() if v.address == reporting(engine).address)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not condition():  # noqa: ASYNC110 -- the fleet announces nothing
                await asyncio.sleep(0.002)

    def replace(self, *decode: MockEngine) -> None:
        self.rig.fleet.replace(Pools((reporting(self.prefill),), tuple(reporting(engine) for engine in decode)))


@contextlib.asynccontextmanager
async def running_control(token_file: Path | None = None, **limits: Any) -> AsyncIterator[Control]:
    """One prefill engine (known to the fleet) and two decode engines (``replace`` makes them known)."""
    async with running_engines(3) as (prefill, *decode):
        for engine in (prefill, *decode):
            engine.behave = answer_report(report())
        settings = Limits(**(QUICK | limits))
        rig = FleetRig([], [], limits=QUICK | limits)
        rig.fleet.known = False
        loop = asyncio.get_running_loop()
        pool = UpstreamPool(loop, settings, Deadlines(loop))
        poller = ReportPoller(rig.fleet, pool, settings, TokenFile(token_file))
        tasks = [asyncio.create_task(poller.run()), asyncio.create_task(Prober(rig.fleet, pool, settings).run())]
        try:
            yield Control(rig, decode, prefill)
            assert not any(task.done() for task in tasks), "control ended"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            pool.close()


async def test_reports_reach_the_fleet_and_only_changes_are_asked_for() -> None:
    session = sessions(1)[0]
    async with running_control() as control:
        one, other = control.decode
        one.behave = answer_report(report(held(session, 700), epoch="a b", sequence=17, requests=5))
        control.replace(one, other)
        await one.wait_for_exchange(3)
        first, second = one.exchanges[0], one.exchanges[2]
        assert urlsplit(first.target).path == "/report"
        assert parse_qs(urlsplit(first.target).query) == {"since": ["0"], "reads": ["1"]}
        assert parse_qs(urlsplit(second.target).query) == {"epoch": ["a b"], "since": ["17"], "reads": ["1"]}
        assert first.header("authorization") is None
        view = control.view(one)
        assert (view.load, view.sessions, view.compatibility) == (5, 1, "a")
        assert control.rig.first(session) == reporting(one)
        one.behave = answer_report(report(held(session, 0), epoch="a b", sequence=18))
        await control.until(lambda: control.view(one).sessions == 0)
        await control.until(lambda: control.view(control.prefill).report_age == 0)


async def test_the_fleet_is_ready_once_every_engine_was_asked() -> None:
    release = asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        await release.wait()
        await exchange.send_json(500, {})

    async with running_control() as control:
        control.decode[0].behave = wait
        control.replace(control.decode[0])
        await control.until(lambda: control.view(control.prefill).compatibility == "a")
        assert control.rig.fleet.explain_unready() == "The engines' first reports have not arrived yet."
        release.set()
        await control.until(lambda: control.rig.fleet.explain_unready() is None)


async def test_a_missing_report_leaves_the_last_one_in_force_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    async with running_control(report_keep_seconds=10.0) as control:
        (one, other) = control.decode
        one.behave = answer_report(report(held(sessions(1)[0], 700), requests=5))
        control.replace(one, other)
        await control.until(lambda: control.view(one).load == 5)
        one.behave = answer_with(500, {"error": "no"})
        await one.wait_for_exchange(len(one.exchanges) + 2)  # what was under way is over
        control.rig.now += 9
        await one.wait_for_exchange(len(one.exchanges) + 2)
        assert (control.view(one).load, control.view(one).report_age) == (5, 9)
        control.rig.now += 2
        await control.until(lambda: control.view(one).load == 0)
        assert control.view(one).sessions == 0
        one.behave = answer_report(report(requests=3))
        await control.until(lambda: control.view(one).load == 3)
        assert "/report?epoch=&since=0&reads=1" in [exchange.target for exchange in one.exchanges[1:]], "all of it anew"
    complaints = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert complaints == [f"The engine {reporting(one).address} does not report (HTTP 500 from port {one.port})"]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (answer_with(401, {}), "refuses the router's token: mount the Secret"),
        (answer_with(404, {}), "has no reports: use an engine of the same release"),
        (answer_with(200, {"engine": "e"}), "reports what this router cannot read: .*missing required field"),
        (answer_report(report()), None),
        (answer_with(200, asdict(report()) | {"version": 2}), "reports what this router cannot read: .*version 2"),
    ],
)
async def test_an_engine_that_cannot_be_understood_counts_as_one_that_does_not_report(
    answer: Any, sentence: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_control() as control:
        one = control.decode[0]
        control.replace(one)
        await control.until(lambda: control.view(one).compatibility == "a")
        one.behave = answer
        await one.wait_for_exchange(len(one.exchanges) + 4)
        assert control.view(one).compatibility == ("a" if sentence is None else "")
    complaints = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(complaints) == (sentence is not None), "once, not at every poll"
    if sentence is not None:
        assert re.search(sentence, complaints[0])


async def test_a_slow_engine_delays_no_other() -> None:
    async with running_control(report_timeout_seconds=LONG) as control:
        slow, quick = control.decode
        slow.behave = hang
        control.replace(slow, quick)
        await quick.wait_for_exchange(5)
        assert len(slow.exchanges) == 1


async def test_an_engine_that_hangs_is_given_up_and_asked_again() -> None:
    async with running_control(report_timeout_seconds=0.02) as control:
        slow = control.decode[0]
        slow.behave = hang
        control.replace(slow)
        await slow.wait_for_exchange(2)
        await slow.exchanges[0].wait_closed_by_router()


async def test_a_new_engine_is_asked_at_once_and_one_that_left_no_more() -> None:
    async with running_control(report_seconds=LONG, report_idle_seconds=LONG) as control:
        one, other = control.decode

        async def told(engine: MockEngine) -> None:
            """An engine that is still being asked is not asked once more."""
            await control.until(lambda: control.view(engine).report_age == 0)
            control.rig.now += 1

        control.replace(one)
        await one.wait_for_exchange()
        await told(one)
        control.replace(one, other)
        await other.wait_for_exchange()
        await one.wait_for_exchange(2)
        await told(other)
        control.replace(other)
        await other.wait_for_exchange(2)
        assert len(one.exchanges) == 2


async def test_an_idle_router_asks_less_often_until_work_begins() -> None:
    async with running_control(report_seconds=0.01, report_idle_seconds=LONG) as control:
        one = control.decode[0]
        control.replace(one)
        await one.wait_for_exchange()
        await asyncio.sleep(0.1)
        assert len(one.exchanges) == 1
        work = control.rig.fleet.decoding(reporting(one))
        await one.wait_for_exchange(4)
        work.end()
        await asyncio.sleep(0.05)  # a poll that was due
        asked = len(one.exchanges)
        await asyncio.sleep(0.1)
        assert len(one.exchanges) <= asked + 1


async def test_an_engine_without_a_state_port_is_not_asked() -> None:
    async with running_control() as control:
        one, other = control.decode
        control.rig.fleet.replace(Pools((), (one.endpoint, reporting(other))))
        await other.wait_for_exchange(2)
        assert one.exchanges == []
        assert control.rig.fleet.explain_unready() == "No prefill engine is ready."


async def test_the_token_is_shown_and_follows_its_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("\n first-token \nsecond-token\n")
    async with running_control(path) as control:
        one = control.decode[0]
        control.replace(one)
        await one.wait_for_exchange()
        assert one.exchanges[0].header("authorization") == "Bearer first-token"
        new = tmp_path / "new"
        new.write_text("third-token\n")
        new.rename(path)
        await control.until(lambda: one.exchanges[-1].header("authorization") == "Bearer third-token")


def test_a_token_file_that_vanishes_leaves_the_last_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tokens"
    path.write_text("a-token\n")
    tokens = TokenFile.from_environment({ENV_TOKEN_FILE: str(path)})
    assert tokens.build_headers() == (("authorization", "Bearer a-token"),)
    path.unlink()
    assert [tokens.build_headers() for _ in range(3)] == [(("authorization", "Bearer a-token"),)] * 3
    assert len(caplog.records) == 1
    assert f"{path} ({ENV_TOKEN_FILE}) cannot be read" in caplog.text
    path.write_bytes(b"\xff\xff\n")
    assert tokens.build_headers() == (("authorization", "Bearer a-token"),)
    path.write_text("b-token\n")
    os.utime(path, ns=(1, 1))
    assert tokens.build_headers() == (("authorization", "Bearer b-token"),)
    assert TokenFile.from_environment({}).build_headers() == ()


async def test_a_healthy_answer_to_a_probe_closes_the_breaker() -> None:
    async with running_control(report_seconds=LONG, report_idle_seconds=LONG) as control:
        one, other = control.decode
        control.replace(one, other)
        await control.until(lambda: control.rig.fleet.explain_unready() is None)
        one.exchanges.clear()
        one.behave = answer_with(503, {})
        control.rig.fleet.note_failure(reporting(one), "connect")
        assert control.view(one).breaker == "open"
        exchange = await one.wait_for_exchange(2)
        assert (exchange.method, exchange.target) == ("GET", "/health")
        assert control.view(one).breaker != "closed"
        assert {control.rig.first(session) for session in sessions(20)} == {reporting(other)}
        one.behave = answer_with(200, {})
        await control.until(lambda: control.view(one).breaker == "closed")
        assert {control.rig.first(session) for session in sessions(20)} == {reporting(one), reporting(other)}


async def test_an_engine_that_is_gone_is_probed_until_it_is_back() -> None:
    async with running_control(report_seconds=LONG, report_idle_seconds=LONG) as control:
        one = control.decode[0]
        control.replace(one)
        await control.until(lambda: control.rig.fleet.explain_unready() is None)
        await one.stop()
        control.rig.fleet.note_failure(reporting(one), "connect")
        await control.until(lambda: control.view(one).breaker == "half_open" or control.view(one).breaker == "open")
        await asyncio.sleep(0.6)  # two looks
        assert control.view(one).breaker != "closed"
        one.behave = answer_with(200, {})
        await one.start()
        await control.until(lambda: control.view(one).breaker == "closed")
