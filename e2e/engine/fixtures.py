"""Fixtures of the tests marked ``engine``: a prefill engine P, a decode engine D and a monolith M, shared by all tests.

Every test starts with empty caches and no faults. P and D have room for 5,120 tokens: two prompts evict everything.
They share a token file, so all their lookups and validations are signed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import string
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from bidikv_runtime import contract
from bidikv_runtime.connector.tokens import Tokens
from e2e.engine.client import Completion, EngineClient, Message, logprob_distance
from e2e.engine.faults import FAULTS_FILE, Faults, events_file
from e2e.engine.local import BLOCK_SIZE, LocalEngine, running

POOL_BLOCKS = 160
OUTPUT_TOKENS = 16
PULL = {"bidikv_cost_model": "AlwaysPull"}
"""What is read depends on the protocol alone, not on how fast this machine happens to be."""
TOKEN = "token-of-all-engines"
TOLERANCE = 1e-3
"""Of log-probabilities in float32. KV that one engine decoded and another prefilled differs by up to 6e-5."""

T = TypeVar("T")


async def eventually(look: Callable[[], Awaitable[T]], what: str, seconds: float = 30.0) -> T:
    """Look until there is something true, and return it.

    Raises:
        TimeoutError: nothing within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        if found := await look():
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        await asyncio.sleep(0.05)


def text(seed: str, length: int) -> str:
    """Printable characters, each of them one token; another seed shares no prefix."""
    return "".join(random.Random(seed).choices(string.ascii_letters + string.digits + " ", k=length))


def user(seed: str, length: int = 600) -> Message:
    return {"role": "user", "content": text(seed, length)}


def assistant(completion: Completion) -> Message:
    return {"role": "assistant", "content": completion.text}


def whole_blocks(tokens: int) -> int:
    """Tokens in full blocks."""
    return tokens // BLOCK_SIZE * BLOCK_SIZE


def assert_same(got: Completion, expected: Completion) -> None:
    """Equal tokens, and log-probabilities within the tolerance at every position."""
    assert got.tokens == expected.tokens
    assert logprob_distance(got.top_logprobs, expected.top_logprobs) < TOLERANCE


@dataclass
class Turn:
    """One turn through P and D, and what each of them read."""

    prefill: Completion
    decode: list[Completion]
    prefill_reused: int
    decode_reused: int
    prompt_tokens: list[int]


