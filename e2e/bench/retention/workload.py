"""Synthetic traffic of a decode engine: coding agents, their sub-agents, chats and single requests.

Times are open-loop: a request's start and end do not depend on what the cache holds, so that every policy, the offline
optimum included, replays the very same accesses.

A trace names KV blocks by keys. Equal keys mean equal content at the same place after an equal prefix, as vLLM's
chained block hashes do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from bidikv_runtime import contract

BLOCK_TOKENS: Final = 512
"""Larger than an engine's blocks (16 to 64 tokens) to save time: policies see whole requests anyway."""


@dataclass(frozen=True)
class Lognormal:
    """Given by its median; ``sigma`` is the standard deviation of the logarithm."""

    median: float
    sigma: float
    highest: float

    def draw(self, source: random.Random) -> float:
        return min(self.highest, self.median * source.lognormvariate(0, self.sigma))


@dataclass(frozen=True)
class Parameters:
    """One kind of traffic. Tokens and seconds. Sources:

    - A: NVIDIA AIPerf, generator of traces of coding agents and its data set of 1,205 sessions:
      github.com/ai-dynamo/aiperf, src/aiperf/dataset/agentic_code_gen (configs/default.json,
      datasets/1k_sessions_200k_ctx/comparison.txt).
    - T: TraceLab, University of Washington, 4,265 recorded sessions of two coding agents: tracelab.cs.washington.edu
      (session_internal_counts: 83 steps per session on average, median 16, 90 % below 152; a person started 9 of them).
    - X: AgentX traces (vllm.ai/blog/2026-09-08-vllm-agentx): 44 % of sessions use sub-agents.
    - K: "KVCache Cache in the Wild" (arxiv.org/abs/2506.02634): with people in the loop 80 % of re-uses fall within ten
      minutes; traffic of programs is mostly single requests.
    - assumed: no public figure was found.
    """

    duration: float = 3600.0
    sessions_per_hour: float = 150.0
    """Agent sessions that begin; assumed, as the load is set by the pool's size."""
    shared_prefix: int = 32_000
    """System prompt and tools, equal in all sessions (A)."""
    start: Lognormal = Lognormal(15_000, 0.8, 100_000)
    """Files opened first (A: contexts begin at 47,000 tokens in the median)."""
    turns: Lognormal = Lognormal(16, 1.76, 400)
    """T: the sigma gives its 90 % point."""
    new: Lognormal = Lognormal(4_000, 0.9, 60_000)
    """Input per turn (A: mean 6,000, median 4,000)."""
    output: Lognormal = Lognormal(800, 0.67, 3_750)
    """A: mean 1,000, median 800, 99 % below 3,750."""
    dropped_output: float = 0.3
    """Share of turns whose answer comes back shortened (reasoning stripped); assumed."""
    context_limit: int = 167_000
    """Where an agent summarises its history and begins anew (A)."""
    summary: int = 10_000
    """Assumed."""
    tool_gap: Lognormal = Lognormal(1.5, 1.5, 600)
    """A: about 5 s on average, median of all gaps 2 s."""
    human_share: float = 0.11
    """Turns that a person starts (T)."""
    human_gap: Lognormal = Lognormal(90, 2.25, 7200)
    """K gives the 80 % point; the median is assumed."""
    subagent_share: float = 0.44
    """Sessions with sub-agents (X)."""
    subagent_interval: int = 10
    """Turns between two fan-outs; assumed."""
    subagent_fan: int = 3
    """The most sub-agents at once; assumed."""
    subagent_turns: Lognormal = Lognormal(8, 0.8, 60)
    """Assumed."""
    subagent_task: Lognormal = Lognormal(3_000, 0.8, 20_000)
    """Assumed."""
    announced_end: float = 0.0
    """Share of sessions whose last request says that it is the last; assumed."""
    offers_tools: bool = True
    """Whether requests announce a return, as every request of an agent does, the last one included."""
    single_per_hour: float = 0.0
    """Requests without a successor, each a session of its own; assumed."""
    single_tokens: Lognormal = Lognormal(6_000, 1.0, 60_000)
    """Assumed."""
    prefill_rate: float = 20_000.0
    """Tokens per second (A)."""
    decode_rate: float = 60.0
    """Tokens per second and request (A)."""


AGENTS: Final = Parameters()
AGENTS_ANNOUNCED: Final = Parameters(announced_end=0.8)
AGENTS_AND_SINGLES: Final = Parameters(sessions_per_hour=100, single_per_hour=6_000)
CHATS: Final = Parameters(
    sessions_per_hour=1_200,
    shared_prefix=1_000,
    start=Lognormal(1_000, 1.0, 20_000),
    turns=Lognormal(3, 1.0, 60),
    new=Lognormal(200, 1.2, 8_000),
    dropped_output=0.0,
    human_share=1.0,
    subagent_share=0.0,
    offers_tools=False,
)
"""Assumed lengths; gaps as in K."""
WORKLOADS: Final[dict[str, Parameters]] = {
    "agents": AGENTS,
    "agents, 80 % announce their end": AGENTS_ANNOUNCED,
    "agents and single requests": AGENTS_AND_SINGLES,
    "chats": CHATS,
}


