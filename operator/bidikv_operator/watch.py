"""kopf as the watch engine, and nothing more: every decorator of the operator is in this file.

Handlers file the object in the cache and name its owner's key; they never do work, as kopf logs and drops what they
raise. There are no index handlers: ``cache.py`` says why. Nothing is reconciled before all watches are open and the
cache has been compared with the API server (``resync.py``), so the first reconcile sees everything. An event that only
repeats the answer to a write of ours names nothing: each new resource would be reconciled twice.

Why nothing is ever written by kopf: only change handlers, timers and daemons make it store annotations or finalizers,
and there are none. No peering (the Lease elects), no scanning of namespaces or CRDs (``__main__`` checks discovery),
no posting of logs as Events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
import kopf
from kopf._core.reactor.inventory import ResourceMemories, ResourceMemory  # spawn_tasks takes it; exported nowhere

from bidikv_operator import names
from bidikv_operator.cache import Key, ObjectCache
from bidikv_operator.kinds import INFERENCE, WATCHED_KINDS, Kind

SERVER_TIMEOUT_SECONDS: Final = 300
"""The API server ends a watch after so long, and kopf opens it again: a sign of life per watch."""
PAGE_SIZE: Final = 50
"""Objects per page of a first list. All kinds are listed at once: with 200 the peak was 30 MB above what stays."""
IDLE_SECONDS: Final = 0.05
"""kopf keeps a task per object, and the object with it, for so long after its last event: at start, of all at once. Not
0: its loop would then spin without ever taking an event."""


class WatchAges:
    """When each watch was last opened, as kopf's HTTP session tells."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._opened: dict[str, float] = {}
        self._changed = asyncio.Event()

    def record(self, path: str) -> None:
        self._opened[path] = self._clock()
        self._changed.set()

    async def wait_for(self, count: int) -> None:
        """Until so many different watches have been opened: each was listed before."""
        while len(self._opened) < count:
            self._changed.clear()
            await self._changed.wait()

    def oldest_seconds(self) -> float:
        """Age of the watch that was opened longest ago; 0 before any was."""
        return self._clock() - min(self._opened.values()) if self._opened else 0.0

    def build_trace(self) -> aiohttp.TraceConfig:
        trace = aiohttp.TraceConfig()

        async def record(
            session: aiohttp.ClientSession, context: SimpleNamespace, params: aiohttp.TraceRequestEndParams
        ) -> None:
            if params.response.status == 200 and params.url.query.get("watch") == "true":
                self.record(params.url.path)

        trace.on_request_end.append(record)
        return trace


def build_registry(
    cache: ObjectCache, enqueue: Callable[[Key], None], ages: WatchAges, kinds: Iterable[Kind] = WATCHED_KINDS
) -> kopf.OperatorRegistry:
    """A registry of its own: kopf's default one is global and would leak between tests."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**kwargs: Any) -> kopf.AiohttpSession:
        found = kopf.login_via_client(**kwargs)
        if not isinstance(found, kopf.ConnectionInfo):
            raise kopf.LoginError("no credentials: run in a cluster or set KUBECONFIG")
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=found.as_ssl_context() or True),
            headers={**found.as_http_headers(), "User-Agent": f"{names.FIELD_MANAGER}-watch"},
            trace_configs=[ages.build_trace()],
        )
        return kopf.AiohttpSession(server=found.server, aiohttp_session=session)

    for kind in kinds:
        _register(registry, kind, cache, enqueue)
    return registry


def _register(registry: kopf.OperatorRegistry, kind: Kind, cache: ObjectCache, enqueue: Callable[[Key], None]) -> None:
    group, version, plural = kind.group, kind.version, kind.plural

    @kopf.on.event(group=group, version=version, plural=plural, id=f"event-{plural}", registry=registry)
    async def event(event: Mapping[str, Any], **_: Any) -> None:
        obj = event["object"]
        if event["type"] == "DELETED":
            key = cache.drop(kind, obj)
        else:
            is_echo = cache.knows(kind, obj) and is_dealt_with(kind, obj)
            key = None if is_echo else cache.put(kind, obj)
        if key is not None:
            enqueue(key)


def is_dealt_with(kind: Kind, obj: Mapping[str, Any]) -> bool:
    """Whether an object that is known from a write's answer can hold no wish of somebody else.

    The answer to an apply of a child was looked at as a whole. That to a write of the status may hold a spec which was
    changed in between: then its generation is not the one that the status speaks of.
    """
    return kind != INFERENCE or (obj.get("status") or {}).get("observedGeneration") == obj["metadata"]["generation"]


class Forgetful(ResourceMemories):
    """Keeps kopf from remembering 900 bytes of every object, for the handlers with a state that we do not have."""

    async def recall(self, raw_body: Any, **options: Any) -> ResourceMemory:
        return await super().recall(raw_body, **{**options, "ephemeral": True})


class _NoDiffs(kopf.DiffBaseStorage):
    """Keeps kopf from copying each object twice, for the differences that change handlers would want."""

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        return {}

    def fetch(self, *, body: Any) -> None:
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        return None


def build_settings(kinds: Iterable[Kind] = WATCHED_KINDS) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.posting.loggers = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.queueing.idle_timeout = IDLE_SECONDS
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.watching.chunk_size = PAGE_SIZE
    settings.watching.server_timeout = SERVER_TIMEOUT_SECONDS
    settings.process.ultimate_exiting_timeout = 20
    for kind in kinds:
        if kind != INFERENCE:
            # The server sends only what carries our label; a cluster's other pods never reach this process.
            settings.watching.label_selectors[kopf_selector(kind)] = names.LABEL_OWNER
    return settings


def kopf_selector(kind: Kind) -> tuple[str, str, str]:
    """How kopf's settings name a kind."""
    return (kind.group, kind.version, kind.plural)
