"""The router's parsers against another implementation (h11): what we accept, it must read in the same way.

That is what request smuggling needs two of: parsers that disagree where a message ends. Being stricter is allowed. The
bytes are drawn as valid messages, whole or damaged with what parsers are known to disagree about, cut at random places.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import h11
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bidikv_runtime.router.http.http1 import Headers
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.tests.router_wire import cut, exchange, receive

_EXAMPLES = 300
"""Each test has passed with 20,000, too; what more examples found is an ``@example`` now."""
_LARGE = 1 << 20


@dataclass
class Message:
    """What both implementations must agree on."""

    start: tuple[bytes, ...]
    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass
class Read:
    """What h11 makes of a connection's bytes."""

    messages: list[Message] = field(default_factory=list)
    error: str = ""
    trailing: bytes = b""
    """What it has not read."""


def read_requests(data: bytes) -> Read:
    """The requests in ``data``, as h11 reads them, until it refuses or the connection must close."""
    read = Read(trailing=data)
    try:
        while read.trailing:
            connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_LARGE)
            # One empty line before a request may be ignored (RFC 9112 section 2.2); h11 does not.
            connection.receive_data(read.trailing.removeprefix(b"\r\n"))
            message = _read_message(connection)
            if message is None:
                break
            read.messages.append(message)
            read.trailing = connection.trailing_data[0]
            if connection.their_state not in (h11.DONE, h11.MUST_CLOSE):  # it offers another protocol: not with us
                connection.send(h11.Response(status_code=200, headers=[]))
            if connection.their_state is not h11.DONE:
                break
    except h11.RemoteProtocolError as error:
        read.error = str(error)
    return read


def _read_message(connection: h11.Connection) -> Message | None:
    message: Message | None = None
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            message = Message((event.method, event.target), list(event.headers), b"")
        elif isinstance(event, h11.Response):
            message = Message((b"%d" % event.status_code,), list(event.headers), b"")
        elif isinstance(event, h11.Data) and message is not None:
            message.body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return message
        elif not isinstance(event, h11.InformationalResponse):
            return None


def read_response(data: bytes, *, end: bool) -> Read:
    """The final response in ``data``, as h11 reads it."""
    connection, read = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LARGE), Read()
    connection.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    if end:
        connection.receive_data(b"")
    try:
        message = _read_message(connection)
        if message is not None:
            read.messages.append(message)
    except h11.RemoteProtocolError as error:
        read.error = str(error)
    read.trailing = connection.trailing_data[0]
    return read


# --- messages and damage ---

_NASTY = [
    *(b"\r\n", b"\n", b"\r", b"\r\r\n", b"\n\r\n", b"\r\n\r\n", b" ", b"\t", b":", b"\x00", b"\x0b", b"\x0c", b"\x7f"),
    *(
        b"\x80",
        b"\xa0",
        b"\xff",
        b";",
        b",",
        b"+",
        b"-",
        b"_",
        b"0x",
        b"0",
        b"1",
        b"5",
        b"f",
        b"00000000000",
        b'"',
        b"%",
    ),
    *(b"chunked", b"identity", b"gzip, chunked", b"close", b"keep-alive", b"100-continue", b"HTTP/1.0", b"HTTP/1.1"),
    *(b"Content-Length: 5\r\n", b"content-length: 0\r\n", b"Transfer-Encoding: chunked\r\n", b"transfer-encoding:\r\n"),
    *(
        b"Content-Length : 5\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b" folded: x\r\n",
        b"\tfolded\r\n",
        b"Host: b\r\n",
    ),
    *(b"Upgrade: h2c\r\n", b"Connection: upgrade\r\n", b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"10000000000000000\r\n"),
    *(b"5;ext=1\r\n", b"5 \r\n", b" 5\r\n", b"0;\r\n", b"trailer: x\r\n", b"GET /b HTTP/1.1\r\nHost: b\r\n\r\n"),
]
_tokens = st.sampled_from([b"x", b"X-Two", b"accept", b"Connection", b"te", b"User-Agent"])
_values = st.sampled_from([b"", b"a", b"a b", b"a\tb", b"close", b"keep-alive", b"\xe4", b"a,b", b"trailers", b'"q"'])
_spaces = st.sampled_from([b"", b" ", b"\t", b"  "])


@st.composite
def _field(draw: st.DrawFn) -> bytes:
    return draw(_tokens) + b":" + draw(_spaces) + draw(_values) + draw(_spaces) + b"\r\n"


