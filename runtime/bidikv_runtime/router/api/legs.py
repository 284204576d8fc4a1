"""Bodies of the two legs of a turn; pure.

The prefill leg must compute exactly the prompt that decode will look up, and generate one token. Verified against vLLM
0.32 (``entrypoints/openai/{chat_completion,completion,responses}`` and ``entrypoints/anthropic``):

- What the prompt's tokens depend on stays: messages, input, instructions, prompt, tools, ``tool_choice`` and
  ``response_format`` or ``text`` (some templates render them), template arguments, truncation, ``cache_salt``, the
  effort of reasoning, ``add_special_tokens``.
- What vLLM refuses together with one token or without a stream goes: ``min_tokens`` (must not exceed ``max_tokens``),
  ``stream_options`` (only with ``stream``), ``max_completion_tokens`` (outranks ``max_tokens``), the thinking budget of
  messages (must be below ``max_tokens``; it limits sampling and renders nothing).
- What only makes prefill work or answer more goes: ``n`` and beams, log probabilities, echo, token ids, stop strings,
  ``structured_outputs`` (a grammar compiled for one token that is thrown away).
- Prefill must leave nothing behind: ``store`` is false.

``prompt_logprobs`` must go for another reason too: it makes vLLM skip its prefix cache for the request.

A prompt that vLLM itself cuts to what the answer leaves room for (``truncate_prompt_tokens`` -1, ``truncation`` "auto")
is cut differently for one token: then decode does not find it and refuses once, see ``contract.PREFILLED_PARAM``.

Of ``kv_transfer_params`` nothing that a client sends survives; both legs carry the router's own (``contract``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from bidikv_runtime.contract import (
    BODY_BYTES_PARAM,
    COMPUTE_LIMIT_PARAM,
    EXPECT_PARAM,
    EXPECT_RETURN,
    HANDOVER_PARAM,
    KV_TRANSFER_PARAMS,
    PREFILLED_PARAM,
    SESSION_PARAM,
    SOURCES_PARAM,
    TOKEN_IDS_PARAM,
)
from bidikv_runtime.router.api.errors import ApiError
from bidikv_runtime.router.api.splice import Buffer, Fields, NotAnObject, parse_fields, set_fields, splice
from bidikv_runtime.router.api.tenant import CACHE_SALT
from bidikv_runtime.router.observe.record import Route

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
        "thinking_token_budget",
        "top_logprobs",
        "use_beam_search",
    }
)
"""From chat and completions."""
RESPONSES_DROPPED: Final = frozenset(
    {
        "background",
        "enable_response_messages",
        "include",
        "max_tool_calls",
        "stop",
        "stream_options",
        "structured_outputs",
        "top_logprobs",
    }
)
MESSAGES_DROPPED: Final = frozenset({"stop_sequences"})


@dataclass(frozen=True, slots=True)
class _Rule:
    """How the prefill leg of one API differs from the client's request."""

    dropped: frozenset[str]
    override: dict[str, bytes]


_CHAT_RULE: Final = _Rule(PREFILL_DROPPED, {"stream": b"false", "max_tokens": b"1"})
_RULES: Final[dict[Route, _Rule]] = {
    "chat": _CHAT_RULE,
    "completions": _CHAT_RULE,
    "responses": _Rule(RESPONSES_DROPPED, {"stream": b"false", "store": b"false", "max_output_tokens": b"1"}),
    "messages": _Rule(MESSAGES_DROPPED, {"stream": b"false", "max_tokens": b"1"}),
}
_PEEK_BYTES: Final = 256
"""Of an array: enough to see whether there is a first element behind usual white space."""
_COMPUTED_BY_DECODE: Final = ("prompt_logprobs", "echo", "use_beam_search")
_NOT_SET: Final = (b"null", b"false")
_SERVED_TOOLS: Final = (b'"code_interpreter"', b'"container"', b'"mcp"', b'"web_search')
"""Types of tools that vLLM calls itself, between two generations within one request."""
_ANSWER_BYTES: Final = 64 * 1024
"""More than one token, its usage and its log need, without what the request makes it repeat."""


_TOKEN_IDS_KEY: Final = b',"%b":' % TOKEN_IDS_PARAM.encode("ascii")
_TOKEN_IDS: Final = re.compile(rb'"prompt_token_ids"\s*:\s*(?=\[\s*\d)')


class _Kind(msgspec.Struct):
    type: str = ""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_KIND: Final = msgspec.json.Decoder(_Kind)
