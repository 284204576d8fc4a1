"""A keyed work queue: events name a key, workers bring that key to its desired state.

Guarantees:

- a key waits at most once, however many events name it (level-triggered: the worker looks at the world, not at events);
- a key is worked on by one worker at a time; an event that arrives meanwhile makes it run once more;
- a failure is repeated with exponential backoff, jitter and a cap; an event does not wait for the backoff;
- the number of waiting keys is bounded; more is a fault that health reports, never a silent loss.

``KeyedQueue`` decides and is told the time; ``WorkQueue`` runs the workers. Neither knows Kubernetes.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
logger = logging.getLogger(__name__)

BACKOFF_BASE_SECONDS: Final = 1.0
BACKOFF_CAP_SECONDS: Final = 300.0
BACKOFF_JITTER: Final = 0.2
STEP_LIMIT_SECONDS: Final = 120.0
"""One run of one key; a run consists of requests with their own, shorter limits."""


@dataclass(frozen=True)
class Done:
    """Nothing more to do until an event."""


@dataclass(frozen=True)
class RequeueAfter:
    """Run again after so many seconds, or at the next event."""

    seconds: float


Result = Done | RequeueAfter


class RetryLaterError(Exception):
    """A failure that is known and explained: repeated with backoff, logged as a sentence without a traceback."""

    def __init__(self, message: str, *, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after
        """At least so many seconds from now (a server's Retry-After)."""


class QueueFullError(Exception):
    """More keys wait than the bound allows."""


def compute_backoff(failures: int, *, jitter: float, at_least: float = 0.0) -> float:
    """Seconds before attempt ``failures + 1``; ``jitter`` in [-1, 1] spreads keys that failed together."""
    plain = min(BACKOFF_CAP_SECONDS, BACKOFF_BASE_SECONDS * 2.0 ** min(failures - 1, 30))
    return max(at_least, plain * (1 + BACKOFF_JITTER * jitter))


class KeyedQueue(Generic[K]):
    """The queue's decisions. Times are seconds of one monotonic clock, given by the caller."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ready: OrderedDict[K, float] = OrderedDict()  # key -> since when it waits
        self._due: dict[K, float] = {}  # key -> when it becomes ready
        self._heap: list[tuple[float, int, K]] = []  # may hold outdated entries; _due decides
        self._sequence = 0
        self._running: dict[K, bool] = {}  # key -> named again meanwhile
        self._failures: dict[K, int] = {}

    def add(self, key: K, now: float) -> None:
        """The key is to run as soon as a worker is free.

        Raises:
            QueueFullError: the bound is reached; the key was not taken.
        """
        if key in self._running:
            self._running[key] = True
            return
        if key in self._ready:
            return
        if len(self._ready) >= self._limit:
            raise QueueFullError(f"{self._limit} keys wait already; the key was not taken")
        self._due.pop(key, None)
        self._ready[key] = now

    def pop(self, now: float) -> K | None:
        """The key that has waited longest, now running; None if nothing is ready."""
        while self._heap and self._heap[0][0] <= now:
            when, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == when:
                del self._due[key]
                self._ready.setdefault(key, when)
        if not self._ready:
            return None
        key, _ = self._ready.popitem(last=False)
        self._running[key] = False
        return key

    def next_due(self) -> float | None:
        """When the next delayed key becomes ready."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def succeed(self, key: K, result: Result, now: float) -> None:
        self._failures.pop(key, None)
        named_again = self._running.pop(key)
        if named_again:
            self._ready[key] = now
        elif isinstance(result, RequeueAfter):
            self._delay(key, now + result.seconds)

    def fail(self, key: K, now: float, *, jitter: float, at_least: float = 0.0) -> float:
        """Returns the seconds until the key runs again."""
        self._failures[key] = self._failures.get(key, 0) + 1
        named_again = self._running.pop(key)
        if named_again:
            self._ready[key] = now
            return 0.0
        delay = compute_backoff(self._failures[key], jitter=jitter, at_least=at_least)
        self._delay(key, now + delay)
        return delay

    def depth(self) -> int:
        return len(self._ready)

    def failing(self) -> int:
        """Keys whose last run failed."""
        return len(self._failures)

    def oldest_seconds(self, now: float) -> float:
        """How long the next key has been ready; 0 when none is."""
        return now - next(iter(self._ready.values())) if self._ready else 0.0

    def _delay(self, key: K, when: float) -> None:
        self._due[key] = when
        self._sequence += 1
        heapq.heappush(self._heap, (when, self._sequence, key))


@dataclass
class QueueObserver(Generic[K]):
    """Hooks for metrics; each is called synchronously and must not raise."""

    on_run: Callable[[str, float], None] = lambda outcome, seconds: None
    """Outcome (``done``, ``requeued`` or ``failed``) and duration of a run."""


class WorkQueue(Generic[K]):
    """N workers over a ``KeyedQueue``."""

    def __init__(
        self,
        process: Callable[[K], Awaitable[Result]],
        *,
        workers: int,
        limit: int,
        observer: QueueObserver[K] | None = None,
        step_limit_seconds: float = STEP_LIMIT_SECONDS,
        jitter: Callable[[], float] = lambda: random.uniform(-1, 1),
    ) -> None:
        self._process = process
        self._count = workers
        self._queue: KeyedQueue[K] = KeyedQueue(limit)
        self._observer = observer or QueueObserver()
        self._step_limit = step_limit_seconds
        self._jitter = jitter
        self._wake = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []
        self._overflowed = False

    def add(self, key: K) -> None:
        """Name a key; never blocks, never raises: a full queue is remembered as a fault."""
        try:
            self._queue.add(key, self._now())
        except QueueFullError as error:
            if not self._overflowed:
                logger.error("The work queue is full: %s", error)
            self._overflowed = True
        self._wake.set()

    def start(self) -> None:
        self._workers = [asyncio.create_task(self._work(), name=f"worker-{n}") for n in range(self._count)]

    async def stop(self) -> None:
        """Cancel what runs and wait for it to end. A cancelled run leaves a state that the next leader completes."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._workers = []

    async def wait_for_fault(self) -> str:
        """Returns, with a sentence, only when a worker died: it never should."""
        done, _ = await asyncio.wait(self._workers, return_when=asyncio.FIRST_COMPLETED)
        return f"worker {next(iter(done)).get_name()} ended"

    @property
    def fault(self) -> str | None:
        """Why this queue can no longer be trusted, or None."""
        if self._overflowed:
            return "the work queue overflowed"
        if any(worker.done() for worker in self._workers):
            return "a worker died"
        return None

    def depth(self) -> int:
        return self._queue.depth()

    def failing(self) -> int:
        return self._queue.failing()

    def oldest_seconds(self) -> float:
        return self._queue.oldest_seconds(self._now())

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def _work(self) -> None:
        while True:
            key = self._queue.pop(self._now())
            if key is None:
                await self._sleep()
            else:
                await self._run(key)

    async def _sleep(self) -> None:
        """Until a key is named or the next delayed one is due."""
        self._wake.clear()
        due = self._queue.next_due()
        try:
            async with asyncio.timeout_at(due):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _run(self, key: K) -> None:
        started = self._now()
        try:
            async with asyncio.timeout(self._step_limit):
                result = await self._process(key)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            at_least = error.after or 0.0 if isinstance(error, RetryLaterError) else 0.0
            delay = self._queue.fail(key, self._now(), jitter=self._jitter(), at_least=at_least)
            outcome = "failed"
            if isinstance(error, RetryLaterError):
                logger.warning("%s: %s; next attempt in %.0f s", key, error, delay)
            else:
                logger.exception("%s: unexpected error; next attempt in %.0f s", key, delay)
        else:
            self._queue.succeed(key, result, self._now())
            outcome = "requeued" if isinstance(result, RequeueAfter) else "done"
        # A delayed or repeated key may be due before what the other, sleeping workers wait for.
        self._wake.set()
        self._observer.on_run(outcome, self._now() - started)
