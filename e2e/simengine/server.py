"""What vLLM's port serves: which path is answered by what, errors in vLLM's form, clients that leave (ASGI 3)."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from prometheus_client import CONTENT_TYPE_LATEST

from e2e.simengine.asgi import Receive, Scope, Send, read_body, send_answer, send_json
from e2e.simengine.engine import EngineCore
from e2e.simengine.faults import Faults
from e2e.simengine.messages_api import Messages, render_messages
from e2e.simengine.openai_api import Chat, Completions, render_body
from e2e.simengine.responses_api import Responses
from e2e.simengine.settings import Engine
from e2e.simengine.text import tokenize
from e2e.simengine.turns import ApiError, Turn, build_bad_request, check_model

logger = logging.getLogger(__name__)

_RESPONSES: Final = "/v1/responses/"


class Api(Protocol):
    """One API's turns."""

    def parse(self, body: Any) -> Turn: ...

    async def answer(self, turn: Turn, send: Send) -> None: ...


class Server:
    """The application."""

    def __init__(self, engine: Engine, core: EngineCore, faults: Faults) -> None:
        self._engine, self._core, self._faults = engine, core, faults
        self._responses = Responses(engine, core)
        self._turns: dict[str, Api] = {
            "/v1/chat/completions": Chat(engine, core),
            "/v1/completions": Completions(engine, core),
            "/v1/messages": Messages(engine, core),
            "/v1/responses": self._responses,
        }
        self._gets: dict[str, Callable[[Send], Awaitable[None]]] = {
            "/health": self._tell_health,
            "/ping": self._tell_health,
            "/metrics": self._tell_metrics,
            "/v1/models": self._tell_models,
            "/version": lambda send: send_json(send, 200, {"version": engine.simulation.vllm_version}),
        }
        self._posts: dict[str, Callable[[Any], Any]] = {
            "/tokenize": self._tokenize,
            "/v1/messages/count_tokens": lambda body: {"input_tokens": len(tokenize(render_messages(body)))},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self._faults.now.deaf:
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        path, method = scope["path"], scope["method"]
        anthropic = path.startswith("/v1/messages")
        try:
            await self._route(method, path, receive, send)
        except ApiError as error:
            body = error.build_anthropic_body() if anthropic else error.build_body()
            await send_json(send, error.status, body)

    async def _route(self, method: str, path: str, receive: Receive, send: Send) -> None:
        if method == "GET" and (tell := self._gets.get(path)) is not None:
            await tell(send)
        elif method == "GET" and path.startswith(_RESPONSES):
            await send_json(send, 200, self._responses.find(path.removeprefix(_RESPONSES)))
        elif method == "POST" and path in self._turns:
            await self._serve_turn(self._turns[path], receive, send)
        elif method == "POST" and path in self._posts:
            await send_json(send, 200, self._posts[path](parse_body(await read_body(receive))))
        elif method == "POST" and path == "/reset_prefix_cache":
            await send_json(send, 200, {"success": self._core.pool.reset()})
        elif path in self._turns or path in self._gets or path in self._posts:
            raise ApiError(405, "Method Not Allowed", "Method Not Allowed")
        else:
            raise ApiError(404, "Not Found", "Not Found")

    async def _serve_turn(self, api: Api, receive: Receive, send: Send) -> None:
        if (status := self._faults.now.status) is not None:
            raise ApiError(status, "InternalServerError", f"A fault of this simulated engine: {status}.")
        turn = api.parse(parse_body(await read_body(receive)))
        leaving = asyncio.ensure_future(self._watch(turn, receive))
        try:
            await api.answer(turn, send)
        finally:
            leaving.cancel()
            self._core.abort(turn.request)

    async def _watch(self, turn: Turn, receive: Receive) -> None:
        """Abort the request when its client leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._core.abort(turn.request)

    async def _tell_health(self, send: Send) -> None:
        await send_answer(send, 503 if self._faults.now.unhealthy else 200, b"", b"text/plain")

    async def _tell_metrics(self, send: Send) -> None:
        await send_answer(send, 200, self._core.render_metrics(), CONTENT_TYPE_LATEST.encode())

    async def _tell_models(self, send: Send) -> None:
        cards: list[dict[str, Any]] = [
            {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "vllm",
                "root": self._engine.model,
                "parent": None,
                "max_model_len": self._engine.maximum_length,
                "permission": [],
            }
            for name in self._engine.served_names
        ]
        await send_json(send, 200, {"object": "list", "data": cards})

    def _tokenize(self, body: Any) -> dict[str, Any]:
        check_model(self._engine, body)
        text = body.get("prompt") if isinstance(body.get("prompt"), str) else render_body(body)
        tokens = tokenize(text)
        length = self._engine.maximum_length
        return {"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": None}


def parse_body(data: bytes) -> dict[str, Any]:
    """A request's body.

    Raises:
        ApiError: it is no JSON object.
    """
    try:
        body = json.loads(data)
    except ValueError as error:
        raise build_bad_request(f"The body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise build_bad_request("The body must be a JSON object.")
    return body
