"""Errors that a client sees, in the form of the API that it speaks; pure.

Invariant: a message is one sentence that says what is wrong and, where somebody can act, what to do. Engines' own error
answers are never rewritten into these: they pass through with status, body and headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import msgspec

from bidikv_runtime.router.observe.record import Route

_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's own words: its SDKs choose an exception by them (API reference, "Errors")."""


@dataclass(eq=False)
class ApiError(Exception):
    """An answer of the router itself.

    Not frozen: the standard library sets an exception's traceback where it leaves a context manager.

    Attributes:
        status: HTTP status code.
        sentence: what went wrong, for the client.
        retry_after: seconds for the ``Retry-After`` header, if the same request may succeed later.
        close: the connection cannot be used further (its framing is unknown or its body was not read).
        allow: methods that a 405 has to name (RFC 9110 section 15.5.6).
    """

    status: int
    sentence: str
    retry_after: int | None = None
    close: bool = False
    allow: str = ""

    def __str__(self) -> str:
        return self.sentence

    def body(self) -> bytes:
        """The JSON body in OpenAI's form, for a request whose route is not known yet."""
        return build_error_body("local", self)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Header fields of the answer, beyond its framing."""
        fields: list[tuple[bytes, bytes]] = []
        if self.retry_after is not None:
            fields.append((b"retry-after", b"%d" % self.retry_after))
        if self.allow:
            fields.append((b"allow", self.allow.encode("ascii")))
        return fields


def build_error_body(route: Route, error: ApiError) -> bytes:
    """The JSON body of ``error``: Anthropic's form for messages, else OpenAI's with vLLM's keys and types."""
    return msgspec.json.encode(_build_document(route, error))


def _build_document(route: Route, error: ApiError) -> dict[str, Any]:
    status = error.status
    if route == "messages":
        fallback = "invalid_request_error" if status < 500 else "api_error"
        return {"type": "error", "error": {"type": _ANTHROPIC_TYPES.get(status, fallback), "message": error.sentence}}
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error" if status < 500 else HTTPStatus(status).phrase.replace(" ", "") + "Error"
    return {"error": {"message": error.sentence, "type": kind, "param": None, "code": status}}


def build_error_event(route: Route, error: ApiError, carried: bytes = b"") -> bytes:
    """A server-sent event that ends a stream with an error; no end marker (``[DONE]``) may follow it.

    The blank line before it closes an event that decode may have left half written, so that the two cannot run
    together.

    - Chat and completions: ``data: {"error": ...}``, as vLLM does.
    - Responses: OpenAI's event ``error`` and, beside its fields, the key ``error``, at which OpenAI's Python client
      raises an exception. Its ``sequence_number`` is 0, since the router does not count a stream's events.
    - Messages: Anthropic's event ``error``.

    Args:
        route: of the request.
        error: what to say.
        carried: body of an engine's error, which is told instead if it is a JSON object with an ``error`` in it.
    """
    document = _build_document(route, error)
    if carried:
        try:
            verdict = msgspec.json.decode(carried)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            verdict = None
        if isinstance(verdict, dict) and isinstance(verdict.get("error"), dict):
            document = verdict
    name = b""
    if route == "responses":
        detail = document["error"]
        document = {
            "type": "error",
            "code": str(detail.get("code") or detail.get("type")),
            "message": str(detail.get("message")),
            "param": detail.get("param"),
            "sequence_number": 0,
            "error": detail,
        }
        name = b"event: error\n"
    elif route == "messages":
        name = b"event: error\n"
    return b"\n\n" + name + b"data: " + msgspec.json.encode(document) + b"\n\n"
