"""The clients' side: HTTP/1.1 connections that receive whole requests and write responses.

Invariants:

- One request at a time per connection. What a client sends ahead waits in the socket, beyond one bounded buffer.
- A request reaches the application only when it is whole; its body's bytes are counted against the server's bound
  before they are received.
- When the client goes, the task that serves it is cancelled in the same turn of the event loop.
- A client that does not read stops its engine from being read (:meth:`ClientConnection.pause_writing`).

Bodies that are not in the head's segment are received straight into their final buffer (``BufferedProtocol``): at 1 MB
this halves the CPU of receiving.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol, cast

from bidikv_runtime.router.api.errors import ApiError
from bidikv_runtime.router.http.deadlines import Deadlines
from bidikv_runtime.router.http.http1 import (
    HEAD_END,
    RequestHead,
    build_local_response,
)
from bidikv_runtime.router.http.parsers import RequestParser, build_too_large
from bidikv_runtime.router.http.sockets import watch_peer
from bidikv_runtime.router.limits import Limits

logger = logging.getLogger(__name__)

_SCRATCH_BYTES: Final = 256 * 1024
_FIRST_ALLOCATION: Final = 1024 * 1024
"""Announced bodies above this grow as they arrive: an announcement alone takes no memory."""
_LINGER_SECONDS: Final = 2.0
"""How long a refused client may go on sending, so that it reads the answer instead of a reset."""
_BACKLOG: Final = 2048


@dataclass(slots=True)
class Request:
    """A whole request."""

    head: RequestHead
    body: bytes | bytearray
    """Emptied by :meth:`ClientConnection.release_body`."""
    received_at: float
    """The loop's time when its last byte came."""


class Pausable(Protocol):
    """Where a response comes from."""

    def pause(self) -> None:
        """Stop reading."""

    def resume(self) -> None:
        """Read on."""


Application = Callable[[Request, "ClientConnection"], Awaitable[None]]
"""Serves one request: it must write a whole response, raise ApiError before the first byte, or abort the connection."""


class _State(enum.Enum):
    HEAD = enum.auto()
    BODY = enum.auto()
    CHUNKED_BODY = enum.auto()
    SERVING = enum.auto()
    LINGERING = enum.auto()


