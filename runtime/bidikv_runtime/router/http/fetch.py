"""Ask an engine something small: a health probe, a report, its models.

It goes through the pool of the data path: a kept connection makes the question cheap, and whoever asks learns of the
same connections that requests use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from bidikv_runtime.router.http.pool import UpstreamPool
from bidikv_runtime.router.http.upstream import AnswerTimedOut, ConnectionLost, Origin, UpstreamError


@dataclass(frozen=True, slots=True)
class Socket:
    """An :class:`~.upstream.Origin` that is not an engine's API port."""

    host: str
    port: int

    @property
    def address(self) -> str:
        """``host:port``, IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole small answer."""

    status: int
    fields: dict[bytes, bytes]
    """Header fields by name in lower case."""
    body: bytes


async def fetch(
    pool: UpstreamPool,
    origin: Origin,
    target: str,
    *,
    seconds: float,
    limit: int,
    headers: Sequence[tuple[str, str]] = (),
) -> Answer:
    """``GET target`` from ``origin``.

    Args:
        pool: whose connections to use.
        origin: an ``Endpoint``, or a :class:`Socket` for another port.
        target: path and query.
        seconds: for all of it, connecting included.
        limit: largest body, in bytes.
        headers: besides Host.

    Raises:
        UpstreamError: no whole answer in time, or one larger than ``limit``.
    """
    host = origin.address.partition("#")[0]
    lines = [f"GET {target} HTTP/1.1", f"host: {host}", *(f"{name}: {value}" for name, value in headers)]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    try:
        async with asyncio.timeout(seconds):
            try:
                return await _ask(pool, origin, head, seconds, limit, fresh=False)
            except ConnectionLost as error:
                if not error.stale:
                    raise
                return await _ask(pool, origin, head, seconds, limit, fresh=True)
    except TimeoutError as error:
        raise AnswerTimedOut(f"no whole answer to GET {target} within {seconds:g} s") from error


async def _ask(pool: UpstreamPool, origin: Origin, head: bytes, seconds: float, limit: int, *, fresh: bool) -> Answer:
    connection = await pool.acquire(origin, fresh=fresh)
    body = bytearray()

    def keep(data: bytes) -> None:
        if len(body) <= limit:
            body.extend(data)
            if len(body) > limit:
                connection.abort()

    try:
        answer = await connection.send(head, (), first_byte_seconds=seconds, idle_seconds=seconds)
        await connection.relay(keep, decoded=True)
    except UpstreamError as error:
        if len(body) > limit:
            raise UpstreamError(f"the answer is larger than {limit} bytes") from error
        raise
    finally:
        connection.release()
    if len(body) > limit:
        raise UpstreamError(f"the answer is larger than {limit} bytes")
    return Answer(answer.status, answer.fields, bytes(body))