@dataclass(frozen=True)
class Request:
    start: float
    end: float
    session: str | None
    expect: str | None
    keys: tuple[int, ...]
    """Blocks that are full at the end, from the prompt's first on."""
    prompt_blocks: int
    """How many of them belong to the prompt."""


@dataclass
class _Conversation:
    """Keys of one agent's context as it grows."""

    prefix: tuple[int, ...]
    fresh: Iterator[int]
    tokens: int = 0
    keys: list[int] = field(default_factory=list)

    def grow(self, tokens: int) -> None:
        self.tokens += tokens
        while (len(self.keys) + 1) * BLOCK_TOKENS <= self.tokens:
            self.keys.append(next(self.fresh))

    def begin(self, tokens: int) -> None:
        """The common prefix and as much of one's own."""
        self.keys = list(self.prefix)
        self.tokens = len(self.prefix) * BLOCK_TOKENS
        self.grow(tokens)

    def drop(self, tokens: int) -> None:
        """Shorten the end."""
        self.tokens -= tokens
        del self.keys[self.tokens // BLOCK_TOKENS :]


class _Generator:
    def __init__(self, parameters: Parameters, seed: int) -> None:
        self.parameters = parameters
        self.source = random.Random(seed)
        self.fresh = count()
        self.names = count()
        self.prefix = tuple(next(self.fresh) for _ in range(parameters.shared_prefix // BLOCK_TOKENS))
        self.requests: list[Request] = []

    def generate(self) -> list[Request]:
        p = self.parameters
        for rate, begin in ((p.sessions_per_hour, self._session), (p.single_per_hour, self._single)):
            at = self._pause(rate)
            while at < p.duration:
                begin(at)
                at += self._pause(rate)
        kept = [request for request in self.requests if request.start < p.duration]
        return sorted(kept, key=lambda request: request.start)

    def _pause(self, per_hour: float) -> float:
        return self.source.expovariate(per_hour / 3600) if per_hour else self.parameters.duration

    def _session(self, at: float) -> None:
        p, source = self.parameters, self.source
        context = _Conversation(self.prefix, self.fresh)
        context.begin(int(p.start.draw(source)))
        interval = p.subagent_interval if source.random() < p.subagent_share else 0
        self._converse(at, context, max(1, round(p.turns.draw(source))), interval, human=True)

    def _converse(self, at: float, context: _Conversation, turns: int, interval: int, *, human: bool) -> float:
        """All turns of a conversation; returns when the last one has ended."""
        p, source = self.parameters, self.source
        name = f"session-{next(self.names)}"
        announced = source.random() < p.announced_end
        for turn in range(1, turns + 1):
            new = int(p.new.draw(source)) if turn > 1 else 0
            if context.tokens + new > p.context_limit:
                context.begin(p.summary + new)
            else:
                context.grow(new)
            expect = contract.EXPECT_RETURN if p.offers_tools else None
            if turn == turns and announced:
                expect = contract.EXPECT_OVER
            prompt, output = len(context.keys), int(p.output.draw(source))
            end = at + (new or context.tokens) / p.prefill_rate + output / p.decode_rate
            context.grow(output)
            self.requests.append(Request(at, end, name, expect, tuple(context.keys), prompt))
            if source.random() < p.dropped_output:
                context.drop(int(output * source.random()))
            by_person = human and source.random() < p.human_share
            at = end + (p.human_gap if by_person else p.tool_gap).draw(source)
            if interval and turn % interval == 0 and turn < turns:
                fan = source.randint(1, p.subagent_fan)
                at = max(at, *(self._subagent(end + 0.1 * i) for i in range(fan)))
            if at > p.duration:
                break
        return at

    def _subagent(self, at: float) -> float:
        p, source = self.parameters, self.source
        context = _Conversation(self.prefix, self.fresh)
        context.begin(int(p.subagent_task.draw(source)))
        return self._converse(at, context, max(1, round(p.subagent_turns.draw(source))), 0, human=False)

    def _single(self, at: float) -> None:
        p, source = self.parameters, self.source
        tokens, output = int(p.single_tokens.draw(source)), int(p.output.draw(source))
        keys = tuple(next(self.fresh) for _ in range((tokens + output) // BLOCK_TOKENS))
        end = at + tokens / p.prefill_rate + output / p.decode_rate
        self.requests.append(
            Request(at, end, f"session-{next(self.names)}", None, keys, min(len(keys), tokens // BLOCK_TOKENS))
        )


def build_trace(parameters: Parameters, seed: int) -> list[Request]:
    """Requests in the order of their start; equal seeds give equal traces."""
    return _Generator(parameters, seed).generate()


def compute_working_set(trace: list[Request]) -> float:
    """Blocks that an ideal cache would hold, averaged over time: every block from its first to its last use."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for request in trace:
        for key in request.keys:
            first.setdefault(key, request.start)
        for key in request.keys:
            last[key] = max(last.get(key, 0.0), request.end)
    span = max(request.end for request in trace) - trace[0].start
    return sum(last[key] - start for key, start in first.items()) / span
