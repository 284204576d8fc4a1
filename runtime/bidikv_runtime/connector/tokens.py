"""Tokens: what tells peers apart from everybody else who reaches the lookup port.

Every message carries a keyed BLAKE2b tag (RFC 7693), whose key is a token. The direction is part of the tag, so a
request that is sent back does not pass for a reply; replies repeat the request's sequence number, which starts at
random in every process, so an old reply does not pass for a new one. Messages are not encrypted: they hold hashes and
block numbers, no prompts; who can read the network reads the KV itself, too.

A token is changed without a restart by adding the new one as the second line everywhere, then making it the first line
everywhere, then removing the old one.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bidikv_runtime import contract

MINIMUM_LENGTH: Final = contract.MINIMUM_TOKEN_LENGTH
MAXIMUM_TOKENS: Final = contract.MAXIMUM_TOKENS
MAXIMUM_FILE_BYTES: Final = 16_384
CHECK_SECONDS: Final = 1.0
"""How often the file is looked at, at most."""
TAG_BYTES: Final = 16
CHUNK: Final = 2_000
"""hashlib gives up the interpreter's lock for pieces of 2,048 bytes and more. Taking it back beside a busy thread takes
up to 5 ms, hashing such a piece 2 us."""

REQUEST: Final = b"bidikv request"
REPLY: Final = b"bidikv reply"
"""Directions: BLAKE2b's personalisation, at most 16 bytes."""


class TokenFileError(ValueError):
    """The token file cannot be used."""


@dataclass(frozen=True)
class _Key:
    token: bytes
    secret: bytes


class Tokens:
    """The tokens of one file, current to the second. May be used from any thread."""

    def __init__(self, path: Path, logger: logging.Logger) -> None:
        """
        Raises:
            TokenFileError: one sentence that names the file and the remedy.
        """
        self._path, self._logger = path, logger
        self._lock = threading.Lock()
        self._state, self._keys = _read(path)
        self._check_at = time.monotonic() + CHECK_SECONDS
        self._complaint = ""

    def seal(self, direction: bytes, data: bytes) -> bytes:
        """Tag, then ``data``; the first token signs."""
        return _tag(self._current()[0].secret, direction, data) + data

    def open(self, direction: bytes, message: bytes) -> bytes | None:
        """The data of a sealed message, or None when no token fits. Compares in constant time."""
        tag, data = message[:TAG_BYTES], message[TAG_BYTES:]
        for key in self._current():
            if hmac.compare_digest(tag, _tag(key.secret, direction, data)):
                return data
        return None

    def accepts(self, token: str) -> bool:
        """Whether ``token`` is one of the tokens. Compares in constant time, with each of them."""
        given = token.encode(errors="replace")
        fits = [hmac.compare_digest(given, key.token) for key in self._current()]  # all of them: equal time
        return any(fits)

    def _current(self) -> tuple[_Key, ...]:
        now = time.monotonic()
        if now >= self._check_at and self._lock.acquire(blocking=False):
            try:
                self._check_at = now + CHECK_SECONDS
                self._read_again()
            finally:
                self._lock.release()
        return self._keys

    def _read_again(self) -> None:
        try:
            if _stat(self._path) == self._state:
                return
            self._state, self._keys = _read(self._path)
        except TokenFileError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                self._logger.warning("%s; the tokens read before stay in use", error)
        else:
            self._complaint = ""
            self._logger.info("the token file %s has changed: %d tokens are accepted", self._path, len(self._keys))


def load_tokens(environment: Mapping[str, str], logger: logging.Logger) -> Tokens | None:
    """The tokens of the file that ``contract.ENV_TOKEN_FILE`` names; None when peers are not authenticated.

    Raises:
        TokenFileError: one sentence that names the file and the remedy.
    """
    path = environment.get(contract.ENV_TOKEN_FILE)
    return Tokens(Path(path), logger) if path else None


def _stat(path: Path) -> tuple[int, int, int]:
    """What changes when the file does. A mounted Secret changes by a symbolic link, hence the inode."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise TokenFileError(_explain(path, f"cannot be read ({error.strerror})")) from None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> tuple[tuple[int, int, int], tuple[_Key, ...]]:
    state = _stat(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAXIMUM_FILE_BYTES + 1)
    except OSError as error:
        raise TokenFileError(_explain(path, f"cannot be read ({error.strerror})")) from None
    return state, tuple(_Key(token, hashlib.blake2b(token).digest()) for token in parse_tokens(path, data))


def parse_tokens(path: Path, data: bytes) -> list[bytes]:
    """Tokens in the content of a token file; empty lines and white space around a token do not count.

    Raises:
        TokenFileError: one sentence that names the file and the line, never a token.
    """
    if len(data) > MAXIMUM_FILE_BYTES:
        raise TokenFileError(_explain(path, f"is larger than {MAXIMUM_FILE_BYTES} bytes"))
    lines = [(number, line.strip()) for number, line in enumerate(data.splitlines(), 1)]
    tokens = [(number, line) for number, line in lines if line]
    for number, token in tokens:
        if len(token) < MINIMUM_LENGTH:
            raise TokenFileError(_explain(path, f"has a token of {len(token)} characters in line {number}"))
        if not all(0x21 <= byte <= 0x7E for byte in token):
            raise TokenFileError(_explain(path, f"has white space or a character outside ASCII within line {number}"))
    if not 1 <= len(tokens) <= MAXIMUM_TOKENS:
        raise TokenFileError(_explain(path, f"holds {len(tokens)} tokens"))
    return [token for _, token in tokens]


def _explain(path: Path, fault: str) -> str:
    return (
        f"the token file {path} ({contract.ENV_TOKEN_FILE}) {fault}: write 1 to {MAXIMUM_TOKENS} tokens of at least "
        f"{MINIMUM_LENGTH} ASCII characters into it, one per line"
    )


def _tag(secret: bytes, direction: bytes, data: bytes) -> bytes:
    digest = hashlib.blake2b(key=secret, person=direction, digest_size=TAG_BYTES)
    view = memoryview(data)
    for start in range(0, len(data), CHUNK):
        digest.update(view[start : start + CHUNK])
    return digest.digest()
