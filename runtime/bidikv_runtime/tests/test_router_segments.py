"""TCP has no messages: however bytes are cut into segments, both sides of the router see the same thing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_runtime.router.limits import Limits
from bidikv_runtime.tests.router_wire import Relayed, cut, exchange, receive


def encode(body: bytes, chunks: Sequence[int] | None) -> bytes:
    """A request with ``body``: with its length, or in chunks that end at ``chunks``."""
    head = b"POST /x HTTP/1.1\r\nhost: a\r\n"
    if chunks is None:
        return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    encoded = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in cut(body, chunks))
    return head + b"transfer-encoding: chunked\r\n\r\n" + encoded + b"0\r\n\r\n"


cuts = st.lists(st.integers(0, 10_000), max_size=12)
garbage = st.binary(max_size=300).filter(lambda data: b"HTTP/" not in data)
bodies = st.binary(max_size=200) | st.builds(lambda n: b"\r\n\r\n" * n, st.integers(0, 60))


@given(st.lists(st.tuples(bodies, st.none() | cuts), min_size=1, max_size=4), cuts)
def test_requests_arrive_whole_and_in_order(requests: list[tuple[bytes, list[int] | None]], where: list[int]) -> None:
    # A chunked request may end the connection if more came in the same segment: it is only drawn as the last one.
    requests = [(body, None) for body, _ in requests[:-1]] + requests[-1:]
    data = b"".join(encode(body, chunks) for body, chunks in requests)
    served = asyncio.run(receive(Limits(), cut(data, where)))
    assert [request.body for request in served.requests] == [body for body, _ in requests]
    assert served.written.count(b"HTTP/1.1 200 OK") == len(requests)


@given(bodies, st.none() | cuts, cuts)
def test_limits_hold_in_any_segmentation(body: bytes, chunks: list[int] | None, where: list[int]) -> None:
    served = asyncio.run(receive(Limits(max_body_bytes=100), cut(encode(body, chunks), where)))
    if len(body) > 100:
        assert served.requests == []
        assert served.written.startswith((b"HTTP/1.1 413 ", b"HTTP/1.1 400 "))
    elif chunks is None:
        assert [request.body for request in served.requests] == [body]


@given(garbage, cuts)
def test_garbage_never_breaks_the_server(data: bytes, where: list[int]) -> None:
    served = asyncio.run(receive(Limits(), cut(data, where)))
    assert served.requests == []
    assert served.written == b"" or served.written.startswith(b"HTTP/1.1 ")


def test_a_body_larger_than_its_first_allocation() -> None:
    body = bytes(range(256)) * 16_384  # 4 MiB
    served = asyncio.run(receive(Limits(), cut(encode(body, None), range(0, 5_000_000, 200_003))))
    assert [request.body for request in served.requests] == [body]


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: x\r\n"


@given(bodies, st.none() | cuts, cuts, st.booleans(), st.booleans(), st.booleans())
def test_answers_are_relayed_as_sent(
    body: bytes, chunks: list[int] | None, where: list[int], decoded: bool, interim: bool, early: bool
) -> None:
    if chunks is None:
        head, raw = HEAD + b"content-length: %d\r\n\r\n" % len(body), body
    else:
        head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
        raw = encode(body, chunks).partition(b"\r\n\r\n")[2]
    data = (b"HTTP/1.1 100 Continue\r\n\r\n" if interim else b"") + head + raw
    relayed = asyncio.run(exchange(cut(data, where), decoded=decoded, end=False, early=early))
    assert (relayed.complete, relayed.kept) == (True, True)
    assert relayed.body == (body if decoded else raw)


@given(bodies, st.none() | cuts, cuts, st.integers(1, 50), st.booleans())
def test_a_truncated_answer_is_never_complete(
    body: bytes, chunks: list[int] | None, where: list[int], missing: int, early: bool
) -> None:
    data = encode(body, chunks).replace(b"POST /x HTTP/1.1\r\nhost: a", b"HTTP/1.1 200 OK\r\nx: y", 1)
    data = data[:-missing]
    relayed = asyncio.run(exchange(cut(data, where), decoded=False, end=True, early=early))
    assert (relayed.complete, relayed.kept) == (False, False)


@given(garbage, cuts)
def test_garbage_is_no_answer(data: bytes, where: list[int]) -> None:
    assert asyncio.run(exchange(cut(data, where), decoded=False, end=True)) == Relayed()


@pytest.mark.parametrize("early", [True, False])
def test_an_answer_without_framing_ends_with_its_connection(early: bool) -> None:
    relayed = asyncio.run(exchange([HEAD + b"\r\n", b"some", b"thing"], decoded=False, end=True, early=early))
    assert (relayed.body, relayed.complete, relayed.kept) == (b"something", True, False)
