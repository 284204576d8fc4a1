"""OpenAI's responses, in the shapes of vLLM 0.32 (``entrypoints/openai/responses``): one message of text."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

from e2e.simengine.asgi import Send, end_events, send_event, send_json, start_events
from e2e.simengine.engine import EngineCore
from e2e.simengine.settings import Engine
from e2e.simengine.text import read_content, render_chat
from e2e.simengine.turns import (
    ApiError,
    GenerationError,
    Piece,
    Turn,
    build_bad_request,
    build_turn,
    build_usage,
    generate,
)

MAXIMUM_STORED: Final = 256
"""vLLM stores without bound."""


class BrokenStream(Exception):
    """How vLLM 0.32 ends the stream of a response that fails: its own error fits none of its events."""


class Responses:
    """``/v1/responses``, and those that were stored."""

    def __init__(self, engine: Engine, core: EngineCore) -> None:
        self._engine, self._core = engine, core
        self._stored: OrderedDict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = OrderedDict()

    def parse(self, body: Mapping[str, Any]) -> Turn:
        """The turn that a body asks for.

        Raises:
            ApiError: it cannot be served.
        """
        if body.get("background"):
            raise build_bad_request("A simulated engine has no responses in the background.", "background")
        return build_turn(
            self._engine, body, render_chat(self._read_messages(body), body.get("tools")), "max_output_tokens"
        )

    def find(self, name: str) -> dict[str, Any]:
        """A stored response.

        Raises:
            ApiError: 404.
        """
        return self._find(name)[1]

    async def answer(self, turn: Turn, send: Send) -> None:
        """Serve a turn.

        Raises:
            GenerationError: and nothing was sent.
            BrokenStream: the stream has begun and cannot go on.
        """
        document = self._build_document(turn)
        item = f"msg_{uuid.uuid4().hex}"
        if turn.stream:
            await self._stream(turn, document, item, send)
            return
        text, last = "", Piece("", [], None, None)
        async for last in generate(self._core, turn):
            text += last.text
        await send_json(send, 200, self._complete(turn, document, item, text, last))

    async def _stream(self, turn: Turn, document: dict[str, Any], item: str, send: Send) -> None:
        await start_events(send)
        number = 0

        async def say(kind: str, **fields: Any) -> None:
            nonlocal number
            await send_event(send, {"type": kind, "sequence_number": number, **fields}, kind)
            number += 1

        place = {"item_id": item, "output_index": 0, "content_index": 0}
        await say("response.created", response=document)
        await say("response.in_progress", response=document)
        text, first, last = "", True, Piece("", [], None, None)
        try:
            async for last in generate(self._core, turn):
                if first:
                    first = False
                    await say("response.output_item.added", output_index=0, item=_build_item(item, None))
                    await say("response.content_part.added", **place, part=_build_part(""))
                if last.text:
                    text += last.text
                    await say("response.output_text.delta", **place, delta=last.text, logprobs=[])
        except GenerationError:
            raise BrokenStream(
                "validation errors for tagged-union[ResponseCreatedEvent,ResponseInProgressEvent,...]"
            ) from None
        await say("response.output_text.done", **place, text=text, logprobs=[])
        await say("response.content_part.done", **place, part=_build_part(text))
        await say("response.output_item.done", output_index=0, item=_build_item(item, text))
        await say("response.completed", response=self._complete(turn, document, item, text, last))
        await end_events(send)

    def _build_document(self, turn: Turn) -> dict[str, Any]:
        body = turn.body
        return {
            "id": str(body.get("request_id") or f"resp_{uuid.uuid4().hex}"),
            "created_at": int(time.time()),
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "model": turn.model,
            "object": "response",
            "output": [],
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools") or [],
            "background": False,
            "max_output_tokens": turn.request.max_tokens,
            "previous_response_id": body.get("previous_response_id"),
            "status": "in_progress",
            "usage": None,
        }

    def _complete(self, turn: Turn, document: dict[str, Any], item: str, text: str, last: Piece) -> dict[str, Any]:
        usage = build_usage(self._engine, turn)
        cut = last.finish == "length"
        complete = document | {
            "output": [_build_item(item, text)],
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": turn.request.num_cached_tokens or 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }
        if turn.body.get("store", True) is not False:
            said = {"role": "assistant", "content": text}
            self._stored[complete["id"]] = ([*self._read_messages(turn.body, instructions=False), said], complete)
            while len(self._stored) > MAXIMUM_STORED:
                self._stored.popitem(last=False)
        return complete

    def _find(self, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        stored = self._stored.get(name)
        if stored is None:
            raise ApiError(404, "invalid_request_error", f"Response with id '{name}' not found.", "response_id")
        return stored

    def _read_messages(self, body: Mapping[str, Any], *, instructions: bool = True) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if instructions and body.get("instructions"):
            messages.append({"role": "system", "content": body["instructions"]})
        if (previous := body.get("previous_response_id")) is not None:
            messages += self._find(str(previous))[0]
        given = body.get("input")
        if isinstance(given, str):
            return [*messages, {"role": "user", "content": given}]
        if not isinstance(given, list) or not given or not all(isinstance(item, dict) for item in given):
            raise build_bad_request("input must be a text or a list of at least one object.", "input")
        return [*messages, *map(_convert, given)]


def _convert(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "function_call":
        return {"role": "assistant", "tool_calls": [{"name": item.get("name"), "arguments": item.get("arguments")}]}
    if kind == "function_call_output":
        return {"role": "tool", "content": read_content(item.get("output"))}
    return {"role": item.get("role", "user"), "content": item.get("content")}


def _build_item(name: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [_build_part(text)]
    status = "in_progress" if text is None else "completed"
    return {"id": name, "content": content, "role": "assistant", "status": status, "type": "message"}


def _build_part(text: str) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
