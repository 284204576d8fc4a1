"""One chat completion over plain HTTP, timed by the client, with whatever KV parameters a set-up needs.

A connection of its own per request: engines close idle ones, and a frozen engine may do so at any moment.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bidikv_runtime import contract
from e2e.engine.client import Completion, Message, Metrics, add_choice
from e2e.engine.local import SERVED_MODEL, LocalEngine


@dataclass
class Answer:
    """A completed answer; times in seconds since the request was sent."""

    choices: list[Completion] = field(default_factory=list)
    first_token_s: float = 0.0
    """Without a stream the time of the whole answer."""
    total_s: float = 0.0
    prompt_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    """What a stock connector hands out; streams never carry it."""


class EngineRefusal(RuntimeError):
    """The engine answered with an error status, or with an error event in the stream."""

    def __init__(self, engine: str, status: int, text: str) -> None:
        super().__init__(f"{engine} answered {status}: {text[:500]}")
        self.status, self.text = status, text


class LeaveEarly(Exception):
    """The client closes the connection on purpose."""


def build_body(messages: Sequence[Message], max_tokens: int, **parameters: Any) -> dict[str, Any]:
    """A greedy completion of exactly ``max_tokens`` (unless a stop string matches), with token ids and log-probs.

    ``parameters`` are further fields of the request.
    """
    return {
        "model": SERVED_MODEL,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "logprobs": True,
        "top_logprobs": 5,
    } | parameters


def build_prefill_body(messages: Sequence[Message], **parameters: Any) -> dict[str, Any]:
    """The same prompt, for one token that nobody reads, as a router sends it to prefill."""
    return {"model": SERVED_MODEL, "messages": list(messages), "max_tokens": 1, "temperature": 0} | parameters


async def ask(
    engine: LocalEngine,
    body: Mapping[str, Any],
    *,
    stream: bool,
    kv_params: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    leave_after_events: int | None = None,
    seconds: float = 600.0,
) -> Answer:
    """Send ``body`` to the engine and collect its answer.

    Args:
        engine: whom to ask.
        body: of ``build_body``.
        stream: whether to ask for server-sent events.
        kv_params: value of the request's ``kv_transfer_params``.
        headers: further request headers.
        leave_after_events: close the connection after as many events with a token.
        seconds: deadline for the whole answer.

    Raises:
        EngineRefusal: an error status or an error event.
        LeaveEarly: as asked for.
        TimeoutError: the deadline passed.
        aiohttp.ClientError: the connection broke.
    """
    request = dict(body) | {"stream": stream}
    if stream:
        request["stream_options"] = {"include_usage": True}
    if kv_params is not None:
        request[contract.KV_TRANSFER_PARAMS] = dict(kv_params)
    answer = Answer([Completion() for _ in range(body.get("n", 1))])
    started = time.perf_counter()
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
        asyncio.timeout(seconds),
        session.post(f"{engine.url}/v1/chat/completions", json=request, headers=headers) as response,
    ):
        if response.status != 200:
            raise EngineRefusal(engine.name, response.status, await response.text())
        if not stream:
            whole = await response.json()
            answer.total_s = answer.first_token_s = time.perf_counter() - started
            for choice in whole["choices"]:
                add_choice(answer.choices[choice["index"]], choice, choice["message"])
            answer.prompt_tokens = whole["usage"]["prompt_tokens"]
            answer.kv_transfer_params = whole.get(contract.KV_TRANSFER_PARAMS)
            return answer
        events = 0
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise EngineRefusal(engine.name, 200, json.dumps(event["error"]))
            for choice in event["choices"]:
                add_choice(answer.choices[choice["index"]], choice, choice["delta"])
                if choice.get("token_ids"):
                    answer.first_token_s = answer.first_token_s or time.perf_counter() - started
                    events += 1
            if usage := event.get("usage"):
                answer.prompt_tokens = usage["prompt_tokens"]
            if leave_after_events is not None and events >= leave_after_events:
                raise LeaveEarly
        answer.total_s = time.perf_counter() - started
    if not all(choice.finish_reason for choice in answer.choices):
        raise aiohttp.ClientPayloadError(f"{engine.name} ended its stream without a reason to finish")
    return answer


async def scrape(engine: LocalEngine) -> Metrics:
    """The engine's /metrics."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
        asyncio.timeout(30),
        session.get(f"{engine.url}/metrics") as response,
    ):
        return Metrics(await response.text())


def difference(before: Metrics, after: Metrics, name: str) -> float | None:
    """By how much a metric grew; None when the engine has no such metric."""
    now = after.split(name)
    return sum(now.values()) - sum(before.split(name).values()) if now else None


async def reset_prefix_cache(engine: LocalEngine) -> bool:
    """Empty the engine's prefix cache; whether it did: it refuses while a block is in use."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
        asyncio.timeout(60),
        session.post(f"{engine.url}/reset_prefix_cache") as response,
    ):
        return response.status == 200
