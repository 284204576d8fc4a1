"""A streaming OpenAI client that measures the time to first token, from the standard library."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Message = dict[str, str]


@dataclass(frozen=True)
class Answer:
    """One streamed answer."""

    text: str
    ttft_s: float
    """Seconds from sending the request to the first token's arrival."""
    total_s: float
    prompt_tokens: int


class RequestFailed(Exception):
    """The service answered with an error, or ended a stream without ``[DONE]``."""


def stream_chat(
    base_url: str,
    *,
    model: str,
    messages: Sequence[Message],
    max_tokens: int,
    session: str,
    timeout: float = 300,
    extra: Mapping[str, Any] | None = None,
) -> Answer:
    """Greedy, streaming chat completion.

    Raises:
        RequestFailed: an error status, or a broken stream; the text is the service's.
    """
    where = urlsplit(base_url)
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **(extra or {}),
    }
    connection = http.client.HTTPConnection(where.hostname or "", where.port or 80, timeout=timeout)
    try:
        started = time.perf_counter()
        headers = {"Content-Type": "application/json", "X-Session-ID": session}
        connection.request("POST", f"{where.path}/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RequestFailed(f"{response.status}: {response.read().decode(errors='replace')[:2000]}")
        first: float | None = None
        text, prompt_tokens, done = "", 0, False
        while line := response.readline():
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                done = True
                break
            event = json.loads(line[6:])
            if "error" in event:
                raise RequestFailed(json.dumps(event["error"]))
            for choice in event.get("choices", ()):
                content = choice["delta"].get("content") or ""
                if content and first is None:
                    first = time.perf_counter() - started
                text += content
            if usage := event.get("usage"):
                prompt_tokens = usage["prompt_tokens"]
        if not done or first is None:
            raise RequestFailed("the stream ended without a token or without [DONE]")
        return Answer(text, first, time.perf_counter() - started, prompt_tokens)
    finally:
        connection.close()
