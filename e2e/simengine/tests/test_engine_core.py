"""The simulated scheduling: chunks, the budget, the prefix cache, preemption, aborts and drains."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from e2e.simengine.engine import Finish, Request
from e2e.simengine.faults import FaultSet
from e2e.simengine.tests.inside import FAST, WAIT_SECONDS, Inside, running_inside


def make(name: str, tokens: Sequence[int], limit: int = 4) -> Request:
    return Request(name, list(tokens), limit, ignore_eos=True)


async def finish(request: Request) -> tuple[list[int], Finish]:
    """All tokens of the answer, and how it ended."""
    tokens = []
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            output = await request.outputs.get()
            if output.token is not None:
                tokens.append(output.token)
            if output.finish is not None:
                return tokens, output.finish


def value(inside: Inside, name: str) -> float:
    lines = inside.core.render_metrics().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


async def test_a_long_prompt_is_computed_in_chunks_and_found_again() -> None:
    async with running_inside("--max-num-batched-tokens", "64") as inside:
        first, again = make("a", range(1000)), make("b", range(1000))
        inside.core.add(first)
        tokens, reason = await finish(first)
        assert (len(tokens), reason) == (4, "length")
        assert first.num_cached_tokens == 0
        inside.core.add(again)
        assert await finish(again) == (tokens, reason)
        assert again.num_cached_tokens == 992  # 62 full blocks; the last tokens are computed
        assert value(inside, "vllm:prefix_cache_queries_total") == 2000
        assert value(inside, "vllm:prefix_cache_hits_total") == 992
        assert inside.core.pool.usage == 0


async def test_an_answer_is_part_of_what_is_cached() -> None:
    async with running_inside() as inside:
        first = make("a", range(100), limit=40)
        inside.core.add(first)
        tokens, _ = await finish(first)
        following = make("b", [*range(100), *tokens, 1, 2, 3])
        inside.core.add(following)
        await finish(following)
        assert following.num_cached_tokens == (100 + 39) // 16 * 16


async def test_requests_that_do_not_fit_together_are_preempted_and_answered_all_the_same() -> None:
    prompts = [range(start, start + 64) for start in (0, 1000, 2000)]
    async with running_inside("--num-gpu-blocks-override", "17", "--max-model-len", "200") as inside:
        alone = []
        for number, prompt in enumerate(prompts):
            request = make(f"alone {number}", prompt, limit=100)
            inside.core.add(request)
            alone.append(await finish(request))
        together = [make(f"together {number}", prompt, limit=100) for number, prompt in enumerate(prompts)]
        for request in together:
            inside.core.add(request)
        assert [await finish(request) for request in together] == alone
        assert value(inside, "vllm:num_preemptions_total") > 0
        assert inside.core.pool.usage == 0


async def test_a_salt_keeps_prompts_apart() -> None:
    async with running_inside() as inside:
        for salt, cached in (("one", 0), ("two", 0), ("one", 96)):
            request = make(salt, range(100))
            request.cache_salt = salt
            inside.core.add(request)
            await finish(request)
            assert request.num_cached_tokens == cached


@pytest.mark.parametrize("outputs", [0, 3])
async def test_an_aborted_request_frees_its_blocks_and_counts_as_no_success(outputs: int) -> None:
    async with running_inside(environment=FAST | {"BIDIKV_SIM_STEP_SECONDS": "0.01"}) as inside:
        request = make("a", range(100), limit=1000)
        inside.core.add(request)
        for _ in range(outputs):
            await request.outputs.get()
        inside.core.abort(request)
        assert (await finish(request))[1] == "abort"
        inside.core.abort(request)
        assert inside.core.unfinished == 0
        assert inside.core.pool.usage == 0
        assert value(inside, "vllm:request_success_total") == 0


async def test_a_drain_finishes_what_there_is_and_aborts_what_comes() -> None:
    async with running_inside(environment=FAST | {"BIDIKV_SIM_STEP_SECONDS": "0.005"}) as inside:
        request, late = make("a", range(100), limit=20), make("b", range(100))
        inside.core.add(request)
        await request.outputs.get()
        drain = asyncio.create_task(inside.core.drain(WAIT_SECONDS))
        await asyncio.sleep(0)
        inside.core.add(late)
        assert await finish(late) == ([], "abort")
        assert (await finish(request))[1] == "length"
        await asyncio.wait_for(drain, WAIT_SECONDS)


async def test_a_drain_without_time_aborts() -> None:
    async with running_inside(faults=FaultSet(hang=True)) as inside:
        request = make("a", range(100))
        inside.core.add(request)
        await inside.core.drain(0)
        assert await finish(request) == ([], "abort")


async def test_a_hang_stops_steps_until_it_is_healed() -> None:
    async with running_inside(faults=FaultSet(hang=True)) as inside:
        request = make("a", range(100))
        inside.core.add(request)
        await asyncio.sleep(0.05)
        assert request.outputs.empty()
        assert value(inside, "vllm:num_requests_waiting") == 1
        inside.faults.set(FaultSet())
        assert (await finish(request))[1] == "length"
