"""ASGI middleware of vLLM's server: one distinct answer for a decode leg whose hand-over was lost.

A request that the connector refuses (``refusal``) ends in vLLM like any request that fails: what the client gets
depends on vLLM's version, and a stream has by then begun with status 200. For a request with
``contract.HANDOVER_HEADER`` this class makes of it HTTP 503 with Retry-After and a JSON error of type
``contract.HANDOVER_LOST``.

How it knows the failure:

- vLLM 0.33: the error's message carries the reason that the connector gave.
- vLLM 0.32: no reason leaves the engine. The error is "Internal server error" with code 500, vLLM's answer for every
  request that its scheduler failed: also for a grammar that does not compile, for reused ids of other images, and for
  an exception while the engine took the request in. Before the first token these cannot be told from a refusal. They
  are rare on a guarded leg (its prefill leg has just passed the same checks) and harmless: the router prefills once
  more, asks without the header and gets the engine's own answer. A dead engine, an overload and a client's mistake have
  other messages, and pass unchanged.

Where it looks: at a JSON answer with status 400 or 500, or at a stream's first events. vLLM 0.32 begins a stream of a
chat, of messages and of a response with events that say nothing yet (``is_prelude``), also when an error follows. They
are held back, with the response's start, until the next event; vLLM sends that at once, unless a parser keeps the first
tokens to itself. Two of vLLM's streams (0.32 and 0.33) do not get to tell the error: that of messages takes it for a
broken chunk and says so, that of a response breaks off with a ``ValidationError``. Anything that does not look like
this passes as it is.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import msgspec

from bidikv_runtime import contract

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

RETRY_AFTER_SECONDS: Final = 1
_GUARDED: Final = (contract.HANDOVER_HEADER.encode(), contract.HANDOVER_GUARDED.encode())
_UNEXPLAINED: Final = (500, "Internal server error")
"""Code and message of vLLM 0.32's ``GenerationError`` (``entrypoints/generate/base/serving.py``)."""
_HELD_BYTES: Final = 1024 * 1024
"""A longer beginning passes: no error is so long, and other events only when they repeat much of the request."""
_PRELUDES: Final = (b"event: message_start\n", b"event: response.created\n", b"event: response.in_progress\n")
_ERROR_EVENT: Final = b"event: error\n"
_BROKEN_CHUNK: Final = "validation errors for ChatCompletionStreamResponse"
"""What the stream of messages says of an error that it was to pass on."""
_BROKEN_EVENT: Final = "union[ResponseCreatedEvent"
"""What the exception says in which the stream of a response ends for the same reason."""
_OF_THE_BODY: Final = (b"content-type", b"content-length", b"content-encoding", b"transfer-encoding")


class _Error(msgspec.Struct):
    message: str
    code: int = _UNEXPLAINED[0]
    """Anthropic's form has none."""


class _Failure(msgspec.Struct):
    error: _Error


class _RoleOnly(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


class _Choice(msgspec.Struct):
    delta: _RoleOnly
    finish_reason: None = None


class _RoleEvent(msgspec.Struct):
    choices: list[_Choice]


_FAILURE: Final = msgspec.json.Decoder(_Failure)
_ROLE_EVENT: Final = msgspec.json.Decoder(_RoleEvent)


def is_lost_handover(document: bytes) -> bool:
    """Whether a JSON answer (or what a stream's event carries) is vLLM's error for a refused request."""
    try:
        error = _FAILURE.decode(document).error
    except msgspec.MsgspecError:
        return False
    return contract.HANDOVER_LOST in error.message or (error.code, error.message) == _UNEXPLAINED


def is_lost_event(event: bytes) -> bool:
    """Whether the first event of a stream that says something tells of a refused request."""
    if not event.startswith(_ERROR_EVENT):
        return is_lost_handover(event.removeprefix(b"data: "))
    try:
        message = _FAILURE.decode(event.removeprefix(_ERROR_EVENT + b"data: ")).error.message
    except msgspec.MsgspecError:
        return False
    return _BROKEN_CHUNK in message


def is_prelude(event: bytes) -> bool:
    """Whether a stream's event says nothing yet: it names the role, or that an answer has begun."""
    if event.startswith(_PRELUDES):
        return True
    try:
        return all(not choice.delta.content for choice in _ROLE_EVENT.decode(event.removeprefix(b"data: ")).choices)
    except msgspec.MsgspecError:
        return False


class HandoverErrors:
    """The middleware; ``contract.ENGINE_MIDDLEWARE`` names it."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI 3); those without the header see nothing of this class."""
        if scope["type"] != "http" or _GUARDED not in scope["headers"]:  # names are lower case in ASGI
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        try:
            await self._app(scope, receive, answer)
        except Exception as error:
            # FastAPI has a handler for pydantic's error, and Starlette complains that it came too late for one.
            told = f"{error} {error.__cause__}"
            if not (answer.holds_events and _BROKEN_EVENT in told):
                raise
            await answer.replace()


class _State(enum.Enum):
    STARTING = enum.auto()
    JSON = enum.auto()
    """A whole JSON answer is held until it is complete."""
    EVENTS = enum.auto()
    """A stream is held until its first event that says something."""
    PASSING = enum.auto()
    REPLACED = enum.auto()


class _Answer:
    """The ``send`` of one guarded request. An exception of the application leaves nothing sent: the server answers."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._state = _State.STARTING
        self._held: list[Message] = []
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if self._state is _State.PASSING:
            await self._send(message)
            return
        if self._state is _State.REPLACED:
            return
        self._held.append(message)
        self._state = self._judge(message)
        if self._state is _State.PASSING:
            held, self._held = self._held, []
            for waiting in held:
                await self._send(waiting)
        elif self._state is _State.REPLACED:
            await self.replace()

    @property
    def holds_events(self) -> bool:
        """Nothing was sent, and the response is a stream that has begun."""
        return self._state is _State.EVENTS

    def _judge(self, message: Message) -> _State:
        if message["type"] == "http.response.start":
            kind = next((value for name, value in message["headers"] if name.lower() == b"content-type"), b"")
            if message["status"] == 200 and kind.startswith(b"text/event-stream"):
                return _State.EVENTS
            if message["status"] in (400, 500) and kind.startswith(b"application/json"):
                return _State.JSON
            return _State.PASSING
        body, more = message.get("body", b""), message.get("more_body", False)
        self._body += body
        if len(self._body) > _HELD_BYTES:
            return _State.PASSING
        if self._state is _State.EVENTS:
            event = bytes(body)
            if is_lost_event(event):
                return _State.REPLACED
            return _State.EVENTS if is_prelude(event) else _State.PASSING
        if more:
            return self._state
        return _State.REPLACED if is_lost_handover(bytes(self._body)) else _State.PASSING

    async def replace(self) -> None:
        """Send the distinct error in the place of what was held."""
        self._state = _State.REPLACED
        start, self._held = self._held[0], []
        body = msgspec.json.encode(
            {
                "error": {
                    "message": "Too little of the prompt's KV is at decode; send the request again.",
                    "type": contract.HANDOVER_LOST,
                    "param": None,
                    "code": 503,
                }
            }
        )
        headers = [(name, value) for name, value in start["headers"] if name.lower() not in _OF_THE_BODY]
        headers += [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"retry-after", b"%d" % RETRY_AFTER_SECONDS),
            (_GUARDED[0], contract.HANDOVER_ANSWERED_LOST.encode()),
        ]
        await self._send({"type": "http.response.start", "status": 503, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})
