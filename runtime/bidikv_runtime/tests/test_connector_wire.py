"""Messages of the lookup port: they round-trip, and what is malformed or too large is refused."""

from __future__ import annotations

import contextlib

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from bidikv_runtime.connector import wire

PEER = wire.Peer("engine", "10.0.0.1", 5600, 4)
numbers = st.integers(0, 2**63 - 1)


def paired(length: int) -> tuple[list[int], list[int]]:
    return list(range(length)), list(range(100, 100 + length))


@pytest.mark.parametrize(
    "message",
    [
        wire.Lookup(wire.VERSION, 1, b"digest", [b"h" * 32]),
        wire.Validate(wire.VERSION, 2, 2**62 - 1, *paired(3)),
        wire.Validate(wire.VERSION, 2, 0, *paired(0)),
    ],
)
def test_requests_round_trip(message: wire.Request) -> None:
    assert wire.decode_request(wire.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        wire.Found(1, 2**62 - 1, [], PEER),
        wire.Found(1, 2**62 - 1, [wire.Run(0, *paired(2)), wire.Run(3, *paired(1))], PEER),
        wire.Validated(2, 3, 4),
        wire.Refused(3, wire.VERSION, {"model": "m"}, 4),
    ],
)
def test_replies_round_trip(message: wire.Reply) -> None:
    assert wire.decode_reply(wire.encode(message)) == message


def test_the_largest_lookup_fits() -> None:
    data = wire.encode(wire.Lookup(wire.VERSION, 1, b"d" * 16, [b"h" * 32] * wire.MAXIMUM_BLOCKS))
    assert len(data) < wire.MAXIMUM_BYTES
    assert isinstance(wire.decode_request(data), wire.Lookup)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (wire.encode(wire.Lookup(1, 1, b"d", [b"h" * 32] * (wire.MAXIMUM_BLOCKS + 1))), "length"),
        (wire.encode(wire.Lookup(1, 1, b"d", [b"short"])), "length"),
        (wire.encode(wire.Lookup(1, 1, b"d", [b"h" * 65])), "length"),
        (wire.encode(wire.Validate(1, 1, 1, [-1], [1])), ">= 0"),
        (wire.encode(wire.Validate(1, 1, 1, [1, 2], [1])), "2 blocks came with 1 publication numbers"),
        (wire.encode(wire.Validated(1, 1, 1)), "Invalid value 'validated'"),
        (b"\xc1", "decoded"),
        (b"", "decoded"),
        (b"\x00" * (wire.MAXIMUM_BYTES + 1), "over the limit"),
        (msgspec.msgpack.encode(["lookup", 1]), "at least"),
        (msgspec.msgpack.encode({"lookup": 1}), "array"),
    ],
)
def test_malformed_requests_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(wire.WireError, match=reason):
        wire.decode_request(data)


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ([wire.Run(0, [1], [])], "1 blocks came with 0 publication numbers"),
        ([wire.Run(0, [], [])], "length >= 1"),
        ([wire.Run(-1, [1], [1])], ">= 0"),
        ([wire.Run(5, [1], [1]), wire.Run(0, [1], [1])], "from 0 to 1 does not come after one to 6"),
        ([wire.Run(0, *paired(3)), wire.Run(2, [1], [1])], "from 2 to 3 does not come after one to 3"),
        ([wire.Run(0, *paired(3)), wire.Run(3, [1], [1])], "from 3 to 4 does not come after one to 3"),  # not maximal
        ([wire.Run(wire.MAXIMUM_BLOCKS - 1, *paired(2))], f"to {wire.MAXIMUM_BLOCKS + 1}"),
        ([wire.Run(wire.MAXIMUM_BLOCKS, [1], [1])], "<= 65535"),
        ([wire.Run(2 * i, [1], [1]) for i in range(wire.MAXIMUM_RUNS + 1)], "length <= 4"),
    ],
)
def test_malformed_replies_are_refused(runs: list[wire.Run], reason: str) -> None:
    with pytest.raises(wire.WireError, match=reason):
        wire.decode_reply(wire.encode(wire.Found(1, 1, runs, PEER)))


