"""Errors that a client sees, in OpenAI's shape; pure.

Invariant: a message is one sentence that says what is wrong and, where somebody can act, what to do. Engines' own error
answers are never rewritten into these: they pass through with status, body and headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

import msgspec


@dataclass(frozen=True)
class ApiError(Exception):
    """An answer of the router itself.

    Attributes:
        status: HTTP status code.
        sentence: what went wrong, for the client.
        retry_after: seconds for the ``Retry-After`` header, if the same request may succeed later.
        close: the connection cannot be used further (its framing is unknown or its body was not read).
    """

    status: int
    sentence: str
    retry_after: int | None = None
    close: bool = False

    def __str__(self) -> str:
        return self.sentence

    def body(self) -> bytes:
        """The JSON body, with vLLM's keys (``message``, ``type``, ``param``, ``code``)."""
        kind = (
            "invalid_request_error" if self.status < 500 else HTTPStatus(self.status).phrase.replace(" ", "") + "Error"
        )
        return msgspec.json.encode(
            {"error": {"message": self.sentence, "type": kind, "param": None, "code": self.status}}
        )


def build_stream_error(sentence: str) -> bytes:
    """A server-sent event that ends a broken stream.

    The blank line before it closes an event that decode may have left half written, so that the two cannot run
    together.
    """
    return b"\n\ndata: " + ApiError(502, sentence).body() + b"\n\n"
