"""The queue's decisions, told the time; and the workers, on the real event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_operator.workqueue import (
    BACKOFF_CAP_SECONDS,
    Done,
    KeyedQueue,
    QueueFullError,
    QueueObserver,
    RequeueAfter,
    Result,
    RetryLaterError,
    WorkQueue,
    compute_backoff,
)

DEADLINE = 10.0


def test_a_key_waits_once_and_first_come_first_served() -> None:
    queue: KeyedQueue[str] = KeyedQueue(limit=10)
    for key in "abab":
        queue.add(key, now=0)
    assert queue.depth() == 2
    assert [queue.pop(0), queue.pop(0), queue.pop(0)] == ["a", "b", None]


def test_an_event_during_a_run_makes_one_more_run() -> None:
    queue: KeyedQueue[str] = KeyedQueue(limit=10)
    queue.add("a", 0)
    assert queue.pop(0) == "a"
    queue.add("a", 1)
    queue.add("a", 2)
    assert queue.pop(3) is None, "never two runs of one key at a time"
    queue.succeed("a", RequeueAfter(100), 4)
    assert queue.pop(4) == "a"
    queue.succeed("a", Done(), 5)
    assert queue.pop(1000) is None


def test_requeue_after() -> None:
    queue: KeyedQueue[str] = KeyedQueue(limit=10)
    queue.add("a", 0)
    queue.pop(0)
    queue.succeed("a", RequeueAfter(5), 1)
    assert queue.next_due() == 6
    assert queue.pop(5.9) is None
    assert queue.pop(6) == "a"


def test_an_event_comes_before_the_delay_and_replaces_it() -> None:
    queue: KeyedQueue[str] = KeyedQueue(limit=10)
    queue.add("a", 0)
    queue.pop(0)
    queue.succeed("a", RequeueAfter(5), 0)
    queue.add("a", 1)
    assert queue.pop(1) == "a"
    queue.succeed("a", Done(), 1)
    assert queue.next_due() is None
    assert queue.pop(100) is None


def test_failures_back_off_and_success_forgets_them() -> None:
    queue: KeyedQueue[str] = KeyedQueue(limit=10)
    queue.add("a", 0)
    now, delays = 0.0, []
    for _ in range(4):
        assert queue.pop(now) == "a"
        delays.append(queue.fail("a", now, jitter=0))
        now += delays[-1]
    assert delays == [1, 2, 4, 8]
    assert queue.failing() == 1
    queue.pop(now)
    queue.succeed("a", Done(), now)
    assert queue.failing() == 0
    queue.add("a", now)
    queue.pop(now)
    assert queue.fail("a", now, jitter=0) == 1


def test_a_key_in_backoff_runs_at_an_event() -> None:
    queue: KeyedQueue[str] = KeyedQueue(limit=10)
    queue.add("a", 0)
    queue.pop(0)
    queue.fail("a", 0, jitter=0, at_least=300)
    queue.add("a", 1)
    assert queue.pop(1) == "a"


def test_the_bound() -> None:
    queue: KeyedQueue[str] = KeyedQueue(limit=2)
    queue.add("a", 0)
    queue.add("b", 0)
    queue.add("a", 0)  # waits already
    with pytest.raises(QueueFullError):
        queue.add("c", 0)


def test_age_of_the_oldest() -> None:
    queue: KeyedQueue[str] = KeyedQueue(limit=5)
    assert queue.oldest_seconds(9) == 0
    queue.add("a", 1)
    queue.add("b", 4)
    assert queue.oldest_seconds(9) == 8
    queue.pop(9)
    assert queue.oldest_seconds(9) == 5


@given(st.integers(1, 2000), st.floats(-1, 1))
def test_backoff_is_bounded(failures: int, jitter: float) -> None:
    assert 0 < compute_backoff(failures, jitter=jitter) <= BACKOFF_CAP_SECONDS * 1.2
    assert compute_backoff(failures, jitter=jitter, at_least=400) == 400


@given(st.lists(st.tuples(st.sampled_from(["add", "pop", "ok", "later", "fail"]), st.sampled_from("abc")), max_size=60))
def test_no_sequence_loses_or_doubles_a_key(steps: list[tuple[str, str]]) -> None:
    """After any history: a key named and not run since is run by popping and time alone; none runs twice at once."""
    queue: KeyedQueue[str] = KeyedQueue(limit=10)
    now, running, owed = 0.0, set[str](), set[str]()
    for step, key in steps:
        now += 1
        if step == "add":
            queue.add(key, now)
            owed.add(key)
        elif step == "pop":
            popped = queue.pop(now)
            if popped is not None:
                assert popped not in running
                running.add(popped)
                owed.discard(popped)
        elif key in running:
            running.discard(key)
            if step == "fail":
                queue.fail(key, now, jitter=0)
                owed.add(key)
            else:
                queue.succeed(key, Done() if step == "ok" else RequeueAfter(3), now)
                if step == "later":
                    owed.add(key)
    for key in running:
        queue.succeed(key, Done(), now)
    for _ in range(20):
        now += 1000
        popped = queue.pop(now)
        if popped is None:
            break
        owed.discard(popped)
        queue.succeed(popped, Done(), now)
    assert not owed


class Recorder:
    """A process function that notes its runs and can be made to wait or fail."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.now_running: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.answer: Callable[[str], Awaitable[Result]] | None = None
        self.changed = asyncio.Event()

    async def __call__(self, key: str) -> Result:
        assert key not in self.now_running
        self.now_running.add(key)
        try:
            self.runs.append(key)
            self.changed.set()
            await self.gate.wait()
            return await self.answer(key) if self.answer else Done()
        finally:
            self.now_running.discard(key)

    async def wait_for_runs(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE):
            while len(self.runs) < count:
                self.changed.clear()
                await self.changed.wait()


