"""Client of one engine for tests: chat completions with token ids and log-probabilities, metrics, cache reset."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp

from bidikv_runtime import contract
from e2e.engine.local import SERVED_MODEL, LocalEngine

REQUEST_SECONDS = 120.0
"""Longer than any request here takes on a busy machine: a hung engine fails the test instead of blocking it."""

Message = Mapping[str, str]


@dataclass
class Completion:
    """One choice."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    """Per position, log-probability of the five likeliest tokens."""
    finish_reason: str | None = None


def logprob_distance(first: Sequence[Mapping[str, float]], second: Sequence[Mapping[str, float]]) -> float:
    """Largest difference at any position; infinite where the likeliest tokens or the lengths differ.

    Tokens alone are no proof: a random model's greedy token often stays the same under other KV.
    """
    if len(first) != len(second):
        return float("inf")
    worst = 0.0
    for a, b in zip(first, second, strict=True):
        if max(a, key=a.__getitem__) not in b:
            return float("inf")
        worst = max(worst, *(abs(a[token] - b[token]) for token in a.keys() & b.keys()))
    return worst


class Metrics:
    """A scrape of /metrics."""

    def __init__(self, text: str) -> None:
        self._samples: list[tuple[str, dict[str, str], float]] = []
        self._families = set(re.findall(r"(?m)^# TYPE (\S+)", text))
        for line in text.splitlines():
            match = re.fullmatch(r"(\w[\w:]*)(?:\{(.*)\})? (\S+)", line)
            if match:
                labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or ""))
                self._samples.append((match[1], labels, float(match[3])))

    def names(self) -> set[str]:
        return {name for name, _, _ in self._samples}

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples with these labels; 0 for a metric that is there and has no samples yet.

        Raises:
            KeyError: there is no such metric, or it has no sample with these labels.
        """
        found = [value for n, have, value in self._samples if n == name and labels.items() <= have.items()]
        if not found and (labels or name not in self._families):
            raise KeyError(f"no series {name} {labels}")
        return sum(found)

    def split(self, name: str) -> dict[str, float]:
        """The samples of a metric by their labels, as ``reason=silent``; vLLM's own labels aside."""
        found: dict[str, float] = {}
        for n, labels, value in self._samples:
            if n == name:
                key = ",".join(f"{k}={v}" for k, v in labels.items() if k not in ("engine", "model_name"))
                found[key] = found.get(key, 0.0) + value
        return found


class EngineClient:
    """HTTP client bound to one engine; an asynchronous context manager."""

    def __init__(self, engine: LocalEngine, headers: Mapping[str, str] | None = None) -> None:
        """``headers`` go with every request."""
        self.engine = engine
        self._headers = headers
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EngineClient:
        # A connection for each request: vLLM closes an idle one after 5 s, which may cross with the next request.
        self._session = aiohttp.ClientSession(
            self.engine.url,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS),
            connector=aiohttp.TCPConnector(force_close=True),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        sources: Any = None,
        stream: bool = True,
        **parameters: Any,
    ) -> list[Completion]:
        """Greedy completion; one ``Completion`` per choice.

        Args:
            messages: the conversation.
            max_tokens: output length; exact unless ``ignore_eos`` is switched off or a stop string matches.
            sources: value of the sources parameter, sent as it is; None sends no KV parameters.
            stream: whether to ask for server-sent events.
            parameters: more fields of the request.

        Raises:
            RuntimeError: the engine answered with an error.
        """
        body: dict[str, Any] = {
            "model": SERVED_MODEL,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "logprobs": True,
            "top_logprobs": 5,
        } | parameters
        if sources is not None:
            body[contract.KV_TRANSFER_PARAMS] = {contract.SOURCES_PARAM: sources}
        completions: list[Completion] = [Completion() for _ in range(parameters.get("n", 1))]
        assert self._session is not None, "use the client as a context manager"
        async with self._session.post("/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"{self.engine.name} answered {response.status}: {await response.text()}")
            if not stream:
                for choice in (await response.json())["choices"]:
                    add_choice(completions[choice["index"]], choice, choice["message"])
                return completions
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"{self.engine.name} failed while streaming: {event['error']}")
                for choice in event["choices"]:
                    add_choice(completions[choice["index"]], choice, choice["delta"])
        return completions

    async def tokenize(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of the prompt that the chat template makes of ``messages``."""
        assert self._session is not None, "use the client as a context manager"
        async with self._session.post("/tokenize", json={"messages": list(messages)}) as response:
            tokens: list[int] = (await response.json())["tokens"]
            return tokens

    async def metrics(self) -> Metrics:
        assert self._session is not None, "use the client as a context manager"
        async with self._session.get("/metrics") as response:
            return Metrics(await response.text())

    async def collective_rpc(self, method: str) -> list[Any]:
        """What the method of that name of each worker returns."""
        assert self._session is not None, "use the client as a context manager"
        async with self._session.post("/collective_rpc", json={"method": method}) as response:
            response.raise_for_status()
            results: list[Any] = (await response.json())["results"]
            return results

    async def reset_prefix_cache(self, *, running: bool = False, connector: bool = False) -> bool:
        """Empty the engine's prefix cache; whether it did (it refuses while blocks are in use).

        With ``running``, vLLM preempts the requests that hold blocks. With ``connector``, it tells the connector, which
        ends its holds: without, the emptied blocks of earlier sessions are still the last ones to be used again.
        """
        assert self._session is not None, "use the client as a context manager"
        query = {"reset_running_requests": "true"} if running else {}
        if connector:
            query["reset_external"] = "true"
        async with self._session.post("/reset_prefix_cache", params=query) as response:
            return response.status == 200 and bool((await response.json())["success"])


def add_choice(completion: Completion, choice: Mapping[str, Any], message: Mapping[str, Any]) -> None:
    """Append what one choice of an answer, or of an event of its stream, holds; ``message`` is its message or delta."""
    completion.text += message.get("content") or ""
    completion.tokens += choice.get("token_ids") or []
    positions: Iterable[Mapping[str, Any]] = (choice.get("logprobs") or {}).get("content") or ()
    completion.top_logprobs += [{top["token"]: top["logprob"] for top in p["top_logprobs"]} for p in positions]
    completion.finish_reason = choice.get("finish_reason") or completion.finish_reason