_ANSWER: Final = msgspec.json.Decoder(_Answer)


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """What a prefill leg's answer says."""

    prompt_tokens: int | None = None
    """Of the whole prompt; None when the answer does not say, so that nobody knows what was computed."""
    cached_tokens: int | None = None
    """Of these, found in a cache or read from decode; None when not said (vLLM tells chat and messages only with
    ``--enable-prompt-tokens-details``)."""
    token_ids: bytes | None = None
    """The prompt's tokens as an encoded list, if they were asked for."""


# --- what a request allows ---


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


def needs_prefill(fields: Fields, route: Route = "chat") -> bool:
    """Whether prefill can compute what decode can use.

    With ``prompt_logprobs`` (which ``echo`` implies) vLLM skips its prefix cache and computes the whole prompt itself,
    and its beam search passes no ``kv_transfer_params`` on. Only the engine that stored a response knows the prompt of
    one that follows it, and a request in the background is answered before it is computed.
    """
    if route == "messages":
        return True
    if route == "responses":
        return not is_set(fields, "previous_response_id") and not is_set(fields, "background")
    return not any(is_set(fields, key) for key in _COMPUTED_BY_DECODE)


def may_refuse(fields: Fields, route: Route) -> bool:
    """Whether decode may refuse the request for what it would have to compute: only while nothing was answered.

    Of a batch one prompt may be refused when another's answer has begun, and where vLLM calls tools itself, a later
    generation of the same request.
    """
    if route == "completions":
        return not is_batch(fields)
    if route == "responses" and "tools" in fields:
        tools = bytes(fields["tools"])
        return not any(kind in tools for kind in _SERVED_TOOLS)
    return True


def may_reuse_tokens(fields: Fields, route: Route) -> bool:
    """Whether decode can take prefill's tokens instead of rendering the messages (``contract.TOKEN_IDS_PARAM``).

    vLLM does so for chats; messages with more than text it renders again, whatever it is given (and to look for these
    here would cost as much as it saves). ``documents`` are left out, since a parser may read them besides, and
    ``return_prompt_text``, which a prompt that was not rendered has none of.
    """
    return route == "chat" and not is_set(fields, "documents") and not is_set(fields, "return_prompt_text")


def wants_events(fields: Fields) -> bool:
    """Whether the answer shall be a stream of events."""
    return bytes(fields.get("stream", b"")) == b"true"


def is_set(fields: Fields, key: str) -> bool:
    """Whether a key is there and neither null nor false."""
    raw = fields.get(key)
    return raw is not None and bytes(memoryview(raw)[:6]) not in _NOT_SET


def offers_tools(fields: Fields) -> bool:
    """Whether the model may call tools: then the session will most likely be back with a tool's result."""
    tools = bytes(memoryview(fields.get("tools", b""))[:_PEEK_BYTES])
    return tools[:1] == b"[" and tools[1:].lstrip()[:1] not in (b"]", b"")


def is_batch(fields: Fields) -> bool:
    """Whether a completions request has a list of prompts: vLLM makes a request of each, the answers interleave."""
    prompt = bytes(memoryview(fields.get("prompt", b""))[:_PEEK_BYTES])
    return prompt[:1] == b"[" and prompt[1:].lstrip()[:1] in (b'"', b"[", b"{")


# --- the legs ---


def build_prefill_body(
    fields: Fields,
    sources: Sequence[str],
    session: bytes,
    *,
    route: Route = "chat",
    body_bytes: int = 0,
    cache_salt: bytes | None = None,
    return_tokens: bool = False,
) -> list[Buffer]:
    """The prefill leg's body: the same prompt, one token, no stream.

    Args:
        fields: the client's top-level values.
        sources: lookup addresses of decode engines that may hold the history.
        session: the session's key (:func:`session.identify`).
        route: whose rules apply.
        body_bytes: of the client's body.
        cache_salt: encoded value that replaces the client's (:func:`tenant.compute_cache_salt`).
        return_tokens: ask for the prompt's tokens.
    """
    rule = _RULES[route]
    params = _build_kv_params(fields, sources, session, body_bytes) | {HANDOVER_PARAM: True}
    override = {**rule.override, KV_TRANSFER_PARAMS: msgspec.json.encode(params)}
    dropped = rule.dropped
    if route == "messages":
        if _read_kind(fields, "thinking") == "enabled":
            dropped = dropped | {"thinking"}
        if _read_kind(fields, "tool_choice") == "tool":
            # vLLM decodes a named tool's arguments, of which there is one token: an error after all the work. No
            # template of vLLM renders the choice except Kimi K3's, whose turns with a named tool decode computes.
            override["tool_choice"] = b'{"type":"auto"}'
    if return_tokens:
        override["return_token_ids"] = b"true"
    if cache_salt is not None:
        override[CACHE_SALT] = cache_salt
    return splice(fields, dropped, override)


