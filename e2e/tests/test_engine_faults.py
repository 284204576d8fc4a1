"""The KV protocol on real engines when something goes wrong between its steps: answers stay right, nothing leaks."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from bidikv_runtime.connector import wire
from bidikv_runtime.connector.tokens import REPLY, REQUEST, Tokens
from e2e.engine.client import Completion, Message, logprob_distance
from e2e.engine.fixtures import OUTPUT_TOKENS, TOLERANCE, Deployment, assert_same, eventually, user
from e2e.engine.local import BLOCK_SIZE, HOST, EngineError, LocalEngine, free_port

pytestmark = [pytest.mark.engine, pytest.mark.asyncio]


@contextmanager
def silent_source() -> Iterator[str]:
    """An address that accepts connections and never says a word."""
    with socket.create_server((HOST, 0)) as server:
        yield f"{HOST}:{server.getsockname()[1]}"


@contextmanager
def lookup_only_source(tokens: Tokens, blocks: int, side_channel_port: int) -> Iterator[str]:
    """A source that answers the lookup with ``blocks`` blocks; its engine is whatever listens on the port, if any."""
    stop = threading.Event()
    peer = wire.Peer(f"engine at {side_channel_port}", HOST, side_channel_port, 1)

    def serve(router: zmq.Socket[bytes]) -> None:
        while not stop.is_set():
            if router.poll(100):
                identity, sealed = router.recv_multipart()
                data = tokens.open(REQUEST, sealed)
                assert data is not None
                ids = list(range(1, blocks + 1))
                found = wire.Found(wire.decode_request(data).sequence, 1, [wire.Run(0, ids, ids)], peer)
                router.send_multipart((identity, tokens.seal(REPLY, wire.encode(found))))

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port(f"tcp://{HOST}")
        thread = threading.Thread(target=serve, args=(router,))
        thread.start()
        try:
            yield f"{HOST}:{port}"
        finally:
            stop.set()
            thread.join(10)


@pytest.mark.parametrize("point", ["read", "validation"])
async def test_blocks_that_were_reused_do_not_validate(deployment: Deployment, point: str) -> None:
    """Held before the read, P reads other content; held before the validation, it cannot know that it did not."""
    messages = await deployment.history(f"overwritten {point}", 2)
    failures = await deployment.validate_failures(deployment.p, "reallocated")
    before = await deployment.reused(deployment.p)
    deployment.fault(hold_reads=point == "read", hold_validations=point == "validation")
    prefill = asyncio.create_task(
        deployment.p.chat(messages, max_tokens=OUTPUT_TOKENS, sources=[deployment.d.engine.source], stream=False)
    )
    await deployment.held(point)
    await deployment.evict(deployment.d)
    deployment.fault()
    [answer] = await prefill
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    assert_same(answer, expected)
    assert await deployment.validate_failures(deployment.p, "reallocated") == failures + 1
    assert await deployment.reused(deployment.p) == before
    await deployment.assert_no_kv_in_use()


async def test_without_validation_the_answer_would_be_wrong(deployment: Deployment) -> None:
    """The control of the test above: the fault is real, and the comparison sees it."""
    messages = await deployment.history("trusting", 2)
    deployment.fault(hold_reads=True, trust_reads=True)
    prefill = asyncio.create_task(
        deployment.p.chat(messages, max_tokens=1, sources=[deployment.d.engine.source], stream=False)
    )
    await deployment.held("read")
    await deployment.evict(deployment.d)
    deployment.fault(trust_reads=True)
    [answer] = await prefill
    [expected] = await deployment.m.chat(messages, max_tokens=1)
    assert logprob_distance(answer.top_logprobs, expected.top_logprobs) > 10 * TOLERANCE


async def test_the_part_that_is_still_valid_is_kept(deployment: Deployment) -> None:
    """Eviction takes a sequence's end first, so the leading blocks of a half evicted history are still good."""
    messages = await deployment.history("partly", 2)
    before = await deployment.reused(deployment.p)
    deployment.fault(hold_validations=True)
    prefill = asyncio.create_task(
        deployment.p.chat(messages, max_tokens=OUTPUT_TOKENS, sources=[deployment.d.engine.source], stream=False)
    )
    await deployment.held("validation")
    # 160 blocks, the null block aside 159; the history takes 39 of them, so 135 blocks reach into its end.
    await deployment.d.chat([user("half", 135 * 32 - 250)], max_tokens=1)
    deployment.fault()
    [answer] = await prefill
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    assert_same(answer, expected)
    assert 0 < await deployment.reused(deployment.p) - before < 1200


