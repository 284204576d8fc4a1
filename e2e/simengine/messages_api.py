"""Anthropic's messages, in the shapes of vLLM 0.32 (``entrypoints/anthropic``)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from e2e.simengine.asgi import Send, end_events, send_event, send_json, start_events
from e2e.simengine.engine import EngineCore
from e2e.simengine.settings import Engine
from e2e.simengine.text import read_content, render_chat
from e2e.simengine.turns import GenerationError, Piece, Turn, build_bad_request, build_turn, build_usage, generate


class Messages:
    """``/v1/messages``."""

    def __init__(self, engine: Engine, core: EngineCore) -> None:
        self._engine, self._core = engine, core

    def parse(self, body: Mapping[str, Any]) -> Turn:
        """The turn that a body asks for.

        Raises:
            ApiError: it cannot be served.
        """
        if body.get("max_tokens") is None:
            raise build_bad_request("max_tokens: Field required", "max_tokens")
        thinking = body.get("thinking")
        if isinstance(thinking, dict) and thinking.get("type") == "enabled":
            budget = thinking.get("budget_tokens")
            if type(budget) is not int or budget >= body["max_tokens"]:
                raise build_bad_request("thinking.budget_tokens must be below max_tokens.", "thinking")
        return build_turn(self._engine, body, render_messages(body), "max_tokens")

    async def answer(self, turn: Turn, send: Send) -> None:
        """Serve a turn.

        Raises:
            GenerationError: and nothing was sent.
        """
        identity = {"id": f"chatcmpl-{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": turn.model}
        if turn.stream:
            await self._stream(turn, identity, send)
            return
        text, last = "", Piece("", [], None, None)
        async for last in generate(self._core, turn):
            text += last.text
        content = [{"type": "text", "text": text}]
        await send_json(send, 200, {**identity, "content": content, **_build_stop(last), "usage": self._usage(turn)})

    async def _stream(self, turn: Turn, identity: dict[str, Any], send: Send) -> None:
        await start_events(send)

        async def say(kind: str, **fields: Any) -> None:
            await send_event(send, {"type": kind, **fields}, kind)

        async def begin() -> None:
            message = {**identity, "content": [], "stop_reason": None, "stop_sequence": None}
            await say("message_start", message=message | {"usage": self._usage(turn)})

        first, opened, last = True, False, Piece("", [], None, None)
        try:
            async for last in generate(self._core, turn):
                if first:
                    first = False
                    await begin()
                if last.text and not opened:
                    opened = True
                    await say("content_block_start", index=0, content_block={"type": "text", "text": ""})
                if last.text:
                    await say("content_block_delta", index=0, delta={"type": "text_delta", "text": last.text})
        except GenerationError:
            if first:
                await begin()
            # vLLM takes the chat's error for a chunk, and complains of it.
            text = "2 validation errors for ChatCompletionStreamResponse\nmodel\n  Field required"
            await say("error", error={"type": "internal_error", "message": text})
        else:
            if opened:
                await say("content_block_stop", index=0)
            await say("message_delta", delta=_build_stop(last), usage=self._usage(turn))
            await say("message_stop")
        await end_events(send)

    def _usage(self, turn: Turn) -> dict[str, Any]:
        usage = build_usage(self._engine, turn)
        told: dict[str, Any] = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        if (details := usage["prompt_tokens_details"]) is not None:
            told["input_tokens"] -= details["cached_tokens"]
            told["cache_read_input_tokens"] = details["cached_tokens"]
        return told


def render_messages(body: Mapping[str, Any]) -> str:
    """The prompt of a body; vLLM too makes a chat of it.

    Raises:
        ApiError: it has no messages.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise build_bad_request("messages: a list of at least one object is required", "messages")
    system = [{"role": "system", "content": read_content(body["system"])}] if body.get("system") else []
    return render_chat([*system, *_convert(messages)], body.get("tools"))


def _convert(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content")
        blocks = content if isinstance(content, list) else []
        results = [block for block in blocks if isinstance(block, dict) and block.get("type") == "tool_result"]
        for block in results:
            yield {"role": "tool", "content": read_content(block.get("content"))}
        rest = [block for block in blocks if block not in results] if blocks else content
        if rest or not results:
            yield {"role": message.get("role", "user"), "content": read_content(rest)}


def _build_stop(last: Piece) -> dict[str, Any]:
    if last.finish == "length":
        reason: str | None = "max_tokens"
    elif last.finish == "stop":
        reason = "stop_sequence" if last.stop is not None else "end_turn"
    else:
        reason = None
    return {"stop_reason": reason, "stop_sequence": last.stop}
