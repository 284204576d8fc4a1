"""Messages between a reader and a source's lookup port: msgpack arrays, versioned and bounded.

A message is decoded into a typed struct or refused; nothing else of it is looked at. Fields may be appended under the
same version (older readers skip them); any other change takes a new version, which the other side refuses.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from bidikv_runtime.contract import MAXIMUM_SESSION_LENGTH

VERSION: Final = 2
MAXIMUM_BLOCKS: Final = 65_536
"""Blocks in a message: a million tokens in blocks of 16."""
MAXIMUM_RUNS: Final = 4
"""Runs in an answer. A session that lost blocks in the middle has two or three; more pieces are not worth reading."""
MAXIMUM_BYTES: Final = 4 << 20
"""Size of a message: the largest lookup carries 65,536 hashes of 32 bytes and their headers, 2.2 MB."""
MAXIMUM_PARALLEL: Final = 4096

Whole = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Hash = Annotated[bytes, msgspec.Meta(min_length=8, max_length=64)]
Hashes = Annotated[list[Hash], msgspec.Meta(max_length=MAXIMUM_BLOCKS)]
Numbers = Annotated[list[Whole], msgspec.Meta(max_length=MAXIMUM_BLOCKS)]
Session = Annotated[str, msgspec.Meta(max_length=MAXIMUM_SESSION_LENGTH)]
ParallelSize = Annotated[int, msgspec.Meta(ge=1, le=MAXIMUM_PARALLEL)]


class WireError(ValueError):
    """A message is too large, malformed or of another version."""


class Lookup(msgspec.Struct, array_like=True, frozen=True, tag="lookup"):
    """Which of ``hashes`` are published? Answered by ``Found`` or ``Refused``."""

    version: Whole
    sequence: Whole
    """Chosen by the reader; the reply repeats it."""
    compatibility: Annotated[bytes, msgspec.Meta(max_length=64)]
    """Digest of the reader's ``Compatibility``; the source answers only its equal."""
    hashes: Hashes
    tensor_parallel_size: ParallelSize = 1
    """The reader's: another one than the source's may do (``compatibility.explain_parallelism``)."""
    session: Session = ""
    """Of the request that wants the KV; empty when it has none. Changes no answer: see ``unread.py``."""


class Validate(msgspec.Struct, array_like=True, frozen=True, tag="validate"):
    """Which leading blocks still carry these publication numbers? Answered by ``Validated``."""

    version: Whole
    sequence: Whole
    epoch: Whole
    blocks: Numbers
    publications: Numbers
    session: Session = ""
    """As in ``Lookup``."""


class Peer(msgspec.Struct, array_like=True, frozen=True):
    """Where a reader's NIXL agents find this engine."""

    engine_id: Name
    host: Name
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    """NIXL side channel, for the handshake."""
    tensor_parallel_size: ParallelSize
    registration: Whole = 0
    """How often its memory was registered: after a sleep (vLLM 0.33) readers have to shake hands again."""


class Run(msgspec.Struct, array_like=True, frozen=True):
    """Consecutive hashes of the question that are published: ``blocks[i]`` holds the hash at ``first + i``."""

    first: Annotated[int, msgspec.Meta(ge=0, lt=MAXIMUM_BLOCKS)]
    blocks: Annotated[Numbers, msgspec.Meta(min_length=1)]
    publications: Numbers

    @property
    def end(self) -> int:
        """Position in the question after the last block."""
        return self.first + len(self.blocks)


class Found(msgspec.Struct, array_like=True, frozen=True, tag="found"):
    """The first runs of published blocks, in order; possibly none."""

    sequence: Whole
    epoch: Whole
    runs: Annotated[list[Run], msgspec.Meta(max_length=MAXIMUM_RUNS)]
    peer: Peer


class Validated(msgspec.Struct, array_like=True, frozen=True, tag="validated"):
    sequence: Whole
    epoch: Whole
    """The source's own epoch: another one than the reader's says that the source restarted."""
    valid: Whole
    """Number of leading blocks that are unchanged since the lookup."""


class Refused(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    """The two engines must not exchange KV, and why."""

    sequence: Whole
    version: Whole
    compatibility: Annotated[dict[Name, Annotated[str, msgspec.Meta(max_length=4096)]], msgspec.Meta(max_length=64)]
    """What the source is, for the reader to say in which point it differs; empty when only the version differs."""
    epoch: Whole = 0


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
    if isinstance(message, Validate):
        _check_pairs(message.blocks, message.publications)
    return message


def decode_reply(data: bytes) -> Reply:
    """Reply of a source. The runs of ``Found`` are in order, apart from each other and within ``MAXIMUM_BLOCKS``.

    Raises:
        WireError: too large, malformed, lists of unequal length, or runs that overlap.
    """
    message: Reply = _decode(_replies, data)
    if isinstance(message, Found):
        end = -1
        for run in message.runs:
            _check_pairs(run.blocks, run.publications)
            if run.first <= end or run.end > MAXIMUM_BLOCKS:
                raise WireError(f"a run of blocks from {run.first} to {run.end} does not come after one to {end}")
            end = run.end
    return message


def _check_pairs(blocks: list[int], publications: list[int]) -> None:
    if len(blocks) != len(publications):
        raise WireError(f"{len(blocks)} blocks came with {len(publications)} publication numbers")


def _decode(decoder: Any, data: bytes) -> Any:
    if len(data) > MAXIMUM_BYTES:
        raise WireError(f"a message of {len(data)} bytes is over the limit of {MAXIMUM_BYTES}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:  # the latter: an appended field may nest without end
        raise WireError(f"a message cannot be decoded: {error}") from None