@pytest.mark.parametrize("point", ["read", "validation"])
async def test_client_that_leaves_during_a_read_leaves_nothing(deployment: Deployment, point: str) -> None:
    messages = await deployment.history(f"leaving {point}", 1)
    deployment.fault(hold_reads=point == "read", hold_validations=point == "validation")
    prefill = asyncio.create_task(
        deployment.p.chat(messages, max_tokens=1, sources=[deployment.d.engine.source], stream=False)
    )
    await deployment.held(point)

    async def count_requests() -> float:
        metrics = await deployment.p.metrics()
        return metrics.value("vllm:num_requests_running") + metrics.value("vllm:num_requests_waiting")

    async def counted() -> bool:  # with the step after the one that began to hold it
        return await count_requests() == 1

    async def aborted() -> bool:
        return await count_requests() == 0

    await eventually(counted, "P to count the request")
    prefill.cancel()
    with pytest.raises(asyncio.CancelledError):
        await prefill
    await eventually(aborted, "P to abort the request")
    deployment.fault()
    await deployment.assert_no_kv_in_use()
    turn = await deployment.turn(messages)
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    assert_same(turn.decode[0], expected)
    assert turn.prefill_reused > 600


async def test_a_silent_source_does_not_keep_a_good_one(deployment: Deployment) -> None:
    messages = await deployment.history("beside a silent one", 1)
    with silent_source() as silent:
        turn = await deployment.turn(messages, prefill_sources=[silent, deployment.d.engine.source])
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    assert_same(turn.decode[0], expected)
    assert turn.prefill_reused > 600


async def test_a_source_that_vanishes_after_the_lookup(deployment: Deployment) -> None:
    failures = await deployment.validate_failures(deployment.p, "read_failed")
    messages = [user("vanished")]
    with lookup_only_source(deployment.tokens, blocks=15, side_channel_port=free_port()) as source:
        turn = await deployment.turn(messages, prefill_sources=[source])
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    assert_same(turn.decode[0], expected)
    assert turn.prefill_reused == 0
    assert await deployment.validate_failures(deployment.p, "read_failed") == failures + 1
    silent = await deployment.lookups(deployment.p, "silent")
    await deployment.p.chat([user("vanished again")], max_tokens=1, sources=[source])
    assert await deployment.validate_failures(deployment.p, "read_failed") == failures + 1
    assert await deployment.lookups(deployment.p, "silent") == silent + 1
    await deployment.assert_no_kv_in_use()