class Deployment:
    """P, D and M with a client each; the tests play the router."""

    def __init__(self, p: EngineClient, d: EngineClient, m: EngineClient, faults: Path) -> None:
        self.p, self.d, self.m = p, d, m
        self._faults = faults

    @property
    def token_file(self) -> Path:
        return Path(self.p.engine.environment[contract.ENV_TOKEN_FILE])

    @property
    def tokens(self) -> Tokens:
        """What P and D sign with, for tests that stand in for one of them."""
        return Tokens(self.token_file, logging.getLogger(__name__))

    def fault(self, **faults: Any) -> None:
        """Faults of P from now on; without arguments none."""
        Faults(**faults).write(self._faults)

    async def held(self, what: str) -> None:
        """Wait until P holds a request at ``what`` (``read`` or ``validation``)."""
        events = events_file(self._faults)

        async def look() -> bool:
            return events.exists() and any(line.startswith(what) for line in events.read_text().splitlines())

        await eventually(look, f"P to hold a {what}")

    async def clean(self) -> None:
        """No faults, empty caches."""
        self.fault()
        events_file(self._faults).unlink(missing_ok=True)
        for client in (self.p, self.d, self.m):

            async def reset(client: EngineClient = client) -> bool:
                return await client.reset_prefix_cache(connector=client is not self.m)

            await eventually(reset, f"{client.engine.name} to reset its prefix cache")

    async def turn(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int = OUTPUT_TOKENS,
        prefill_sources: Any = None,
        stream: bool = True,
        **parameters: Any,
    ) -> Turn:
        """P computes the first token with D as source (or ``prefill_sources``), then D answers with P as source."""
        before = await self.reused(self.p), await self.reused(self.d)
        sources = [self.d.engine.source] if prefill_sources is None else prefill_sources
        [prefill] = await self.p.chat(messages, max_tokens=1, sources=sources, stream=False)
        decode = await self.d.chat(
            messages, max_tokens=max_tokens, sources=[self.p.engine.source], stream=stream, **parameters
        )
        after = await self.reused(self.p), await self.reused(self.d)
        return Turn(prefill, decode, after[0] - before[0], after[1] - before[1], await self.p.tokenize(messages))

    async def history(self, seed: str, turns: int) -> list[Message]:
        """The messages of ``turns`` turns, then the next question; P's cache is empty and D holds the history."""
        messages: list[Message] = []
        for number in range(turns):
            messages.append(user(f"{seed} {number}"))
            turn = await self.turn(messages)
            messages.append(assistant(turn.decode[0]))
        await eventually(self.p.reset_prefix_cache, "P to reset its prefix cache")
        return [*messages, user(f"{seed} {turns}")]

    async def evict(self, client: EngineClient) -> None:
        """Re-use every block of an engine's pool."""
        for number in range(2):
            await client.chat([user(f"evict {time.monotonic()} {number}", 2700)], max_tokens=1)

    @staticmethod
    async def reused(client: EngineClient) -> int:
        return int((await client.metrics()).value(contract.METRIC_REUSED_TOKENS))

    @staticmethod
    async def lookups(client: EngineClient, result: str) -> int:
        return int((await client.metrics()).value(contract.METRIC_LOOKUPS, result=result))

    @staticmethod
    async def validate_failures(client: EngineClient, reason: str) -> int:
        return int((await client.metrics()).value(contract.METRIC_VALIDATE_FAILURES, reason=reason))

    @staticmethod
    async def quarantined(client: EngineClient) -> int:
        return int((await client.metrics()).value(contract.METRIC_QUARANTINED_BLOCKS))

    async def assert_no_kv_in_use(self) -> None:
        """Nothing is pinned: with no request running, every block is free."""
        for client in (self.p, self.d):

            async def idle(client: EngineClient = client) -> bool:
                return (await client.metrics()).value("vllm:kv_cache_usage_perc") == 0

            await eventually(idle, f"{client.engine.name} to free all KV")


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LocalEngine]]:
    """P (with faults on demand), D and M, ready; all started at once."""
    logs = tmp_path_factory.mktemp("engines")
    token_file = logs / "tokens"
    token_file.write_text(TOKEN)
    authenticated = {contract.ENV_TOKEN_FILE: str(token_file), "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    room = ("--num-gpu-blocks-override", str(POOL_BLOCKS), "--max-model-len", "4096")
    started = {
        "P": LocalEngine(
            "P",
            logs / "P.log",
            connector_module="e2e.engine.faulty_connector",
            arguments=room,
            environment=authenticated | {FAULTS_FILE: str(logs / "faults.json")},
            settings=PULL,
        ),
        "D": LocalEngine("D", logs / "D.log", arguments=room, environment=authenticated, settings=PULL),
        "M": LocalEngine("M", logs / "M.log", connector_module=None, arguments=("--max-model-len", "4096")),
    }
    with running(started):
        yield started


@pytest_asyncio.fixture
async def deployment(engines: dict[str, LocalEngine]) -> AsyncIterator[Deployment]:
    """Clients of the engines, whose caches are empty."""
    async with AsyncExitStack() as stack:
        p, d, m = [await stack.enter_async_context(EngineClient(engines[name])) for name in ("P", "D", "M")]
        faults = Path(engines["P"].environment[FAULTS_FILE])
        deployment = Deployment(p, d, m, faults)
        await deployment.clean()
        yield deployment
        deployment.fault()
