"""Which conversation a request belongs to; pure.

Why: the decode engine that served the last turn holds the conversation's KV, so all turns must reach the same one
without the client having to know. First match wins:

1. a header that names the session (``contract.SESSION_HEADERS``), with the one that names an agent or a thread within
   it (``contract.SESSION_PART_HEADERS``): their conversations share next to nothing;
2. a body key that does: ``contract.SESSION_BODY_KEYS``, the Responses API's ``conversation`` (an id, or an object with
   one), ``metadata.session_id``, and Anthropic's ``metadata.user_id`` where an agent has put a session into it;
3. ``previous_response_id``, if the router made that id: it carries the session (:func:`build_response_id`);
4. the conversation's own beginning, which stays equal from turn to turn while the history grows.

The tenant's credentials are part of the key, see ``tenant``: equal names of two tenants are two sessions. A client
whose credential changes begins a new session.

Invariant: the result depends on the request's bytes only, so every router replica derives the same one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import msgspec

from bidikv_runtime.contract import SESSION_BODY_KEYS, SESSION_HEADERS, SESSION_PART_HEADERS
from bidikv_runtime.router.api.splice import Fields
from bidikv_runtime.router.api.tenant import CREDENTIALS, compute_tenant
from bidikv_runtime.router.http.http1 import Headers

_NAME, _PART, _CREDENTIAL = range(3)
_HEADERS: Final = (
    {name.encode("ascii"): (_NAME, rank) for rank, name in enumerate(SESSION_HEADERS)}
    | {name.encode("ascii"): (_PART, rank) for rank, name in enumerate(SESSION_PART_HEADERS)}
    | {name: (_CREDENTIAL, rank) for rank, name in enumerate(CREDENTIALS)}
)
"""Header name -> what it says, and its rank among those that say the same."""
_USER_ID: Final = re.compile(r"_session_([0-9A-Za-z-]+)$")
"""Claude Code's ``metadata.user_id`` has been ``user_..._account_..._session_<id>``, and JSON with ``session_id``."""
_EMPTY: Final = (b"null", b'""')
_OPENING_MESSAGES: Final = 8
"""How many messages may precede the first user message (system, developer, few-shot preambles)."""
_OPENING_BYTES: Final = 1024
"""Of a prompt, or of instructions: what identifies it. A shorter first prompt loses affinity for one turn."""
_SHORT_BYTES: Final = 8 * 1024
"""Up to here it is cheaper to cut a whole array than to find its first elements."""
_TOKEN: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]', re.DOTALL)
"""Strings as a whole (brackets within them do not count), brackets and commas of valid JSON."""
_ANSWERED: Final = (b'"assistant"', b'"function_call_output"')
"""What only an array of messages that had an answer holds. Within a string of JSON the last quote has a backslash
before it, so text never matches."""
_RESPONSE_PREFIX: Final = "resp_"
_SESSION_BYTES: Final = 16
_RANDOM_BYTES: Final = 8
_CHECK_BYTES: Final = 4


class _Message(msgspec.Struct):
    role: str = ""


class _Conversation(msgspec.Struct):
    id: str


class _Metadata(msgspec.Struct):
    session_id: str = ""
    user_id: str = ""


class _UserId(msgspec.Struct):
    session_id: str


_ELEMENTS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_MESSAGE: Final = msgspec.json.Decoder(_Message)
_CONVERSATION: Final = msgspec.json.Decoder(str | _Conversation)
_METADATA: Final = msgspec.json.Decoder(_Metadata)
_USER_ID_OBJECT: Final = msgspec.json.Decoder(_UserId)
_BAD_JSON: Final = (msgspec.MsgspecError, UnicodeDecodeError)


@dataclass(slots=True)
class Identity:
    """Whose turn it is."""

    session: bytes
    """Key of the session: 16 bytes."""
    tenant: bytes
    """Digest of the credentials; empty without any."""
    named: bool
    """The client named the session, or the response that it follows."""
    first_turn: bool
    """Nothing in the request was generated before. A hint: a prompt (not messages) never counts as a first turn."""


def identify(headers: Headers, fields: Fields, body: bytes | bytearray) -> Identity:
    """Whose turn a request is.

    Args:
        headers: the request's headers.
        fields: the body's top-level values.
        body: the whole body.
    """
    name, tenant = _read_headers(headers)
    follows = _read_text(fields, "previous_response_id")
    session = b""
    if not name:
        name = _find_in_body(fields)
        if not name and follows:
            session = parse_response_id(follows) or b""
            name = follows.encode("utf-8", "surrogatepass")
    named = bool(name)
    if not session:
        session = _digest(b"named", tenant, name) if named else _digest(*_describe_opening(fields), tenant)
    return Identity(session, tenant, named, not follows and is_first_turn(fields, body))


def is_first_turn(fields: Fields, body: bytes | bytearray) -> bool:
    """Whether the request's messages hold no answer yet; 10 us for 32 KB without one, else less."""
    if "messages" in fields:
        return body.find(_ANSWERED[0]) < 0
    if "input" in fields:
        return all(body.find(sign) < 0 for sign in _ANSWERED)
    return False


