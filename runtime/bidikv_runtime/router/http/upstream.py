"""A connection to an engine: one exchange at a time.

Invariants:

- Closing the connection is how a leg is cancelled: vLLM aborts a request whose client disconnected. An exchange that is
  left early therefore never returns its connection to the pool.
- Body bytes are handed on as received, chunk framing included; the parser only finds the end. Who relays may ask for
  decoded bytes instead, also when it has seen the head.
- Nothing of a body is parsed before somebody relays it; until then it waits here, bounded.

Times are ``time.monotonic``: the loop's clock, of which uvloop shows only milliseconds, too coarse for gaps between
tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Final, NoReturn, Protocol, cast

from bidikv_runtime.router.api.splice import Buffer
from bidikv_runtime.router.http.http1 import HEAD_END, ResponseHead
from bidikv_runtime.router.http.parsers import DecodingParser, MalformedAnswer, ResponseParser
from bidikv_runtime.router.http.sockets import watch_peer

if TYPE_CHECKING:
    from bidikv_runtime.router.http.pool import UpstreamPool

_BACKLOG_BYTES: Final = 256 * 1024
"""Body bytes held while nobody takes them, before reading pauses."""

Sink = Callable[[bytes], None]


class Origin(Protocol):
    """Where to connect: an engine's API, or another port of it."""

    @property
    def host(self) -> str:
        """IP address or name."""

    @property
    def port(self) -> int:
        """TCP port."""

    @property
    def address(self) -> str:
        """``host:port``, perhaps with a rank after ``#``: whose idle connections may be used."""


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
    """Nothing moved for too long; the text tells which limit ended it: no head, silence within the body, or a client
    that does not read."""