async def test_a_source_that_hangs_before_the_read(deployment: Deployment) -> None:
    """Its kernel takes connections, nobody answers them: the handshake must not wait, and others' even less."""
    failures = await deployment.validate_failures(deployment.p, "read_failed")
    messages = await deployment.history("beside a hung one", 1)
    with (
        silent_source() as hung,
        lookup_only_source(deployment.tokens, blocks=15, side_channel_port=int(hung.split(":")[1])) as source,
    ):
        [expected] = await deployment.m.chat([user("hung")], max_tokens=OUTPUT_TOKENS)
        [answer], turn = await asyncio.gather(
            deployment.p.chat([user("hung")], max_tokens=OUTPUT_TOKENS, sources=[source], stream=False),
            deployment.turn(messages),
        )
    assert_same(answer, expected)
    assert turn.prefill_reused > 600
    [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
    assert_same(turn.decode[0], expected)
    assert await deployment.validate_failures(deployment.p, "read_failed") == failures + 1
    await deployment.assert_no_kv_in_use()


async def meet(deployment: Deployment, seed: str) -> None:
    """P reads from D: a handshake with a frozen source fails by itself, and a source that failed is left alone."""
    messages = await deployment.history(seed, 1)

    async def has_read() -> bool:
        await eventually(deployment.p.reset_prefix_cache, "P to reset its prefix cache")
        return (await deployment.turn(messages)).prefill_reused > 0

    await eventually(has_read, "P to read from D")


async def read_from_a_frozen_source(
    deployment: Deployment, engines: dict[str, LocalEngine], messages: list[Message], point: str
) -> Completion:
    """P's answer to a prompt whose history D holds; D stops in its tracks before the read or in the middle of it."""
    group = engines["D"].process_group
    deployment.fault(hold_reads=point == "before", freeze_on_read=group if point == "middle" else 0)
    prefill = asyncio.create_task(
        deployment.p.chat(messages, max_tokens=OUTPUT_TOKENS, sources=[deployment.d.engine.source], stream=False)
    )
    if point == "before":
        await deployment.held("read")
        engines["D"].freeze()
    else:
        await deployment.held("frozen")
    deployment.fault()
    [answer] = await prefill
    return answer


async def freeze_during_a_read(deployment: Deployment, engines: dict[str, LocalEngine], point: str) -> None:
    """P gives up a read from D, which is left frozen, and answers right all the same.

    In the middle of it the freeze races with the read. One that ended first was not met in its middle (its source is
    then silent when asked to validate it), so another is tried.
    """
    for attempt in range(5):
        messages = await deployment.history(f"frozen {point} {attempt}", 3)
        [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
        overdue, silent = [await deployment.validate_failures(deployment.p, reason) for reason in ("overdue", "silent")]
        assert_same(await read_from_a_frozen_source(deployment, engines, messages, point), expected)
        if await deployment.validate_failures(deployment.p, "overdue") == overdue + 1:
            return
        assert point == "middle"
        assert await deployment.validate_failures(deployment.p, "silent") == silent + 1
        engines["D"].thaw()
        await deployment.clean()
    pytest.fail("the read was quicker than the freeze in every attempt")


@pytest.mark.parametrize("point", ["before", "middle"])
async def test_a_source_that_freezes_costs_a_recompute_and_its_late_data_hit_nobody(
    deployment: Deployment, engines: dict[str, LocalEngine], point: str
) -> None:
    await meet(deployment, f"handshake {point}")
    other = [user(f"meanwhile {point}", 2000)]
    [other_expected] = await deployment.m.chat(other, max_tokens=OUTPUT_TOKENS)
    try:
        await freeze_during_a_read(deployment, engines, point)

        # Everything that may be used is used by somebody else when the late data arrive.
        await deployment.evict(deployment.p)
        [answer] = await deployment.p.chat(other, max_tokens=OUTPUT_TOKENS)
        assert_same(answer, other_expected)
        assert await deployment.quarantined(deployment.p) >= 1800 // BLOCK_SIZE
    finally:
        engines["D"].thaw()

    async def released() -> bool:
        await deployment.p.chat([user("step", 20)], max_tokens=1)  # workers are heard with engine steps only
        return await deployment.quarantined(deployment.p) == 0

    await eventually(released, "P to release what it held back")
    [answer] = await deployment.p.chat(other, max_tokens=OUTPUT_TOKENS)
    assert_same(answer, other_expected)
    await deployment.assert_no_kv_in_use()


async def test_an_engine_stops_while_a_transfer_is_under_way(
    deployment: Deployment, engines: dict[str, LocalEngine]
) -> None:
    await meet(deployment, "handshake before stopping")
    messages = await deployment.history("stopping", 3)
    try:
        await read_from_a_frozen_source(deployment, engines, messages, "before")
        assert await deployment.quarantined(deployment.p) > 0
        engines["P"].terminate()

        async def ended() -> bool:
            return engines["P"].has_ended

        await eventually(ended, "P to end")
    finally:
        # D as well: a source that is thawed after its reader has gone is aborted by UCX (connector/README.md).
        engines["D"].kill()
        engines["P"].stop()
        for name in ("P", "D"):
            engines[name].start()
        for name in ("P", "D"):
            await asyncio.to_thread(engines[name].wait_ready)


async def test_a_killed_source_costs_a_recompute_and_is_used_again_after_its_restart(
    deployment: Deployment, engines: dict[str, LocalEngine]
) -> None:
    messages = await deployment.history("killed", 1)
    deployment.fault(hold_validations=True)
    held = asyncio.create_task(
        deployment.p.chat(messages, max_tokens=OUTPUT_TOKENS, sources=[deployment.d.engine.source], stream=False)
    )
    await deployment.held("validation")
    engines["D"].kill()
    try:
        deployment.fault()
        [expected] = await deployment.m.chat(messages, max_tokens=OUTPUT_TOKENS)
        [answer] = await held  # killed between READ and VALIDATE
        assert_same(answer, expected)

        await eventually(deployment.p.reset_prefix_cache, "P to reset its prefix cache")
        silent = await deployment.lookups(deployment.p, "silent")
        [answer] = await deployment.p.chat(messages, max_tokens=OUTPUT_TOKENS, sources=[deployment.d.engine.source])
        assert_same(answer, expected)
        assert await deployment.lookups(deployment.p, "silent") == silent + 1
    finally:
        engines["D"].start()  # not before: how soon it would answer is the machine's affair

    await asyncio.to_thread(engines["D"].wait_ready)
    hits = await deployment.lookups(deployment.p, "hit")
    [answer] = await deployment.d.chat(messages, max_tokens=OUTPUT_TOKENS, sources=[deployment.p.engine.source])
    assert_same(answer, expected)

    async def used_again() -> bool:  # P may still hold the address for silent
        await eventually(deployment.p.reset_prefix_cache, "P to reset its prefix cache")
        [again] = await deployment.p.chat(messages, max_tokens=OUTPUT_TOKENS, sources=[deployment.d.engine.source])
        assert_same(again, expected)
        return await deployment.lookups(deployment.p, "hit") > hits

    await eventually(used_again, "P to read from the restarted D")
    assert await deployment.reused(deployment.p) > 0
    await deployment.assert_no_kv_in_use()


async def test_an_engine_that_cannot_run_the_protocol_ends_with_one_sentence(tmp_path: Path) -> None:
    engine = LocalEngine(
        "refused", tmp_path / "refused.log", arguments=("--max-model-len", "4096"), environment={"PYTHONHASHSEED": ""}
    )
    try:
        engine.start()
        with pytest.raises(EngineError, match="ended with"):
            await asyncio.to_thread(engine.wait_ready)
    finally:
        engine.stop()
    assert "UnsupportedEngineError: PYTHONHASHSEED is not set to a number" in engine.log.read_text()