@pytest.mark.parametrize(
    "peer",
    [
        wire.Peer("e" * 257, "10.0.0.1", 5600, 1),
        wire.Peer("engine", "h" * 257, 5600, 1),
        wire.Peer("engine", "10.0.0.1", 65536, 1),
        wire.Peer("engine", "10.0.0.1", 5600, 0),
    ],
)
def test_a_peer_out_of_bounds_is_refused(peer: wire.Peer) -> None:
    with pytest.raises(wire.WireError, match="Expected"):
        wire.decode_reply(wire.encode(wire.Found(1, 1, [], peer)))


def test_a_lookup_of_the_first_version_is_understood_well_enough_to_be_refused() -> None:
    message = wire.decode_request(msgspec.msgpack.encode(["lookup", 1, 7, b"digest", [b"h" * 32]]))
    assert (message.version, message.sequence) == (1, 7)


def test_a_session_was_appended_to_messages_of_the_same_version() -> None:
    """Engines of before understand those that name one, and are understood."""
    lookup = wire.decode_request(msgspec.msgpack.encode(["lookup", wire.VERSION, 7, b"digest", [b"h" * 32], 2]))
    assert lookup == wire.Lookup(wire.VERSION, 7, b"digest", [b"h" * 32], 2, "")
    validate = wire.decode_request(msgspec.msgpack.encode(["validate", wire.VERSION, 7, 1, [1], [1]]))
    assert validate == wire.Validate(wire.VERSION, 7, 1, [1], [1], "")
    assert msgspec.msgpack.decode(wire.encode(wire.Lookup(wire.VERSION, 7, b"", [], 2, "s")))[6:] == ["s"]
    with pytest.raises(wire.WireError, match="length <= 128"):
        wire.decode_request(wire.encode(wire.Lookup(wire.VERSION, 7, b"", [], 2, "s" * 129)))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_raise_anything_else(data: bytes) -> None:
    for decode in (wire.decode_request, wire.decode_reply):
        with contextlib.suppress(wire.WireError):
            decode(data)


MESSAGES = [
    wire.encode(wire.Lookup(wire.VERSION, 1, b"digest", [b"h" * 32] * 3)),
    wire.encode(wire.Validate(wire.VERSION, 2, 2**62 - 1, *paired(3))),
    wire.encode(wire.Found(1, 2**62 - 1, [wire.Run(0, *paired(2)), wire.Run(3, *paired(1))], PEER)),
    wire.encode(wire.Validated(2, 3, 4)),
    wire.encode(wire.Refused(3, wire.VERSION, {"model": "m"}, 4)),
]


@given(
    st.sampled_from(MESSAGES),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4),
    st.integers(0, 200),
)
def test_damaged_messages_never_raise_anything_else(data: bytes, damage: list[tuple[int, int]], length: int) -> None:
    damaged = bytearray(data)
    for position, value in damage:
        damaged[position % len(data)] = value
    for decode in (wire.decode_request, wire.decode_reply):
        with contextlib.suppress(wire.WireError):
            decode(bytes(damaged[:length]))


@pytest.mark.parametrize("message", [wire.Validate(1, 1, 1, [1], [1]), wire.Validated(1, 1, 1)])
def test_endless_nesting_in_an_appended_field_is_refused(message: wire.Request | wire.Reply) -> None:
    plain = wire.encode(message)
    longer = bytes([plain[0] + 1]) + plain[1:] + b"\x91" * 100_000 + b"\x00"  # one field more: arrays in arrays
    decode = wire.decode_request if isinstance(message, wire.Validate) else wire.decode_reply
    with pytest.raises(wire.WireError, match="recursion"):
        decode(longer)


@given(st.lists(numbers, max_size=20), st.integers(0, 2**32), st.integers(0, 2**62))
def test_fields_appended_by_a_later_release_are_skipped(blocks: list[int], sequence: int, epoch: int) -> None:
    message = wire.Validate(wire.VERSION, sequence, epoch, blocks, blocks)
    longer = msgspec.msgpack.encode([*msgspec.msgpack.decode(wire.encode(message)), "appended"])
    assert wire.decode_request(longer) == message
