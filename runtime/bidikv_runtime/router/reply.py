"""The answer of one request, on its way to the client.

Usually an engine's answer is relayed as it comes: its head rebuilt, its body's bytes untouched, chunk framing included.
Two things make the router write a stream of events in chunks of its own:

- Nothing came for a while (a queue, a long prefill): it begins the response and sends comments, which event clients
  ignore, so that neither client nor proxy takes the silence for death. From then on every error is an event, too, and
  an engine's head no longer reaches the client.
- The stream may have to go on with another engine's answer (``api/continuation.py``).

Invariant: comments are written only where a new chunk, and a new event of the stream, may begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic
from typing import Final, Literal, Protocol

from bidikv_runtime.router.api.errors import ApiError, build_error_body, build_error_event
from bidikv_runtime.router.http.client import ClientConnection, Request
from bidikv_runtime.router.http.deadlines import Deadlines
from bidikv_runtime.router.http.http1 import (
    LAST_CHUNK,
    Headers,
    ResponseHead,
    build_chunk,
    build_local_response,
    build_response_head,
)
from bidikv_runtime.router.http.upstream import UpstreamConnection
from bidikv_runtime.router.observe.record import TurnRecord

_EVENTS_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n"
)
_COMMENT: Final = b": keep-alive\n\n"
_SUCCESS: Final = range(200, 300)
_ERROR_BYTES: Final = 64 * 1024
"""Of an engine's error that becomes an event; of a longer one only the status is told."""


class Rewriter(Protocol):
    """Changes a stream's decoded bytes on their way."""

    def feed(self, data: bytes) -> bytes:
        """What to send instead of ``data``."""


