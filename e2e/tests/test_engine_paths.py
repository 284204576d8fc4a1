"""The router's paths on real engines: decode alone, its refusals, replicas without memory, tokens handed over, streams
that go on elsewhere. Answers are compared with those of an engine that reuses nothing.

Turns with a prefill leg are not streamed where the next one shall be decode's alone: without a time to first token the
router cannot know that the path with two legs is faster on this machine, so it tries the other one.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from bidikv_runtime import contract
from bidikv_runtime.contract import RouterConfig
from bidikv_runtime.router.api.session import identify
from bidikv_runtime.router.api.splice import parse_fields
from bidikv_runtime.router.choice.endpoints import Endpoint, Pools
from bidikv_runtime.router.choice.ring import compute_weights
from bidikv_runtime.router.control.token_file import TokenFile
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.router.wiring import Router
from bidikv_runtime.tests.router_process import RouterProcess, running_router
from e2e.bench.processes import parse_stat
from e2e.engine.client import EngineClient, Message, Metrics
from e2e.engine.fixtures import (
    OUTPUT_TOKENS,
    Deployment,
    assert_same,
    assistant,
    eventually,
    user,
    whole_blocks,
)
from e2e.engine.local import HOST, SERVED_MODEL, LocalEngine, running
from e2e.engine.relay import Breakage, running_relay

pytestmark = [pytest.mark.engine, pytest.mark.asyncio]

FIRST = 1200
"""Tokens of a first turn: too many for decode alone, whatever the router thinks how many a byte has."""
NEW = 40
STREAMED = 48
"""Tokens of a stream that breaks."""
BROKEN_AFTER = 8
"""Events of it: few, since vLLM makes one event of tokens whose reader was late."""
DYING = 160
"""Tokens of a stream whose engine is killed: the kill must come before they are all on their way."""
STEADY = ("--local-stall-seconds", "60", "--report-timeout-seconds", "10")
"""Which path a turn takes depends on what is held and reported, not on how fast this machine is."""


@pytest.fixture(scope="module")
def second_engine(engines: dict[str, LocalEngine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    """E, a second decode engine as D."""
    d = engines["D"]
    log = tmp_path_factory.mktemp("second") / "E.log"
    engine = LocalEngine("E", log, arguments=d.arguments, environment=d.environment, settings=d.settings)
    with running({"E": engine}):
        yield engine


@pytest_asyncio.fixture
async def second(second_engine: LocalEngine) -> AsyncIterator[EngineClient]:
    """E with an empty cache; started again if a test has killed it."""
    if second_engine.has_ended:
        second_engine.stop()
        second_engine.start()
        second_engine.wait_ready()
    async with EngineClient(second_engine) as client:
        await eventually(client.reset_prefix_cache, "E to reset its prefix cache")
        yield client


def endpoint_of(engine: LocalEngine, port: int = 0) -> Endpoint:
    """As routers see it; at ``port`` when a relay is in front."""
    return Endpoint(HOST, port or engine.port, engine.lookup_port, state_port=engine.state_port)


@asynccontextmanager
async def router_before(
    deployment: Deployment, decode: Sequence[Endpoint], *flags: str
) -> AsyncIterator[tuple[RouterProcess, EngineClient]]:
    """A router process in front of P and ``decode``, ready, and a client of it."""
    environment = {contract.ENV_TOKEN_FILE: str(deployment.token_file)}
    prefill = [endpoint_of(deployment.p.engine)]
    async with (
        running_router(prefill, decode, *STEADY, *flags, environment=environment) as router,
        bound(router.port) as client,
        aiohttp.ClientSession(router.url) as http,
    ):

        async def is_ready() -> bool:
            async with http.get("/ready") as response:
                return response.status == 200

        await eventually(is_ready, "the router to be ready")
        yield router, client


def bound(port: int) -> EngineClient:
    """The tests' client, bound to a router."""
    return EngineClient(LocalEngine("router", Path(os.devnull), port=port))


