"""Turns through the router, timed by the client, alone and beside a stream."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any, Final, TypeVar

import aiohttp

from bidikv_runtime import contract
from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.tests.router_process import RouterProcess, running_router
from e2e.bench.ask import ask, reset_prefix_cache
from e2e.bench.kv_plan import TEMPLATE_TOKENS, build_text
from e2e.bench.paths.plan import BIDIRECTIONAL, CHOSEN, LOCAL, PLAIN, VARIANTS, Gap, Sample, Sizes
from e2e.engine.client import Message, Metrics
from e2e.engine.local import HOST, SERVED_MODEL, LocalEngine

PATHS = "bidikv_router_paths_total"
WAIT_SECONDS = 60.0
REQUEST_SECONDS = 300.0


T = TypeVar("T")


def shuffle(kinds: Sequence[T], seed: str) -> list[T]:
    """In an order that depends on ``seed`` alone: none always comes behind the same other one."""
    return Random(seed).sample(list(kinds), len(kinds))


@dataclass
class Answer:
    """A streamed answer, while it comes and afterwards; times of ``time.perf_counter``."""

    sent_at: float
    text: str = ""
    token_at: list[float] = field(default_factory=list)
    prompt_tokens: int = 0

    @property
    def first_token_s(self) -> float:
        return self.token_at[0] - self.sent_at


def compute_longest_gap(times: Sequence[float], begin: float, end: float) -> float:
    """Longest time between two tokens; the later one came after ``begin``, the earlier one before ``end``."""
    return max((b - a for a, b in pairwise(times) if b > begin and a < end), default=0.0)


class Client:
    """Asks one router."""

    def __init__(self, router: RouterProcess, http: aiohttp.ClientSession) -> None:
        self._router, self._http = router, http

    async def stream(self, answer: Answer, body: dict[str, Any], session: str, path: str | None) -> None:
        """Fill ``answer`` while it comes.

        Raises:
            RuntimeError: an error, in the answer's status or within its stream.
        """
        headers = {"x-session-id": session} | ({contract.PATH_HEADER: path} if path else {})
        request = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with self._http.post(
            f"{self._router.url}/v1/chat/completions", json=request, headers=headers
        ) as response:
            if response.status != 200:
                raise RuntimeError(f"the router answered {response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"the stream broke off: {event['error']}")
                for choice in event["choices"]:
                    answer.text += choice["delta"].get("content") or ""
                    if choice.get("token_ids"):
                        answer.token_at.append(time.perf_counter())
                if usage := event.get("usage"):
                    answer.prompt_tokens = usage["prompt_tokens"]

    async def ask(
        self, messages: Sequence[Message], session: str, tokens: int, path: str | None = None
    ) -> tuple[Answer, str, str]:
        """A whole answer, the path that it took, and why; nothing else may ask this router meanwhile."""
        before = await self._read_paths()
        answer = Answer(time.perf_counter())
        await self.stream(answer, build_body(messages, tokens), session, path)
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            after = await self._read_paths()
            for (taken, reason), count in after.items():
                if count > before.get((taken, reason), 0):
                    return answer, taken, reason
            await asyncio.sleep(0.01)
        raise RuntimeError("the router counted no path for a turn that it answered")

    async def wait_idle(self, engine: LocalEngine) -> None:
        """Until the router knows that ``engine`` has nothing to do; it must serve /debug/engines."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            async with self._http.get(f"{self._router.url}/debug/engines") as response:
                views = (await response.json())["engines"]
            if all(view["load"] == 0 for view in views if view["address"] == f"{HOST}:{engine.port}"):
                return
            await asyncio.sleep(0.05)
        raise RuntimeError(f"{engine.name} was busy for {WAIT_SECONDS:.0f} s")

    async def _read_paths(self) -> dict[tuple[str, str], float]:
        async with self._http.get(f"{self._router.url}/metrics") as response:
            counts = Metrics(await response.text()).split(PATHS)
        found = {}
        for labels, count in counts.items():
            label = dict(part.split("=") for part in labels.split(","))
            found[label["path"], label["reason"]] = count
        return found


