"""One request to one engine, up to the head of its answer.

A kept connection that the engine closed just when it was used is replaced once: the request did not reach the engine,
so this is no failure of it and no retry. Everything else is told to the fleet, whose breakers decide what to avoid.

Leaving an exchange early closes its connection, which makes vLLM abort the request: whoever opened it must release the
connection in a ``finally``.
"""

from __future__ import annotations

from collections.abc import Sequence

from bidikv_runtime.router.api.splice import Buffer
from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.router.choice.fleet import Fleet
from bidikv_runtime.router.http.http1 import ResponseHead, address_rank
from bidikv_runtime.router.http.pool import UpstreamPool
from bidikv_runtime.router.http.upstream import (
    AnswerTimedOut,
    ConnectFailed,
    ConnectionLost,
    UpstreamConnection,
)
from bidikv_runtime.router.observe.metrics import Leg, RouterMetrics

ENGINE_FAULTS = frozenset({500, 502, 504})
"""Statuses that count against an engine. 503 does not: vLLM sheds load with it."""


class Exchanges:
    """Opens exchanges; shared by all requests."""

    def __init__(self, pool: UpstreamPool, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._pool = pool
        self._fleet = fleet
        self._metrics = metrics

    async def open(
        self,
        leg: Leg,
        endpoint: Endpoint,
        head: bytes,
        pieces: Sequence[Buffer],
        *,
        first_byte_seconds: float,
        idle_seconds: float,
    ) -> tuple[UpstreamConnection, ResponseHead]:
        """Send a request and wait for the head of its answer.

        Args:
            leg: which one it is, for metrics.
            endpoint: the engine.
            head: the whole request head.
            pieces: of the body.
            first_byte_seconds: longest wait for the head.
            idle_seconds: longest silence within the body that follows.

        Raises:
            UpstreamError: no answer.
        """
        if endpoint.rank >= 0:
            head = address_rank(head, endpoint.rank)
        fresh = False
        while True:
            connection: UpstreamConnection | None = None
            began = self._fleet.now()
            try:
                connection = await self._pool.acquire(endpoint, fresh=fresh)
                answer = await connection.send(
                    head, pieces, first_byte_seconds=first_byte_seconds, idle_seconds=idle_seconds
                )
            except ConnectionLost as error:
                if error.stale and not fresh:
                    self._metrics.count_retry(leg, "stale")
                    fresh = True
                    continue
                self._fleet.note_failure(endpoint, "broken")
                raise
            except ConnectFailed:
                self._fleet.note_failure(endpoint, "connect")
                raise
            except AnswerTimedOut:
                self._fleet.note_failure(endpoint, "timeout")
                raise
            except BaseException:
                if connection is not None:
                    connection.abort()
                raise
            if answer.status in ENGINE_FAULTS:
                self._fleet.note_failure(endpoint, "status")
            else:
                self._fleet.note_success(endpoint, began)
            return connection, answer