async def finished(client: EngineClient) -> int:
    """Requests that an engine has answered."""
    return int((await client.metrics()).value("vllm:request_success_total"))


async def exceeded(client: EngineClient) -> int:
    return int((await client.metrics()).value(contract.METRIC_COMPUTE_LIMIT_EXCEEDED))


def taken(metrics: Metrics) -> dict[str, float]:
    """Turns of a router by path and reason, as ``local held``."""
    counts = metrics.split("bidikv_router_paths_total")
    labels = {key: dict(part.split("=") for part in key.split(",")) for key in counts}
    return {f"{labels[key]['path']} {labels[key]['reason']}": number for key, number in counts.items()}


async def assert_right(
    deployment: Deployment, client: EngineClient, messages: list[Message], **parameters: Any
) -> None:
    """The next turn's answer, appended to ``messages``, is the monolith's."""
    [answer] = await client.chat(messages, max_tokens=OUTPUT_TOKENS, **parameters)
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    assert_same(answer, expected)
    messages.append(assistant(answer))


@pytest.mark.parametrize("stream", [True, False])
async def test_turns_with_little_new_go_to_decode_alone(deployment: Deployment, stream: bool) -> None:
    messages = [user(f"alone {stream}", FIRST)]
    async with router_before(deployment, [endpoint_of(deployment.d.engine)]) as (_, client):
        await assert_right(deployment, client, messages, stream=False)
        prefills, refusals = await finished(deployment.p), await exceeded(deployment.d)
        for number in range(3):
            messages.append(user(f"alone {stream} {number}", NEW))
            await assert_right(deployment, client, messages, stream=stream)
        assert taken(await client.metrics()) == {"plain first": 1, "local held": 3}
    assert await finished(deployment.p) == prefills
    assert await exceeded(deployment.d) == refusals


@pytest.mark.parametrize(
    ("lost_by", "stream"), [("reset", True), ("reset", False), ("eviction", True), ("edit", False)]
)
async def test_what_decode_refuses_takes_the_other_path(deployment: Deployment, lost_by: str, stream: bool) -> None:
    """A router without reports, which believes what it remembers."""
    messages = [user(f"refused {lost_by} {stream}", FIRST)]
    session = {"prompt_cache_key": f"{lost_by} {stream}"}
    decode = [endpoint_of(deployment.d.engine)]
    flags = ("--state-port", "0")
    async with router_before(deployment, [replace(decode[0], state_port=0)], *flags) as (_, client):
        await assert_right(deployment, client, messages, stream=False, **session)
        if lost_by == "reset":
            await eventually(deployment.d.reset_prefix_cache, "D to reset its prefix cache")
        elif lost_by == "eviction":
            # A session's blocks are given up last: only two prompts at once that need nearly all of the pool get them.
            evicting = [user(f"evict {number}", 2400) for number in range(2)]
            await asyncio.gather(*(deployment.d.chat([message], max_tokens=32) for message in evicting))
        else:
            messages[0] = user("an edit", FIRST)
        prefills, refusals = await finished(deployment.p), await exceeded(deployment.d)
        expected = {"plain first": 1.0}
        for number, path in enumerate(("bidirectional refused", "bidirectional refused", "local held")):
            messages.append(user(f"refused {number}", NEW))
            await assert_right(deployment, client, messages, stream=stream and path != "local held", **session)
            expected[path] = expected.get(path, 0) + 1
            assert taken(await client.metrics()) == expected
        metrics = await client.metrics()
        assert metrics.value("bidikv_router_local_refusals_total") == 1
        assert metrics.split("bidikv_router_retries_total") == {"leg=decode,reason=local": 1}
    assert await exceeded(deployment.d) == refusals + 1
    assert await finished(deployment.p) == prefills + 2


