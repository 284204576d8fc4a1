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
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from bidikv_runtime.contract import KV_TRANSFER_PARAMS, SOURCES_PARAM
from bidikv_runtime.router.errors import ApiError
from bidikv_runtime.router.splice import Buffer, Fields, NotAnObject, parse_fields, set_field, splice

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
_COMPUTED_BY_DECODE: Final = ("prompt_logprobs", "echo", "use_beam_search")
_NOT_SET: Final = (b"null", b"false")


def build_kv_params(sources: Sequence[str]) -> bytes:
    """The encoded ``kv_transfer_params`` that offers ``sources`` (possibly none)."""
    return msgspec.json.encode({SOURCES_PARAM: list(sources)})


def build_prefill_body(fields: Fields, sources: Sequence[str]) -> list[Buffer]:
    """The prefill leg's body: the same prompt, one token, no stream; ``sources`` are decode engines."""
    return splice(fields, PREFILL_DROPPED, {**_PREFILL_OVERRIDE, KV_TRANSFER_PARAMS: build_kv_params(sources)})


def build_decode_body(body: Buffer, fields: Fields, sources: Sequence[str]) -> list[Buffer]:
    """The decode leg's body: the client's, byte for byte, except ``kv_transfer_params``.

    The key is always written, also without sources: vLLM lets it win over a client's ``vllm_xargs``.
    """
    return set_field(body, fields, KV_TRANSFER_PARAMS, build_kv_params(sources))


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
