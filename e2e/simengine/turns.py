"""From a request's body to what the engine core takes, and from tokens to text: what the four APIs have in common."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bidikv_runtime import contract
from e2e.simengine.engine import EngineCore, Finish, Request
from e2e.simengine.settings import Engine
from e2e.simengine.text import tokenize


class ApiError(Exception):
    """A client's mistake, or what the engine could not do; types and texts are vLLM's."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.param = status, kind, message, param

    def build_body(self) -> dict[str, Any]:
        """OpenAI's form."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}

    def build_anthropic_body(self) -> dict[str, Any]:
        return {"type": "error", "error": {"type": self.kind, "message": self.message}}


class GenerationError(ApiError):
    """The engine ended the request with an error; vLLM 0.32 does not say which."""

    def __init__(self) -> None:
        super().__init__(500, "InternalServerError", "Internal server error")


def build_bad_request(message: str, param: str | None = None) -> ApiError:
    """400."""
    return ApiError(400, "BadRequestError", message, param)


class Piece(NamedTuple):
    """Text that goes to the client at once."""

    text: str
    tokens: list[int]
    finish: Finish | None
    stop: str | None
    """The stop string that ended the answer."""


@dataclass
class Turn:
    """A request that is understood."""

    body: Mapping[str, Any]
    model: str
    request: Request
    stream: bool
    stops: Sequence[str]
    wants_usage: bool
    wants_every_usage: bool
    wants_tokens: bool
    generated: int = 0
    """Tokens of the answer that ``generate`` has given out."""


def build_turn(engine: Engine, body: Mapping[str, Any], prompt: str | Sequence[int], limit: str) -> Turn:
    """Check a body and make the engine's request of it.

    Args:
        engine: whose limits apply.
        body: the client's.
        prompt: text or tokens.
        limit: the key of the API's most tokens of an answer.

    Raises:
        ApiError: what vLLM refuses, and what this engine cannot do.
    """
    model = check_model(engine, body)
    stream = body.get("stream") is True
    if body.get("stream_options") is not None and not stream and limit == "max_tokens":
        raise build_bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    for key in ("n", "best_of"):
        if body.get(key) not in (None, 1):
            raise build_bad_request(f"A simulated engine makes one choice only; leave out {key}.", key)
    params = body.get(contract.KV_TRANSFER_PARAMS)
    if params is not None and not isinstance(params, dict):
        raise build_bad_request(f"{contract.KV_TRANSFER_PARAMS} must be an object.", contract.KV_TRANSFER_PARAMS)
    tokens = list(prompt) if not isinstance(prompt, str) else tokenize(prompt)
    given = (params or {}).get(contract.TOKEN_IDS_PARAM)
    if given is not None:
        tokens = check_tokens(given)
    most = _find_limit(body, limit)
    tokens = _truncate(engine, body, tokens, most)
    if len(tokens) >= engine.maximum_length:
        raise build_bad_request(
            f"This model's maximum context length is {engine.maximum_length} tokens. However, your prompt contains "
            f"{len(tokens)} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
            "length of the input prompt.",
            "input_tokens",
        )
    if not tokens:
        raise build_bad_request("The decoder prompt cannot be empty.")
    room = engine.maximum_length - len(tokens)
    least = body.get("min_tokens") or 0
    if most is not None and least > most:
        raise build_bad_request(f"min_tokens must be less than or equal to max_tokens={most}, got {least}.")
    stops = body.get("stop_sequences") or body.get("stop") or ()
    options = body.get("stream_options") or {}
    request = Request(
        request_id=uuid.uuid4().hex,
        tokens=tokens,
        max_tokens=min(most or room, room),
        min_tokens=least,
        ignore_eos=body.get("ignore_eos") is True,
        kv_transfer_params=params,
        cache_salt=body.get("cache_salt"),
        skip_reading_prefix_cache=body.get("prompt_logprobs") is not None,
    )
    return Turn(
        body=body,
        model=model,
        request=request,
        stream=stream,
        stops=[stops] if isinstance(stops, str) else list(stops),
        wants_usage=options.get("include_usage") is True,
        wants_every_usage=options.get("continuous_usage_stats") is True,
        wants_tokens=body.get("return_token_ids") is True,
    )


def check_model(engine: Engine, body: Mapping[str, Any]) -> str:
    """The name of the model that is meant."""
    model = body.get("model") or engine.served_names[0]
    if model not in engine.served_names:
        raise ApiError(404, "NotFoundError", f"The model `{model}` does not exist.", "model")
    return str(model)


def check_tokens(value: Any) -> list[int]:
    """Token ids from outside."""
    right = isinstance(value, list) and value and all(type(token) is int and 0 <= token < 2**63 for token in value)
    if not right:
        raise build_bad_request("Token ids must be a list of whole numbers from 0 on, and not empty.")
    return list(value)


async def generate(core: EngineCore, turn: Turn) -> AsyncIterator[Piece]:
    """The answer as it comes. As in vLLM, text that may be the beginning of a stop string is held back.

    Raises:
        GenerationError: the engine ended the request with an error.
    """
    request = turn.request
    keep = max((len(stop) for stop in turn.stops), default=1) - 1
    held = ""
    core.add(request)
    while True:
        output = await request.outputs.get()
        if output.finish == "error":
            raise GenerationError
        held += output.text
        tokens = [] if output.token is None else [output.token]
        turn.generated += len(tokens)
        found = [(held.index(stop), stop) for stop in turn.stops if stop and stop in held]
        if found:
            position, stop = min(found)
            core.abort(request, "stop")
            end = position + (len(stop) if turn.body.get("include_stop_str_in_output") is True else 0)
            yield Piece(held[:end], tokens, "stop", stop)
            return
        if output.finish is not None:
            yield Piece(held, tokens, output.finish, None)
            return
        out, held = held[: len(held) - keep], held[max(0, len(held) - keep) :]
        yield Piece(out, tokens, None, None)


def build_usage(engine: Engine, turn: Turn) -> dict[str, Any]:
    """OpenAI's form, so far."""
    prompt, cached = turn.request.num_prompt_tokens, turn.request.num_cached_tokens or 0
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + turn.generated,
        "completion_tokens": turn.generated,
        "prompt_tokens_details": {"cached_tokens": cached} if engine.tells_cached else None,
    }


def _find_limit(body: Mapping[str, Any], limit: str) -> int | None:
    key = "max_completion_tokens" if body.get("max_completion_tokens") is not None else limit
    most = body.get(key)
    if most is not None and (type(most) is not int or most < 1):
        raise build_bad_request(f"{key} must be at least 1, got {most}.", key)
    return most


def _truncate(engine: Engine, body: Mapping[str, Any], tokens: list[int], most: int | None) -> list[int]:
    length = body.get("truncate_prompt_tokens")
    if length is None:
        return tokens
    if type(length) is not int or length < -1 or length == 0:
        raise build_bad_request(f"truncate_prompt_tokens must be -1 or at least 1, got {length}.")
    return tokens[-(length if length > 0 else engine.maximum_length - (most or 1)) :]
