"""Features of vLLM that bend a request's way, on real engines: answers stay those of an engine that reuses nothing.

Each test also says how much was read, so that an answer cannot be right for lack of reuse.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from bidikv_runtime import contract
from e2e.engine.client import EngineClient, Message
from e2e.engine.fixtures import (
    OUTPUT_TOKENS,
    POOL_BLOCKS,
    Deployment,
    assert_same,
    assistant,
    eventually,
    text,
    user,
    whole_blocks,
)
from e2e.engine.local import LocalEngine

pytestmark = [pytest.mark.engine, pytest.mark.asyncio]

LONG = 3000
"""Characters of a prompt that vLLM computes in two chunks (of 2,048 tokens)."""


async def test_tenants_share_nothing(deployment: Deployment) -> None:
    """``cache_salt`` is part of the first block's hash, hence of all."""
    messages = [user("salt")]
    await deployment.d.chat(messages, max_tokens=1, cache_salt="tenant-a")
    sources = [deployment.d.engine.source]
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)

    async def read(**parameters: Any) -> int:
        before = await deployment.reused(deployment.p)
        [answer] = await deployment.p.chat(messages, max_tokens=OUTPUT_TOKENS, sources=sources, **parameters)
        assert_same(answer, expected)
        return await deployment.reused(deployment.p) - before

    assert await read(cache_salt="tenant-b") == 0
    assert await read() == 0
    assert await read(cache_salt="tenant-a") == whole_blocks(len(await deployment.p.tokenize(messages)) - 1)


async def test_prompt_logprobs_are_computed_and_published(deployment: Deployment) -> None:
    """vLLM reads no prefix cache for such a request, local or not: it needs the output of every position."""
    messages = await deployment.history("prompt logprobs", 1)
    turn = await deployment.turn(messages, prompt_logprobs=1, stream=False)
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS, prompt_logprobs=1, stream=False)
    assert_same(turn.decode[0], expected)
    assert turn.prefill_reused > 600
    assert turn.decode_reused == 0
    messages = [*messages, assistant(turn.decode[0]), user("after prompt logprobs")]
    await eventually(deployment.p.reset_prefix_cache, "P to reset its prefix cache")
    after = await deployment.turn(messages)
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    assert_same(after.decode[0], expected)
    assert after.prefill_reused == whole_blocks(len(turn.prompt_tokens) + OUTPUT_TOKENS - 1)


async def test_a_prompt_of_several_chunks_goes_both_ways(deployment: Deployment) -> None:
    messages = [user("chunks", LONG)]
    turn = await deployment.turn(messages)
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    assert_same(turn.decode[0], expected)
    assert turn.decode_reused == whole_blocks(len(turn.prompt_tokens) - 1)
    await eventually(deployment.p.reset_prefix_cache, "P to reset its prefix cache")
    messages = [*messages, assistant(turn.decode[0]), user("after chunks", 200)]
    after = await deployment.turn(messages)
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    assert_same(after.decode[0], expected)
    assert after.prefill_reused == whole_blocks(len(turn.prompt_tokens) + OUTPUT_TOKENS - 1)


async def test_branches_read_what_they_share(deployment: Deployment) -> None:
    """Two continuations of one history, at the same time."""
    messages = await deployment.history("branch", 1)
    shared = messages[:-1]

    async def branch(seed: str) -> None:
        continued: list[Message] = [*shared, user(seed, 300)]
        sources = [deployment.d.engine.source]
        [answer] = await deployment.p.chat(continued, max_tokens=OUTPUT_TOKENS, sources=sources)
        [expected] = await deployment.m.chat(continued, max_tokens=OUTPUT_TOKENS)
        assert_same(answer, expected)

    before = await deployment.reused(deployment.p)
    await asyncio.gather(branch("one way"), branch("another way"))
    assert await deployment.reused(deployment.p) - before >= 600 - 32
    await deployment.assert_no_kv_in_use()


async def leave(client: EngineClient, messages: list[Message], max_tokens: int, *, generating: bool) -> None:
    """Send a request and hang up while its prompt is computed, or while it generates."""
    name = "vllm:generation_tokens_total" if generating else "vllm:num_requests_running"
    before = (await client.metrics()).value(name) if generating else 0
    request = asyncio.create_task(client.chat(messages, max_tokens=max_tokens))

    async def under_way() -> bool:
        return (await client.metrics()).value(name) > before

    await eventually(under_way, f"{client.engine.name} to begin")
    assert not request.done(), "the request ended before its client could leave"
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


