"""One client's connection: receives whole requests, one after the other, and writes responses.

Invariants:

- One request at a time. A client may send a little ahead; if it sends more, the rest is dropped and the connection ends
  with the response. Reading never pauses while a request is served: only a reader notices that the client went.
- A request reaches the application only when it is whole; its body's bytes count against the server's bound as they
  arrive.
- When the client goes, the task that serves it is cancelled in the same turn of the event loop.
- A client that does not read stops its engine from being read (:meth:`ClientConnection.pause_writing`), and gets no
  further response before it has taken the last one.

Bodies that are not in the head's segment are received straight into their final buffer (``BufferedProtocol``): at 1 MB
this halves the CPU of receiving.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol, cast

from bidikv_runtime.router.api.errors import ApiError
from bidikv_runtime.router.http.http1 import HEAD_END, RequestHead, build_local_response
from bidikv_runtime.router.http.parsers import RequestParser, build_too_large

if TYPE_CHECKING:
    from bidikv_runtime.router.http.server import Server

logger = logging.getLogger(__name__)

_FIRST_ALLOCATION: Final = 1024 * 1024
"""Announced bodies above this grow as they arrive: an announcement alone takes no memory."""
_PROGRESS_BYTES: Final = 256 * 1024
"""Of a body: what must arrive within ``Limits.body_seconds``. A limit on silence alone lets one byte a minute hold a
body in memory for ever."""
_LINGER_SECONDS: Final = 2.0
"""How long a refused client may go on sending, so that it reads the answer instead of a reset."""


@dataclass(slots=True)
class Request:
    """A whole request."""

    head: RequestHead
    body: bytes | bytearray
    """Emptied by :meth:`ClientConnection.release_body`."""
    received_at: float
    """``time.monotonic`` when its last byte came."""


class Pausable(Protocol):
    """Where a response comes from."""

    def pause(self) -> None:
        """Stop reading."""

    def resume(self) -> None:
        """Read on."""


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
        self._dropped = 0
        self._closed = False
        self.deadline = math.inf
        # For one request.
        self._head: RequestHead | None = None
        self._parser: RequestParser | None = None
        self._body = bytearray()
        self._received = 0
        self._progress = 0
        self._reserved = 0
        self._task: asyncio.Task[None] | None = None
        self._source: Pausable | None = None
        self._waits_for_client = False
        self.stalled = False
        """The client does not keep up: what is written now waits in memory."""
        self.response_started = False
        self._close_after = False

    # --- for the application ---

    @property
    def will_close(self) -> bool:
        """Whether the response should announce the end of the connection."""
        return self._close_after or self._server.draining or self._head is None or not self._head.keep_alive

    @property
    def peer(self) -> str:
        """The client's IP address; empty once it is gone."""
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(name[0]) if name else ""

    def write(self, data: bytes) -> None:
        """Write response bytes, at once; nothing happens when the client is gone."""
        if not self._closed and self._transport is not None:
            self.response_started = True
            self._transport.write(data)

    def attach(self, source: Pausable | None) -> None:
        """From now on ``source`` is paused while the client does not keep up."""
        self._source = source
        if source is not None and self.stalled:
            source.pause()

    def release_body(self, request: Request) -> None:
        """The body is not needed any more: a long stream must not hold its history in memory."""
        self._server.memory.keep(request.body)
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
        if not self._server.admit(self):
            self._closed = True
            self._transport.abort()
            return
        self.deadline = monotonic() + self._limits.keep_alive_seconds

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._server.forget(self)
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
        self.stalled = True
        if self._source is not None:
            self._source.pause()

    def resume_writing(self) -> None:
        self.stalled = False
        if self._source is not None:
            self._source.resume()
        if self._waits_for_client:
            self._waits_for_client = False
            self._finish()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._state is not _State.BODY:
            return memoryview(self._server.scratch)
        assert self._head is not None
        if self._received == len(self._body):
            # Grown here, not on arrival: then the loop still holds a view of the buffer, which forbids resizing.
            missing = self._head.length - self._received
            self._body += bytes(min(missing, max(self._received // 2, _FIRST_ALLOCATION)))
        return memoryview(self._body)[self._received :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._state is not _State.BODY:
            self._take(nbytes)
            return
        assert self._head is not None
        self._received += nbytes
        try:
            self._reserve(self._received)
        except ApiError as error:
            self._refuse(error)
            return
        if self._received == self._head.length:
            self._serve(self._body)
        else:
            self._note_progress(self._received)

    def on_deadline(self) -> None:
        """The server's sweep: the client was idle or too slow, or does not read the end of what it was sent."""
        leaving = self._transport is None or self._transport.is_closing()
        if not leaving and (
            self._state in (_State.BODY, _State.CHUNKED_BODY) or (self._state is _State.HEAD and self._pending)
        ):
            self._refuse(ApiError(408, "The request did not arrive in time.", close=True))
        else:
            self.abort()

    def close_if_idle(self) -> None:
        """Draining: leave if no request is under way."""
        if self._state is _State.HEAD and not self._pending and self._transport is not None:
            self._transport.close()

    # --- receiving ---

    def _take(self, size: int) -> None:
        """Take ``size`` bytes from the scratch buffer."""
        scratch = self._server.scratch
        if self._state is _State.HEAD and not self._pending:
            self._take_head(scratch, size)  # where it lies: a body behind it is copied once
            return
        data = bytes(memoryview(scratch)[:size])
        if self._state is _State.HEAD:
            self._pending += data
            self._take_head(self._pending, len(self._pending))
        elif self._state is _State.CHUNKED_BODY:
            self._take_chunked(data)
        elif self._state is _State.SERVING:
            self._take_ahead(data)

    def _take_ahead(self, data: bytes) -> None:
        """Of a client that does not wait for its response."""
        if not self._dropped and len(self._pending) + len(data) <= self._limits.max_header_bytes:
            self._pending += data
            return
        self._pending = b""
        self._close_after = True
        self._dropped += len(data)
        if self._dropped > self._limits.max_body_bytes:
            self.abort()

    def _take_head(self, data: bytes | bytearray, size: int) -> None:
        """Look for a head in the first ``size`` bytes of ``data``; the rest of them is of its body, or follows it."""
        start = 2 if data.startswith(b"\r\n", 0, size) else 0  # an empty line may come first: RFC 9112 section 2.2
        end = data.find(HEAD_END, start, size)
        view = memoryview(data)
        if end < 0 or end > self._limits.max_header_bytes:
            self._pending = bytes(view[:size])
            if size > self._limits.max_header_bytes:
                self._refuse(ApiError(431, "The request's head is too large.", close=True))
            else:
                self.deadline = min(self.deadline, monotonic() + self._limits.head_seconds)  # from its first bytes
            return
        end += len(HEAD_END)
        raw, rest, self._pending = bytes(view[start:end]), view[end:size], b""
        try:
            self._parser = RequestParser()
            self._head = head = self._parser.parse_head(raw, self._limits.max_header_fields)
            if head.length > self._limits.max_body_bytes:
                raise build_too_large(self._limits.max_body_bytes)
            if self._server.buffered + head.length > self._limits.max_buffered_bytes:
                raise _build_full()  # at once: the upload would be in vain
            if not head.chunked:
                self._reserve(min(len(rest), head.length))
        except ApiError as error:
            self._refuse(error)
            return
        if head.chunked:
            self._state = _State.CHUNKED_BODY
            self._begin_body(head, rest)
            if rest:
                self._take_chunked(bytes(rest))
        elif len(rest) >= head.length:
            self._pending = bytes(rest[head.length :])
            self._serve(bytes(rest[: head.length]))
        else:
            self._state = _State.BODY
            self._begin_body(head, rest)
            self._body = self._server.memory.take(min(head.length, max(_FIRST_ALLOCATION, len(rest))))
            self._body[: len(rest)] = rest
            self._received = len(rest)

    def _begin_body(self, head: RequestHead, rest: memoryview) -> None:
        self._progress = len(rest)
        self.deadline = monotonic() + self._limits.body_seconds
        if head.expects_continue and not rest and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _note_progress(self, received: int) -> None:
        if received - self._progress >= _PROGRESS_BYTES:
            self._progress = received
            self.deadline = monotonic() + self._limits.body_seconds

    def _take_chunked(self, data: bytes) -> None:
        assert self._parser is not None
        try:
            complete = self._parser.feed_chunked(data, self._limits.max_body_bytes)
            self._reserve(len(self._parser.body))
        except ApiError as error:
            self._refuse(error)
            return
        if complete:
            self._close_after = self._close_after or self._parser.followed
            self._serve(self._parser.body)
        else:
            self._note_progress(len(self._parser.body))

    def _reserve(self, length: int) -> None:
        """Count the body's bytes against the server's bound (``length`` is the request's new total)."""
        server = self._server
        if server.buffered + length - self._reserved > self._limits.max_buffered_bytes:
            raise _build_full()
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
        self._task = self._loop.create_task(self._run(Request(self._head, body, monotonic())))

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
            self.release_body(request)
        self._finish()

    def _answer(self, error: ApiError, *, with_body: bool = True) -> None:
        """Write ``error`` as a response, or break off what was started."""
        if self.response_started:
            self.abort()
            return
        self._close_after = self._close_after or error.close
        self.write(
            build_local_response(
                error.status, error.body(), headers=error.headers(), close=self.will_close, with_body=with_body
            )
        )

    def _refuse(self, error: ApiError) -> None:
        """Answer before the request is whole."""
        self.response_started = False
        self._close_after = True
        self._give_back()
        self._body, self._pending, self._parser = bytearray(), b"", None
        self._server.on_refusal(error)
        self._answer(error)
        self._linger()

    def _linger(self) -> None:
        """Leave a client that may still be sending: what comes is read and dropped for a while."""
        self._state = _State.LINGERING
        if self._transport is not None and not self._closed:
            # After a response: as long as a client may take to read it.
            self.deadline = monotonic() + (self._limits.keep_alive_seconds if self.stalled else _LINGER_SECONDS)
            if self._transport.can_write_eof():  # TLS cannot close one direction only
                self._transport.write_eof()

    def _finish(self) -> None:
        """The response is written: take the next request or close."""
        if self._transport is None or self._transport.is_closing():
            return
        self.deadline = monotonic() + self._limits.keep_alive_seconds
        if self._dropped:
            self._linger()
        elif self.will_close:
            self._transport.close()  # which waits, until the deadline, for a client that reads
        elif self.stalled:
            self._waits_for_client = True
        else:
            self._head = self._parser = None
            self._state = _State.HEAD
            if self._pending:
                self._take_head(self._pending, len(self._pending))


def _build_full() -> ApiError:
    return ApiError(503, "The router holds too many request bodies; retry later.", retry_after=1, close=True)
