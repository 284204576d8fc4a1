"""HTTP/1.1 heads: parse, filter, build; pure.

llhttp (through httptools) judges the syntax, strictly; this module adds the rules that matter for a proxy, so that
client, router and engine always agree where a message ends (RFC 9112 section 6.3): both framings at once, repeated
framing headers and unknown transfer codings are refused. Heads are rebuilt from parsed fields, never copied, on both
sides.

The body is not parsed here, except chunked request bodies (:meth:`RequestParser.feed_chunked`).
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import httptools

from bidikv_runtime.contract import HANDOVER_ANSWERED_LOST, HANDOVER_GUARDED, HANDOVER_HEADER
from bidikv_runtime.router.api.errors import ApiError

Headers = list[tuple[bytes, bytes]]
"""Header fields in the order received, names as sent."""

HEAD_END: Final = b"\r\n\r\n"

HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""RFC 9110 section 7.6.1, and the older names still in use."""
_HANDOVER: Final = HANDOVER_HEADER.encode("ascii")
_REBUILT: Final = frozenset({b"content-length", b"expect", _HANDOVER})
_ANSWERED_LOST: Final = HANDOVER_ANSWERED_LOST.encode("ascii")
_GUARDED: Final = b"%b: %b\r\n" % (_HANDOVER, HANDOVER_GUARDED.encode("ascii"))
_CHUNK_OVERHEAD: Final = 8
"""Raw bytes per body byte that a chunked body may cost: one-byte chunks cost 6."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request's head after all framing checks."""

    method: bytes
    target: bytes
    """Path and query as sent."""
    headers: Headers
    length: int
    """Content-Length; 0 without one."""
    chunked: bool
    keep_alive: bool
    expects_continue: bool
    http10: bool

    @property
    def path(self) -> bytes:
        """The target without its query."""
        return self.target.partition(b"?")[0]

    def header(self, name: bytes) -> bytes | None:
        """First value of the header ``name`` (lower case), or None."""
        for key, value in self.headers:
            if key.lower() == name:
                return value
        return None


class RequestParser:
    """One request: its head in one call, then its chunked body, if it has one.

    httptools' parser and this object refer to each other. It is dropped when its work is done, else every request
    (and its body) would wait for the garbage collector.
    """

    def __init__(self) -> None:
        self._parser: Any = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: Headers = []
        self._in_body = False
        self._keep_alive = False
        self._raw_bytes = 0
        self.body = bytearray()
        """Decoded bytes of a chunked body."""
        self.complete = False
        self.followed = False
        """More bytes came behind the chunked body: the connection must close after the response."""

    def parse_head(self, data: bytes) -> RequestHead:
        """Parse one complete head (``data`` ends with an empty line).

        Raises:
            ApiError: 400 for malformed or ambiguous heads, 501 and 505 for what HTTP/1.1 servers may refuse.
        """
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # an offer (h2c, websocket) that a server may ignore
        except httptools.HttpParserError as error:
            raise ApiError(400, f"The request is not valid HTTP/1.1: {error}.", close=True) from error
        self._in_body = True
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise ApiError(505, f"HTTP/{version} is not supported; use HTTP/1.1.", close=True)
        http10 = version == "1.0"
        if not self._target.startswith(b"/"):
            raise ApiError(400, "The request target must be a path that starts with '/'.", close=True)

        length: int | None = None
        codings: list[bytes] = []
        hosts = 0
        expects_continue = False
        for name, value in self._headers:
            key = name.lower()
            if key == b"content-length":
                if length is not None or not value.isdigit():
                    raise ApiError(400, "Content-Length must be given once, as a decimal number.", close=True)
                length = int(value)
            elif key == b"transfer-encoding":
                codings.append(value)
            elif key == b"host":
                hosts += 1
            elif key == b"expect":
                expects_continue = value.lower() == b"100-continue"
        if codings and (length is not None or http10):
            raise ApiError(400, "Transfer-Encoding with Content-Length or in HTTP/1.0 is ambiguous.", close=True)
        if codings and [coding.lower() for coding in codings] != [b"chunked"]:
            raise ApiError(501, "The only supported Transfer-Encoding is 'chunked'.", close=True)
        if hosts > 1 or (hosts == 0 and not http10):
            raise ApiError(400, "A request must have exactly one Host header.", close=True)
        method = self._parser.get_method()
        if not codings:
            self._parser = None
        return RequestHead(
            method=method,
            target=self._target,
            headers=self._headers,
            length=length or 0,
            chunked=bool(codings),
            keep_alive=self._keep_alive and not http10,
            expects_continue=expects_continue and not http10,
            http10=http10,
        )

    def feed_chunked(self, data: bytes, limit: int) -> bool:
        """Decode more of a chunked body; true once it is complete.

        Raises:
            ApiError: 400 for broken framing, 413 when the body (or its framing) is larger than ``limit`` allows.
        """
        self._raw_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                raise ApiError(400, f"The chunked request body is malformed: {error}.", close=True) from error
            self.followed = True
        if len(self.body) > limit or self._raw_bytes > _CHUNK_OVERHEAD * limit:
            raise build_too_large(limit)
        if self.complete:
            self._parser = None
        return self.complete

    # --- callbacks of httptools ---

    def on_message_begin(self) -> None:
        if self.complete:
            self.followed = True

    def on_url(self, url: bytes) -> None:
        if not self._in_body:
            self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # later ones are trailers: a proxy may drop them
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if not self._in_body:  # asked here: llhttp forgets the Connection header when a message is complete
            self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        if not self.complete:
            self.body += data

    def on_message_complete(self) -> None:
        self.complete = self.complete or self._in_body