def _read_headers(headers: Headers) -> tuple[bytes, bytes]:
    """The session's name (empty without one) and the tenant."""
    best: list[tuple[int, bytes]] = [(99, b""), (99, b""), (99, b"")]
    for name, value in headers:
        said = _HEADERS.get(name.lower())
        if said is not None and value and said[1] < best[said[0]][0]:
            best[said[0]] = (said[1], value)
    session, part, credential = best[_NAME][1], best[_PART][1], best[_CREDENTIAL][1]
    if session and part and part != session:
        session = b"%b\0%b" % (session, part)
    return session, compute_tenant(credential)


def _find_in_body(fields: Fields) -> bytes:
    for key in SESSION_BODY_KEYS:
        raw = fields.get(key)
        if raw is None or bytes(raw) in _EMPTY:
            continue
        try:
            value = msgspec.json.decode(raw)
        except _BAD_JSON:
            continue  # the engine will judge it
        # A header and a body key with the same id mean the same session, so a string loses its quotes here.
        return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(raw)
    text = ""
    try:
        if (raw := fields.get("conversation")) is not None:
            value = _CONVERSATION.decode(raw)
            text = value if isinstance(value, str) else value.id
    except _BAD_JSON:
        pass
    if not text and (raw := fields.get("metadata")) is not None:
        try:
            metadata = _METADATA.decode(raw)
        except _BAD_JSON:
            return b""
        text = metadata.session_id or _find_in_user_id(metadata.user_id)
    return text.encode("utf-8", "surrogatepass")


def _find_in_user_id(user_id: str) -> str:
    if user_id.startswith("{"):
        try:
            return _USER_ID_OBJECT.decode(user_id).session_id
        except _BAD_JSON:
            return ""
    match = _USER_ID.search(user_id)
    return match[1] if match else ""


def _read_text(fields: Fields, key: str) -> str:
    raw = fields.get(key)
    if raw is None or bytes(raw) in _EMPTY:
        return ""
    try:
        return msgspec.json.decode(raw, type=str)
    except _BAD_JSON:
        return ""


def _describe_opening(fields: Fields) -> list[bytes]:
    """What stays equal from turn to turn, for the digest."""
    model = bytes(fields.get("model", b""))
    instructions = bytes(memoryview(fields.get("instructions", b""))[:_OPENING_BYTES])
    for key in ("messages", "input"):
        if key in fields and (opening := _select_opening(fields[key])):
            return [key.encode(), model, instructions, *opening]
    text = fields.get("prompt", fields.get("input", b""))
    return [b"text", model, instructions, bytes(memoryview(text)[:_OPENING_BYTES])]


def _select_opening(messages: msgspec.Raw) -> list[bytes]:
    """Raw bytes of the messages up to and with the first one of a user."""
    opening: list[bytes] = []
    for element in _cut(messages) if memoryview(messages).nbytes <= _SHORT_BYTES else iterate_elements(messages):
        opening.append(element)
        try:
            role = _MESSAGE.decode(element).role
        except _BAD_JSON:
            role = ""  # the engine will judge it
        if role == "user" or len(opening) == _OPENING_MESSAGES:
            break
    return opening


def _cut(array: msgspec.Raw) -> list[bytes]:
    """What :func:`iterate_elements` gives, all at once."""
    try:
        return [bytes(element) for element in _ELEMENTS.decode(array)]
    except _BAD_JSON:
        return []


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


# --- ids of responses ---


def build_response_id(session: bytes) -> str:
    """A new id for a response of ``session`` (16 bytes): any replica can tell the session from it.

    vLLM takes it as the request's ``request_id``, and stores and names the response by it.
    """
    carried = session + os.urandom(_RANDOM_BYTES)
    return _RESPONSE_PREFIX + (carried + _compute_check(carried)).hex()


def parse_response_id(text: str) -> bytes | None:
    """The session of an id that :func:`build_response_id` made; None for any other id."""
    if not text.startswith(_RESPONSE_PREFIX):
        return None
    digits = text[len(_RESPONSE_PREFIX) :]
    if len(digits) != 2 * (_SESSION_BYTES + _RANDOM_BYTES + _CHECK_BYTES):
        return None
    try:
        raw = bytes.fromhex(digits)
    except ValueError:
        return None
    carried, check = raw[:-_CHECK_BYTES], raw[-_CHECK_BYTES:]
    return carried[:_SESSION_BYTES] if check == _compute_check(carried) else None


def _compute_check(carried: bytes) -> bytes:
    # It only tells the router's ids from others; what protects a stored response is its random part.
    return blake2b(carried, digest_size=_CHECK_BYTES, person=b"bidikv.response").digest()


def _digest(*parts: bytes) -> bytes:
    digest = blake2b(digest_size=_SESSION_BYTES)
    for part in parts:
        digest.update(b"%d:" % len(part))  # length first: no two lists of parts give the same bytes
        digest.update(part)
    return digest.digest()
