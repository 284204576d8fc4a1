"""Bodies of the two legs of a turn; pure.

Verified against vLLM 0.32 (``entrypoints/openai/{chat_completion,completion}/protocol.py``):

- What the prompt's tokens depend on stays: messages, prompt, tools, ``tool_choice``, ``response_format`` (some
  templates render both), template arguments, truncation, ``cache_salt``, ``reasoning_effort``,
  ``add_special_tokens``.
- What vLLM refuses together with ``max_tokens`` 1 or without a stream goes: ``min_tokens`` (must not exceed
  ``max_tokens``), ``stream_options`` (only with ``stream``), ``max_completion_tokens`` (outranks ``max_tokens``).
- What only makes prefill work or answer more goes: ``n`` and beams, log probabilities, echo, token ids, and
  ``structured_outputs`` (a grammar compiled for one token that is thrown away).

``prompt_logprobs`` must go for another reason too: it makes vLLM skip its prefix cache for the request.

Of ``kv_transfer_params`` nothing that a client sends survives; both legs carry the router's own (``contract``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from bidikv_runtime.contract import (
    EXPECT_PARAM,
    EXPECT_RETURN,
    HANDOVER_PARAM,
    KV_TRANSFER_PARAMS,
    PREFILLED_PARAM,
    SESSION_PARAM,
    SOURCES_PARAM,
)
from bidikv_runtime.router.api.errors import ApiError
from bidikv_runtime.router.api.splice import Buffer, Fields, NotAnObject, parse_fields, set_field, splice

PREFILL_DROPPED: Final = frozenset(
    {
        "best_of",
        "echo",
        "logprob_token_ids",
        "logprobs",
        "max_completion_tokens",
        "min_tokens",
        "n",
        "prompt_logprobs",
        "return_prompt_text",
        "return_token_ids",
        "return_token_offsets",
        "stop",
        "stream_interval",
        "stream_options",
        "structured_outputs",
        "top_logprobs",
        "use_beam_search",
    }
)
_PREFILL_OVERRIDE: Final = {"stream": b"false", "max_tokens": b"1"}
_PEEK_BYTES: Final = 256
"""Of an array: enough to see whether there is a first element behind usual white space."""
_COMPUTED_BY_DECODE: Final = ("prompt_logprobs", "echo", "use_beam_search")
_NOT_SET: Final = (b"null", b"false")


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _PrefillAnswer(msgspec.Struct):
    usage: _Usage


_PREFILL_ANSWER: Final = msgspec.json.Decoder(_PrefillAnswer)


def build_prefill_body(fields: Fields, sources: Sequence[str], session: bytes) -> list[Buffer]:
    """The prefill leg's body: the same prompt, one token, no stream; ``sources`` are decode engines."""
    params = _build_kv_params(fields, sources, session) | {HANDOVER_PARAM: True}
    return splice(fields, PREFILL_DROPPED, {**_PREFILL_OVERRIDE, KV_TRANSFER_PARAMS: msgspec.json.encode(params)})


def build_decode_body(
    body: Buffer, fields: Fields, sources: Sequence[str], session: bytes, prefilled: int | None = None
) -> list[Buffer]:
    """The decode leg's body: the client's, byte for byte, except ``kv_transfer_params``.

    The key is always written, also without sources: vLLM lets it win over a client's ``vllm_xargs``.

    Args:
        body: the client's.
        fields: its top-level values.
        sources: lookup address of the prefill engine, if there was a prefill leg.
        session: the session's key (:func:`session.derive_session`).
        prefilled: prompt tokens that decode must find, or refuse the request; None when it shall answer anyhow.
    """
    params = _build_kv_params(fields, sources, session)
    if prefilled is not None:
        params[PREFILLED_PARAM] = prefilled
    return set_field(body, fields, KV_TRANSFER_PARAMS, msgspec.json.encode(params))


def _build_kv_params(fields: Fields, sources: Sequence[str], session: bytes) -> dict[str, Any]:
    params: dict[str, Any] = {SOURCES_PARAM: list(sources), SESSION_PARAM: session.hex()}
    if offers_tools(fields):
        params[EXPECT_PARAM] = EXPECT_RETURN
    return params


def offers_tools(fields: Fields) -> bool:
    """Whether the model may call tools: then the session will most likely be back with a tool's result."""
    tools = bytes(memoryview(fields.get("tools", b""))[:_PEEK_BYTES])
    return tools[:1] == b"[" and tools[1:].lstrip()[:1] not in (b"]", b"")


def is_batch(fields: Fields) -> bool:
    """Whether a completions request has a list of prompts: vLLM makes a request of each, the answers interleave."""
    prompt = bytes(memoryview(fields.get("prompt", b""))[:_PEEK_BYTES])
    return prompt[:1] == b"[" and prompt[1:].lstrip()[:1] in (b'"', b"[", b"{")


def parse_prefilled(answer: Buffer) -> int | None:
    """Prompt tokens that a prefill leg's answer reports; None when it reports none."""
    try:
        tokens = _PREFILL_ANSWER.decode(answer).usage.prompt_tokens
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return tokens if tokens > 0 else None


def build_passed_body(body: Buffer, fields: Fields) -> list[Buffer]:
    """The body of a request without a prefill leg: the client's without ``kv_transfer_params``."""
    return splice(fields, (KV_TRANSFER_PARAMS,), {}) if KV_TRANSFER_PARAMS in fields else [body]


def needs_prefill(fields: Fields) -> bool:
    """Whether decode can use what prefill computes.

    With ``prompt_logprobs`` (which ``echo`` implies) vLLM skips its prefix cache and computes the whole prompt
    itself, and its beam search passes no ``kv_transfer_params`` on.
    """
    return not any(bytes(fields.get(key, b"null")) not in _NOT_SET for key in _COMPUTED_BY_DECODE)


def check_fields(body: Buffer) -> Fields:
    """The body's top-level values.

    Raises:
        ApiError: 400 when the body is not a JSON object, or smuggles KV parameters.
    """
    try:
        fields = parse_fields(body)
    except NotAnObject as error:
        raise ApiError(400, f"The request body is not a JSON object: {error}.") from error
    extra = fields.get("vllm_xargs")
    if extra is not None and bytes(extra) != b"null":
        try:
            smuggled = KV_TRANSFER_PARAMS in parse_fields(extra)
        except NotAnObject:
            smuggled = False  # vLLM refuses it
        if smuggled:  # vLLM merges these into the same place as the field itself
            raise ApiError(400, f"vllm_xargs must not contain {KV_TRANSFER_PARAMS}; remove it.")
    return fields
