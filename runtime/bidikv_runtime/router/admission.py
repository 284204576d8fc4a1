"""Lets turns wait, fairly and within bounds, until prefill can take them.

Why: prompts that queue inside the engines cannot be reordered, moved to an engine that joins, or dropped when their
client leaves early. So at most ``max_prefills_per_engine`` prefill legs per ready engine are under way, and what comes
on top waits here.

- Tenants take turns, each served in the order of arrival: one tenant's burst delays its own turns, not those of others.
- The queue is bounded. When it is full, the newest turn of the tenant that waits with most of them makes room for one
  that waits with less; else the new one is refused (429).
- Nobody waits longer than ``queue_seconds`` (503). A client that leaves gives up its place at once.

Invariant: nobody waits while a slot is free, so that :meth:`Admission.try_enter` is a comparison and no turn needs a
timer or a future of its own unless it waits. A tenant is what the caller says it is: without authentication in front of
the router, one client can pose as many.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from bidikv_runtime.router.api.errors import ApiError
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.router.observe.metrics import QueueRefusal

_RATE_WINDOW: Final = 64
"""How many of the latest completions tell how fast the queue moves."""

Waiters = dict["asyncio.Future[None]", None]
"""In order of arrival; a dictionary, since a client that leaves may stand anywhere."""


class Admission:
    """Slots of the prefill engines, and the queue for them."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, limits: Limits, on_refusal: Callable[[QueueRefusal], None]
    ) -> None:
        self._loop = loop
        self._limits = limits
        self._on_refusal = on_refusal
        self._per_engine: float = limits.max_prefills_per_engine or math.inf
        self._capacity = self._per_engine
        self._waiting: OrderedDict[bytes, Waiters] = OrderedDict()
        """Tenant -> its waiting turns; whoever is first is served next."""
        self._finished_at: deque[float] = deque(maxlen=_RATE_WINDOW + 1)
        """When the queue formed, then when slots came back; the latest ones."""
        self.active = 0
        """Turns that hold a slot."""
        self.queued = 0

    def resize(self, engines: int) -> None:
        """Follow the number of ready prefill engines.

        Without any, one engine's slots remain: whoever enters is told at once that there is none.
        """
        self._capacity = max(1, engines) * self._per_engine
        while self.active < self._capacity and self._admit_next():
            self.active += 1

    def try_enter(self) -> bool:
        """Take a slot if one is free. Whoever entered must :meth:`leave`."""
        if self.active < self._capacity:
            self.active += 1
            return True
        return False

    async def wait(self, tenant: bytes) -> None:
        """Wait for a slot after :meth:`try_enter` failed; then :meth:`leave` is due as well.

        Args:
            tenant: whose turn it is; any name.

        Raises:
            ApiError: 429, the queue is full; 503, the wait took too long. No slot is held.
        """
        self._make_room(tenant)
        waiter: asyncio.Future[None] = self._loop.create_future()
        if not self.queued:
            self._finished_at.clear()
            self._finished_at.append(self._loop.time())
        self._waiting.setdefault(tenant, {})[waiter] = None
        self.queued += 1
        timer = self._loop.call_later(self._limits.queue_seconds, self._expire, tenant, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.leave()  # the slot came just when the client left
            else:
                self._forget(tenant, waiter)
            raise
        finally:
            timer.cancel()

    def leave(self) -> None:
        """Give the slot back, to whoever is next."""
        if self.queued:
            self._finished_at.append(self._loop.time())
            if self.active <= self._capacity and self._admit_next():
                return
        self.active -= 1

    def estimate_wait(self) -> int:
        """Seconds after which a place in the queue may be free: its length over the recent rate of completion."""
        finished = self._finished_at
        if not finished:
            return 1
        estimate = self.queued * (self._loop.time() - finished[0]) / max(1, len(finished) - 1)
        return max(1, math.ceil(min(estimate, self._limits.queue_seconds)))

    def _admit_next(self) -> bool:
        """Let the first turn of the tenant that is next have a slot; false when nobody waits."""
        while self._waiting:
            tenant, waiters = self._waiting.popitem(last=False)
            waiter = next(iter(waiters))
            del waiters[waiter]
            if waiters:
                self._waiting[tenant] = waiters  # last again
            self.queued -= 1
            if not waiter.done():  # else its client left in this very turn of the loop
                waiter.set_result(None)
                return True
        return False

    def _make_room(self, tenant: bytes) -> None:
        if self.queued < self._limits.max_queued:
            return
        refusal = ApiError(
            429, "Too many requests wait for prefill engines; retry later.", retry_after=self.estimate_wait()
        )
        most = max(self._waiting, key=lambda name: len(self._waiting[name]), default=tenant)
        if most == tenant or len(self._waiting[most]) <= len(self._waiting.get(tenant, ())) + 1:
            self._on_refusal("full")
            raise refusal
        waiter = next(reversed(self._waiting[most]))
        self._forget(most, waiter)
        if not waiter.done():
            self._on_refusal("full")
            waiter.set_exception(refusal)

    def _expire(self, tenant: bytes, waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            self._forget(tenant, waiter)
            self._on_refusal("timeout")
            waiter.set_exception(
                ApiError(
                    503,
                    f"No prefill engine became free within {self._limits.queue_seconds:g} s; retry later.",
                    retry_after=self.estimate_wait(),
                )
            )

    def _forget(self, tenant: bytes, waiter: asyncio.Future[None]) -> None:
        waiters = self._waiting.get(tenant)
        if waiters is not None and waiter in waiters:
            del waiters[waiter]
            self.queued -= 1
            if not waiters:
                del self._waiting[tenant]
