"""Connections to engines: one exchange at a time each, kept for reuse.

Invariants:

- Closing the connection is how a leg is cancelled: vLLM aborts a request whose client disconnected. An exchange that is
  left early therefore never returns its connection to the pool.
- Idle connections are closed before the engine closes them (uvicorn: after 5 s). If it was faster anyhow, the request
  did not reach it: it is sent again once, on a fresh connection.
- Body bytes are handed on as received, chunk framing included; the parser only finds the end. Only clients that speak
  HTTP/1.0 get decoded bodies.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import httptools

from bidikv_runtime.router.api.splice import Buffer
from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.router.http.deadlines import Deadlines
from bidikv_runtime.router.http.http1 import HEAD_END, Headers, ResponseHead
from bidikv_runtime.router.http.sockets import watch_peer
from bidikv_runtime.router.limits import Limits

_BACKLOG_BYTES: Final = 256 * 1024
"""Body bytes held while nobody takes them, before reading pauses."""


class UpstreamError(Exception):
    """The engine did not give a whole answer; the text is a clause without a final stop."""


class ConnectFailed(UpstreamError):
    """No connection: the request was not sent."""


class ConnectionLost(UpstreamError):
    """The connection broke before the answer was complete, or the answer was not HTTP/1.1."""

    def __init__(self, message: str, *, stale: bool = False) -> None:
        super().__init__(message)
        self.stale = stale
        """A reused connection that was closed before any byte of the answer: worth one more try."""


class AnswerTimedOut(UpstreamError):
    """Nothing moved for too long: the engine was silent, or its client did not read."""


class _ResponseParser:
    """Reads one response: its head, and where a chunked body ends."""

    def __init__(self) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)  # dropped as in http1.RequestParser
        self._reason = b""
        self._headers: Headers = []
        self._in_body = False
        self._keep_alive = False
        self.in_chunk = False
        self.complete = False
        self.followed = False

    def parse_head(self, data: bytes) -> ResponseHead:
        """Parse a complete head; raises httptools' errors and ValueError."""
        self._parser.feed_data(data)
        self._in_body = True
        lengths = [value for name, value in self._headers if name.lower() == b"content-length"]
        codings = [value.lower() for name, value in self._headers if name.lower() == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            raise ValueError("unknown transfer coding")
        status = self._parser.get_status_code()
        if not codings:
            self._parser = None
        return ResponseHead(
            status=status,
            reason=self._reason,
            headers=self._headers,
            length=int(lengths[0]) if lengths else None,
            chunked=bool(codings),
            keep_alive=self._keep_alive,
        )

    def feed(self, data: bytes) -> None:
        """Follow a chunked body; raises httptools' errors."""
        self._parser.feed_data(data)
        if self.complete:
            self._parser = None

    # --- callbacks of httptools ---

    def on_message_begin(self) -> None:
        self.followed = self.complete

    def on_status(self, reason: bytes) -> None:
        if not self._in_body:
            self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if not self._in_body:  # asked here: llhttp forgets it when a message is complete
            self._keep_alive = self._parser.should_keep_alive()

    def on_chunk_header(self) -> None:
        self.in_chunk = True

    def on_chunk_complete(self) -> None:
        self.in_chunk = False

    def on_message_complete(self) -> None:
        self.complete = True


class _DecodingParser(_ResponseParser):
    """Also collects the decoded bytes of a chunked body."""

    def __init__(self) -> None:
        super().__init__()
        self.decoded: list[bytes] = []

    def on_body(self, data: bytes) -> None:
        self.decoded.append(data)


class UpstreamConnection(asyncio.Protocol):
    """A connection to one engine and the exchange that runs on it."""

    def __init__(self, pool: UpstreamPool, endpoint: Endpoint) -> None:
        # For the connection's life.
        self._pool = pool
        self.endpoint = endpoint
        self._loop = pool.loop
        self._transport: asyncio.Transport | None = None
        self.deadline = math.inf
        self.idle = False
        self.lost = False
        self._exchanges = 0
        # For one exchange.
        self._head_waiter: asyncio.Future[ResponseHead] | None = None
        self._done: asyncio.Future[None] | None = None
        self._received = bytearray()
        self._head: ResponseHead | None = None
        self._parser: _ResponseParser | None = None
        self._decode = False
        self._left: int | None = None
        self._idle_seconds = math.inf
        self._sink: Callable[[bytes], None] | None = None
        self._backlog: list[bytes] = []
        self._backlog_bytes = 0
        self._paused_by_client = False
        self._boundary = True

    # --- the exchange ---

    async def send(
        self,
        head: bytes,
        pieces: Sequence[Buffer],
        *,
        first_byte_seconds: float,
        idle_seconds: float,
        decode: bool,
    ) -> ResponseHead:
        """Send a request and wait for the head of the answer.

        Raises:
            ConnectionLost: see there.
            AnswerTimedOut: no head within ``first_byte_seconds``.
        """
        assert self._transport is not None
        reused = self._exchanges > 0
        if self.lost or self._transport.is_closing():
            raise ConnectionLost("the engine closed the connection", stale=reused)
        self._exchanges += 1
        self.idle = False
        self._head_waiter = self._loop.create_future()
        self._done = self._loop.create_future()
        self._received.clear()
        self._head = self._parser = self._left = self._sink = None
        self._decode = decode
        self._boundary = True
        self._idle_seconds = idle_seconds
        self.deadline = self._loop.time() + first_byte_seconds
        self._transport.writelines([head, *pieces])
        return await self._head_waiter

    async def relay(self, sink: Callable[[bytes], None]) -> None:
        """Hand body bytes to ``sink`` until the answer is complete.

        Raises:
            ConnectionLost, AnswerTimedOut: the answer stays incomplete.
        """
        assert self._done is not None
        self._sink = sink
        backlog, self._backlog, self._backlog_bytes = self._backlog, [], 0
        for data in backlog:
            sink(data)
        self._update_reading()
        await self._done

    def replace_sink(self, sink: Callable[[bytes], None]) -> None:
        """Change where body bytes go (for a sink that only wants the first piece)."""
        self._sink = sink

    def pause(self) -> None:
        """The client does not keep up: stop reading."""
        self._paused_by_client = True
        self._update_reading()

    def resume(self) -> None:
        """The client took what was waiting."""
        self._paused_by_client = False
        self._update_reading()

    @property
    def at_chunk_boundary(self) -> bool:
        """Whether a new chunk may follow what was relayed so far."""
        return self._boundary and (self._parser is None or not self._parser.in_chunk)

    def release(self) -> None:
        """End the exchange: keep the connection if its answer was complete, else close it."""
        done, self._head_waiter, self._done, self._sink = self._done, None, None, None
        self._backlog, self._backlog_bytes, self._paused_by_client = [], 0, False
        complete = done is not None and done.done() and not done.cancelled() and done.exception() is None
        if complete and self._head is not None and self._head.keep_alive and not self.lost:
            self._pool.put(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once; the engine aborts the request."""
        self.idle = False
        self.deadline = math.inf
        if self._transport is not None:
            self._transport.abort()

    # --- callbacks of the loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        watch_peer(transport, reads_promptly=True)
        self._pool.deadlines.watch(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.deadline = math.inf
        self._pool.forget(self)
        if self._head_waiter is not None and not self._head_waiter.done():
            stale = self._exchanges > 1 and not self._received
            self._fail(ConnectionLost("the engine closed the connection before it answered", stale=stale))
        elif exc is None and self._head is not None and self._left is None and not self._head.chunked:
            self._complete()  # a body that ends with its connection
        else:
            self._fail(ConnectionLost("the engine closed the connection within its answer"))

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.abort()  # an answer that nobody asked for
        elif self._head is not None:
            self._take_body(data)
        else:
            self._received += data
            try:
                self._take_head()
            except (httptools.HttpParserError, httptools.HttpParserUpgrade, ValueError) as error:
                self._fail(ConnectionLost(f"the engine's answer is not HTTP/1.1 ({error})"))

    def on_deadline(self) -> None:
        """The pool's sweep: idle too long, or silent too long."""
        if not self.idle:
            who = "the client took nothing" if self._paused_by_client else "the engine was silent"
            self._fail(AnswerTimedOut(f"{who} for too long"))
        self.abort()

    # --- inside ---

    def _take_head(self) -> None:
        while (end := self._received.find(HEAD_END)) >= 0:
            end += len(HEAD_END)
            parser = _DecodingParser() if self._decode else _ResponseParser()
            head = parser.parse_head(bytes(self._received[:end]))
            rest = bytes(self._received[end:])
            if 100 <= head.status < 200 and head.status != 101:
                self._received[:] = rest  # an interim answer: the next head is the one
                continue
            self._head, self._parser = head, parser
            self._left = 0 if head.bodyless else head.length
            self.deadline = self._loop.time() + self._idle_seconds
            if self._head_waiter is not None and not self._head_waiter.done():
                self._head_waiter.set_result(head)
            if rest or self._left == 0:
                self._take_body(rest)
            return
        if len(self._received) > self._pool.limits.max_header_bytes:
            raise ValueError("its head is too large")

    def _take_body(self, data: bytes) -> None:
        head, parser = self._head, self._parser
        assert head is not None
        assert parser is not None
        self.deadline = self._loop.time() + self._idle_seconds
        complete = False
        if self._left is not None:
            self._left -= len(data)
            complete = self._left == 0
            if self._left < 0:
                self._fail(ConnectionLost("the engine sent more than its answer"))
                return
        elif head.chunked:
            try:
                parser.feed(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                self._fail(ConnectionLost(f"the engine's answer is not HTTP/1.1 ({error})"))
                return
            if parser.followed:
                self._fail(ConnectionLost("the engine sent more than its answer"))
                return
            complete = parser.complete
            self._boundary = data.endswith(b"\r\n")
            if isinstance(parser, _DecodingParser):
                data = b"".join(parser.decoded)
                parser.decoded.clear()
        if data:
            if self._sink is not None:
                self._sink(data)
            else:
                self._backlog.append(data)
                self._backlog_bytes += len(data)
                self._update_reading()
        if complete:
            self._complete()

    def _complete(self) -> None:
        self.deadline = math.inf
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: UpstreamError) -> None:
        if self._head_waiter is not None and not self._head_waiter.done():
            self._head_waiter.set_exception(error)
        elif self._done is not None and not self._done.done():
            self._done.set_exception(error)
            self._done.exception()  # whoever waits still sees it; nobody waits after a disconnect
        self.abort()

    def _update_reading(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._paused_by_client or self._backlog_bytes > _BACKLOG_BYTES:
            transport.pause_reading()
        else:
            transport.resume_reading()


class UpstreamPool:
    """Idle connections per engine, newest first."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: Limits, deadlines: Deadlines) -> None:
        self.loop = loop
        self.limits = limits
        self.deadlines = deadlines
        self._idle: dict[str, list[UpstreamConnection]] = {}

    async def acquire(self, endpoint: Endpoint, *, fresh: bool = False) -> UpstreamConnection:
        """A connection to ``endpoint``: an idle one, unless ``fresh``, else a new one.

        Raises:
            ConnectFailed: refused, unreachable, or not within the limit.
        """
        idle = self._idle.get(endpoint.address)
        while idle and not fresh:
            connection = idle.pop()
            connection.idle = False
            if not connection.lost and connection.deadline > self.loop.time():
                connection.deadline = math.inf
                return connection
            connection.abort()
        try:
            async with asyncio.timeout(self.limits.connect_seconds):
                _, made = await self.loop.create_connection(
                    lambda: UpstreamConnection(self, endpoint), endpoint.host, endpoint.port
                )
        except TimeoutError as error:
            raise ConnectFailed("it accepted no connection in time") from error
        except OSError as error:
            raise ConnectFailed(f"no connection ({error.strerror or 'the name is unknown'})") from error
        return made

    def put(self, connection: UpstreamConnection) -> None:
        """Keep ``connection`` for the next exchange, within the bound."""
        idle = self._idle.setdefault(connection.endpoint.address, [])
        if len(idle) >= self.limits.max_idle_per_engine:
            connection.abort()
            return
        connection.idle = True
        connection.deadline = self.loop.time() + self.limits.upstream_idle_seconds
        connection.resume()
        idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """The connection is gone."""
        self.deadlines.forget(connection)
        idle = self._idle.get(connection.endpoint.address)
        if idle is not None:
            if connection in idle:
                idle.remove(connection)
            if not idle:
                del self._idle[connection.endpoint.address]

    def close(self) -> None:
        """Close all idle connections."""
        for idle in list(self._idle.values()):
            for connection in list(idle):
                connection.abort()
