"""Asks every engine for its report, about four times a minute, and names the resources of which something changed.

Only the leader asks. The work is spread evenly over each round and bounded: so many engines at a time, so many bytes
and seconds each, and a round takes somewhat longer when there are many engines. An engine that cannot be
asked is no event: its last report stays, with its age.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from typing import Final

import aiohttp
import msgspec

from bidikv_operator.cache import Key, ObjectCache
from bidikv_operator.engines.facts import FactStore
from bidikv_operator.engines.reach import STALE_SECONDS
from bidikv_operator.engines.targets import Target
from bidikv_operator.state import Fault
from bidikv_runtime.contract import REPORT_PATH, EngineReport

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS: Final = 2.0
AT_ONCE: Final = 32
"""Engines asked at the same time. If none answered, 1,000 engines would take a minute."""
RATE: Final = 100.0
"""Engines a second, unless a round would take longer than ``LONGEST_ROUND_SECONDS``."""
LONGEST_ROUND_SECONDS: Final = STALE_SECONDS / 3
TICK_SECONDS: Final = 0.25
"""Between two batches of a round: a wake-up for each resource would cost more than the questions."""
JITTER: Final = 0.1
MAXIMUM_BYTES: Final = 64 * 1024
"""Of a report without sessions: 128 addresses of peers take 3 kB."""
SUPPORTED_VERSION: Final = 1
_REPORT: Final = msgspec.json.Decoder(EngineReport)

TokenSource = Callable[[Key], str | None]
"""The token that a resource's engines accept; None when there is none."""


class EnginePoller:
    def __init__(
        self,
        store: FactStore,
        cache: ObjectCache,
        enqueue: Callable[[Key], None],
        token: TokenSource,
        *,
        period_seconds: float,
        on_refused: Callable[[Key], None] = lambda key: None,
        on_poll: Callable[[str], None] = lambda result: None,
    ) -> None:
        """
        Args:
            store: takes the answers.
            cache: knows pods and resources.
            enqueue: is told which resources to reconcile.
            token: what a resource's engines accept.
            period_seconds: of one round.
            on_refused: is told of resources one of whose engines does not accept the token.
            on_poll: is told how each question ended: ``answered``, or the fault.
        """
        self._store, self._cache, self._enqueue, self._token = store, cache, enqueue, token
        self._period, self._on_refused, self._on_poll = period_seconds, on_refused, on_poll
        self._places = asyncio.Semaphore(AT_ONCE)
        self._asking: set[Key] = set()

    async def run(self) -> None:
        """Ask until cancelled."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        connector = aiohttp.TCPConnector(limit=AT_ONCE, force_close=True)  # engines close after each answer
        session = aiohttp.ClientSession(
            timeout=timeout, connector=connector, trust_env=False, cookie_jar=aiohttp.DummyCookieJar()
        )
        async with session, asyncio.TaskGroup() as tasks:
            while True:
                keys = self._store.keys()
                seconds = self._period * random.uniform(1 - JITTER, 1 + JITTER)
                seconds = max(seconds, min(self._store.count() / RATE, LONGEST_ROUND_SECONDS))
                size = max(1, math.ceil(len(keys) * TICK_SECONDS / seconds))
                batches = [keys[start : start + size] for start in range(0, len(keys), size)] or [()]
                for batch in batches:
                    for key in batch:
                        if key not in self._asking:  # else its engines have been slow to answer since the last round
                            self._asking.add(key)
                            tasks.create_task(self._ask_all(session, key))
                    await asyncio.sleep(seconds / len(batches))

    async def _ask_all(self, session: aiohttp.ClientSession, key: Key) -> None:
        """Ask all engines of a resource, then judge it."""
        try:
            pods = self._cache.pods(key)
            if targets := self._store.targets(key, pods):
                token = self._token(key)
                await asyncio.gather(*(self._ask(session, key, target, token) for target in targets))
            resource = self._cache.resource(key)
            if resource is not None and self._store.judge(key, pods, resource.get("status") or {}):
                self._enqueue(key)
        except Exception:
            # A fault of ours over one resource's engines must not end the asking of all others.
            logger.exception("%s: its engines cannot be asked", key)
        finally:
            self._asking.discard(key)

    async def _ask(self, session: aiohttp.ClientSession, key: Key, target: Target, token: str | None) -> None:
        async with self._places:
            answer = await fetch_report(session, target, token)
        self._on_poll("answered" if isinstance(answer, EngineReport) else answer)
        if answer == "refused":
            self._on_refused(key)
        self._store.take(key, target, answer)


async def fetch_report(session: aiohttp.ClientSession, target: Target, token: str | None) -> EngineReport | Fault:
    """One engine's report without its sessions, or why there is none."""
    url = f"http://{target.report_address}{REPORT_PATH}?sessions=0"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with session.get(url, headers=headers, allow_redirects=False) as response:
            if response.status in (401, 403):
                return "refused"
            if response.status != 200:
                return "malformed" if response.status == 404 else "silent"
            body = await response.content.read(MAXIMUM_BYTES + 1)
            while len(body) <= MAXIMUM_BYTES and (more := await response.content.read(MAXIMUM_BYTES + 1 - len(body))):
                body += more
    except (TimeoutError, aiohttp.ClientError, OSError):
        return "silent"
    try:
        report = _REPORT.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return "malformed"
    return report if report.version == SUPPORTED_VERSION else "malformed"
