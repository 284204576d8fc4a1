"""From received bytes to heads and bodies; pure.

llhttp (through httptools) judges the syntax, strictly; this module adds the rules that matter for a proxy (RFC 9112
section 6.3): both framings at once, repeated framing headers and unknown transfer codings are refused, from clients and
from engines.

httptools' parsers and their owners refer to each other. A parser is dropped when its work is done, else every message
(and its body) would wait for the garbage collector.
"""

from __future__ import annotations

import re
from typing import Any, Final

import httptools

from bidikv_runtime.router.api.errors import ApiError
from bidikv_runtime.router.http.http1 import Headers, RequestHead, ResponseHead

_CHUNK_OVERHEAD: Final = 8
_CHUNK_ALLOWANCE: Final = 64 * 1024
"""Raw bytes that a chunked body may cost: this many per byte of it (chunks of one byte cost 6), and so many more."""
_VERSIONS: Final = {"1.1": False, "1.0": True}
_REASON: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_CHUNKED_ANSWER: Final = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class MalformedAnswer(Exception):
    """An engine's answer is not HTTP/1.1, or it does not say clearly where it ends."""


class RequestParser:
    """One request: its head in one call, then its chunked body, if it has one."""

    def __init__(self) -> None:
        self._parser: Any = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: Headers = []
        self._in_body = False
        self._keep_alive = False
        self._raw_bytes = 0
        self._recent = b""
        self.body = bytearray()
        """Decoded bytes of a chunked body."""
        self.complete = False
        self.followed = False
        """More bytes came behind the chunked body: the connection must close after the response."""

    def parse_head(self, data: bytes, max_fields: int) -> RequestHead:
        """Parse one complete head (``data`` ends with an empty line) of at most ``max_fields`` fields.

        Raises:
            ApiError: 400 for malformed or ambiguous heads, 431, 501 and 505 for what servers may refuse.
        """
        if data[0] in b"\r\n":  # llhttp skips any number of them
            raise ApiError(400, "The request line is empty.", close=True)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # an offer (h2c, websocket) that a server may ignore
        except httptools.HttpParserError as error:
            raise ApiError(400, f"The request is not valid HTTP/1.1: {error}.", close=True) from error
        self._in_body = True
        version = self._parser.get_http_version()
        http10 = _VERSIONS.get(version)
        if http10 is None:
            raise ApiError(505, f"HTTP/{version} is not supported; use HTTP/1.1.", close=True)
        target = self._target
        if not target.startswith(b"/"):
            raise ApiError(400, "The request target must be a path that starts with '/'.", close=True)
        headers = self._headers
        if len(headers) > max_fields:
            raise ApiError(431, f"The request has more than {max_fields} header fields.", close=True)
        fields = dict(reversed(headers))
        length, chunked = self._find_framing(fields, http10)
        method = self._parser.get_method()
        if not data.startswith(b"%b %b HTTP/" % (method, target)):
            raise ApiError(400, "The request line must be: method, space, target, space, version.", close=True)
        if not chunked:
            self._parser = None
        return RequestHead(
            method=method,
            target=target,
            path=target.partition(b"?")[0],
            headers=headers,
            fields=fields,
            length=length,
            chunked=chunked,
            keep_alive=self._keep_alive and not http10,
            expects_continue=not http10 and fields.get(b"expect", b"").lower() == b"100-continue",
            http10=http10,
        )

    def _find_framing(self, fields: dict[bytes, bytes], http10: bool) -> tuple[int, bool]:
        repeated: set[bytes] = set()
        if len(fields) != len(self._headers):
            names = [name for name, _ in self._headers]
            repeated = {name for name in fields if names.count(name) > 1}
        length, coding = fields.get(b"content-length"), fields.get(b"transfer-encoding")
        if length is not None and (b"content-length" in repeated or not length.isdigit()):
            raise ApiError(400, "Content-Length must be given once, as a decimal number.", close=True)
        if coding is not None:
            if length is not None or http10:
                raise ApiError(400, "Transfer-Encoding with Content-Length or in HTTP/1.0 is ambiguous.", close=True)
            if b"transfer-encoding" in repeated or coding.lower() != b"chunked":
                raise ApiError(501, "The only supported Transfer-Encoding is 'chunked'.", close=True)
        if b"host" in repeated or (not http10 and b"host" not in fields):
            raise ApiError(400, "A request must have exactly one Host header.", close=True)
        return int(length or 0), coding is not None

    def feed_chunked(self, data: bytes, limit: int) -> bool:
        """Decode more of a chunked body; true once it is complete.

        Raises:
            ApiError: 400 for broken or excessive framing, 413 when the body is larger than ``limit``.
        """
        self._raw_bytes += len(data)
        self._recent = _keep_recent(self._recent, data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                raise ApiError(400, f"The chunked request body is malformed: {error}.", close=True) from error
            self.followed = True
        if len(self.body) > limit:
            raise build_too_large(limit)
        if self._raw_bytes > _CHUNK_OVERHEAD * len(self.body) + _CHUNK_ALLOWANCE:
            raise ApiError(400, "The chunked request body is nearly all framing; send larger chunks.", close=True)
        if self.complete:
            self._parser = None
            self.followed = self.followed or not _ends_body(self._recent)
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
            self._headers.append((name.lower(), value.rstrip(b" \t")))

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


def _keep_recent(recent: bytes, data: bytes) -> bytes:
    """The last bytes of a body, at least as many as :func:`_ends_body` looks at."""
    return data if len(data) > 8 else (recent + data)[-8:]


def _ends_body(recent: bytes) -> bool:
    """Whether nothing follows a complete chunked body: llhttp takes line ends behind it for the next message's."""
    return recent.endswith(b"\r\n\r\n") and recent[-5:-4] != b"\n"


class ResponseParser:
    """One response: its head in one call, then where its chunked body ends."""

    def __init__(self) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self._reason = b""
        self._headers: Headers = []
        self._in_body = False
        self._keep_alive = False
        self._recent = b""
        self.in_chunk = False
        self.complete = False
        self.followed = False
        """More bytes came behind the body: whose they are nobody knows."""

    def parse_head(self, data: bytes) -> ResponseHead:
        """Parse one complete head (``data`` ends with an empty line).

        Raises:
            MalformedAnswer: it is malformed, ambiguous, or switches protocols.
        """
        if data[0] in b"\r\n":
            raise MalformedAnswer("the status line is empty")
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise MalformedAnswer(str(error)) from error
        self._in_body = True
        headers = self._headers
        fields = dict(reversed(headers))
        if len(fields) != len(headers):
            for framing in (b"content-length", b"transfer-encoding"):
                if sum(name == framing for name, _ in headers) > 1:
                    raise MalformedAnswer(f"repeated {framing.decode()}")
        length, coding = fields.get(b"content-length"), fields.get(b"transfer-encoding")
        if coding is not None and (length is not None or coding.lower() != b"chunked"):
            raise MalformedAnswer("unknown transfer coding")
        if length is not None and not length.isdigit():
            raise MalformedAnswer("bad content-length")
        status = self._parser.get_status_code()
        if status == 101 or status < 100:
            raise MalformedAnswer(f"status {status}")
        if _REASON.fullmatch(self._reason) is None:
            raise MalformedAnswer("bad reason phrase")  # llhttp lets control characters pass
        if coding is None:
            self._parser = None
        return ResponseHead(
            status=status,
            reason=self._reason,
            headers=headers,
            fields=fields,
            length=None if length is None else int(length),
            chunked=coding is not None,
            keep_alive=self._keep_alive,
        )

    def follow(self, data: bytes) -> bytes:
        """Follow a chunked body; what to hand on of ``data``: all of it, chunk framing included.

        Raises:
            MalformedAnswer: broken framing, or bytes behind the end.
        """
        self._recent = _keep_recent(self._recent, data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise MalformedAnswer(str(error)) from error
        if self.complete:
            self._parser = None
            if self.followed or not _ends_body(self._recent):
                raise MalformedAnswer("more than one answer")
        return data

    # --- callbacks of httptools ---

    def on_message_begin(self) -> None:
        self.followed = self.complete

    def on_status(self, reason: bytes) -> None:
        if not self._in_body:
            self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:
            self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        if not self._in_body:  # asked here: llhttp forgets it when a message is complete
            self._keep_alive = self._parser.should_keep_alive()

    def on_chunk_header(self) -> None:
        self.in_chunk = True

    def on_chunk_complete(self) -> None:
        self.in_chunk = False

    def on_message_complete(self) -> None:
        self.complete = True


class DecodingParser(ResponseParser):
    """Follows a chunked body whose head another parser has read, and decodes it."""

    def __init__(self) -> None:
        self._decoded: list[bytes] = []
        super().__init__()
        self.parse_head(_CHUNKED_ANSWER)

    def follow(self, data: bytes) -> bytes:
        """What ``data`` holds of the body, without chunk framing; raises as the base class."""
        super().follow(data)
        decoded, self._decoded = self._decoded, []
        return b"".join(decoded)

    def on_body(self, data: bytes) -> None:
        self._decoded.append(data)
