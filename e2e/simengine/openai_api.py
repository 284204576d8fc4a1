"""Chat and completions, in the shapes of vLLM 0.32 (``entrypoints/openai/{chat_completion,completion}``)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from e2e.simengine.asgi import Send, end_events, send_event, send_json, start_events
from e2e.simengine.engine import EngineCore
from e2e.simengine.settings import Engine
from e2e.simengine.text import render_chat
from e2e.simengine.turns import (
    GenerationError,
    Piece,
    Turn,
    build_bad_request,
    build_turn,
    build_usage,
    check_tokens,
    generate,
)


class Completions:
    """``/v1/completions``; the shapes that chats have otherwise are in methods."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, engine: Engine, core: EngineCore) -> None:
        self._engine, self._core = engine, core

    def parse(self, body: Mapping[str, Any]) -> Turn:
        """The turn that a body asks for.

        Raises:
            ApiError: it cannot be served.
        """
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
                raise build_bad_request("A simulated engine takes one prompt only, no batch.", "prompt")
            prompt = check_tokens(prompt)
        return build_turn(self._engine, body, prompt, "max_tokens")

    async def answer(self, turn: Turn, send: Send) -> None:
        """Serve a turn; its request is done or given up at the end.

        Raises:
            GenerationError: and nothing was sent.
        """
        identity = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": turn.model}
        if turn.stream:
            await self._stream(turn, identity | {"object": self.chunk}, send)
        else:
            await self._complete(turn, identity | {"object": self.whole}, send)

    async def _complete(self, turn: Turn, identity: dict[str, Any], send: Send) -> None:
        text, tokens, last = "", list[int](), Piece("", [], None, None)
        async for last in generate(self._core, turn):
            text += last.text
            tokens += last.tokens
        prompt = turn.request.tokens[: turn.request.num_prompt_tokens] if turn.wants_tokens else None
        choice = {
            "index": 0,
            **self.build_choice(text, prompt),
            "logprobs": None,
            "finish_reason": last.finish,
            "stop_reason": last.stop,
            "token_ids": tokens if turn.wants_tokens else None,
        }
        usage = build_usage(self._engine, turn)
        extra = self.build_extra(prompt)
        await send_json(send, 200, {**identity, "choices": [choice], "usage": usage, **extra})

    async def _stream(self, turn: Turn, identity: dict[str, Any], send: Send) -> None:
        await start_events(send)

        async def say(fields: dict[str, Any], piece: Piece | None, **top: Any) -> None:
            choice = {"index": 0, **fields, "logprobs": None, "finish_reason": piece.finish if piece else None}
            if piece and piece.finish:
                choice["stop_reason"] = piece.stop
            if piece and turn.wants_tokens:
                choice["token_ids"] = piece.tokens
            if turn.wants_every_usage:
                top["usage"] = build_usage(self._engine, turn)
            await send_event(send, {**identity, "choices": [choice], **top})

        first = True
        try:
            async for piece in generate(self._core, turn):
                if first:
                    await self.begin(turn, say)
                    first = False
                await say(self.build_delta(piece.text), piece)
        except GenerationError as error:
            if first:
                await self.begin(turn, say)
            await send_event(send, error.build_body())
        else:
            if turn.wants_usage:
                usage = build_usage(self._engine, turn)
                await send_event(send, {**identity, "choices": [], "usage": usage})
        await send_event(send, "[DONE]")
        await end_events(send)

    def build_choice(self, text: str, prompt: list[int] | None) -> dict[str, Any]:
        return {"text": text, "prompt_logprobs": None, "prompt_token_ids": prompt}

    def build_extra(self, prompt: list[int] | None) -> dict[str, Any]:
        return {"system_fingerprint": None, "kv_transfer_params": None}

    def build_delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    async def begin(self, turn: Turn, say: Any) -> None:
        """What a stream begins with."""


class Chat(Completions):
    """``/v1/chat/completions``."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def parse(self, body: Mapping[str, Any]) -> Turn:
        return build_turn(self._engine, body, render_body(body), "max_tokens")

    def build_choice(self, text: str, prompt: list[int] | None) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text,
            "refusal": None,
            "tool_calls": [],
            "reasoning": None,
        }
        return {"message": message}

    def build_extra(self, prompt: list[int] | None) -> dict[str, Any]:
        return {
            "system_fingerprint": None,
            "prompt_logprobs": None,
            "prompt_token_ids": prompt,
            "kv_transfer_params": None,
        }

    def build_delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    async def begin(self, turn: Turn, say: Any) -> None:
        top: dict[str, Any] = {}
        if turn.wants_tokens:
            top["prompt_token_ids"] = turn.request.tokens[: turn.request.num_prompt_tokens]
        await say({"delta": {"role": "assistant", "content": ""}}, None, **top)


def render_body(body: Mapping[str, Any]) -> str:
    """The prompt of a chat's body.

    Raises:
        ApiError: it has no messages.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise build_bad_request("messages must be a list of at least one object.", "messages")
    go_on = body.get("continue_final_message") is True
    if go_on and body.get("add_generation_prompt"):
        raise build_bad_request(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.", "continue_final_message"
        )
    generate_prompt = body.get("add_generation_prompt", True) is not False
    return render_chat(messages, body.get("tools"), generate=generate_prompt, go_on=go_on)
