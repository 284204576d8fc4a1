"""Start-up and shutdown: settings, discovery, lease, then kopf and the workers; ``python -m bidikv_operator``.

Exit codes: 0 after SIGTERM or SIGINT; 1 when the lease is lost, a part died, or start-up is impossible (the message
says what to do). The kubelet restarts the process: starting afresh is the one recovery from everything.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import sys
import time
from collections.abc import Iterable
from typing import Any, cast

import kopf
import uvloop
from kubernetes.aio.config import ConfigException

from bidikv_operator import names
from bidikv_operator.cache import Key, ObjectCache
from bidikv_operator.engines.facts import FactStore
from bidikv_operator.engines.poll import EnginePoller
from bidikv_operator.health import HealthServer, Pulse
from bidikv_operator.kinds import INFERENCE, LEASE, OPTIONAL_KINDS, WATCHED_KINDS, Kind
from bidikv_operator.kube import ApiError, ForbiddenError, Kube, TransientError, connect
from bidikv_operator.lease import Lease, LeaseTerms
from bidikv_operator.metrics import Metrics
from bidikv_operator.reconcile import Reconciler
from bidikv_operator.resync import resync
from bidikv_operator.settings import Settings, SettingsError, read_settings
from bidikv_operator.token_store import TokenStore
from bidikv_operator.watch import Forgetful, WatchAges, build_registry, build_settings
from bidikv_operator.workqueue import QueueObserver, WorkQueue
from bidikv_runtime.collector import spare_collector

logger = logging.getLogger("bidikv_operator")

DISCOVERY_LIMIT_SECONDS = 60.0
STOP_LIMIT_SECONDS = 15.0
WATCH_LIMIT_SECONDS = 300.0
"""From the start of kopf until every watch is open; a large first list takes a while."""
RESYNC_JITTER = 0.2
RESYNC_RETRY_SECONDS = 5.0


class StartError(Exception):
    """The operator cannot start; the message says what to do."""


class WorkerDiedError(Exception):
    """A worker of the queue ended, which none ever should."""


class Operator:
    """The parts of one process and their life."""

    def __init__(self, settings: Settings, kube: Kube) -> None:
        self._settings = settings
        self._kube = kube
        self._stop = asyncio.Event()
        self._metrics = Metrics()
        self._cache = ObjectCache()
        self._ages = WatchAges()
        self._lease = Lease(
            kube,
            LeaseTerms(
                namespace=settings.lease_namespace,
                name=settings.lease_name,
                identity=settings.identity,
                lease_seconds=settings.lease_seconds,
                renew_deadline_seconds=settings.renew_deadline_seconds,
                retry_seconds=settings.retry_seconds,
            ),
            clock=time.monotonic,
        )
        kube.may_write = self._lease.is_held
        kube.on_write = self._metrics.record_write
        self._tokens = TokenStore(kube, propagation_seconds=settings.token_propagation_seconds)
        self._engines = FactStore()
        self._reconciler = Reconciler(
            kube=kube,
            cache=self._cache,
            tokens=self._tokens,
            engines=self._engines,
            runtime_image=settings.runtime_image,
            operator_namespace=settings.operator_namespace,
            identity=settings.identity,
        )
        self._queue: WorkQueue[Key] = WorkQueue(
            self._reconciler.reconcile,
            workers=settings.workers,
            limit=settings.queue_limit,
            observer=QueueObserver(on_run=self._metrics.record_run),
        )
        self._poller = EnginePoller(
            self._engines,
            self._cache,
            self._queue.add,
            self._tokens.token,
            period_seconds=settings.poll_seconds,
            on_refused=self._note_refusal,
            on_poll=self._metrics.record_poll,
        )
        self._optional: frozenset[Kind] = frozenset()
        self._discovered = asyncio.Event()
        """Set when ``_optional`` says which optional kinds are watched."""
        self._forbidden: set[Kind] = set()
        """Optional kinds about whose missing rights the log has told."""
        self._watch_fault: str | None = None
        self._health = HealthServer(self._read_pulse, self._refresh_metrics, self._metrics)

    async def run(self) -> int:
        """Returns the exit code."""
        self._handle_signals()
        port = await self._health.start(self._settings.http_host, self._settings.http_port)
        logger.info("Serving /healthz, /readyz and /metrics on port %d", port)
        try:
            if await self._stopped_before(self._check_discovery()):
                return 0
            if await self._stopped_before(self._check_rights()):
                return 0
            if await self._stopped_before(self._lease.acquire()):
                return 0
            return await self._lead()
        finally:
            await self._health.stop()

    async def _lead(self) -> int:
        """Act as the leader until told to stop or until something essential ends."""
        lease = asyncio.create_task(self._lease.hold(), name="lease")
        work = asyncio.create_task(self._work(), name="work")
        poll = asyncio.create_task(self._poller.run(), name="poll")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        kopf_stop = asyncio.Event()
        kopf_ended = asyncio.create_task(self._watch(kopf_stop), name="kopf")
        try:
            await asyncio.wait({lease, work, poll, stop, kopf_ended}, return_when=asyncio.FIRST_COMPLETED)
            is_clean = stop.done() and not lease.done()
            if not is_clean:
                logger.error("Stopping: %s", self._watch_fault or _explain({lease, work, poll, kopf_ended}))
            work.cancel()
            poll.cancel()
            await asyncio.wait({work, poll})
            # First the writers, then the watches, then the lease: the next leader must find nobody writing.
            await self._queue.stop()
            kopf_stop.set()
            await asyncio.wait({kopf_ended}, timeout=STOP_LIMIT_SECONDS)
            lease.cancel()  # a renewal in between would take the released lease again
            await asyncio.wait({lease})
            await self._lease.release()
            return 0 if is_clean else 1
        finally:
            for task in (lease, work, poll, stop, kopf_ended):
                task.cancel()
            await asyncio.gather(lease, work, poll, stop, kopf_ended, return_exceptions=True)

    async def _work(self) -> None:
        """Complete the cache, reconcile, and resync now and then. Never returns.

        Raises:
            StartError: the watches could not be opened.
            WorkerDiedError: a worker of the queue ended.
        """
        try:
            async with asyncio.timeout(WATCH_LIMIT_SECONDS):
                await self._discovered.wait()
                await self._ages.wait_for(len(self._kinds()) * max(1, len(self._settings.namespaces)))
        except TimeoutError:
            raise StartError("not all watches could be opened; check the operator's rights") from None
        await self._resync()
        self._queue.start()
        while True:
            pause = self._settings.resync_seconds * random.uniform(1 - RESYNC_JITTER, 1 + RESYNC_JITTER)
            fault = asyncio.create_task(self._queue.wait_for_fault())
            await asyncio.wait({fault}, timeout=pause)
            if fault.done():
                raise WorkerDiedError(fault.result())
            fault.cancel()
            await self._compare_kinds()
            found = await self._resync()
            self._metrics.corrections.inc(found)
            if found:
                logger.warning("%d objects differed from what the watches had told", found)

    async def _resync(self) -> int:
        """Correct the cache and name every resource. Returns how many objects differed."""
        while True:
            try:
                corrections = await resync(self._kube, self._cache, self._settings.namespaces, self._kinds())
                break
            except ApiError as error:
                logger.warning("The cache could not be compared with the API server: %s", error)
                await self._compare_kinds()
                await asyncio.sleep(RESYNC_RETRY_SECONDS)
        self._tokens.expire()
        for key in {*corrections.keys, *self._cache.keys()}:
            self._queue.add(key)
        return corrections.count

    async def _watch(self, stop: asyncio.Event) -> None:
        """Run kopf. Returns when ``stop`` is set, raises or returns when a watch failed for good."""
        # Again: the wait for the lease may have been long, and kopf would wait for ever for a kind that has gone.
        await self._check_discovery()
        self._optional = await self._find_optional_kinds()
        self._reconciler.missing_kinds = frozenset(OPTIONAL_KINDS) - self._optional
        self._discovered.set()
        existing = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=build_registry(self._cache, self._queue.add, self._ages, self._kinds()),
            settings=build_settings(self._kinds()),
            memories=Forgetful(),
            # Unless it is told, kopf asks for the user's name, which an arbitrary uid in a container has not.
            identity=cast(Any, self._settings.identity),
            standalone=True,
            clusterwide=not self._settings.namespaces,
            namespaces=self._settings.namespaces,
            stop_flag=stop,
        )
        for task in tasks:
            task.add_done_callback(self._note_watch_fault)
        self._handle_signals()  # kopf has just taken the signals for itself
        await kopf.run_tasks(tasks, ignored=existing)

    def _note_refusal(self, key: Key) -> None:
        """An engine does not accept the peers' token that this process knows."""
        if self._tokens.refuse(key):
            self._queue.add(key)

    def _note_watch_fault(self, task: asyncio.Task[Any]) -> None:
        """kopf ends seconds after a watch failed, and before that it cancels the workers: they would be blamed."""
        if self._watch_fault is None and not task.cancelled() and task.exception() is not None:
            self._watch_fault = f"a watch failed: {task.exception()}"

    async def _check_discovery(self) -> None:
        """kopf silently ignores kinds that are not served at its start, so look before.

        Raises:
            StartError: a kind is not served, or the API server does not answer.
        """
        deadline = time.monotonic() + DISCOVERY_LIMIT_SECONDS
        while True:
            try:
                missing = [kind for kind in (*WATCHED_KINDS, LEASE) if not await self._kube.discover(kind)]
                break
            except TransientError as error:
                if time.monotonic() > deadline:
                    raise StartError(f"the API server does not answer: {error}") from error
                await asyncio.sleep(1)
            except ApiError as error:
                raise StartError(f"the API server refuses discovery: {error}") from error
        if INFERENCE in missing:
            raise StartError(
                f"the API server does not serve {names.CRD_NAME} {names.VERSION}; install the CRD (kubectl apply "
                "--server-side -f crds/, or the chart with crds.enabled=true)"
            )
        if missing:
            listed = ", ".join(f"{kind.plural} {kind.api_version}" for kind in missing)
            raise StartError(f"the API server does not serve {listed}; use a newer Kubernetes")

    def _kinds(self) -> tuple[Kind, ...]:
        """What is watched: the optional kinds as far as they are there."""
        return (*WATCHED_KINDS, *(kind for kind in OPTIONAL_KINDS if kind in self._optional))

    async def _find_optional_kinds(self) -> frozenset[Kind]:
        """The optional kinds that the API server serves and lets this operator list.

        Raises:
            StartError: the API server does not answer.
        """
        found = set()
        try:
            for kind in OPTIONAL_KINDS:
                if await self._kube.discover(kind) and await self._may_list(kind):
                    found.add(kind)
        except ApiError as error:
            raise StartError(f"the API server does not answer: {error}") from error
        return frozenset(found)

    async def _may_list(self, kind: Kind) -> bool:
        try:
            for namespace in self._settings.namespaces or (None,):
                await self._kube.try_list(kind, namespace)
        except ForbiddenError as error:
            if kind not in self._forbidden:
                logger.warning("%s is left alone as if it were not served: %s", kind.kind, error)
            self._forbidden.add(kind)
            return False
        return True

    async def _compare_kinds(self) -> None:
        """Stop, cleanly, when an optional kind came or went: the next start watches what is there.

        kopf takes no further kind while it runs, and one that has gone fails every comparison of the cache.
        """
        try:
            found = await self._find_optional_kinds()
        except StartError as error:
            logger.warning("Optional kinds could not be looked for: %s", error)
            return
        for kind in sorted(found ^ self._optional, key=lambda kind: kind.kind):
            logger.info("%s is %s; stopping, to start anew", kind.kind, "served now" if kind in found else "gone")
            self._stop.set()

    async def _check_rights(self) -> None:
        """kopf would end with a traceback where one sentence does.

        Raises:
            StartError: a kind may not be listed.
        """
        try:
            for namespace in self._settings.namespaces or (None,):
                for kind in WATCHED_KINDS:
                    await self._kube.try_list(kind, namespace)
        except ForbiddenError as error:
            raise StartError(f"{error}; grant get, list and watch on every kind that the chart's roles name") from error
        except ApiError as error:
            raise StartError(f"the API server does not answer: {error}") from error

    async def _stopped_before(self, step: object) -> bool:
        """Run a step of the start-up; True if a signal came first."""
        task = asyncio.ensure_future(step)  # type: ignore[call-overload]
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return False
            return True
        finally:
            for pending in (task, stop):
                pending.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)

    def _read_pulse(self) -> Pulse:
        return Pulse(
            is_leader=self._lease.is_held(),
            queue_fault=self._queue.fault,
            oldest_key_seconds=self._queue.oldest_seconds(),
            watch_age_seconds=self._ages.oldest_seconds(),
            lease_idle_seconds=self._lease.idle_seconds(),
            is_stopping=self._stop.is_set(),
        )

    def _refresh_metrics(self) -> None:
        metrics = self._metrics
        metrics.queue_depth.set(self._queue.depth())
        metrics.queue_failing.set(self._queue.failing())
        metrics.queue_oldest_seconds.set(self._queue.oldest_seconds())
        metrics.is_leader.set(self._lease.is_held())
        metrics.watch_age_seconds.set(self._ages.oldest_seconds())
        counts = {"True": 0, "False": 0, "Unknown": 0}
        for resource in self._cache.resources():
            conditions = (resource.get("status") or {}).get("conditions") or []
            ready = next((c["status"] for c in conditions if c["type"] == names.READY), "Unknown")
            counts[ready] += 1
        for status, count in counts.items():
            metrics.resources.labels(status).set(count)


def _explain(tasks: Iterable[asyncio.Task[object]]) -> str:
    """Which essential task ended, and how."""
    for task in tasks:
        if not task.done():
            continue
        if task.cancelled():
            return f"{task.get_name()} was cancelled"
        error = task.exception()
        return f"{task.get_name()} failed: {error!r}" if error else f"{task.get_name()} ended ({task.result()})"
    return "nothing ended"


async def run(settings: Settings) -> int:
    kube = await connect(write_timeout_seconds=settings.write_timeout_seconds, identity=settings.identity)
    try:
        return await Operator(settings, kube).run()
    finally:
        await kube.close()


def main() -> int:
    """Entry point of ``bidikv-operator``."""
    try:
        settings = read_settings()
        logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        if settings.log_level != "DEBUG":
            logging.getLogger("kopf").setLevel(logging.WARNING)  # it reports every event that it passed on
        spare_collector()  # a tenth of the CPU less while 1,000 resources are brought up, 3 MB more at rest
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run(settings))
    except (SettingsError, StartError, ConfigException, OSError) as error:
        print(f"bidikv-operator: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