class UpstreamConnection(asyncio.Protocol):
    """A connection to one engine and the exchange that runs on it."""

    def __init__(self, pool: UpstreamPool, endpoint: Origin) -> None:
        # For the connection's life.
        self._pool = pool
        self.endpoint = endpoint
        self._loop = pool.loop
        self._transport: asyncio.Transport | None = None
        self.deadline = math.inf
        self.idle = False
        self.lost = False
        """It is closed, or about to be."""
        self._broken = False
        self._exchanges = 0
        # For one exchange.
        self._busy = False
        self._head_waiter: asyncio.Future[ResponseHead] | None = None
        self._done: asyncio.Future[None] | None = None
        self._received = b""
        """Bytes that are not parsed yet: of the head, or of a body that nobody relays yet."""
        self._head: ResponseHead | None = None
        self._parser: ResponseParser | None = None
        self._decoded = False
        self._left = -1
        self._complete = False
        self._error: UpstreamError | None = None
        self._first_byte_seconds = self._idle_seconds = math.inf
        self._sink: Sink | None = None
        self._last_piece = b""
        self._paused_by_client = False
        self._reading_paused = False
        # What was relayed in this exchange; read by whoever observes it.
        self.pieces = 0
        """Of the body, as the network cut it: of a stream about one per event."""
        self.first_at = self.last_at = math.nan
        self.longest_gap = 0.0
        """Seconds between two pieces."""

    # --- the exchange ---

    async def send(
        self, head: bytes, pieces: Sequence[Buffer], *, first_byte_seconds: float, idle_seconds: float
    ) -> ResponseHead:
        """Send a request and wait for the head of the answer.

        Raises:
            ConnectionLost: see there.
            AnswerTimedOut: no head within ``first_byte_seconds``.
        """
        transport = self._transport
        assert transport is not None
        if self.lost or transport.is_closing():
            raise ConnectionLost("the engine closed the connection", stale=self._exchanges > 0)
        self._exchanges += 1
        self._busy = True
        waiter: asyncio.Future[ResponseHead] = self._loop.create_future()
        self._head_waiter = waiter
        self._done = self._head = self._parser = self._sink = self._error = None
        self._received = self._last_piece = b""
        self._complete = False
        self.pieces = 0
        self.longest_gap = 0.0
        self._first_byte_seconds = first_byte_seconds
        self._idle_seconds = idle_seconds
        self.last_at = now = monotonic()
        self.deadline = now + first_byte_seconds
        transport.writelines([head, *pieces])
        try:
            return await waiter
        finally:
            del waiter  # an error in it refers to this frame: a cycle, with the request's body, for the collector

    async def relay(self, sink: Sink, *, decoded: bool = False, prefix: bytes = b"") -> None:
        """Hand body bytes to ``sink`` until the answer is complete.

        Args:
            sink: takes each piece as it comes; it must not raise.
            decoded: without chunk framing, whatever framing the engine uses.
            prefix: for ``sink`` before all of it, in one piece with what is already there: a response head written
                alone costs another system call.

        Raises:
            ConnectionLost, AnswerTimedOut: the answer stays incomplete.
        """
        head = self._head
        assert head is not None
        self._decoded = decoded
        if decoded and head.chunked:
            self._parser = DecodingParser()
        data, self._received = self._received, b""
        self._sink = sink
        piece = self._follow(data) if data or self._left == 0 else b""
        if piece or prefix:
            sink(prefix + piece)
        if self.lost and not self._complete and self._error is None:
            self._end_of_connection()
        if self._error is not None:
            self._raise()
        if self._complete:
            return
        self._done = self._loop.create_future()
        self._update_reading()
        await self._done

    def replace_sink(self, sink: Sink) -> None:
        """Change where body bytes go: for a sink that only wants the first piece."""
        if self._sink is not None:
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
    def ends_with_connection(self) -> bool:
        """Whether the engine's answer ends with its connection: anything may follow what was relayed so far."""
        return self._head is not None and self._head.ends_with_connection

    @property
    def at_chunk_boundary(self) -> bool:
        """Whether a chunk of the router's own may follow what was relayed so far of a chunked body."""
        if self._decoded or self._parser is None or self._head is None or not self._head.chunked:
            return False
        return not self._parser.in_chunk and (not self.pieces or self._last_piece.endswith(b"\r\n"))

    @property
    def at_event_end(self) -> bool:
        """Whether an event of the router's own may follow what was relayed so far, in whatever framing it was relayed.

        At a mere end of a line it would cut an event in two whose lines come one by one.
        """
        if self.at_chunk_boundary:
            return not self.pieces or self._last_piece.endswith((b"\n\n\r\n", b"\r\n\r\n\r\n"))
        framed = self._decoded or self.ends_with_connection
        return framed and (not self.pieces or self._last_piece.endswith((b"\n\n", b"\r\n\r\n")))

    def release(self) -> None:
        """End the exchange: keep the connection if its answer was complete and the request was sent, else close it."""
        self._busy = False
        self._head_waiter = self._done = self._sink = None
        self._received = self._last_piece = b""
        self._paused_by_client = False
        if self._complete and self._head is not None and self._head.keep_alive and not self.lost and self._is_sent():
            self._update_reading()
            self._pool.put(self)
        else:
            self.abort()

    def _is_sent(self) -> bool:
        """Whether the engine has taken the whole request: behind the rest of one, the next would wait for ever."""
        return self._transport is not None and self._transport.get_write_buffer_size() == 0

    def abort(self) -> None:
        """Close at once; the engine aborts the request."""
        self.idle = False
        self.lost = True
        self.deadline = math.inf
        if self._transport is not None:
            self._transport.abort()

    # --- callbacks of the loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        watch_peer(transport.get_extra_info("socket"), reads_promptly=True)
        self._pool.deadlines.watch(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._broken = exc is not None
        self.deadline = math.inf
        self._pool.forget(self)
        if not self._busy or self._complete:
            return
        if self._head is None:
            stale = self._exchanges > 1 and not self._received
            self._fail(ConnectionLost("the engine closed the connection before it answered", stale=stale))
        elif self._sink is not None:
            self._end_of_connection()

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None:
            self._keep(data)
            return
        piece = self._follow(data)
        if piece:
            sink(piece)
        if self._complete and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def on_deadline(self) -> None:
        """The pool's sweep: idle too long, or silent too long."""
        if self.idle:
            self.abort()
            return
        if self._head is None:
            text = f"the engine sent no head within {self._first_byte_seconds:g} s"
        elif (latest := self.last_at + self._idle_seconds) > monotonic():
            self.deadline = latest  # not moved with every piece
            return
        elif self._paused_by_client:
            text = f"the client took nothing for {self._idle_seconds:g} s"
        else:
            text = f"the engine was silent for {self._idle_seconds:g} s within its answer"
        self._fail(AnswerTimedOut(text))

    # --- inside ---

    def _keep(self, data: bytes) -> None:
        if not self._busy or self._complete:
            self.abort()  # an answer that nobody asked for
            return
        self._received += data
        if self._head is not None:
            self._update_reading()
            return
        try:
            self._take_head()
        except MalformedAnswer as error:
            self._fail(ConnectionLost(f"the engine's answer is not HTTP/1.1 ({error})"))

    def _take_head(self) -> None:
        while (end := self._received.find(HEAD_END)) >= 0:
            end += len(HEAD_END)
            raw, self._received = self._received[:end], self._received[end:]
            parser = ResponseParser()
            head = parser.parse_head(raw)
            if head.status < 200:
                continue  # an interim answer: the next head is the one
            self._head, self._parser = head, parser
            self._left = 0 if head.bodyless else -1 if head.length is None else head.length
            self.last_at = now = monotonic()
            self.deadline = now + self._idle_seconds
            if self._head_waiter is not None and not self._head_waiter.done():
                self._head_waiter.set_result(head)
            return
        if len(self._received) > self._pool.limits.max_header_bytes:
            raise MalformedAnswer("its head is too large")

    def _follow(self, data: bytes) -> bytes:
        """What to hand on of ``data``; notes when, and whether it was the last of the body."""
        now = monotonic()
        if self._left >= 0:
            self._left -= len(data)
            if self._left < 0:
                self._fail(ConnectionLost("the engine sent more than its answer"))
                return b""
            self._complete = self._left == 0
        elif self._head is not None and self._head.chunked:
            assert self._parser is not None
            try:
                data = self._parser.follow(data)
            except MalformedAnswer as error:
                self._parser = None  # it has read what is not relayed: it cannot tell where a chunk may follow
                self._fail(ConnectionLost(f"the engine's answer is not HTTP/1.1 ({error})"))
                return b""
            self._complete = self._parser.complete
        if self._complete:
            self.deadline = math.inf
            self._sink = None
        if self.pieces:
            if now - self.last_at > self.longest_gap:
                self.longest_gap = now - self.last_at
        else:
            self.first_at = now
        self.pieces += 1
        self.last_at = now
        self._last_piece = data
        return data

    def _end_of_connection(self) -> None:
        if self._head is not None and self._head.ends_with_connection and not self._broken:
            self._complete = True
            if self._done is not None and not self._done.done():
                self._done.set_result(None)
        else:
            self._fail(ConnectionLost("the engine closed the connection within its answer"))

    def _fail(self, error: UpstreamError) -> None:
        # Nothing here keeps what was raised: its traceback refers to this connection and to the request's body.
        self._sink = None
        if self._head_waiter is not None and not self._head_waiter.done():
            self._head_waiter.set_exception(error)
            self._head_waiter = None
        elif self._done is not None and not self._done.done():
            self._done.set_exception(error)
            self._done.exception()  # whoever waits still sees it; nobody waits after a disconnect
            self._done = None
        else:
            self._error = error
        self.abort()

    def _raise(self) -> NoReturn:
        """Raise what ended the exchange while nobody waited."""
        error, self._error = self._error, None
        assert error is not None
        try:
            raise error
        finally:
            del error

    def _update_reading(self) -> None:
        pause = self._paused_by_client or (self._sink is None and len(self._received) > _BACKLOG_BYTES)
        transport = self._transport
        if pause is self._reading_paused or transport is None or transport.is_closing():
            return
        self._reading_paused = pause
        if pause:
            transport.pause_reading()
        else:
            transport.resume_reading()
