"""Simulated engines behind the real router: which path a turn takes, what is reused, that the answer is the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from bidikv_runtime import contract
from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.tests.router_process import RouterProcess, running_router
from e2e.engine.client import Metrics
from e2e.engine.fixtures import eventually
from e2e.simengine.local import SERVED_MODEL, SimulatedEngine, running

WAIT_SECONDS = 30.0
OUTPUT_TOKENS = 24
BLOCK_SIZE = 16
HISTORY = "The first question is long enough for many blocks of the cache. " * 60
QUESTION = "And what follows from all of this? "
FAST_REPORTS = ("--debug", "--report-seconds", "0.05", "--report-idle-seconds", "0.05", "--token-ids-from", "64")


@dataclass
class Fleet:
    p: SimulatedEngine
    d: SimulatedEngine
    m: SimulatedEngine
    """It stands alone: its answers are what the others' must be."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("simulated")
    tokens = folder / "tokens"
    tokens.write_text("token-of-all-engines\n")
    settings = {"bidikv_cost_model": "AlwaysPull"}
    p, d, m = (
        SimulatedEngine(
            name, folder / f"{name}.log", settings=settings, environment={contract.ENV_TOKEN_FILE: str(tokens)}
        )
        for name in "pdm"
    )
    with pytest.MonkeyPatch.context() as patch, running(p, d, m):
        patch.setenv(contract.ENV_TOKEN_FILE, str(tokens))  # the router shows it when it asks for reports
        yield Fleet(p, d, m)


@pytest_asyncio.fixture
async def router(fleet: Fleet) -> AsyncIterator[RouterProcess]:
    for engine in (fleet.p, fleet.d):
        assert engine.reset_prefix_cache()
    async with running_router([fleet.p.endpoint], [fleet.d.endpoint], *FAST_REPORTS) as started:
        yield started


