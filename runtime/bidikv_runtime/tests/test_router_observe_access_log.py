"""The access log: what a line tells, and that no reader of it can hold up the router."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

import pytest

from bidikv_runtime.router.observe import access_log
from bidikv_runtime.router.observe.access_log import AccessLog, build_line
from bidikv_runtime.router.observe.record import TurnRecord
from bidikv_runtime.router.observe.trace_context import start_trace
from bidikv_runtime.tests.router_engine import WAIT_SECONDS
from bidikv_runtime.tests.router_records import STREAM

FILLING = b"x" * 65536


def test_a_line_tells_what_happened() -> None:
    trace = start_trace(b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", 0.0)
    record = replace(STREAM, client="10.9.9.9", trace=trace, retries=1, keep_alives=2)
    assert json.loads(build_line(record, now=1_800_000_000.5)) == {
        "time": "2027-01-15T07:59:56.500000Z",
        "route": "chat",
        "status": 200,
        "outcome": "answered",
        "phase": "stream",
        "path": "bidirectional",
        "reason": "history",
        "seconds": 4.0,
        "body_bytes": 5000,
        "client": "10.9.9.9",
        "session": (b"s" * 16).hex(),
        "prefill": "10.0.0.1:8000",
        "decode": "10.0.0.2:8000",
        "prompt_tokens": 1200,
        "streamed": True,
        "chunks": 5,
        "first_token_seconds": 1.75,
        "stages": {"queue": 0.25, "prefill": 0.75, "handover": 0.5, "first_token": 0.25, "stream": 2.25},
        "longest_gap_seconds": 0.75,
        "retries": 1,
        "keep_alives": 2,
        "trace": "0af7651916cd43dd8448eb211c80319c",
    }


def test_what_did_not_happen_is_left_out() -> None:
    record = TurnRecord(1.0, route="models", status=200, ended_at=1.5)
    assert json.loads(build_line(record, now=0.5)) == {
        "time": "1970-01-01T00:00:00Z",
        "route": "models",
        "status": 200,
        "outcome": "answered",
        "phase": "receive",
        "path": "direct",
        "seconds": 0.5,
        "body_bytes": 0,
        "stages": {"answer": 0.5},
    }


class Pipe:
    """Where the log writes, and its reader."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.drops: list[int] = []

    def fill(self) -> None:
        """Leave no room in it."""
        os.set_blocking(self.writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self.writer, FILLING)
        os.set_blocking(self.writer, True)

    async def read_lines(self, count: int) -> list[str]:
        """The first ``count`` lines, without the filling before them."""
        data = b""
        while data.count(b"\n") < count:
            data += await asyncio.wait_for(asyncio.to_thread(os.read, self.reader, 1 << 20), WAIT_SECONDS)
        return [json.loads(line)["route"] for line in data.lstrip(b"x").splitlines()]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    for descriptor in (pipe.reader, pipe.writer):
        with contextlib.suppress(OSError):
            os.close(descriptor)


@pytest.fixture
async def log(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AccessLog]:
    monkeypatch.setattr(access_log, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(access_log, "MAXIMUM_LINES", 3)
    log = AccessLog(asyncio.get_running_loop(), pipe.drops.append, pipe.writer)
    yield log
    os.set_blocking(pipe.reader, False)
    await log.close(0.1)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not holds():  # noqa: ASYNC110 - a thread's progress
            await asyncio.sleep(0.005)


def write(log: AccessLog, *routes: str) -> None:
    for route in routes:
        log.write(replace(STREAM, route=route))  # type: ignore[arg-type]


async def test_lines_arrive_in_order_and_are_not_held_back(log: AccessLog, pipe: Pipe) -> None:
    write(log, "a", "b")
    assert await pipe.read_lines(2) == ["a", "b"]
    write(log, "c")
    assert await pipe.read_lines(1) == ["c"]
    assert pipe.drops == []


@pytest.mark.parametrize("blocking", [True, False])
async def test_a_slow_reader_costs_lines_but_holds_up_nobody(log: AccessLog, pipe: Pipe, blocking: bool) -> None:
    pipe.fill()
    os.set_blocking(pipe.writer, blocking)
    write(log, "a", "b", "c")
    await until(lambda: log._writing)
    write(log, "d", "e", "f", "lost", "lost")
    assert pipe.drops == [1, 1]
    assert await pipe.read_lines(6) == ["a", "b", "c", "d", "e", "f"]


async def test_a_reader_that_left_is_noticed(log: AccessLog, pipe: Pipe) -> None:
    os.close(pipe.reader)
    pipe.reader = os.open(os.devnull, os.O_RDONLY)
    write(log, "a", "b")
    await until(lambda: pipe.drops == [2])


async def test_closing_writes_what_is_left(pipe: Pipe) -> None:
    log = AccessLog(asyncio.get_running_loop(), pipe.drops.append, pipe.writer)
    write(log, "a", "b")
    await log.close(WAIT_SECONDS)
    assert await pipe.read_lines(2) == ["a", "b"]


async def test_closing_does_not_wait_for_a_reader_that_does_not_read(pipe: Pipe) -> None:
    pipe.fill()
    log = AccessLog(asyncio.get_running_loop(), pipe.drops.append, pipe.writer)
    write(log, "a")
    log._flush()
    write(log, "b", "c")
    await log.close(0.05)
    assert pipe.drops == [2]
    assert await pipe.read_lines(1) == ["a"]
