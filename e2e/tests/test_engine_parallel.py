"""The KV protocol between engines of several processes: equal and unequal tensor parallelism, data parallelism.

Three engines of a model with two layers and two KV heads: T and U of tensor parallel size 2, X of two data parallel
ranks of one process each, which are engines of their own to the protocol. X's rank 1 is also the reference: a salted
prompt shares no KV with any other.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import zmq

from bidikv_runtime import contract
from bidikv_runtime.connector import wire
from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.tests.router_process import running_router
from e2e.engine.client import Completion, EngineClient, Message
from e2e.engine.faults import FAULTS_FILE, Faults, events_file
from e2e.engine.fixtures import OUTPUT_TOKENS, assert_same, assistant, eventually, user, whole_blocks
from e2e.engine.local import BLOCK_SIZE, HOST, LocalEngine, running
from e2e.engine.provision import TINY_LINK

pytestmark = [pytest.mark.engine, pytest.mark.asyncio]
ROOM = ("--num-gpu-blocks-override", "160", "--max-model-len", "4096")

SETTINGS = {"bidikv_cost_model": "AlwaysPull"}
"""So small a model is computed about as fast as it is read."""


@dataclass
class Side:
    """An engine, or one data parallel rank of one."""

    client: EngineClient
    rank: int = 0

    @property
    def source(self) -> str:
        return f"{HOST}:{self.client.engine.lookup_port + self.rank}"

    async def value(self, metric: str, **labels: str) -> int:
        try:
            return int((await self.client.metrics()).value(metric, engine=str(self.rank), **labels))
        except KeyError:
            return 0

    async def reused(self) -> int:
        return await self.value(contract.METRIC_REUSED_TOKENS)


@dataclass
class Parallel:
    sides: dict[str, Side]
    faults: Path

    def fault(self, **faults: bool) -> None:
        """Faults of T, in both of its ranks."""
        Faults(**faults).write(self.faults)

    async def held_validations(self, count: int) -> None:
        async def look() -> bool:
            events = events_file(self.faults)
            return events.exists() and events.read_text().count("validation") >= count

        await eventually(look, f"{count} ranks of T to hold a validation")

    async def expected(self, messages: list[Message]) -> Completion:
        """What an engine answers that reuses nothing."""
        salt = f"reference {len(messages)} {messages[0]['content'][:20]}"
        [answer] = await self.sides["X1"].client.chat(messages, max_tokens=OUTPUT_TOKENS, cache_salt=salt)
        return answer


@contextmanager
def without_the_beginning(source: str, blocks: int) -> Iterator[str]:
    """A lookup port in front of ``source`` that keeps to itself the first ``blocks`` blocks that the source finds."""
    stop = threading.Event()

    def answer(lookup: bytes) -> bytes:
        upstream.send(lookup)
        reply = wire.decode_reply(upstream.recv())
        if isinstance(reply, wire.Found):
            runs = []
            for run in reply.runs:
                cut = max(0, blocks - run.first)
                if cut < len(run.blocks):
                    runs.append(wire.Run(run.first + cut, run.blocks[cut:], run.publications[cut:]))
            reply = msgspec.structs.replace(reply, runs=runs)
        return wire.encode(reply)

    def serve() -> None:
        while not stop.is_set():
            if router.poll(100):
                identity, lookup = router.recv_multipart()
                router.send_multipart((identity, answer(lookup)))

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as upstream:
        router.linger = upstream.linger = 0
        upstream.connect(f"tcp://{source}")
        port = router.bind_to_random_port(f"tcp://{HOST}")
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"{HOST}:{port}"
        finally:
            stop.set()
            thread.join(10)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LocalEngine]]:
    logs = tmp_path_factory.mktemp("parallel")
    two = ("--tensor-parallel-size", "2")
    started = {
        "T": LocalEngine(
            "T",
            logs / "T.log",
            connector_module="e2e.engine.faulty_connector",
            arguments=(*ROOM, *two),
            environment={FAULTS_FILE: str(logs / "faults.json")},
            model=TINY_LINK,
            settings=SETTINGS,
        ),
        "U": LocalEngine("U", logs / "U.log", arguments=(*ROOM, *two), model=TINY_LINK, settings=SETTINGS),
        "X": LocalEngine(
            "X", logs / "X.log", arguments=(*ROOM, "--data-parallel-size", "2"), model=TINY_LINK, settings=SETTINGS
        ),
    }
    with running(started):
        yield started


@pytest_asyncio.fixture
async def parallel(engines: dict[str, LocalEngine]) -> AsyncIterator[Parallel]:
    """The engines, whose caches are empty and that have no faults."""
    async with AsyncExitStack() as stack:
        sides = {}
        for name, engine, rank in (("T", "T", 0), ("U", "U", 0), ("X0", "X", 0), ("X1", "X", 1)):
            client = EngineClient(engines[engine], {"X-data-parallel-rank": str(rank)})
            sides[name] = Side(await stack.enter_async_context(client), rank)
        parallel = Parallel(sides, Path(engines["T"].environment[FAULTS_FILE]))
        parallel.fault()
        events_file(parallel.faults).unlink(missing_ok=True)
        for side in sides.values():
            await eventually(side.client.reset_prefix_cache, f"{side.client.engine.name} to reset its prefix cache")
        yield parallel
        parallel.fault()


@pytest.mark.parametrize(("prefill", "decode"), [("T", "U"), ("T", "X0"), ("X0", "T"), ("T", "X1")])
async def test_conversation_equals_the_reference_and_reads_only_what_is_missing(
    parallel: Parallel, prefill: str, decode: str
) -> None:
    """Equal sizes of 2; 2 and 1 in both roles, hence both ways in both directions; the second data parallel rank."""
    p, d = parallel.sides[prefill], parallel.sides[decode]
    messages: list[Message] = []
    previous = 0
    for number in range(2):
        messages.append(user(f"{prefill} {decode} {number}"))
        before = await p.reused(), await d.reused()
        [first] = await p.client.chat(messages, max_tokens=1, sources=[d.source], stream=False)
        [answer] = await d.client.chat(messages, max_tokens=OUTPUT_TOKENS, sources=[p.source])
        after = await p.reused(), await d.reused()
        expected = await parallel.expected(messages)
        assert_same(answer, expected)
        assert first.tokens == expected.tokens[:1]
        prompt = len(await p.client.tokenize(messages))
        held_by_d = whole_blocks(previous + OUTPUT_TOKENS - 1) if number else 0
        assert after[0] - before[0] == held_by_d
        assert after[1] - before[1] == whole_blocks(prompt - 1) - held_by_d
        previous = prompt
        messages.append(assistant(answer))
        await eventually(p.client.reset_prefix_cache, f"{prefill} to reset its prefix cache")


@pytest.mark.parametrize("lost", ["nothing", "the second part", "the first part"])
async def test_a_match_is_joined_from_sources_of_different_sizes(parallel: Parallel, lost: str) -> None:
    """What counts is the prefix that is still valid in all parts and ranks: the second part is nothing without the
    first."""
    t, u, x = parallel.sides["T"], parallel.sides["U"], parallel.sides["X0"]
    beginning, first = user(f"joined {lost}", 400), await x.client.tokenize([user(f"joined {lost}", 400)])
    messages = [beginning, {"role": "assistant", "content": "Then"}, user(f"more {lost}", 400)]
    await x.client.chat([beginning], max_tokens=1)
    await u.client.chat(messages, max_tokens=1)
    both = await t.value(contract.METRIC_READ_SECONDS + "_count")
    before = await t.reused()
    parallel.fault(hold_validations=True)
    # The chat template ends a prompt with the beginning of the answer: a few tokens are not of the longer prompt.
    blocks = (len(first) - 20) // BLOCK_SIZE
    with without_the_beginning(u.source, blocks) as rest:
        prefill = asyncio.create_task(
            t.client.chat(messages, max_tokens=OUTPUT_TOKENS, sources=[rest, x.source], stream=False)
        )
        await parallel.held_validations(4)
        if lost != "nothing":
            side = u if lost == "the second part" else x
            for number in range(2):
                await side.client.chat([user(f"evict {lost} {number}", 2700)], max_tokens=1)
        parallel.fault()
        [answer] = await prefill
    assert_same(answer, await parallel.expected(messages))
    assert await t.value(contract.METRIC_READ_SECONDS + "_count") == both + 4
    reused = await t.reused() - before
    if lost == "nothing":
        assert reused == whole_blocks(len(await t.client.tokenize(messages)) - 1)
    elif lost == "the second part":
        assert reused in (blocks * BLOCK_SIZE, (blocks + 1) * BLOCK_SIZE)
    else:
        assert reused == 0


async def test_every_rank_validates_what_it_has_read(parallel: Parallel) -> None:
    t, x = parallel.sides["T"], parallel.sides["X0"]
    messages = [user("every rank")]
    await x.client.chat(messages, max_tokens=1)
    validations = await t.value(contract.METRIC_VALIDATE_SECONDS + "_count")
    failures = await t.value(contract.METRIC_VALIDATE_FAILURES, reason="reallocated")
    reused = await t.reused()
    parallel.fault(hold_validations=True)
    prefill = asyncio.create_task(t.client.chat(messages, max_tokens=OUTPUT_TOKENS, sources=[x.source], stream=False))
    await parallel.held_validations(2)
    for number in range(2):
        await x.client.chat([user(f"evict {number}", 2700)], max_tokens=1)
    parallel.fault()
    [answer] = await prefill
    assert_same(answer, await parallel.expected(messages))
    assert await t.value(contract.METRIC_VALIDATE_SECONDS + "_count") == validations + 2
    assert await t.value(contract.METRIC_VALIDATE_FAILURES, reason="reallocated") == failures + 2
    assert await t.reused() == reused


async def test_data_parallel_ranks_are_sources_of_their_own(parallel: Parallel) -> None:
    t, x0, x1 = parallel.sides["T"], parallel.sides["X0"], parallel.sides["X1"]
    messages = [user("one rank's")]
    await x1.client.chat(messages, max_tokens=1)
    hits, misses = [await t.value(contract.METRIC_LOOKUPS, result=result) for result in ("hit", "miss")]
    for source, reused in ((x0.source, 0), (x1.source, whole_blocks(600))):
        before = await t.reused()
        [answer] = await t.client.chat(messages, max_tokens=OUTPUT_TOKENS, sources=[source], stream=False)
        assert_same(answer, await parallel.expected(messages))
        assert await t.reused() - before >= reused
        await eventually(t.client.reset_prefix_cache, "T to reset its prefix cache")
    assert await t.value(contract.METRIC_LOOKUPS, result="miss") == misses + 1
    assert await t.value(contract.METRIC_LOOKUPS, result="hit") == hits + 1


async def test_the_router_returns_a_session_to_its_data_parallel_rank(parallel: Parallel, tmp_path: Path) -> None:
    t, x = parallel.sides["T"].client.engine, parallel.sides["X0"].client.engine
    p = Endpoint(HOST, t.port, t.lookup_port, state_port=t.state_port)
    d = Endpoint(HOST, x.port, x.lookup_port, state_port=x.state_port)
    used: set[int] = set()
    async with running_router([p], [d], "--decode-ranks", "2", "--local-limit-tokens", "0") as router:
        for session in range(40):  # until each rank has had one
            # A rank that the client names is not passed on: vLLM would refuse this one.
            headers = {"x-session-id": f"session {session}", contract.RANK_HEADER: "7"}
            unused = LocalEngine("router", tmp_path / "unused", port=router.port)
            messages: list[Message] = []
            ranks = set()
            async with EngineClient(unused, headers) as client:
                for number in range(2):
                    messages.append(user(f"ranks {session} {number}"))
                    expected = await parallel.expected(messages)
                    reused, served = await parallel.sides["T"].reused(), await count_served(parallel)
                    [answer] = await client.chat(messages, max_tokens=OUTPUT_TOKENS)
                    assert_same(answer, expected)
                    held = len(await parallel.sides["T"].client.tokenize(messages[:1])) + OUTPUT_TOKENS - 1
                    assert await parallel.sides["T"].reused() - reused == (whole_blocks(held) if number else 0)
                    after = await count_served(parallel)
                    ranks |= {rank for rank in (0, 1) if after[rank] > served[rank]}
                    messages.append(assistant(answer))
                    await eventually(parallel.sides["T"].client.reset_prefix_cache, "T to reset its prefix cache")
            assert len(ranks) == 1
            used |= ranks
            if len(used) == 2:
                return
    raise AssertionError(f"all sessions went to rank {used}")


async def count_served(parallel: Parallel) -> list[int]:
    """Requests that each rank of X has answered."""
    return [await parallel.sides[name].value("vllm:request_success_total") for name in ("X0", "X1")]