async def test_replicas_that_remember_nothing_learn_from_reports(deployment: Deployment, second: EngineClient) -> None:
    """One is killed; two new ones, which also know a further engine that would win the session, serve a turn each."""
    d, e = endpoint_of(deployment.d.engine), endpoint_of(second.engine)
    name = find_session(first=e, before=d)
    session = {"prompt_cache_key": name}
    messages = [user("replicas", FIRST)]
    async with router_before(deployment, [d]) as (replica, client):
        await assert_right(deployment, client, messages, stream=False, **session)
        replica.process.kill()
    answered = await finished(deployment.p), await finished(second)
    async with router_before(deployment, [e, d]) as (_, one), router_before(deployment, [e, d]) as (_, other):
        for number, client in enumerate((one, other)):
            messages.append(user(f"replicas {number}", NEW))
            await assert_right(deployment, client, messages, stream=True, **session)
            assert taken(await client.metrics()) == {"local held": 1}
    assert (await finished(deployment.p), await finished(second)) == answered


def find_session(*, first: Endpoint, before: Endpoint) -> str:
    """A session's name (``prompt_cache_key``) that rendezvous hashing gives to ``first``."""
    names = [first.address.encode(), before.address.encode()]
    for number in count():
        body = json.dumps({"prompt_cache_key": f"session {number}"}).encode()
        weights = compute_weights(identify([], parse_fields(body), body).session, names)
        if weights[0] > weights[1]:
            return f"session {number}"
    raise AssertionError("unreachable")


async def test_a_decode_engine_that_terminates_is_a_source_only(deployment: Deployment, second: EngineClient) -> None:
    p, d, e = (endpoint_of(client.engine) for client in (deployment.p, deployment.d, second))
    config = RouterConfig(namespace="", prefill_service="", decode_service="", served_model_name="")
    router = Router(config, Limits(), TokenFile(deployment.token_file))
    router.start_control()
    router.take_pools(Pools((p,), (d,)))
    messages = [user("terminating", FIRST)]
    try:
        async with bound(await router.listen(HOST, 0)) as client:
            await assert_right(deployment, client, messages)
            held = whole_blocks(len(await deployment.d.tokenize(messages[:1])) + OUTPUT_TOKENS - 1)
            router.take_pools(Pools((p,), (replace(d, ready=False, terminating=True), e)))
            await eventually(deployment.p.reset_prefix_cache, "P to reset its prefix cache")
            reused = await deployment.reused(deployment.p)
            answered, answered_by_second = await finished(deployment.d), await finished(second)
            messages.append(user("terminating, next", NEW))
            await assert_right(deployment, client, messages)
    finally:
        await router.close()
    assert await deployment.reused(deployment.p) - reused == held
    assert await finished(deployment.d) == answered

    async def is_counted() -> bool:
        return await finished(second) == answered_by_second + 1

    await eventually(is_counted, "E to count its answer")


@pytest.mark.parametrize("stream", [True, False])
async def test_decode_gets_the_tokens_of_a_long_chat(deployment: Deployment, stream: bool) -> None:
    messages = [user(f"tokens {stream}", FIRST)]
    async with running_relay(deployment.d.engine.port) as relay:
        decode = [endpoint_of(deployment.d.engine, relay.port)]
        async with router_before(deployment, decode, "--local-limit-tokens", "0") as (_, client):
            for number in range(2):
                relay.requests.clear()
                tokens = await deployment.m.tokenize(messages)
                await assert_right(deployment, client, messages, stream=stream)
                params = json.loads(relay.requests.partition(b"\r\n\r\n")[2])[contract.KV_TRANSFER_PARAMS]
                assert params[contract.TOKEN_IDS_PARAM] == tokens
                messages.append(user(f"tokens {number}", NEW))
        async with router_before(deployment, decode, "--local-limit-tokens", "0", "--token-ids-from", "0") as (
            _,
            client,
        ):
            relay.requests.clear()
            await assert_right(deployment, client, messages, stream=stream)
            assert contract.TOKEN_IDS_PARAM.encode() not in relay.requests


@dataclass
class Streamed:
    """A stream of chat or completions as a client sees it."""

    text: str = ""
    events: int = 0
    """With text."""
    ids: set[str] = field(default_factory=set)
    roles: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    completion_tokens: list[int] = field(default_factory=list)
    done: int = 0


