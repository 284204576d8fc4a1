"""The KV protocol on real engines: what is reused, and that answers equal those of an engine that reuses nothing."""

from __future__ import annotations

import asyncio
from itertools import takewhile
from typing import Any

import pytest

from bidikv_runtime import contract
from e2e.engine.client import logprob_distance
from e2e.engine.fixtures import (
    OUTPUT_TOKENS,
    POOL_BLOCKS,
    TOLERANCE,
    Deployment,
    assert_same,
    assistant,
    eventually,
    text,
    user,
    whole_blocks,
)
from e2e.engine.local import BLOCK_SIZE

pytestmark = [pytest.mark.engine, pytest.mark.asyncio]


@pytest.mark.parametrize("stream", [True, False])
async def test_conversation_equals_the_monolith_and_reads_only_what_is_missing(
    deployment: Deployment, stream: bool
) -> None:
    messages = []
    previous = 0  # prompt length of the turn before
    for number in range(3):
        messages.append(user(f"conversation {stream} {number}"))
        await eventually(deployment.p.reset_prefix_cache, "P to reset its prefix cache")
        turn = await deployment.turn(messages, stream=stream)
        [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
        assert_same(turn.decode[0], expected)
        assert turn.prefill.tokens == expected.tokens[:1]

        prompt = len(turn.prompt_tokens)
        held_by_d = whole_blocks(previous + OUTPUT_TOKENS - 1) if number else 0  # the last token has no KV
        assert turn.prefill_reused == held_by_d
        assert turn.decode_reused == whole_blocks(prompt - 1) - held_by_d
        previous = prompt
        messages.append(assistant(turn.decode[0]))


async def test_edited_history_reuses_the_common_prefix_alone(deployment: Deployment) -> None:
    messages = await deployment.history("edited", 2)
    original = await deployment.p.tokenize(messages)
    answer = messages[3]["content"]
    messages[3] = {"role": "assistant", "content": answer[:4] + "EDIT" + answer[8:]}
    turn = await deployment.turn(messages)
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    assert_same(turn.decode[0], expected)
    common = whole_blocks(
        len(list(takewhile(lambda pair: pair[0] == pair[1], zip(original, turn.prompt_tokens, strict=False))))
    )
    assert 600 < common < len(original) - 600
    assert turn.prefill_reused == common


async def test_shortened_history_reuses_what_is_left(deployment: Deployment) -> None:
    messages = (await deployment.history("shortened", 2))[:3]
    turn = await deployment.turn(messages)
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    assert_same(turn.decode[0], expected)
    assert turn.prefill_reused == whole_blocks(len(turn.prompt_tokens) - 1)


async def test_two_sessions_at_once_do_not_mix(deployment: Deployment) -> None:
    async def session(seed: str) -> None:
        messages = []
        for number in range(3):
            messages.append(user(f"{seed} {number}", 500))
            sources = [deployment.d.engine.source]
            await deployment.p.chat(messages, max_tokens=1, sources=sources, stream=False)
            [answer] = await deployment.d.chat(messages, max_tokens=OUTPUT_TOKENS, sources=[deployment.p.engine.source])
            [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
            assert_same(answer, expected)
            messages.append(assistant(answer))

    before = await deployment.reused(deployment.d)
    await asyncio.gather(session("left"), session("right"))
    assert await deployment.reused(deployment.d) - before > 2 * 3 * 480
    await deployment.assert_no_kv_in_use()


async def test_answer_ended_by_a_stop_string_is_reused(deployment: Deployment) -> None:
    """vLLM finds stop strings in its front end and aborts the request in the engine: no handle would come of it."""
    messages = [user("stop")]
    [whole] = await deployment.m.chat(messages, max_tokens=80)
    stop = whole.text[60:70]
    turn = await deployment.turn(messages, max_tokens=80, stop=[stop])
    [expected] = await deployment.m.chat(messages, max_tokens=80, stop=[stop])
    assert turn.decode[0].finish_reason == "stop"
    assert turn.decode[0].text == expected.text
    messages = [*messages, assistant(turn.decode[0]), user("after stop")]
    await deployment.assert_no_kv_in_use()  # the abort follows the answer, and D publishes with it
    await eventually(deployment.p.reset_prefix_cache, "P to reset its prefix cache")
    after = await deployment.turn(messages)
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    assert_same(after.decode[0], expected)
    assert len(turn.decode[0].text) == 60
    assert after.prefill_reused == whole_blocks(len(turn.prompt_tokens) + 60)


async def test_several_choices_share_one_prompt(deployment: Deployment) -> None:
    messages = await deployment.history("choices", 1)
    turn = await deployment.turn(messages, n=2, temperature=1, top_k=1)  # vLLM refuses n > 1 at temperature 0
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    assert len(turn.decode) == 2
    for choice in turn.decode:
        assert_same(choice, expected)
    assert turn.prefill_reused > 600
    await deployment.assert_no_kv_in_use()


async def test_requests_without_parameters_are_published_too(deployment: Deployment) -> None:
    messages = [user("plain")]
    [answer] = await deployment.d.chat(messages, max_tokens=OUTPUT_TOKENS)
    messages += [assistant(answer), user("next")]
    turn = await deployment.turn(messages)
    assert turn.prefill_reused > 600


async def test_more_work_than_the_cache_can_hold(deployment: Deployment) -> None:
    """Preemption and eviction while others read: four conversations of up to 1,900 tokens in a cache of 5,120."""

    async def session(seed: str) -> float:
        messages, worst = [], 0.0
        for number in range(2):
            messages.append(user(f"{seed} {number}", 800))
            await deployment.p.chat(messages, max_tokens=1, sources=[deployment.d.engine.source], stream=False)
            [answer] = await deployment.d.chat(messages, max_tokens=64, sources=[deployment.p.engine.source])
            [expected] = await deployment.m.chat(messages, max_tokens=64)
            assert answer.tokens == expected.tokens
            worst = max(worst, logprob_distance(answer.top_logprobs, expected.top_logprobs))
            messages.append(assistant(answer))
        return worst

    distances = await asyncio.gather(*(session(f"crowd {number}") for number in range(4)))
    assert max(distances) < TOLERANCE
    await deployment.assert_no_kv_in_use()


async def test_cache_reset_unpublishes(deployment: Deployment) -> None:
    messages = await deployment.history("reset", 1)
    assert await deployment.d.reset_prefix_cache()
    misses = await deployment.lookups(deployment.p, "miss")
    turn = await deployment.turn(messages)
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    assert_same(turn.decode[0], expected)
    assert turn.prefill_reused == 0
    assert await deployment.lookups(deployment.p, "miss") == misses + 1


@pytest.mark.parametrize(
    "sources",
    [
        pytest.param("127.0.0.1:5700", id="text"),
        pytest.param(["no port"], id="no port"),
        pytest.param(["127.0.0.1:99999"], id="port too large"),
        pytest.param([{"host": "127.0.0.1"}], id="object"),
        pytest.param(["tcp://127.0.0.1:5700"], id="address with a scheme"),
        pytest.param(7, id="number"),
        pytest.param([], id="none"),
    ],
)
async def test_malformed_sources_cost_the_reuse_only(deployment: Deployment, sources: Any) -> None:
    messages = [user("malformed", 100)]
    [answer] = await deployment.p.chat(messages, max_tokens=4, sources=sources)
    [expected] = await deployment.m.chat(messages, max_tokens=4)
    assert_same(answer, expected)


async def test_metrics_are_in_vllms_own(deployment: Deployment) -> None:
    await deployment.turn(await deployment.history("metrics", 1))
    for client in (deployment.p, deployment.d):
        metrics = await client.metrics()
        wanted = {
            contract.METRIC_LOOKUPS,
            contract.METRIC_LOOKUP_SECONDS + "_count",
            contract.METRIC_REUSED_TOKENS,
            contract.METRIC_DISCARDED_TOKENS,
            contract.METRIC_READ_BYTES,
            contract.METRIC_READ_SECONDS + "_count",
            contract.METRIC_VALIDATE_FAILURES,
            contract.METRIC_PUBLISHED_BLOCKS,
            "vllm:nixl_xfer_time_seconds_count",
        }
        assert wanted <= metrics.names()
        assert 0 < metrics.value(contract.METRIC_PUBLISHED_BLOCKS) < POOL_BLOCKS


async def test_bytes_read_are_those_of_the_tokens_reused(deployment: Deployment) -> None:
    """8 layers, keys and values, 2 heads of 64, 4 bytes: 8 KiB a token."""
    before = await deployment.d.metrics()
    turn = await deployment.turn([user("bytes")])
    after = await deployment.d.metrics()
    read = after.value(contract.METRIC_READ_BYTES) - before.value(contract.METRIC_READ_BYTES)
    assert turn.decode_reused >= 600 - BLOCK_SIZE
    assert read == turn.decode_reused * 8192


async def test_short_prompts_are_not_looked_up(deployment: Deployment) -> None:
    before = await deployment.p.metrics()
    await deployment.p.chat(
        [{"role": "user", "content": text("short", 20)}], max_tokens=1, sources=[deployment.d.engine.source]
    )
    after = await deployment.p.metrics()
    assert after.value(contract.METRIC_LOOKUPS) == before.value(contract.METRIC_LOOKUPS)
