"""The little of HTTP that the simulated engine needs on top of its server (uvicorn, which speaks ASGI 3)."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]


async def read_body(receive: Receive) -> bytes:
    """The whole body of a request; what there is of it when the client goes away."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


async def send_answer(send: Send, status: int, body: bytes, kind: bytes, headers: Headers = ()) -> None:
    """A whole answer."""
    fixed = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, value: Any, headers: Headers = ()) -> None:
    """A whole answer in JSON."""
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    await send_answer(send, status, body, b"application/json", headers)


async def start_events(send: Send) -> None:
    """The head of a stream of server-sent events."""
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_event(send: Send, value: Any, name: str = "") -> None:
    """One event, in one piece as vLLM sends it; a string goes as it is."""
    data = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    head = f"event: {name}\n" if name else ""
    await send({"type": "http.response.body", "body": f"{head}data: {data}\n\n".encode(), "more_body": True})


async def end_events(send: Send) -> None:
    """The end of a stream."""
    await send({"type": "http.response.body", "body": b""})
