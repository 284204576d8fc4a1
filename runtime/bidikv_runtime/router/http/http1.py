"""HTTP/1.1 heads: what a proxy keeps of them, and how they are built; pure.

Heads are rebuilt from parsed fields (``parsers.py``), never copied: then client, router and engine always agree where
a message ends. Names are lower-cased once, while parsing: HTTP does not tell them apart, and every look-up is cheap.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from bidikv_runtime.contract import HANDOVER_ANSWERED_LOST, HANDOVER_GUARDED, HANDOVER_HEADER, RANK_HEADER

Headers = list[tuple[bytes, bytes]]
"""Header fields in the order received, names in lower case."""

HEAD_END: Final = b"\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"

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
_RANK: Final = RANK_HEADER.encode("ascii")
_DROPPED: Final = HOP_BY_HOP | {b"content-length", b"expect", _HANDOVER, _RANK}
"""And what the router writes itself."""
_ANSWERED_LOST: Final = HANDOVER_ANSWERED_LOST.encode("ascii")
_GUARDED: Final = b"%b: %b\r\n" % (_HANDOVER, HANDOVER_GUARDED.encode("ascii"))
_STATUS_LINES: Final = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode("ascii")) for status in HTTPStatus
}


@dataclass(slots=True)
class RequestHead:
    """A request's head after all framing checks; never changed (a frozen one costs a microsecond more)."""

    method: bytes
    target: bytes
    """Path and query as sent."""
    path: bytes
    """The target without its query."""
    headers: Headers
    fields: dict[bytes, bytes]
    """The same by name; of a repeated one the first value."""
    length: int
    """Content-Length; 0 without one."""
    chunked: bool
    keep_alive: bool
    expects_continue: bool
    http10: bool

    def header(self, name: bytes) -> bytes | None:
        """First value of the header ``name`` (lower case), or None."""
        return self.fields.get(name)


def compute_end_to_end(headers: Headers) -> Headers:
    """``headers`` without hop-by-hop fields, those that Connection names, and those that the router writes itself."""
    dropped: frozenset[bytes] | set[bytes] = _DROPPED
    for name, value in headers:
        if name == b"connection":
            dropped = dropped | {token.strip().lower() for token in value.split(b",")}
    return [field for field in headers if field[0] not in dropped]


def build_forwarded_head(request: RequestHead, traceparent: bytes | None = None) -> bytes:
    """The head for engines, equal for all legs of a request, up to its framing (:func:`finish_request_head`).

    Args:
        request: the client's.
        traceparent: replaces the client's, if not None.
    """
    lines = [b"%b %b HTTP/1.1\r\n" % (request.method, request.target)]
    fields = compute_end_to_end(request.headers)
    if traceparent is not None:
        fields = [field for field in fields if field[0] != b"traceparent"]
        fields.append((b"traceparent", traceparent))
    lines += [b"%b: %b\r\n" % field for field in fields]
    if request.http10 and b"host" not in request.fields:
        lines.append(b"host: router\r\n")
    return b"".join(lines)


def finish_request_head(forwarded: bytes, length: int | None, *, guarded: bool = False) -> bytes:
    """``forwarded`` with the length of its body (None: a request without one).

    Args:
        forwarded: from :func:`build_forwarded_head`.
        length: of the body.
        guarded: the body announces prefilled tokens: ask for the distinct error when they are lost.
    """
    framing = b"\r\n" if length is None else b"content-length: %d\r\n\r\n" % length
    return forwarded + _GUARDED + framing if guarded else forwarded + framing


def address_rank(head: bytes, rank: int) -> bytes:
    """A whole request head, for one of the data-parallel ranks behind an engine's API."""
    return b"%b%b: %d\r\n\r\n" % (head[:-2], _RANK, rank)


@dataclass(slots=True)
class ResponseHead:
    """An engine's response head; never changed."""

    status: int
    reason: bytes
    headers: Headers
    fields: dict[bytes, bytes]
    """The same by name; of a repeated one the first value."""
    length: int | None
    """Content-Length; None when the body is chunked or ends with the connection."""
    chunked: bool
    keep_alive: bool

    @property
    def bodyless(self) -> bool:
        """Whether this status never has a body (RFC 9112 section 6.3)."""
        return self.status in (204, 304)

    @property
    def ends_with_connection(self) -> bool:
        """Whether only the end of the connection says where the body ends."""
        return self.length is None and not self.chunked and not self.bodyless

    @property
    def lost_handover(self) -> bool:
        """Whether decode refused the request because it did not find what prefill computed."""
        return self.status == 503 and self.fields.get(_HANDOVER) == _ANSWERED_LOST

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return self.fields.get(b"content-type", b"")[:17].lower() == b"text/event-stream"


def build_response_head(head: ResponseHead, *, chunked: bool, close: bool, extra: Headers | None = None) -> bytes:
    """The head for the client of a relayed response.

    Args:
        head: the engine's head.
        chunked: the body goes out in chunks: the engine's, relayed as they are, or the router's own.
        close: the connection ends after this response.
        extra: fields added by the router.
    """
    lines = [b"HTTP/1.1 %d %b\r\n" % (head.status, head.reason)]
    lines += [b"%b: %b\r\n" % field for field in compute_end_to_end(head.headers)]
    if extra:
        lines += [b"%b: %b\r\n" % field for field in extra]
    if chunked:
        lines.append(b"transfer-encoding: chunked\r\n")
    elif head.length is not None:
        lines.append(b"content-length: %d\r\n" % head.length)
    lines.append(b"connection: close\r\n\r\n" if close else b"\r\n")
    return b"".join(lines)


def build_chunk(data: bytes) -> bytes:
    """``data`` (not empty: that would end the body) as one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


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
    lines = [_STATUS_LINES[status], b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type, len(body))]
    lines += [b"%b: %b\r\n" % field for field in headers or []]
    lines.append(b"connection: close\r\n\r\n" if close else b"\r\n")
    if with_body:
        lines.append(body)
    return b"".join(lines)