def build_decode_body(
    body: Buffer,
    fields: Fields,
    sources: Sequence[str],
    session: bytes,
    prefilled: int | None = None,
    *,
    compute_limit: int | None = None,
    token_ids: bytes | None = None,
    cache_salt: bytes | None = None,
    response_id: str = "",
) -> list[Buffer]:
    """The leg that answers: the client's body, byte for byte, except what the router sets.

    ``kv_transfer_params`` is always written, also without sources: vLLM lets it win over a client's ``vllm_xargs``.

    Args:
        body: the client's.
        fields: its top-level values.
        sources: lookup address of the prefill engine, if there was a prefill leg.
        session: the session's key (:func:`session.identify`).
        prefilled: prompt tokens that decode must find, or refuse the request; None when it shall answer anyhow.
        compute_limit: without a prefill leg: prompt tokens that decode may compute, or refuse the request.
        token_ids: the prompt's tokens (:attr:`PrefillAnswer.token_ids`).
        cache_salt: encoded value that replaces the client's (:func:`tenant.compute_cache_salt`).
        response_id: for the Responses API: id of the answer, unless the client chose one.
    """
    params = _build_kv_params(fields, sources, session, memoryview(body).nbytes)
    if prefilled is not None:
        params[PREFILLED_PARAM] = prefilled
    if compute_limit is not None:
        params[COMPUTE_LIMIT_PARAM] = compute_limit
    values: dict[str, bytes] = {}
    if cache_salt is not None:
        values[CACHE_SALT] = cache_salt
    if response_id and "request_id" not in fields:
        values["request_id"] = msgspec.json.encode(response_id)
    values[KV_TRANSFER_PARAMS] = msgspec.json.encode(params)
    pieces = set_fields(body, fields, values)
    if token_ids is not None:
        # Into the parameters, which end the body: the list may be larger than the body and is never copied.
        pieces[-1:] = [bytes(memoryview(pieces[-1])[:-2]) + _TOKEN_IDS_KEY, token_ids, b"}}"]
    return pieces


def build_passed_body(body: Buffer, fields: Fields) -> list[Buffer]:
    """The body of a request without a prefill leg: the client's without ``kv_transfer_params``."""
    return splice(fields, (KV_TRANSFER_PARAMS,), {}) if KV_TRANSFER_PARAMS in fields else [body]


def _build_kv_params(fields: Fields, sources: Sequence[str], session: bytes, body_bytes: int) -> dict[str, Any]:
    params: dict[str, Any] = {SOURCES_PARAM: list(sources), SESSION_PARAM: session.hex()}
    if body_bytes:
        params[BODY_BYTES_PARAM] = body_bytes
    if offers_tools(fields):
        params[EXPECT_PARAM] = EXPECT_RETURN
    return params


def _read_kind(fields: Fields, key: str) -> str:
    raw = fields.get(key)
    if raw is None:
        return ""
    try:
        return _KIND.decode(raw).type
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""  # the engine will judge it


# --- prefill's answer ---


def bound_prefill_answer(route: Route, body_bytes: int, *, returns_tokens: bool = False) -> int:
    """How many bytes of a prefill leg's answer are worth keeping.

    A response repeats the request's instructions and tools, and a token takes about as many digits as it has
    characters; both may grow by their encoding.
    """
    repeats = route == "responses" or returns_tokens
    return _ANSWER_BYTES + (3 * body_bytes if repeats else 0)


def parse_prefill_answer(answer: bytes | bytearray) -> PrefillAnswer:
    """What a prefill leg's answer says; an empty :class:`PrefillAnswer` when it cannot be read.

    The list of tokens is found by its key and the rest parsed without it: 250,000 tokens take 0.2 instead of 1.7 ms. No
    text can look like the key: within a string of JSON a quote has a backslash before it.
    """
    token_ids = None
    if (found := _TOKEN_IDS.search(answer)) is not None and (end := answer.find(b"]", found.end()) + 1):
        token_ids = bytes(memoryview(answer)[found.end() : end])
        answer = answer[: found.end()] + b"null" + answer[end:]
    try:
        usage = _ANSWER.decode(answer).usage
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return PrefillAnswer()
    if usage is None:
        return PrefillAnswer()
    if usage.prompt_tokens is not None:
        tokens, details = usage.prompt_tokens, usage.prompt_tokens_details
    else:
        # Messages: without what came from a cache or went to one. Responses: the whole prompt.
        tokens = (usage.input_tokens or 0) + (usage.cache_read_input_tokens or 0)
        tokens += usage.cache_creation_input_tokens or 0
        details = usage.input_tokens_details
    cached = details.cached_tokens if details is not None else usage.cache_read_input_tokens
    return PrefillAnswer(tokens if tokens > 0 else None, cached, token_ids)