@st.composite
def _framed(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A framing header and the body in it."""
    body = draw(st.binary(max_size=40))
    kind = draw(st.sampled_from(["none", "length", "length", "chunked", "chunked"]))
    if kind == "none":
        return b"", b""
    if kind == "length":
        return b"Content-Length:" + draw(_spaces) + b"%d" % len(body) + draw(_spaces) + b"\r\n", body
    chunks = cut(body, draw(st.lists(st.integers(0, 40), max_size=4)))
    extension = draw(st.sampled_from([b"", b"", b";a=b", b';a="b"', b" ;a"]))
    size = draw(st.sampled_from([b"%x", b"%X", b"0%x"]))
    raw = b"".join(size % len(chunk) + extension + b"\r\n" + chunk + b"\r\n" for chunk in chunks)
    trailers = b"".join(draw(st.lists(_field(), max_size=2)))
    name = draw(st.sampled_from([b"Transfer-Encoding: chunked\r\n", b"transfer-encoding:\tChunked \r\n"]))
    return name, raw + b"0\r\n" + trailers + b"\r\n"


@st.composite
def _request(draw: st.DrawFn) -> bytes:
    method = draw(st.sampled_from([b"GET", b"POST", b"HEAD", b"PUT"]))
    target = draw(st.sampled_from([b"/", b"/a?b=c", b"/%41", b"/a#b", b"*", b"http://a/b"]))
    version = draw(st.sampled_from([b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0"]))
    framing, body = draw(_framed())
    fields = [b"Host: a\r\n", framing, *draw(st.lists(_field(), max_size=3))]
    return b"%b %b %b\r\n" % (method, target, version) + b"".join(draw(st.permutations(fields))) + b"\r\n" + body


@st.composite
def _response(draw: st.DrawFn) -> bytes:
    status = draw(st.sampled_from([b"200 OK", b"200 OK", b"200 ", b"204 No Content", b"304 x", b"503 a b", b"101 x"]))
    version = draw(st.sampled_from([b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0"]))
    interim = draw(st.sampled_from([b"", b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 x\r\nlink: y\r\n\r\n"]))
    framing, body = draw(_framed())
    fields = [framing, *draw(st.lists(_field(), max_size=3))]
    head = b"%b %b\r\n" % (version, status) + b"".join(draw(st.permutations(fields))) + b"\r\n"
    return interim + head + body


@st.composite
def _damaged(draw: st.DrawFn, data: bytes) -> bytes:
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(data)))
        removed = draw(st.sampled_from([0, 0, 1, 2, 8]))
        data = data[:start] + draw(st.sampled_from([b"", *_NASTY])) + data[start + removed :]
    return data


_requests = st.lists(_request(), min_size=1, max_size=3).map(b"".join).flatmap(_damaged)
_responses = _response().flatmap(_damaged)
_cuts = st.lists(st.integers(0, 2000), max_size=6)


# --- the comparison ---


def normalize(headers: Headers) -> Headers:
    """As h11 does."""
    return [(name, value.lower() if name == b"transfer-encoding" else value) for name, value in headers]


@given(_requests, _cuts)
@settings(max_examples=_EXAMPLES)
@example(b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\n\r\nGET /b HTTP/1.1\r\nHost: a\r\n\r\n", [])
@example(
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
    [],
)
@example(b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", [])
@example(b"\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", [])
def test_requests_are_read_as_the_reference_reads_them(data: bytes, where: Sequence[int]) -> None:
    served = asyncio.run(receive(Limits(), cut(data, where)))
    ours = [Message((r.head.method, r.head.target), normalize(r.head.headers), bytes(r.body)) for r in served.requests]
    assert ours == read_requests(data).messages[: len(ours)]


@given(_responses, _cuts, st.booleans(), st.booleans())
@settings(max_examples=_EXAMPLES)
@example(b"HTTP/1.1 200 \x00OK\r\nContent-Length:0\r\n\r\n", [], False, True)
@example(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n\r\n", [], False, True)
@example(b"HTTP/1.1 304 x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", [46], False, True)
def test_responses_are_read_as_the_reference_reads_them(
    data: bytes, where: Sequence[int], end: bool, early: bool
) -> None:
    relayed = asyncio.run(exchange(cut(data, where), decoded=True, end=end, early=early))
    if not relayed.complete:
        return
    assert relayed.head is not None
    theirs = read_response(data, end=end)
    ours = Message((b"%d" % relayed.head.status,), normalize(relayed.head.headers), relayed.body)
    assert [ours] == theirs.messages
    assert not (relayed.kept and theirs.trailing)