class Reply:
    """What the client gets for one request."""

    def __init__(
        self,
        client: ClientConnection,
        request: Request,
        record: TurnRecord,
        deadlines: Deadlines,
        comment_seconds: float,
    ) -> None:
        """
        Args:
            client: whose request it is.
            request: the same.
            record: told when the answer begins and ends.
            deadlines: wake this reply when a comment is due.
            comment_seconds: longest silence of a stream of events; 0 for no comments.
        """
        self._client = client
        self._http10 = request.head.http10
        self._with_body = request.head.method != b"HEAD"
        self._record = record
        self._deadlines = deadlines
        self._comment_seconds = comment_seconds
        self.on_first_byte: Callable[[], None] | None = None
        """Called when the first byte of a streamed answer was written."""
        self._connection: UpstreamConnection | None = None
        self._begun = False
        self._framing: Literal["own", "engine's", "close", "length"] = "length"
        """Of the body under way: chunks written here, the engine's chunks, up to the connection's end, or counted."""
        self._at_event_end = True
        """The chunks written here end with a whole event."""
        self.deadline = math.inf
        self.answering = False
        """Bytes of an engine's answer may have been written: it cannot be asked for again."""
        self.extra: Headers = []
        """Fields added to the answer's head."""

    # --- comments while nothing comes ---

    def expect_events(self) -> None:
        """The client asked for a stream of events: keep it alive from now on, until :meth:`finish`."""
        if self._comment_seconds and not self._http10:
            self.deadline = monotonic() + self._comment_seconds
            self._deadlines.watch(self)

    def finish(self) -> None:
        """The request is over, whatever came of it."""
        self.on_first_byte = None  # it refers to the turn, which refers here: a cycle would wait for the collector
        if self.deadline != math.inf:
            self.deadline = math.inf
            self._deadlines.forget(self)

    def on_deadline(self) -> None:
        """Send a comment if nothing was written for ``comment_seconds``."""
        now = monotonic()
        self.deadline = now + self._comment_seconds
        connection = self._connection
        if connection is not None:
            if connection.last_at + self._comment_seconds > now:
                self.deadline = connection.last_at + self._comment_seconds
                return
            if not self._record.streamed or not self._may_insert(connection):
                return
        elif not self._begun:
            self._begun = True
            self._framing = "own"
            self._record.streamed = True
            self._record.status = 200
            self._client.write(self._build_events_head())
        self._record.keep_alives += 1
        self._write_chunk(_COMMENT)

    def _may_insert(self, connection: UpstreamConnection) -> bool:
        return self._at_event_end if self._framing == "own" else connection.at_event_end and self._framing == "engine's"

    def _build_events_head(self) -> bytes:
        lines = [_EVENTS_HEAD, *(b"%b: %b\r\n" % field for field in self.extra)]
        if self._client.will_close:
            lines.append(b"connection: close\r\n")
        return b"".join([*lines, b"\r\n"])

    def _write_chunk(self, data: bytes) -> None:
        if data:
            self._at_event_end = data.endswith((b"\n\n", b"\r\n\r\n"))
            self._client.write(build_chunk(data))

    # --- errors of the router ---

    def refuse(self, error: ApiError) -> None:
        """Answer with an error of the router, in the form that the request's API has."""
        record, client = self._record, self._client
        record.outcome = "broken" if self.answering else "refused"
        if self._begun and self._framing == "own":
            self._write_chunk(build_error_event(record.route, error))
            client.write(LAST_CHUNK)
        elif self.answering:
            client.abort()
        else:
            record.status = error.status
            if error.close:
                client.close_after_response()
            client.write(
                build_local_response(
                    error.status,
                    build_error_body(record.route, error),
                    headers=self.extra + error.headers(),
                    close=client.will_close,
                    with_body=self._with_body,
                )
            )

    # --- an engine's answer ---

    async def relay(self, connection: UpstreamConnection, head: ResponseHead, rewriter: Rewriter | None = None) -> None:
        """Write the engine's answer to the client as it comes.

        Args:
            connection: the exchange.
            head: of its answer.
            rewriter: sees and changes the body of a stream of events, which ends with :meth:`end_events` only.

        Raises:
            UpstreamError: the answer broke off. Say so with :meth:`end_broken`, or go on with another one.
        """
        client, record = self._client, self._record
        events = head.is_event_stream and head.status in _SUCCESS
        if self._begun and not events:
            await self._relay_as_event(connection, head)
            return
        own_chunks = events and not self._http10 and (rewriter is not None or (self._begun and not head.chunked))
        write: Callable[[bytes], None] = client.write
        if own_chunks:
            rewrite: Callable[[bytes], bytes] = rewriter.feed if rewriter is not None else bytes
            write = lambda data: self._write_chunk(rewrite(data))  # noqa: E731

        def write_first(data: bytes) -> None:
            write(data)
            if connection.pieces:  # else it was the head alone
                record.first_byte_at = connection.first_at
                connection.replace_sink(write)
                if events and self.on_first_byte is not None:
                    self.on_first_byte()

        self.answering = True
        self._connection = connection
        client.attach(connection)
        try:
            if own_chunks:
                self._framing = "own"
            elif head.chunked and not self._http10:
                self._framing = "engine's"
            else:
                self._framing = "close" if head.length is None and not head.bodyless else "length"
            prefix = b""
            if not self._begun:
                prefix = self._build_head(head)
                record.status = head.status
                record.streamed = self._begun = events
            if own_chunks:
                client.write(prefix)
                prefix = b""
            sink = write_first if math.isnan(record.first_byte_at) else write
            await connection.relay(sink, decoded=own_chunks or self._http10, prefix=prefix)
            if own_chunks and rewriter is None:
                client.write(LAST_CHUNK)
        finally:
            record.chunks += connection.pieces
            if connection.pieces:
                record.last_byte_at = connection.last_at
            record.longest_gap = max(record.longest_gap, connection.longest_gap)
            client.attach(None)
            self._connection = None

    def _build_head(self, head: ResponseHead) -> bytes:
        if self._framing == "close":
            self._client.close_after_response()
        chunked = self._framing in ("own", "engine's")
        return build_response_head(head, chunked=chunked, close=self._client.will_close, extra=self.extra)

    async def _relay_as_event(self, connection: UpstreamConnection, head: ResponseHead) -> None:
        """An answer that is no stream of events, after the router began one: it becomes the last event."""
        body = bytearray()
        await connection.relay(lambda data: body.extend(data[: _ERROR_BYTES + 1 - len(body)]), decoded=True)
        self._record.outcome = "broken" if self.answering else "refused"
        error = ApiError(head.status, f"The engine answered with status {head.status}.")
        carried = bytes(body) if len(body) <= _ERROR_BYTES else b""
        self._write_chunk(build_error_event(self._record.route, error, carried))
        self._client.write(LAST_CHUNK)

    def may_rewrite(self, head: ResponseHead) -> bool:
        """Whether :meth:`relay` would pass this answer through a rewriter: a stream of events, in chunks."""
        return head.is_event_stream and head.status in _SUCCESS and not self._http10

    def end_events(self, tail: bytes) -> None:
        """End a stream that was relayed through a rewriter; ``tail`` is sent before."""
        self._write_chunk(tail)
        self._client.write(LAST_CHUNK)

    def end_broken(self, connection: UpstreamConnection, sentence: str) -> None:
        """End an answer that broke off: a stream of events says so, anything else can only be cut off.

        Args:
            connection: that the answer came from.
            sentence: for the client.
        """
        client = self._client
        self._record.outcome = "broken"
        event = build_error_event(self._record.route, ApiError(502, sentence))
        may_insert = self._framing == "own" or (self._framing == "engine's" and connection.at_chunk_boundary)
        if self._record.streamed and may_insert:
            self._write_chunk(event)
            client.write(LAST_CHUNK)
        elif self._record.streamed and self._framing == "close":
            client.write(event)
        else:
            client.abort()
