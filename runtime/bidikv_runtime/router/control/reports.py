"""Asks every engine once a second what it does and holds (``contract.EngineReport``), and tells the fleet.

This is how replicas of the router agree without talking to each other, and how a replica that has just started knows
every session. A report that does not come leaves the last one in force for a while. Each engine is asked by itself: a
slow one delays no other. An idle router asks less often, until work begins.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Final, Literal
from urllib.parse import urlencode

import msgspec

from bidikv_runtime.contract import REPORT_PATH, EngineReport
from bidikv_runtime.router.choice.fleet import Fleet, Reporting
from bidikv_runtime.router.control.token_file import TokenFile
from bidikv_runtime.router.http.fetch import Socket, fetch
from bidikv_runtime.router.http.pool import UpstreamPool
from bidikv_runtime.router.http.upstream import UpstreamError
from bidikv_runtime.router.limits import Limits

logger = logging.getLogger(__name__)

SUPPORTED_VERSION: Final = 1
_MOST_BYTES: Final = 4 * 1024 * 1024
"""Of a report: 4096 sessions take about 0.6 MB."""
_AT_ONCE: Final = 16
"""Engines asked at the same time."""
_JITTER: Final = 0.1
"""Share by which pauses differ, so that replicas do not ask at the same moment."""
_REPORT: Final = msgspec.json.Decoder(EngineReport)

Fault = Literal["silent", "refused", "missing", "malformed"]
_EXPLANATIONS: Final[dict[Fault, str]] = {
    "silent": "does not report",
    "refused": "refuses the router's token: mount the Secret of the engines' tokens into the router, too",
    "missing": "has no reports: use an engine of the same release as the router",
    "malformed": "reports what this router cannot read: use an engine and a router of the same release",
}


class ReportFailed(Exception):
    """An engine gave no report that can be used."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(f"{_EXPLANATIONS[fault]} ({detail})")
        self.fault = fault


class ReportPoller:
    """Keeps the fleet's reports fresh."""

    def __init__(self, fleet: Fleet, pool: UpstreamPool, limits: Limits, token: TokenFile) -> None:
        self._fleet, self._pool, self._limits, self._token = fleet, pool, limits, token
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._asking: set[str] = set()
        self._complaints: dict[str, Fault] = {}
        self._wake = asyncio.Event()
        fleet.expect_reports()
        fleet.on_change = self._wake.set

    async def run(self) -> None:
        """Ask until cancelled."""
        clock = asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as tasks:
            while True:
                began = clock()
                engines = self._fleet.list_reporting()
                known = {engine.address for engine in engines}
                self._complaints = {address: fault for address, fault in self._complaints.items() if address in known}
                for engine in engines:
                    if engine.address not in self._asking:
                        self._asking.add(engine.address)
                        tasks.create_task(self._ask(engine))
                await self._pause(began)

    async def _pause(self, began: float) -> None:
        """Until the next round: a change of engines begins it at once, work after idleness not before its time."""
        limits, fleet = self._limits, self._fleet
        clock = asyncio.get_running_loop().time
        jitter = random.uniform(1 - _JITTER, 1 + _JITTER)
        pools = fleet.pools
        while fleet.pools is pools:
            # Read anew each time: work may begin meanwhile.
            seconds = limits.report_seconds if fleet.busy else max(limits.report_seconds, limits.report_idle_seconds)
            left = began + seconds * jitter - clock()
            if left <= 0:
                return
            self._wake.clear()
            try:
                async with asyncio.timeout(left):
                    await self._wake.wait()
            except TimeoutError:
                return

    async def _ask(self, engine: Reporting) -> None:
        try:
            async with self._turn:
                report = await self._fetch(engine)
        except ReportFailed as failure:
            if self._complaints.get(engine.address) != failure.fault:
                self._complaints[engine.address] = failure.fault
                logger.warning("The engine %s %s", engine.address, failure)
            self._fleet.note_silence(engine.address, keep=failure.fault == "silent")
        else:
            if self._complaints.pop(engine.address, None):
                logger.info("The engine %s reports again", engine.address)
            self._fleet.take_report(engine.address, report)
        finally:
            self._asking.discard(engine.address)

    async def _fetch(self, engine: Reporting) -> EngineReport:
        """One report.

        Raises:
            ReportFailed: none came, or not one that can be used.
        """
        query = urlencode({"epoch": engine.epoch, "since": engine.sequence, "reads": int(engine.reads)})
        try:
            answer = await fetch(
                self._pool,
                Socket(engine.host, engine.port),
                f"{REPORT_PATH}?{query}",
                seconds=self._limits.report_timeout_seconds,
                limit=_MOST_BYTES,
                headers=self._token.build_headers(),
            )
        except UpstreamError as error:
            raise ReportFailed("silent", str(error)) from error
        if answer.status != 200:
            fault: Fault = {401: "refused", 403: "refused", 404: "missing"}.get(answer.status, "silent")  # type: ignore[assignment]
            raise ReportFailed(fault, f"HTTP {answer.status} from port {engine.port}")
        try:
            report = _REPORT.decode(answer.body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ReportFailed("malformed", str(error)) from error
        if report.version != SUPPORTED_VERSION:
            raise ReportFailed("malformed", f"version {report.version}, not {SUPPORTED_VERSION}")
        return report