async def read_stream(
    url: str, route: str, body: dict[str, Any], after_event: Callable[[int], None] = lambda _: None
) -> Streamed:
    """A stream of plain text; ``after_event`` is told the number of events with text so far."""
    got = Streamed()
    request = {
        "model": SERVED_MODEL,
        "max_tokens": STREAMED,
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    } | body
    async with aiohttp.ClientSession(url) as http, http.post(f"/v1/{route}", json=request) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                got.done += 1
                continue
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            got.ids.add(event["id"])
            if usage := event.get("usage"):
                got.completion_tokens.append(usage["completion_tokens"])
            for choice in event["choices"]:
                delta = choice.get("delta", {})
                got.roles += "role" in delta and delta["role"] is not None
                if choice.get("finish_reason"):
                    got.finish_reasons.append(choice["finish_reason"])
                if text := choice.get("text") or delta.get("content"):
                    got.text += text
                    got.events += 1
                    after_event(got.events)
    return got


def assert_uninterrupted(got: Streamed, expected: Streamed, tokens: int = STREAMED) -> None:
    """Nothing about the stream tells that two engines took part in it."""
    assert got.text == expected.text
    assert len(got.ids) == 1
    assert (got.roles, got.finish_reasons, got.done) == (expected.roles, expected.finish_reasons, 1)
    assert got.completion_tokens == expected.completion_tokens == [tokens]


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
@pytest.mark.parametrize("turn", ["first", "alone"])
async def test_a_stream_that_breaks_goes_on_at_another_engine(
    deployment: Deployment, second: EngineClient, route: str, turn: str
) -> None:
    """The connection to the engine breaks within an event, of a turn with two legs and of one that decode has alone."""
    messages = [user(f"broken {route} {turn}", FIRST)]
    breakage = Breakage(BROKEN_AFTER)
    d, e = deployment.d.engine, second.engine
    async with running_relay(d.port, breakage) as before_d, running_relay(e.port, breakage) as before_e:
        decode = [endpoint_of(d, before_d.port), endpoint_of(e, before_e.port)]
        async with router_before(deployment, decode, "--continue-streams") as (router, client):
            if turn == "alone":
                [answer] = await client.chat(messages, max_tokens=OUTPUT_TOKENS, stream=False)
                messages += [assistant(answer), user("broken, next", NEW)]
            body: dict[str, Any] = {"messages": messages}
            if route == "completions":
                body = {"prompt": " ".join(message["content"] for message in messages)}
            got = await read_stream(router.url, route, body)
            metrics = await client.metrics()
    assert breakage.broken is not None
    assert metrics.value("bidikv_router_continued_streams_total") == 1
    assert_uninterrupted(got, await read_stream(deployment.m.engine.url, route, body))


async def test_a_stream_goes_on_when_its_engine_dies(deployment: Deployment, second: EngineClient) -> None:
    """vLLM's core is killed, so that its server ends the stream itself, with an error event."""
    d, e = endpoint_of(deployment.d.engine), endpoint_of(second.engine)
    messages = [user("dying", FIRST)]
    body = {"messages": messages, "prompt_cache_key": find_session(first=e, before=d), "max_tokens": DYING}
    core = find_core(second.engine)

    def kill_after(events: int) -> None:
        if events == BROKEN_AFTER:
            os.kill(core, signal.SIGKILL)

    async with router_before(deployment, [d, e], "--continue-streams") as (router, client):
        got = await read_stream(router.url, "chat/completions", body, kill_after)
        metrics = await client.metrics()
    assert metrics.value("bidikv_router_continued_streams_total") == 1
    assert_uninterrupted(got, await read_stream(deployment.m.engine.url, "chat/completions", body), DYING)


def find_core(engine: LocalEngine) -> int:
    """Process id of vLLM's core in the engine's group."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            group, _ = parse_stat((entry / "stat").read_text())
            if group == engine.process_group and b"EngineCore" in (entry / "cmdline").read_bytes():
                return int(entry.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    raise AssertionError(f"{engine.name} has no core process")
