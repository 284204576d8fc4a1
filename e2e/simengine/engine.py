"""The engine core: vLLM's scheduling, in which a step takes time and computes nothing.

As in vLLM 0.32: requests that run come first, in a step's budget of tokens; a long prompt is computed in chunks; what
the prefix cache or a source holds is not computed; when blocks are wanting, the request that began last is preempted
and begins anew; blocks of a finished request stay cached until they are used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from bidikv_runtime.connector.reuse import Read
from e2e.simengine import metrics
from e2e.simengine.blocks import Block, BlockHasher, BlockPool
from e2e.simengine.connector import REFUSED, Connector
from e2e.simengine.faults import Faults
from e2e.simengine.metrics import Metrics
from e2e.simengine.settings import Engine
from e2e.simengine.text import Answer

DEFER_SECONDS: Final = 0.001
"""Pause when nothing runs and a request waits for its sources' answers, as vLLM's."""

Finish = Literal["stop", "length", "abort", "error"]


class Output(NamedTuple):
    """What a step adds to an answer."""

    token: int | None
    text: str
    finish: Finish | None


@dataclass(eq=False)
class Request:
    """One request; the names that vLLM's ``Request`` has too are those that the connector's parts read."""

    request_id: str
    tokens: list[int]
    """The prompt's, then the answer's."""
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    kv_transfer_params: Any = None
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    cached_blocks: int = 0
    """Of ``blocks``, from the first one on, that are in the prefix cache."""
    num_cached_tokens: int | None = None
    """Of the prompt, found here or read, when it was first admitted."""
    finish: Finish | None = None
    outputs: asyncio.Queue[Output] = field(default_factory=asyncio.Queue)
    """Not bounded by itself: there are at most ``max_tokens``."""
    arrived_at: float = field(default_factory=time.monotonic)
    last_token_at: float = 0.0
    answer: Answer | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens


class EngineCore:
    """All methods belong to the event loop's thread."""

    def __init__(self, engine: Engine, faults: Faults, metrics: Metrics) -> None:
        self._engine, self._simulation, self._faults, self._metrics = engine, engine.simulation, faults, metrics
        self._size = engine.block_size
        self.pool = BlockPool(engine.blocks)
        self._hasher = BlockHasher(engine.hash_seed, engine.block_size)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._loaded: deque[Request] = deque()
        """Their read has ended: they hold blocks and come before all that wait."""
        self._reading: dict[Request, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        """Set when a request has ended and no other is left."""
        self._draining = False
        self.connector: Connector | None = None
        if engine.connector is not None:
            self.connector = Connector(engine, engine.connector, self.pool, self._hasher, faults, metrics)

    @property
    def requests(self) -> list[Request]:
        """The unfinished ones."""
        return [*self._waiting, *self._loaded, *self._running, *self._reading]

    @property
    def unfinished(self) -> int:
        return len(self._waiting) + len(self._loaded) + len(self._running) + len(self._reading)

    def close(self) -> None:
        """Close the connector's ports."""
        if self.connector is not None:
            self.connector.close()

    def add(self, request: Request) -> None:
        """Take a request; its ``outputs`` end with one that has ``finish`` set."""
        if self._draining:
            self._tell(request, "abort")
            return
        request.answer = Answer(request.tokens, self._simulation.answer_tokens)
        self._hasher.extend(request.block_hashes, request.tokens, request.cache_salt)
        if self.connector is not None:
            self.connector.on_new_request(request)
        self._waiting.append(request)
        self._idle.clear()
        self._wake.set()

    def abort(self, request: Request, finish: Finish = "abort") -> None:
        """End a request, unless it has ended: nobody wants the rest (``abort``), or a stop string has come (``stop``).

        What it would still have put out is dropped.
        """
        if request.finish is None:
            self._leave(request)
            self._finish(request, finish)

    async def drain(self, seconds: float) -> None:
        """Take no more requests and finish those that there are; with 0 seconds, abort them."""
        self._draining = True
        if self.unfinished and seconds:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)
        for request in self.requests:
            self.abort(request)

    async def run(self) -> None:
        """Step for ever; an engine without work sleeps."""
        while True:
            await self._faults.wait_until_whole()
            plan = self._schedule()
            if plan:
                await self._step(plan)
            elif self._waiting or self._loaded:
                await asyncio.sleep(DEFER_SECONDS)
            else:
                self._wake.clear()
                await self._wake.wait()

    def render_metrics(self) -> bytes:
        """/metrics."""
        record = self._metrics.record
        record(metrics.RUNNING, len(self._running))
        capacity = len(self._waiting) + len(self._loaded)
        record(metrics.WAITING, capacity + len(self._reading))
        record(metrics.WAITING_BY_REASON, capacity, "capacity")
        record(metrics.WAITING_BY_REASON, len(self._reading), "deferred")
        record(metrics.CACHE_USAGE, self.pool.usage)
        if self.connector is not None:
            self.connector.observe()
        return self._metrics.render()

    # --- a step -------------------------------------------------------------------------------------------------------

    def _schedule(self) -> dict[Request, int]:
        """Which requests are in the next step, with how many tokens."""
        plan: dict[Request, int] = {}
        budget = self._engine.step_tokens
        preempted = False
        for request in list(self._running):
            if budget == 0:
                break
            if preempted and request not in self._running:
                continue
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self._allocate(request, request.num_computed_tokens + count):
                victim = self._running[-1]  # not planned yet, unless it is this one
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                plan[request] = count
                budget -= count
        if not preempted:
            self._admit(plan, budget)
        for request, count in plan.items():
            request.num_computed_tokens += count
            request.num_in_flight_tokens = count
        return plan

    def _admit(self, plan: dict[Request, int], budget: int) -> None:
        deferred: list[Request] = []
        while (self._loaded or self._waiting) and budget and len(self._running) < self._engine.step_requests:
            if self._loaded:
                request = self._loaded[0]
                count = min(request.num_tokens - request.num_computed_tokens, budget)
                if not self._allocate(request, request.num_computed_tokens + count):
                    break
                self._loaded.popleft()
            else:
                request = self._waiting[0]
                found = self._count_found(request)
                matched = self.connector.match(request, found * self._size) if self.connector is not None else 0
                if matched is None:
                    deferred.append(self._waiting.popleft())
                    continue
                if matched == REFUSED:
                    self._waiting.popleft()
                    self._finish(request, "error")
                    continue
                if not self._take_blocks(request, found, matched, budget):
                    break
                self._waiting.popleft()
                if self._begin_read(request, found, matched):
                    continue
            self._running.append(request)
            if request.num_cached_tokens is None:
                self._note_cached(request, 0)
            plan[request] = min(request.num_tokens - request.num_computed_tokens, budget)
            budget -= plan[request]
        self._waiting.extendleft(reversed(deferred))

    def _count_found(self, request: Request) -> int:
        """Leading blocks in the prefix cache; the last token is always computed, its output is the next token."""
        if request.skip_reading_prefix_cache:
            return 0
        return self.pool.count_cached(request.block_hashes[: (request.num_tokens - 1) // self._size])

    def _take_blocks(self, request: Request, found: int, external: int, budget: int) -> bool:
        """Take the cached blocks and as many new ones as the first step needs, or the read; whether there were enough.

        As in vLLM 0.32, all of the prompt must fit. A read does not compute and cannot be preempted, so it must fit
        beside what all others that are under way still need for their prompts: else they could wait for each other.
        """
        request.blocks = self.pool.take_cached(request.block_hashes[:found])
        reserved = sum(map(self._count_missing, [*self._loaded, *self._running, *self._reading])) if external else 0
        if self._count_missing(request) > self.pool.free - reserved:
            self._free(request)
            return False
        self._allocate(request, min(request.num_tokens, found * self._size + (external or budget)))
        request.cached_blocks, request.num_computed_tokens = found, found * self._size
        return True

    def _count_missing(self, request: Request) -> int:
        """Blocks that a request's tokens so far still need."""
        return max(0, -(-request.num_tokens // self._size) - len(request.blocks))

    def _begin_read(self, request: Request, found: int, external: int) -> bool:
        """Whether the request now waits for a read."""
        read = self.connector.admit(request, external) if self.connector is not None else None
        if read is not None:
            self._reading[request] = asyncio.get_running_loop().create_task(self._read(request, read, found))
        return read is not None

    async def _read(self, request: Request, read: Read, found: int) -> None:
        assert self.connector is not None
        refused = await self.connector.read(request, read)
        if self._reading.pop(request, None) is None:
            return
        if request.num_cached_tokens is None:
            self._note_cached(request, request.num_computed_tokens - found * self._size)
        if refused:
            request.num_computed_tokens = found * self._size
            self._finish(request, "error")
            return
        self._cache(request)
        # The last token is computed again: its output is the next token.
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        self._loaded.append(request)
        self._wake.set()

    async def _step(self, plan: dict[Request, int]) -> None:
        simulation, began = self._simulation, time.monotonic()
        prefills = [(r.num_computed_tokens - n, n) for r, n in plan.items() if n > 1]
        decodes = len(plan) - len(prefills)
        seconds = simulation.step_seconds + decodes * simulation.decode_seconds
        seconds += sum(tokens for _, tokens in prefills) / simulation.prefill_tokens_per_second
        await asyncio.sleep(seconds * self._faults.slow)
        await self._faults.wait_until_whole()
        now = time.monotonic()
        for request in plan:
            if request.finish is None and request.num_in_flight_tokens:
                self._end_step_of(request, now)
        if self.connector is not None:
            self.connector.end_step(self._running, prefills, decodes, now - began)

    def _end_step_of(self, request: Request, now: float) -> None:
        request.num_in_flight_tokens = 0
        self._cache(request)
        if request.num_computed_tokens < request.num_tokens:
            return
        assert request.answer is not None
        token, text = request.answer.next(not request.ignore_eos and request.num_output_tokens >= request.min_tokens)
        request.tokens.append(token)
        self._hasher.extend(request.block_hashes, request.tokens, request.cache_salt)
        first = request.num_output_tokens == 1
        since = request.arrived_at if first else request.last_token_at
        self._metrics.record(metrics.TIME_TO_FIRST_TOKEN if first else metrics.INTER_TOKEN_LATENCY, now - since)
        if first:
            self._metrics.record(metrics.PROMPT_TOKENS, request.num_prompt_tokens)
        self._metrics.record(metrics.GENERATION_TOKENS)
        request.last_token_at = now
        finish: Finish | None = None
        if not text:
            finish = "stop"
        elif request.num_output_tokens >= request.max_tokens or request.num_tokens >= self._engine.maximum_length:
            finish = "length"
        if finish is None:
            request.outputs.put_nowait(Output(token, text, None))
        else:
            self._leave(request)
            self._finish(request, finish, Output(token, text, finish))
        self._faults.count_token()

    # --- blocks -------------------------------------------------------------------------------------------------------

    def _allocate(self, request: Request, tokens: int) -> bool:
        """Blocks for the request's first ``tokens`` tokens; whether there are enough."""
        missing = -(-tokens // self._size) - len(request.blocks)
        if missing > self.pool.free:
            return False
        if missing > 0:
            request.blocks += self.pool.get_new_blocks(missing)
        return True

    def _cache(self, request: Request) -> None:
        full = min(request.num_computed_tokens // self._size, len(request.block_hashes))
        new = slice(request.cached_blocks, full)
        self.pool.cache(request.blocks[new], request.block_hashes[new])
        request.cached_blocks = max(full, request.cached_blocks)

    def _free(self, request: Request) -> None:
        self.pool.free_blocks(reversed(request.blocks))
        request.blocks, request.cached_blocks, request.num_in_flight_tokens = [], 0, 0

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._metrics.record(metrics.PREEMPTIONS)
        self._waiting.appendleft(request)

    def _note_cached(self, request: Request, external: int) -> None:
        """A request is admitted for the first time."""
        found = request.num_computed_tokens - external
        request.num_cached_tokens = request.num_computed_tokens
        self._metrics.record(metrics.QUEUE_TIME, time.monotonic() - request.arrived_at)
        if not request.skip_reading_prefix_cache:
            self._metrics.record(metrics.CACHE_QUERIES, request.num_tokens)
            self._metrics.record(metrics.CACHE_HITS, found)
        if self.connector is not None:
            self._metrics.record(metrics.EXTERNAL_QUERIES, request.num_tokens - found)
            self._metrics.record(metrics.EXTERNAL_HITS, external)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _leave(self, request: Request) -> None:
        if request in self._running:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        elif request in self._loaded:
            self._loaded.remove(request)
        else:
            self._reading.pop(request, None)  # its task goes on and finds that nobody waits

    def _finish(self, request: Request, finish: Finish, last: Output | None = None) -> None:
        if self.connector is not None:
            self.connector.request_finished(request, aborted=finish == "abort", failed=finish == "error")
        self._free(request)
        if finish in ("stop", "length"):
            self._metrics.record(metrics.SUCCESS, 1, finish)
            self._metrics.record(metrics.REQUEST_LATENCY, time.monotonic() - request.arrived_at)
            self._metrics.record(metrics.PROMPT_SIZE, request.num_prompt_tokens)
            self._metrics.record(metrics.ANSWER_SIZE, request.num_output_tokens)
        self._tell(request, finish, last)

    def _tell(self, request: Request, finish: Finish, last: Output | None = None) -> None:
        request.finish = finish
        if not self.unfinished:
            self._idle.set()
        request.outputs.put_nowait(last or Output(None, "", finish))