def build_body(messages: Sequence[Message], tokens: int) -> dict[str, Any]:
    """A greedy answer of exactly as many tokens."""
    return {
        "model": SERVED_MODEL,
        "messages": list(messages),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def build_message(seed: str, new: int) -> Message:
    """A question with which a turn has ``new`` new tokens."""
    return {"role": "user", "content": build_text(seed, max(1, new - TEMPLATE_TOKENS))}


TOUCH: Final = build_body([build_message("touch", 60)], 4)


@dataclass
class Bench:
    """Three routers in front of the same two engines."""

    prefill: LocalEngine
    decode: LocalEngine
    forcing: Client
    """Obeys the header that names a path."""
    one_way: Client
    """Never reads from decode: all of its turns are plain. (The other routers offer prefill sources on every path,
    also on the plain one: a first turn may share its beginning with other conversations.)"""
    choosing: Client
    """Chooses by itself, and learns from its own turns only."""
    sizes: Sizes

    async def ask(
        self, variant: str, messages: Sequence[Message], session: str, tokens: int, *, forget: bool = True
    ) -> tuple[Answer, str, str]:
        """One turn.

        Args:
            variant: a forced path, or ``CHOSEN``.
            messages: of the conversation.
            session: its name.
            tokens: of the answer.
            forget: prefill has forgotten the conversation, as when it serves many others between; the choosing router
                knows that decode is idle; and both engines have just computed something, since after seconds of
                idleness the first turn is slow on any path.
        """
        if forget:
            await self.forget()
            await self.choosing.wait_idle(self.decode)
            await asyncio.gather(*(ask(engine, TOUCH, stream=False) for engine in (self.prefill, self.decode)))
        if variant == CHOSEN:
            return await self.choosing.ask(messages, session, tokens)
        if variant == PLAIN:
            return await self.one_way.ask(messages, session, tokens)
        return await self.forcing.ask(messages, session, tokens, variant)

    async def forget(self) -> None:
        """Empty prefill's cache."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not await reset_prefix_cache(self.prefill):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.prefill.name} kept blocks in use for {WAIT_SECONDS:.0f} s")
            await asyncio.sleep(0.05)

    async def warm_up(self) -> None:
        """First-use costs of kernels, handshakes in both directions, every path once."""
        for variant in VARIANTS:
            messages = [build_message(f"warm-up/{variant}", 600)]
            answer, *_ = await self.ask(CHOSEN, messages, f"warm-up-{variant}", self.sizes.answer)
            messages += [{"role": "assistant", "content": answer.text}, build_message(f"warm-up/2/{variant}", 100)]
            await self.ask(variant, messages, f"warm-up-{variant}", self.sizes.answer)

    async def measure_history(self, number: int, history: int) -> list[Sample]:
        """One conversation: a first turn of ``history`` tokens, then a turn of each size on every path.

        Forced turns are branches, with sessions of their own; the conversation goes on with the chosen one.
        """
        sizes, samples = self.sizes, []
        session = f"paths-{number}-{history}"
        messages = [build_message(session, history)]
        answer, *_ = await self.ask(CHOSEN, messages, session, sizes.answer)
        messages.append({"role": "assistant", "content": answer.text})
        for new in sizes.new:
            continued: list[Message] = []
            for variant in shuffle(VARIANTS, f"{session}/{new}"):
                branch = [*messages, build_message(f"{session}/{new}/{variant}", new)]
                name = session if variant == CHOSEN else f"{session}-{new}-{variant}"
                answer, path, reason = await self.ask(variant, branch, name, sizes.answer)
                samples.append(
                    Sample(number, history, new, variant, path, reason, answer.prompt_tokens, answer.first_token_s)
                )
                if variant == CHOSEN:
                    continued = [*branch, {"role": "assistant", "content": answer.text}]
            messages = continued
        return samples

    async def measure_beside(self, number: int) -> list[Gap]:
        """Turns of decode while it also answers another conversation with a long stream."""
        sizes, gaps = self.sizes, []
        kinds = [(new, variant) for new in sizes.beside for variant in (LOCAL, BIDIRECTIONAL, CHOSEN)]
        for new, variant in shuffle(kinds, f"beside-{number}"):
            session = f"beside-{number}-{new}-{variant}"
            messages = [build_message(session, sizes.beside_history)]
            answer, *_ = await self.ask(CHOSEN, messages, session, sizes.answer)
            messages.append({"role": "assistant", "content": answer.text})
            messages.append(build_message(f"{session}/2", new))
            await self.forget()
            async with self._streaming(session) as stream:
                quiet_from = time.perf_counter()
                await asyncio.sleep(sizes.quiet_seconds)
                answer, path, reason = await self.ask(variant, messages, session, 1, forget=False)
                until = answer.sent_at + answer.first_token_s
                await asyncio.sleep(sizes.quiet_seconds / 4)  # the token behind the longest gap is still to come
                if stream.token_at[-1] < until:
                    raise RuntimeError("the stream ended before the turn beside it: it needs more tokens")
            gaps.append(
                Gap(
                    number,
                    new,
                    variant,
                    path,
                    reason,
                    answer.first_token_s,
                    compute_longest_gap(stream.token_at, quiet_from, answer.sent_at),
                    compute_longest_gap(stream.token_at, answer.sent_at, until),
                )
            )
        return gaps

    @asynccontextmanager
    async def _streaming(self, seed: str) -> AsyncIterator[Answer]:
        """Another conversation's answer, in the middle; the client leaves at the end."""
        answer = Answer(time.perf_counter())
        body = build_body([build_message(f"stream/{seed}", self.sizes.stream_history)], 8000)
        # Through another router than the turn's, which counts one turn at a time; it learns of the stream by reports.
        task = asyncio.create_task(self.one_way.stream(answer, body, f"stream-{seed}", None))
        try:
            deadline = time.monotonic() + WAIT_SECONDS
            while len(answer.token_at) < 20:
                if task.done():
                    task.result()
                if time.monotonic() > deadline:
                    raise RuntimeError("no stream came from decode")
                await asyncio.sleep(0.01)
            yield answer
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def running_bench(
    prefill: LocalEngine, decode: LocalEngine, environment: dict[str, str], sizes: Sizes
) -> AsyncIterator[Bench]:
    """Routers in front of engines that are ready."""
    p, d = (
        [Endpoint(HOST, engine.port, engine.lookup_port, state_port=engine.state_port)] for engine in (prefill, decode)
    )
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    async with (
        running_router(p, d, "--debug", environment=environment) as forcing,
        running_router(p, d, "--reuse", "OneWay", environment=environment) as one_way,
        # An idle router asks engines every five seconds; this one shall know what a busy one knows.
        running_router(p, d, "--debug", "--report-idle-seconds", "1", environment=environment) as choosing,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), timeout=timeout) as http,
    ):
        for router in (forcing, one_way, choosing):
            await _wait_ready(http, router)
        yield Bench(prefill, decode, Client(forcing, http), Client(one_way, http), Client(choosing, http), sizes)


async def _wait_ready(http: aiohttp.ClientSession, router: RouterProcess) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        async with http.get(f"{router.url}/ready") as response:
            if response.status == 200:
                return
            reason = await response.text()
        if time.monotonic() > deadline:
            raise RuntimeError(f"a router did not become ready: {reason}")
        await asyncio.sleep(0.05)