async def test_workers_run_keys_in_parallel_and_stop() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    queue: WorkQueue[str] = WorkQueue(recorder, workers=2, limit=10)
    queue.start()
    for key in "abca":
        queue.add(key)
    await recorder.wait_for_runs(2)
    assert recorder.now_running == {"a", "b"}
    recorder.gate.set()
    await recorder.wait_for_runs(3)
    assert queue.fault is None
    await queue.stop()
    assert sorted(recorder.runs) == ["a", "b", "c"]


async def test_a_delayed_key_wakes_a_sleeping_worker() -> None:
    recorder = Recorder()

    async def again_soon(key: str) -> Result:
        return RequeueAfter(0.01) if len(recorder.runs) < 3 else Done()

    recorder.answer = again_soon
    queue: WorkQueue[str] = WorkQueue(recorder, workers=3, limit=10)
    queue.start()
    queue.add("a")
    await recorder.wait_for_runs(3)
    await queue.stop()


async def test_failures_are_repeated_and_observed(caplog: pytest.LogCaptureFixture) -> None:
    recorder, seen = Recorder(), []

    async def fail_twice(key: str) -> Result:
        if len(recorder.runs) == 1:
            raise RetryLaterError("the API server is away")
        if len(recorder.runs) == 2:
            raise ValueError("a bug")
        return Done()

    recorder.answer = fail_twice
    queue: WorkQueue[str] = WorkQueue(
        recorder,
        workers=1,
        limit=10,
        observer=QueueObserver(on_run=lambda outcome, seconds: seen.append(outcome)),
        jitter=lambda: -1.0,
    )
    queue.start()
    queue.add("a")
    # An event does not wait for the backoff.
    await recorder.wait_for_runs(1)
    queue.add("a")
    await recorder.wait_for_runs(2)
    queue.add("a")
    await recorder.wait_for_runs(3)
    await queue.stop()
    assert seen[:2] == ["failed", "failed"]
    errors = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.exc_info is not None for record in errors] == [False, True], "known failures need no traceback"


async def test_a_run_that_hangs_is_cut_off() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    queue: WorkQueue[str] = WorkQueue(recorder, workers=1, limit=10, step_limit_seconds=0.01)
    queue.start()
    queue.add("a")
    queue.add("b")
    await recorder.wait_for_runs(2)
    await queue.stop()
    assert recorder.runs[:2] == ["a", "b"]


async def test_overflow_and_dead_workers_are_faults() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    queue: WorkQueue[str] = WorkQueue(recorder, workers=1, limit=1)
    queue.add("a")
    faults = [queue.fault]
    queue.add("b")
    faults.append(queue.fault)
    assert faults == [None, "the work queue overflowed"]
    await queue.stop()

    broken: WorkQueue[str] = WorkQueue(recorder, workers=1, limit=1)
    broken.start()
    (worker,) = broken._workers
    worker.cancel()
    async with asyncio.timeout(DEADLINE):
        assert "ended" in await broken.wait_for_fault()
    assert broken.fault == "a worker died"
