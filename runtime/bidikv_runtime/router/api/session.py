"""Which conversation a request belongs to; pure.

Why: the decode engine that served the last turn holds the conversation's KV, so all turns must reach the same one
without the client having to know. Order: a header, a body key, else the conversation's own beginning, which stays
equal from turn to turn while the history grows.

Invariant: the result depends on the request's bytes only, so every router replica derives the same one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final

import msgspec

from bidikv_runtime.contract import SESSION_BODY_KEYS, SESSION_HEADERS
from bidikv_runtime.router.api.splice import Fields
from bidikv_runtime.router.http.http1 import Headers

_HEADERS: Final = tuple(name.encode("ascii") for name in SESSION_HEADERS)
_OPENING_MESSAGES: Final = 8
"""How many messages may precede the first user message (system, developer, few-shot preambles)."""
_OPENING_PROMPT_BYTES: Final = 1024
"""Of a completions prompt: what identifies it. A shorter first prompt loses affinity for one turn."""
_TOKEN: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]', re.DOTALL)
"""Strings as a whole (brackets within them do not count), brackets and commas of valid JSON."""


class _Message(msgspec.Struct):
    role: str = ""


_MESSAGE_DECODER: Final = msgspec.json.Decoder(_Message)


def derive_session(headers: Headers, fields: Fields) -> bytes:
    """The session's key: 16 bytes.

    Args:
        headers: the request's headers.
        fields: the body's top-level values.
    """
    named = _find_named(headers, fields)
    if named is not None:
        return _digest(b"named", named)
    model = bytes(fields.get("model", b""))
    for key in ("messages", "input"):
        if key in fields and (opening := _select_opening(fields[key])):
            return _digest(key.encode(), model, *opening)
    text = fields.get("prompt", fields.get("input", b""))
    return _digest(b"text", model, bytes(memoryview(text)[:_OPENING_PROMPT_BYTES]))


def _find_named(headers: Headers, fields: Fields) -> bytes | None:
    for wanted in _HEADERS:
        for name, value in headers:
            if value and name.lower() == wanted:
                return value
    for key in SESSION_BODY_KEYS:
        raw = fields.get(key)
        if raw is None or bytes(raw) in (b"null", b'""'):
            continue
        try:
            value = msgspec.json.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue  # the engine will judge it
        # A header and a body key with the same id mean the same session, so a string loses its quotes here.
        return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(raw)
    return None


def _select_opening(messages: msgspec.Raw) -> list[bytes]:
    """Raw bytes of the messages up to and with the first one of a user."""
    opening: list[bytes] = []
    for element in iterate_elements(messages):
        opening.append(element)
        try:
            role = _MESSAGE_DECODER.decode(element).role
        except (msgspec.MsgspecError, UnicodeDecodeError):
            role = ""  # the engine will judge it
        if role == "user" or len(opening) == _OPENING_MESSAGES:
            break
    return opening


def iterate_elements(array: msgspec.Raw) -> Iterator[bytes]:
    """The elements of a JSON array one by one, without reading what is behind the last one asked for.

    ``array`` must be valid JSON. What is not an array has no elements. White space around an element is not part of it:
    it differs between the last element and the others in indented JSON.
    """
    view = memoryview(array)
    if not view.nbytes or view[0] != 0x5B:
        return
    depth = 0
    start = 1
    for match in _TOKEN.finditer(view):
        token = view[match.start()]
        if token in b"[{":
            depth += 1
        elif token in b"]}":
            depth -= 1
            if depth == 0:
                if last := view[start : match.start()].tobytes().strip():
                    yield last
                return
        elif token == 0x2C and depth == 1:
            yield view[start : match.start()].tobytes().strip()
            start = match.end()


def _digest(*parts: bytes) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(b"%d:" % len(part))  # length first: no two lists of parts give the same bytes
        digest.update(part)
    return digest.digest()
