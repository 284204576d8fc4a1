"""A block pool as vLLM's, without content: replays a trace under one policy and counts what must be computed again."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from bidikv_runtime.connector.cost import CostModel
from bidikv_runtime.connector.eviction import TieredQueue
from bidikv_runtime.connector.retention import Retention
from bidikv_runtime.connector.settings import Settings
from e2e.bench.retention.workload import BLOCK_TOKENS, Request

STEP_TOKENS: Final = 8192


@dataclass(eq=False)
class Block:
    """What the free queue sees of vLLM's ``KVCacheBlock``, and the key of its content."""

    block_id: int
    key: int | None = None
    depth: int = 0
    """Position in its prompt."""
    references: int = 0
    prev_free_block: Any = None
    next_free_block: Any = None

    @property
    def block_hash(self) -> int | None:
        return self.key


class FreeQueue(Protocol):
    """The part of the free queue that a replay uses."""

    num_free_blocks: int

    def popleft_n(self, n: int) -> list[Block]: ...
    def remove(self, block: Block) -> None: ...
    def append_n(self, blocks: Sequence[Block]) -> None: ...


class FutureQueue:
    """Gives up what is needed again latest (L. Belady, 1966), of equals the end of a prompt first.

    No policy that fills a block for every token can compute fewer tokens again: blocks of a prompt are needed in order,
    so this one never loses a block before its successors.
    """

    def __init__(self, blocks: Sequence[Block], next_use: dict[int, int]) -> None:
        self.num_free_blocks = len(blocks)
        self._next_use = next_use
        self._heap: list[tuple[float, int, int, int]] = []
        self._blocks = blocks
        self._stamps = [0] * len(blocks)
        self._free = [False] * len(blocks)
        for block in blocks:
            self._push(block)

    def _push(self, block: Block) -> None:
        i = block.block_id
        self._free[i] = True
        self._stamps[i] += 1
        use = self._next_use.get(block.key) if block.key is not None else None
        latest = float("-inf") if use is None else -float(use)
        heapq.heappush(self._heap, (latest, -block.depth, i, self._stamps[i]))

    def popleft_n(self, n: int) -> list[Block]:
        taken: list[Block] = []
        while len(taken) < n:
            _, _, i, stamp = heapq.heappop(self._heap)
            if self._free[i] and stamp == self._stamps[i]:
                self._free[i] = False
                taken.append(self._blocks[i])
        self.num_free_blocks -= n
        return taken

    def remove(self, block: Block) -> None:
        self._free[block.block_id] = False
        self.num_free_blocks -= 1

    def append_n(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._push(block)
        self.num_free_blocks += len(blocks)


@dataclass(frozen=True)
class Outcome:
    """Of all prompts of a trace."""

    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    """Computed before, and again because the cache had lost them. The rest was new."""
    recompute_seconds: float
    """Estimated with the cost model's prior for a large model on eight GPUs."""
    turned_away: int
    """Requests that did not fit because running ones filled the pool; the same for all policies but for sharing."""
    state: dict[str, Any]
    """The policy's own description at the end."""


def compute_next_uses(trace: Sequence[Request]) -> list[tuple[float, ...]]:
    """Per request and block: the number of the next request whose prompt has it; infinite if none."""
    following: dict[int, float] = {}
    uses: list[tuple[float, ...]] = []
    for number in range(len(trace) - 1, -1, -1):
        request = trace[number]
        uses.append(tuple(following.get(key, float("inf")) for key in request.keys))
        for key in request.keys[: request.prompt_blocks]:
            following[key] = number
    uses.reverse()
    return uses


class Replay:
    """One trace, one pool, one policy.

    Args:
        policy: ``none``, ``LRU``, ``SessionAware`` or ``optimum``.
        settings: budgets and durations of SessionAware.
    """

    def __init__(self, trace: Sequence[Request], pool_blocks: int, policy: str, settings: Settings) -> None:
        self._trace = trace
        self._blocks = [Block(i) for i in range(pool_blocks)]
        self._cache: dict[int, Block] = {}
        self._caching = policy != "none"
        self._uses = compute_next_uses(trace) if policy == "optimum" else None
        self._next_use: dict[int, Any] = {}
        self._cost = CostModel("LIBFABRIC", STEP_TOKENS)
        self._retention: Retention | None = None
        self._queue: FreeQueue
        if policy == "optimum":
            self._queue = FutureQueue(self._blocks, self._next_use)
        else:
            queue = TieredQueue(self._blocks, self._blocks)
            if policy == "SessionAware":
                self._retention = Retention(queue, settings, BLOCK_TOKENS, self._cost.estimate_prefill)
            self._queue = queue

    def run(self) -> Outcome:
        """Replay all of the trace."""
        seen: set[int] = set()
        prompt = reused = recomputed = turned_away = 0
        seconds = 0.0
        running: list[tuple[float, int, list[Block]]] = []
        for number, request in enumerate(self._trace):
            while running and running[0][0] <= request.start:
                self._finish(*heapq.heappop(running))
            if self._uses is not None:
                self._next_use.update(zip(request.keys, self._uses[number], strict=True))
            found, blocks = self._admit(request)
            known = 0
            for key in request.keys[: request.prompt_blocks]:
                if key not in seen:
                    break
                known += 1
            again = max(0, known - found)
            prompt += request.prompt_blocks
            reused += found
            recomputed += again
            if again:
                seconds += self._cost.estimate_prefill(found * BLOCK_TOKENS, again * BLOCK_TOKENS)
            seen.update(request.keys)
            if blocks is None:
                turned_away += 1
            else:
                heapq.heappush(running, (request.end, number, blocks))
        return Outcome(
            prompt * BLOCK_TOKENS,
            reused * BLOCK_TOKENS,
            recomputed * BLOCK_TOKENS,
            seconds,
            turned_away,
            self._retention.describe() if self._retention else {},
        )

    def _admit(self, request: Request) -> tuple[int, list[Block] | None]:
        """Blocks found in the cache, and all blocks of the request; None when it does not fit."""
        queue, found = self._queue, []
        if self._retention:
            self._retention.expire(request.start)
            self._retention.request_arrived(request.session, request.start)
        for key in request.keys[: request.prompt_blocks]:
            block = self._cache.get(key)
            if block is None:
                break
            found.append(block)
        need = len(request.keys) - len(found)
        if need > queue.num_free_blocks - sum(not block.references for block in found):
            if self._retention:
                self._retention.request_finished(request.session, request.expect, (), request.start)
            return 0, None
        for block in found:
            if not block.references:
                queue.remove(block)
            block.references += 1
        blocks = queue.popleft_n(need)
        for depth, block in enumerate(blocks, len(found)):
            if block.key is not None and self._cache.get(block.key) is block:
                del self._cache[block.key]
            block.key, block.depth, block.references = request.keys[depth], depth, 1
            if self._caching:
                self._cache.setdefault(block.key, block)
        return len(found), found + blocks

    def _finish(self, end: float, number: int, blocks: list[Block]) -> None:
        request = self._trace[number]
        if self._retention:
            ids = [block.block_id for block in blocks]
            self._retention.request_finished(request.session, request.expect, ids, end)
        freed = []
        for block in reversed(blocks):
            block.references -= 1
            if not block.references:
                freed.append(block)
        self._queue.append_n(freed)