@pytest.mark.parametrize("generating", [False, True], ids=["in the middle of prefill", "while generating"])
async def test_what_an_aborted_request_has_computed_is_right(deployment: Deployment, generating: bool) -> None:
    messages = [user(f"abort {generating}", LONG)]
    await leave(deployment.d, messages, 900, generating=generating)
    await deployment.assert_no_kv_in_use()
    before = await deployment.reused(deployment.p)
    [answer] = await deployment.p.chat(messages, max_tokens=OUTPUT_TOKENS, sources=[deployment.d.engine.source])
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    assert_same(answer, expected)
    if generating:
        assert await deployment.reused(deployment.p) - before >= LONG - 32


async def test_resetting_the_cache_under_running_requests(deployment: Deployment) -> None:
    """vLLM preempts them; they are computed again, and what they then publish is right."""
    messages = [user("reset under way", 900)]
    request = asyncio.create_task(deployment.d.chat(messages, max_tokens=400))
    start = (await deployment.d.metrics()).value("vllm:generation_tokens_total")

    async def generating() -> bool:
        return (await deployment.d.metrics()).value("vllm:generation_tokens_total") > start + 20

    await eventually(generating, "D to generate")
    assert await deployment.d.reset_prefix_cache(running=True)
    assert not request.done(), "the request ended before the reset"
    [answer] = await request
    [expected] = await deployment.m.chat(messages, max_tokens=400)
    assert_same(answer, expected)
    messages = [*messages, assistant(answer), user("after the reset", 100)]
    turn = await deployment.turn(messages)
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    assert_same(turn.decode[0], expected)
    assert turn.prefill_reused >= 1300 - 32


@pytest.fixture(scope="module")
def speculating(engines: dict[str, LocalEngine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    """A decode engine that proposes drafts from its context."""
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    engine = LocalEngine(
        "S",
        tmp_path_factory.mktemp("speculating") / "S.log",
        arguments=(
            *("--num-gpu-blocks-override", str(POOL_BLOCKS), "--max-model-len", "4096"),
            *("--speculative-config", json.dumps(drafts)),
        ),
        environment={contract.ENV_TOKEN_FILE: engines["D"].environment[contract.ENV_TOKEN_FILE]},
    )
    try:
        engine.start()
        engine.wait_ready()
        yield engine
    finally:
        engine.stop()


@pytest_asyncio.fixture
async def s(speculating: LocalEngine) -> AsyncIterator[EngineClient]:
    async with EngineClient(speculating) as client:
        yield client


async def test_drafts_do_not_show_in_what_is_published(deployment: Deployment, s: EngineClient) -> None:
    """vLLM counts accepted drafts beyond a request's end as computed."""
    repetitive = text("drafts", 40) * 15  # drafts come from repetitions
    messages: list[Message] = [{"role": "user", "content": repetitive}]
    for number in range(3):
        [answer] = await s.chat(messages, max_tokens=61 + number)
        [expected] = await deployment.m.chat(messages, max_tokens=61 + number)
        assert_same(answer, expected)
        messages = [*messages, assistant(answer), user(f"after drafts {number}", 70)]
        computed = len(await s.tokenize(messages[:-2])) + len(answer.tokens) - 1
        await eventually(deployment.p.reset_prefix_cache, "P to reset its prefix cache")
        before = await deployment.reused(deployment.p)
        [read] = await deployment.p.chat(messages, max_tokens=OUTPUT_TOKENS, sources=[s.engine.source])
        [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
        assert_same(read, expected)
        assert await deployment.reused(deployment.p) - before == whole_blocks(computed)
    assert (await s.metrics()).value("vllm:spec_decode_num_draft_tokens_total") > 0


async def test_new_weights_are_shared_with_nobody_before_they_have_a_name(
    deployment: Deployment, s: EngineClient
) -> None:
    """The last test with S: it shares nothing any more."""
    messages = [user("weights")]
    await s.chat(messages, max_tokens=1)
    async with aiohttp.ClientSession(s.engine.url) as session:
        body = {"method": "reload_weights"}
        async with session.post("/collective_rpc", json=body) as response:
            assert response.status == 200, await response.text()
    before = await deployment.reused(deployment.p)
    refused = await deployment.lookups(deployment.p, "refused")
    [answer] = await deployment.p.chat(messages, max_tokens=OUTPUT_TOKENS, sources=[s.engine.source])
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    assert_same(answer, expected)
    assert await deployment.reused(deployment.p) == before
    assert await deployment.lookups(deployment.p, "refused") == refused + 1
    [again] = await s.chat(messages, max_tokens=OUTPUT_TOKENS)
    assert_same(again, expected)
    assert "the weights may have changed" in s.engine.log_end(200)