def build_too_large(limit: int) -> ApiError:
    """The 413 for a body above ``limit`` bytes."""
    return ApiError(413, f"The request body is larger than the router's limit of {limit} bytes.", close=True)


def compute_end_to_end(headers: Headers) -> Headers:
    """``headers`` without hop-by-hop fields, those that Connection names, and those that the router writes itself."""
    named: set[bytes] = set()
    for name, value in headers:
        if name.lower() == b"connection":
            named.update(token.strip().lower() for token in value.split(b","))
    dropped = HOP_BY_HOP | _REBUILT | named if named else HOP_BY_HOP | _REBUILT
    return [(name, value) for name, value in headers if name.lower() not in dropped]


def build_forwarded_head(request: RequestHead) -> bytes:
    """The head for engines, equal for all legs of a request, up to its framing (:func:`finish_request_head`)."""
    lines = [b"%b %b HTTP/1.1\r\n" % (request.method, request.target)]
    lines += [b"%b: %b\r\n" % field for field in compute_end_to_end(request.headers)]
    if request.http10 and request.header(b"host") is None:
        lines.append(b"host: router\r\n")
    return b"".join(lines)


def finish_request_head(forwarded: bytes, length: int | None, *, guarded: bool = False) -> bytes:
    """``forwarded`` with the length of its body (None: a request without one).

    Args:
        forwarded: from :func:`build_forwarded_head`.
        length: of the body.
        guarded: the body announces prefilled tokens: ask for the distinct error when they are lost.
    """
    lines = [forwarded]
    if guarded:
        lines.append(_GUARDED)
    if length is not None:
        lines.append(b"content-length: %d\r\n" % length)
    return b"".join([*lines, b"\r\n"])


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """An engine's response head."""

    status: int
    reason: bytes
    headers: Headers
    length: int | None
    """Content-Length; None when the body is chunked or ends with the connection."""
    chunked: bool
    keep_alive: bool

    @property
    def bodyless(self) -> bool:
        """Whether this status never has a body (RFC 9112 section 6.3)."""
        return self.status in (204, 304) or self.status < 200

    @property
    def lost_handover(self) -> bool:
        """Whether decode refused the request because it did not find what prefill computed."""
        return self.status == 503 and any(
            name.lower() == _HANDOVER and value == _ANSWERED_LOST for name, value in self.headers
        )

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return any(
            name.lower() == b"content-type" and value.lower().startswith(b"text/event-stream")
            for name, value in self.headers
        )


def build_response_head(head: ResponseHead, *, raw_framing: bool, close: bool) -> bytes:
    """The head for the client of a relayed response.

    Args:
        head: the engine's head.
        raw_framing: the body's bytes are relayed as they are, so Transfer-Encoding stays.
        close: the connection ends after this response.
    """
    lines = [b"HTTP/1.1 %d %b\r\n" % (head.status, head.reason)]
    lines += [b"%b: %b\r\n" % field for field in compute_end_to_end(head.headers)]
    if head.chunked and raw_framing:
        lines.append(b"transfer-encoding: chunked\r\n")
    elif head.length is not None:
        lines.append(b"content-length: %d\r\n" % head.length)
    if close:
        lines.append(b"connection: close\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


def build_local_response(
    status: int,
    body: bytes,
    *,
    content_type: bytes = b"application/json",
    headers: Headers | None = None,
    close: bool = False,
    with_body: bool = True,
) -> bytes:
    """A complete response of the router itself (``with_body`` is false for HEAD)."""
    lines = [
        b"HTTP/1.1 %d %b\r\n" % (status, HTTPStatus(status).phrase.encode("ascii")),
        b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type, len(body)),
    ]
    lines += [b"%b: %b\r\n" % field for field in headers or []]
    if close:
        lines.append(b"connection: close\r\n")
    lines.append(b"\r\n")
    if with_body:
        lines.append(body)
    return b"".join(lines)
