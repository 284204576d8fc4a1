"""Messages between a reader and a source's lookup port: msgpack arrays, versioned and bounded.

A message is decoded into a typed struct or refused; nothing else of it is looked at. Fields may be appended under the
same version (older readers skip them); any other change takes a new version, which the other side refuses.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

VERSION: Final = 1
MAXIMUM_BLOCKS: Final = 65_536
"""Blocks in a message: a million tokens in blocks of 16."""
MAXIMUM_BYTES: Final = 8 << 20
"""Size of a message: the largest lookup carries 65,536 hashes of 32 bytes and their headers."""

Hash = Annotated[bytes, msgspec.Meta(min_length=8, max_length=64)]
Hashes = Annotated[list[Hash], msgspec.Meta(max_length=MAXIMUM_BLOCKS)]
Numbers = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=MAXIMUM_BLOCKS)]


class WireError(ValueError):
    """A message is too large, malformed or of another version."""


class Lookup(msgspec.Struct, array_like=True, frozen=True, tag="lookup"):
    """Which leading run of ``hashes`` is published? Answered by ``Found`` or ``Refused``."""

    version: int
    sequence: int
    """Chosen by the reader; the reply repeats it."""
    compatibility: bytes
    """Digest of the reader's ``Compatibility``; the source answers only its equal."""
    hashes: Hashes


class Validate(msgspec.Struct, array_like=True, frozen=True, tag="validate"):
    """Which leading blocks still carry these publication numbers? Answered by ``Validated``."""

    version: int
    sequence: int
    epoch: int
    blocks: Numbers
    publications: Numbers


class Peer(msgspec.Struct, array_like=True, frozen=True):
    """Where a reader's NIXL agents find this engine."""

    engine_id: str
    host: str
    port: int
    """NIXL side channel, for the handshake."""
    tensor_parallel_size: int


class Found(msgspec.Struct, array_like=True, frozen=True, tag="found"):
    """The published prefix, possibly empty."""

    sequence: int
    epoch: int
    blocks: Numbers
    publications: Numbers
    peer: Peer


class Validated(msgspec.Struct, array_like=True, frozen=True, tag="validated"):
    sequence: int
    epoch: int
    """The source's own epoch: another one than the reader's says that the source restarted."""
    valid: int
    """Number of leading blocks that are unchanged since the lookup."""


class Refused(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    """The two engines must not exchange KV, and why."""

    sequence: int
    version: int
    compatibility: dict[str, str]
    """What the source is, for the reader to say in which point it differs; empty when only the version differs."""


Request = Lookup | Validate
Reply = Found | Validated | Refused

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """Message as bytes."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """Request of any version whose layout is known; the caller compares the version.

    Raises:
        WireError: too large, malformed, or lists of unequal length.
    """
    message: Request = _decode(_requests, data)
    if isinstance(message, Validate) and len(message.blocks) != len(message.publications):
        raise WireError(f"{len(message.blocks)} blocks came with {len(message.publications)} publication numbers")
    return message


def decode_reply(data: bytes) -> Reply:
    """Reply of a source.

    Raises:
        WireError: too large, malformed, or lists of unequal length.
    """
    message: Reply = _decode(_replies, data)
    if isinstance(message, Found) and len(message.blocks) != len(message.publications):
        raise WireError(f"{len(message.blocks)} blocks came with {len(message.publications)} publication numbers")
    return message


def _decode(decoder: Any, data: bytes) -> Any:
    if len(data) > MAXIMUM_BYTES:
        raise WireError(f"a message of {len(data)} bytes is over the limit of {MAXIMUM_BYTES}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:  # the latter: an appended field may nest without end
        raise WireError(f"a message cannot be decoded: {error}") from None