class ClientConnection(asyncio.BufferedProtocol):
    """One client."""

    def __init__(self, server: Server) -> None:
        # For the connection's life.
        self._server = server
        self._loop = server.loop
        self._limits = server.limits
        self._transport: asyncio.Transport | None = None
        self._state = _State.HEAD
        self._pending = b""
        self._reading_paused = False
        self._closed = False
        self.deadline = math.inf
        # For one request.
        self._head: RequestHead | None = None
        self._parser: RequestParser | None = None
        self._body = bytearray()
        self._received = 0
        self._reserved = 0
        self._task: asyncio.Task[None] | None = None
        self._source: Pausable | None = None
        self._write_paused = False
        self.response_started = False
        self._close_after = False

    # --- for the application ---

    @property
    def will_close(self) -> bool:
        """Whether the response should announce the end of the connection."""
        return self._close_after or self._server.draining or self._head is None or not self._head.keep_alive

    def write(self, data: bytes) -> None:
        """Write response bytes; nothing happens when the client is gone."""
        if self._transport is not None and not self._closed:
            self.response_started = True
            self._transport.write(data)

    def attach(self, source: Pausable | None) -> None:
        """From now on ``source`` is paused while the client does not keep up."""
        self._source = source
        if source is not None and self._write_paused:
            source.pause()

    def release_body(self, request: Request) -> None:
        """The body is not needed any more: a long stream must not hold its history in memory."""
        request.body = b""
        self._parser = None
        self._give_back()

    def close_after_response(self) -> None:
        """The connection cannot carry another request."""
        self._close_after = True

    def abort(self) -> None:
        """Drop the connection: the only way left to say that a started response is broken."""
        if self._transport is not None:
            self._transport.abort()

    # --- callbacks of the loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        watch_peer(transport, reads_promptly=False)
        self._server.connections.add(self)
        self._server.deadlines.watch(self)
        self.deadline = self._loop.time() + self._limits.keep_alive_seconds

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._server.connections.discard(self)
        self._server.deadlines.forget(self)
        self._give_back()
        if self._task is not None:
            self._task.cancel()

    def eof_received(self) -> bool:
        # A client that stops sending is gone: vLLM treats it the same way. Closing would first wait until what was
        # written is read, and the engine would work on for nobody.
        if self._state is _State.SERVING:
            self.abort()
        return False

    def pause_writing(self) -> None:
        self._write_paused = True
        if self._source is not None:
            self._source.pause()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._source is not None:
            self._source.resume()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._state is not _State.BODY:
            return self._server.scratch
        assert self._head is not None
        if self._received == len(self._body):
            # Grown here, not on arrival: then the loop still holds a view of the buffer, which forbids resizing.
            missing = self._head.length - self._received
            self._body += bytes(min(missing, max(self._received, _FIRST_ALLOCATION)))
        return memoryview(self._body)[self._received :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._state is not _State.BODY:
            self._take(bytes(self._server.scratch[:nbytes]))
            return
        assert self._head is not None
        self._received += nbytes
        if self._received == self._head.length:
            self._serve(self._body)
        else:
            self.deadline = self._loop.time() + self._limits.body_idle_seconds

    def on_deadline(self) -> None:
        """The server's sweep: the client was idle or too slow, or does not read the end of what it was sent."""
        leaving = self._transport is None or self._transport.is_closing()
        if not leaving and (self._state in (_State.BODY, _State.CHUNKED_BODY) or self._pending):
            self._refuse(ApiError(408, "The request did not arrive in time.", close=True))
        else:
            self.abort()

    def close_if_idle(self) -> None:
        """Draining: leave if no request is under way."""
        if self._state is _State.HEAD and not self._pending and self._transport is not None:
            self._transport.close()

    # --- receiving ---

    def _take(self, data: bytes) -> None:
        if self._state is _State.LINGERING:
            return
        if self._state is _State.CHUNKED_BODY:
            self._take_chunked(data)
            return
        self._pending += data
        if self._state is _State.SERVING:
            if len(self._pending) > self._limits.max_header_bytes and self._transport is not None:
                self._reading_paused = True
                self._transport.pause_reading()
            return
        self._take_head()

    def _take_head(self) -> None:
        if self._pending[:1] in (b"\r", b"\n"):
            self._pending = self._pending.lstrip(b"\r\n")  # RFC 9112 section 2.2
        end = self._pending.find(HEAD_END)
        if end < 0 or end > self._limits.max_header_bytes:
            if len(self._pending) > self._limits.max_header_bytes:
                self._refuse(ApiError(431, "The request's head is too large.", close=True))
            elif (
                self._pending
                and self._head is None
                and self.deadline > (limit := self._loop.time() + self._limits.head_seconds)
            ):
                self.deadline = limit
            return
        end += len(HEAD_END)
        raw, rest, self._pending = self._pending[:end], self._pending[end:], b""
        try:
            self._parser = RequestParser()
            self._head = head = self._parser.parse_head(raw, self._limits.max_header_fields)
            if head.length > self._limits.max_body_bytes:
                raise build_too_large(self._limits.max_body_bytes)
            self._reserve(head.length)
        except ApiError as error:
            self._refuse(error)
            return
        self.deadline = self._loop.time() + self._limits.body_idle_seconds
        if head.chunked:
            self._state = _State.CHUNKED_BODY
            self._invite(head, rest)
            if rest:
                self._take_chunked(rest)
        elif len(rest) >= head.length:
            self._pending = rest[head.length :]
            self._serve(rest[: head.length])
        else:
            self._state = _State.BODY
            self._invite(head, rest)
            self._body = bytearray(min(head.length, max(_FIRST_ALLOCATION, len(rest))))
            self._body[: len(rest)] = rest
            self._received = len(rest)

    def _invite(self, head: RequestHead, rest: bytes) -> None:
        if head.expects_continue and not rest and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _take_chunked(self, data: bytes) -> None:
        assert self._parser is not None
        self.deadline = self._loop.time() + self._limits.body_idle_seconds
        try:
            complete = self._parser.feed_chunked(data, self._limits.max_body_bytes)
            self._reserve(len(self._parser.body))
        except ApiError as error:
            self._refuse(error)
            return
        if complete:
            self._close_after = self._close_after or self._parser.followed
            self._serve(self._parser.body)

    def _reserve(self, length: int) -> None:
        """Count the body's bytes against the server's bound (``length`` is the request's new total)."""
        server = self._server
        if server.buffered + length - self._reserved > self._limits.max_buffered_bytes:
            raise ApiError(503, "The router holds too many request bodies; retry later.", retry_after=1, close=True)
        server.buffered += length - self._reserved
        self._reserved = length

    def _give_back(self) -> None:
        self._server.buffered -= self._reserved
        self._reserved = 0

    # --- serving ---

    def _serve(self, body: bytes | bytearray) -> None:
        assert self._head is not None
        self._state = _State.SERVING
        self.deadline = math.inf
        self.response_started = False
        self._body = bytearray()
        request = Request(self._head, body, self._loop.time())
        self._task = self._loop.create_task(self._run(request))

    async def _run(self, request: Request) -> None:
        try:
            try:
                await self._server.application(request, self)
            except ApiError as error:
                self._answer(error, with_body=request.head.method != b"HEAD")
            except Exception:
                logger.exception("The router failed on %s %s", request.head.method, request.head.path)
                self._answer(ApiError(500, "The router failed; its log has the reason."))
        finally:
            self._task = None
            self._source = None
            self._give_back()
        self._finish()

    def _answer(self, error: ApiError, *, with_body: bool = True) -> None:
        """Write ``error`` as a response, or break off what was started."""
        if self.response_started:
            self.abort()
            return
        self._close_after = self._close_after or error.close
        headers = [(b"retry-after", b"%d" % error.retry_after)] if error.retry_after is not None else []
        self.write(
            build_local_response(
                error.status, error.body(), headers=headers, close=self.will_close, with_body=with_body
            )
        )

    def _refuse(self, error: ApiError) -> None:
        """Answer before the request is whole; the rest of it is read and dropped for a while."""
        self.response_started = False
        self._close_after = True
        self._give_back()
        self._body, self._pending = bytearray(), b""
        self._state = _State.LINGERING
        self._server.on_refusal(error)
        self._answer(error)
        if self._transport is not None and not self._closed:
            self._transport.write_eof()
            self.deadline = self._loop.time() + _LINGER_SECONDS

    def _finish(self) -> None:
        """The response is written: take the next request or close."""
        if self._closed or self._transport is None:
            return
        if self.will_close:
            self.deadline = self._loop.time() + self._limits.keep_alive_seconds  # closing waits for a client that reads
            self._transport.close()
            return
        self._head = self._parser = None
        self._state = _State.HEAD
        self.deadline = self._loop.time() + self._limits.keep_alive_seconds
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        if self._pending:
            self._take_head()


class Server:
    """Listens, and holds what all connections share."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        application: Application,
        limits: Limits,
        deadlines: Deadlines,
        on_refusal: Callable[[ApiError], None],
    ) -> None:
        self.loop = loop
        self.application = application
        self.limits = limits
        self.deadlines = deadlines
        self.on_refusal = on_refusal
        self.scratch = memoryview(bytearray(_SCRATCH_BYTES))
        """Receive buffer of all connections: the loop calls ``buffer_updated`` before it asks for another buffer."""
        self.connections: set[ClientConnection] = set()
        self.buffered = 0
        """Bytes of request bodies announced or held."""
        self.draining = False
        self._listener: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Start to accept; returns the port (for port 0, the one that was chosen).

        Raises:
            OSError: the address cannot be used.
        """
        self._listener = await self.loop.create_server(lambda: ClientConnection(self), host, port, backlog=_BACKLOG)
        chosen: int = self._listener.sockets[0].getsockname()[1]
        return chosen

    async def drain(self, delay: float, grace: float) -> bool:
        """Finish: announce the end on every response, accept for ``delay`` seconds, then wait for the rest.

        Returns:
            Whether all requests finished within ``grace`` seconds; those that did not are cut off.
        """
        self.draining = True
        await asyncio.sleep(delay)
        if self._listener is not None:
            self._listener.close()
        deadline = self.loop.time() + grace
        while True:
            for connection in list(self.connections):
                connection.close_if_idle()
            if not self.connections or self.loop.time() >= deadline:
                break
            await asyncio.sleep(0.05)
        clean = not self.connections
        await self.close()
        return clean

    async def close(self) -> None:
        """Stop at once."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)  # let connection_lost run
        self.deadlines.close()
