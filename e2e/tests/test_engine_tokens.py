"""Tokens on real engines: strangers get nothing, a token is changed while requests run, the state port shows it all."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from bidikv_runtime.connector import wire
from bidikv_runtime.connector.lookup_client import LookupClient
from bidikv_runtime.connector.sources import Source
from bidikv_runtime.connector.tokens import CHECK_SECONDS
from e2e.engine.client import EngineClient
from e2e.engine.fixtures import OUTPUT_TOKENS, TOKEN, Deployment, assert_same, eventually, user
from e2e.engine.local import HOST

pytestmark = [pytest.mark.engine, pytest.mark.asyncio]

NEW = "another-token-of-all-engines"


async def ask_state(client: EngineClient, token: str | None = None) -> tuple[int, dict[str, Any]]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{HOST}:{client.engine.state_port}/state", headers=headers) as response,
    ):
        return response.status, await response.json()


async def state_of(client: EngineClient, token: str = TOKEN) -> dict[str, Any]:
    status, state = await ask_state(client, token)
    assert status == 200
    return state


async def test_the_state_port_wants_a_token_and_shows_what_was_exchanged(deployment: Deployment) -> None:
    for token in (None, NEW):
        status, body = await ask_state(deployment.d, token)
        assert (status, list(body)) == (401, ["error"])
    before, before_p = await state_of(deployment.d), await state_of(deployment.p)
    messages = await deployment.history("state", 1)
    turn = await deployment.turn(messages)
    assert turn.prefill_reused > 0
    after = await state_of(deployment.d)
    assert after["published_blocks"] > 0
    assert after["epoch"] == before["epoch"]
    for count in ("lookups", "validations"):
        assert after["server"][count] > before["server"][count]
    assert after["server"]["unauthenticated"] == before["server"]["unauthenticated"]
    after_p = await state_of(deployment.p)
    assert after_p["client"]["unauthenticated_replies"] == before_p["client"]["unauthenticated_replies"]


async def test_a_stranger_at_the_lookup_port_gets_no_answer(deployment: Deployment) -> None:
    before = (await state_of(deployment.d))["server"]
    stranger = LookupClient(silent_period=1)
    source = Source(HOST, deployment.d.engine.lookup_port)
    question = stranger.ask(source, lambda n: wire.Lookup(wire.VERSION, n, b"", [b"h" * 32]), 60)
    try:

        async def counted() -> bool:
            stranger.poll()
            server = (await state_of(deployment.d))["server"]
            return bool(server["unauthenticated"] == before["unauthenticated"] + 1)

        await eventually(counted, "D to count the stranger's message")
        stranger.poll()
        assert question.open
    finally:
        stranger.close()


async def test_a_reply_that_was_changed_on_its_way_is_not_believed(deployment: Deployment) -> None:
    silent = await deployment.lookups(deployment.p, "silent")
    unauthenticated = (await state_of(deployment.p))["client"]["unauthenticated_replies"]
    messages = [user("changed", 2000)]
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    await deployment.d.chat(messages, max_tokens=1)

    async def interfere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source_reader, source_writer = await asyncio.open_connection(HOST, deployment.d.engine.lookup_port)

        async def relay(source: asyncio.StreamReader, target: asyncio.StreamWriter, damage: bool) -> None:
            while data := await source.read(65536):
                if damage and len(data) > 200:  # not the greeting of ZeroMQ's protocol, but the reply
                    data = data[:-1] + bytes([data[-1] ^ 1])
                target.write(data)
                await target.drain()
            target.close()

        await asyncio.gather(relay(reader, source_writer, False), relay(source_reader, writer, True))

    async with await asyncio.start_server(interfere, HOST, 0) as server:
        port = server.sockets[0].getsockname()[1]
        [answer] = await deployment.p.chat(messages, max_tokens=OUTPUT_TOKENS, sources=[f"{HOST}:{port}"])
    assert_same(answer, expected)
    assert (await state_of(deployment.p))["client"]["unauthenticated_replies"] == unauthenticated + 1
    assert await deployment.lookups(deployment.p, "silent") == silent + 1


async def test_a_token_is_changed_while_requests_run(deployment: Deployment) -> None:
    messages = await deployment.history("rotation", 1)
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    try:
        for tokens in ((TOKEN, NEW), (NEW, TOKEN), (NEW,)):
            replacement = deployment.token_file.with_suffix(".new")
            replacement.write_text("\n".join(tokens))
            replacement.replace(deployment.token_file)
            for _ in range(3):  # before, while and after the engines look at the file, which they do once a second
                await eventually(deployment.p.reset_prefix_cache, "P to reset its prefix cache")
                turn = await deployment.turn(messages)
                assert_same(turn.decode[0], expected)
                assert turn.prefill_reused > 0
                await asyncio.sleep(0.5)
        assert (await ask_state(deployment.d, TOKEN))[0] == 401
        assert (await ask_state(deployment.d, NEW))[0] == 200
    finally:
        deployment.token_file.write_text(TOKEN)

        async def accepted() -> bool:
            return all([(await ask_state(client, TOKEN))[0] == 200 for client in (deployment.p, deployment.d)])

        await eventually(accepted, "the engines to take the first token again")
        await asyncio.sleep(CHECK_SECONDS)  # the workers look for themselves