async def ask(url: str, messages: Sequence[Mapping[str, str]], **parameters: Any) -> tuple[str, str]:
    """The answer to a chat and the path that it took."""
    body = {
        "model": SERVED_MODEL,
        "messages": list(messages),
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
    } | parameters
    headers = {contract.PATH_HEADER: str(body.pop("path"))} if "path" in body else {}
    async with (
        aiohttp.ClientSession(url) as http,
        http.post("/v1/chat/completions", json=body, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        taken = response.headers.get(contract.PATH_HEADER, "")
        if not body.get("stream"):
            return (await response.json())["choices"][0]["message"]["content"], taken
        events = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: {")]
        return "".join(event["choices"][0]["delta"]["content"] for event in events), taken


async def count_tokens(engine: SimulatedEngine, messages: Sequence[Mapping[str, str]]) -> int:
    body = {"messages": list(messages)}
    async with aiohttp.ClientSession(engine.url) as http, http.post("/tokenize", json=body) as response:
        return int((await response.json())["count"])


async def scrape(engine: SimulatedEngine | RouterProcess) -> Metrics:
    async with aiohttp.ClientSession(engine.url) as http, http.get("/metrics") as response:
        return Metrics(await response.text())


async def reused(engine: SimulatedEngine) -> float:
    return (await scrape(engine)).value(contract.METRIC_REUSED_TOKENS)


def say(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def unreported(engine: SimulatedEngine) -> Endpoint:
    return replace(engine.endpoint, state_port=0)


def answered(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def debug(router: RouterProcess, what: str) -> list[dict[str, Any]]:
    """What the router knows of ``engines`` or ``sessions``, of these the latest first."""
    async with aiohttp.ClientSession(router.url) as http, http.get(f"/debug/{what}") as response:
        known: list[dict[str, Any]] = (await response.json())[what]
        return known


@pytest.mark.parametrize("path", ["local", "bidirectional", "plain"])
async def test_every_path_reuses_what_it_should_and_gives_the_same_answer(
    fleet: Fleet, router: RouterProcess, path: str
) -> None:
    messages = [say(f"{path}. {HISTORY}")]
    first, taken = await ask(router.url, messages)
    assert taken == "plain"
    assert first == (await ask(fleet.m.url, messages))[0]
    held = (await count_tokens(fleet.m, messages) + OUTPUT_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
    messages += [answered(first), say(QUESTION * 12)]
    assert fleet.p.reset_prefix_cache()
    before = await reused(fleet.p), await reused(fleet.d)
    second, taken = await ask(router.url, messages, path=path)
    assert taken == path
    assert second == (await ask(fleet.m.url, messages))[0] != first
    read = await reused(fleet.p) - before[0], await reused(fleet.d) - before[1]
    rest = await count_tokens(fleet.m, messages) - held  # its partly filled last block is handed over, too
    assert read == {"local": (0, 0), "bidirectional": (held, rest), "plain": (0, rest)}[path]


async def test_a_short_addition_goes_to_decode_alone(fleet: Fleet, router: RouterProcess) -> None:
    messages = [say(f"chosen. {HISTORY}")]
    first, _ = await ask(router.url, messages)
    messages += [answered(first), say(QUESTION)]
    second, taken = await ask(router.url, messages)
    assert taken == "local"
    assert second == (await ask(fleet.m.url, messages))[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_engine_that_has_lost_the_session_refuses_and_the_client_does_not_notice(
    fleet: Fleet, stream: bool
) -> None:
    messages = [say(f"lost {stream}. {HISTORY}")]
    # Without reports the router cannot know of the loss.
    async with running_router([fleet.p.endpoint], [unreported(fleet.d)], "--debug", "--state-port", "0") as router:
        first, _ = await ask(router.url, messages)
        messages += [answered(first), say(QUESTION)]
        refusals = (await scrape(fleet.d)).value(contract.METRIC_COMPUTE_LIMIT_EXCEEDED)
        assert fleet.d.reset_prefix_cache()
        second, taken = await ask(router.url, messages, stream=stream)
    assert (await scrape(fleet.d)).value(contract.METRIC_COMPUTE_LIMIT_EXCEEDED) == refusals + 1
    assert taken in ("bidirectional", "plain")
    assert second == (await ask(fleet.m.url, messages))[0]


async def test_a_router_that_knows_nothing_learns_from_reports_what_decode_holds(
    fleet: Fleet, router: RouterProcess
) -> None:
    messages = [say(f"reported. {HISTORY}")]
    first, _ = await ask(router.url, messages)
    messages += [answered(first), say(QUESTION)]
    async with running_router([fleet.p.endpoint], [fleet.d.endpoint], *FAST_REPORTS) as other:

        async def is_told() -> bool:
            return any(engine["sessions"] for engine in await debug(other, "engines"))

        await eventually(is_told, "a report of the session")
        second, taken = await ask(other.url, messages)
    assert taken == "local"
    assert second == (await ask(fleet.m.url, messages))[0]


@pytest.mark.parametrize(
    ("api", "first", "following"),
    [
        ("completions", {"prompt": HISTORY}, None),
        ("messages", {"messages": [say(HISTORY)], "system": "Be kind."}, None),
        ("responses", {"input": HISTORY, "instructions": "Be kind."}, {"input": QUESTION}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_other_apis_go_through_both_legs(
    fleet: Fleet, router: RouterProcess, api: str, first: dict[str, Any], following: dict[str, Any] | None, stream: bool
) -> None:
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    before = (await scrape(fleet.p)).value("vllm:request_success_total")
    body: dict[str, Any] = {"model": SERVED_MODEL, limit: 12, "stream": stream, **first}
    async with aiohttp.ClientSession(router.url) as http:
        async with http.post(f"/v1/{api}", json=body) as response:
            text = await response.text()
            assert response.status == 200, text
            assert '"error"' not in text
        assert (await scrape(fleet.p)).value("vllm:request_success_total") == before + 1
        if following is not None and not stream:
            made = json.loads(text)["id"]
            body |= following | {"previous_response_id": made}
            async with http.post(f"/v1/{api}", json=body) as response:
                assert response.status == 200, await response.text()
            async with http.get(f"/v1/responses/{made}") as response:
                assert (await response.json())["id"] == made


async def test_a_client_that_leaves_frees_both_engines(fleet: Fleet, router: RouterProcess) -> None:
    body = {"model": SERVED_MODEL, "messages": [say(HISTORY)], "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession(router.url) as http, http.post("/v1/chat/completions", json=body) as response:
        await response.content.readuntil(b"\n\n")
        response.close()

    async def is_idle() -> bool:
        return not (await scrape(fleet.d)).value("vllm:num_requests_running")

    await eventually(is_idle, "decode to stop")
    for engine in (fleet.p, fleet.d):
        assert (await scrape(engine)).value("vllm:kv_cache_usage_perc") == 0


async def test_a_stream_that_decode_breaks_goes_on_at_another_one_with_the_same_text(
    fleet: Fleet, tmp_path: Path
) -> None:
    other = SimulatedEngine("other", tmp_path / "other.log", environment=fleet.d.environment)
    messages = [say(f"continued. {HISTORY}")]
    expected, _ = await ask(fleet.m.url, messages, max_tokens=60)
    decode = {engine.endpoint.address: engine for engine in (fleet.d, other)}
    with running(other):
        endpoints = [engine.endpoint for engine in decode.values()]
        async with running_router([fleet.p.endpoint], endpoints, *FAST_REPORTS, "--continue-streams") as router:
            first, _ = await ask(router.url, messages, max_tokens=1)
            assert expected.startswith(first)
            chosen = decode[(await debug(router, "sessions"))[0]["decode"]]
            chosen.set_faults(crash_after_tokens=20)
            text, _ = await ask(router.url, messages, max_tokens=60, stream=True)
        assert chosen.process.wait(WAIT_SECONDS) == 1
        if chosen is fleet.d:  # the other tests go on with it
            chosen.start()
            chosen.wait_ready()
    assert text == expected
