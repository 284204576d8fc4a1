"""What an operator sees of turns that a running router serves: metrics, log, traces, debug pages, and its queue."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from time import monotonic

import pytest

from bidikv_runtime.router.limits import Limits
from bidikv_runtime.router.observe import metrics as names
from bidikv_runtime.router.observe.record import TurnRecord
from bidikv_runtime.tests.router_collector import running_collector
from bidikv_runtime.tests.router_engine import WAIT_SECONDS, Exchange, hang
from bidikv_runtime.tests.router_rig import Rig, running_rig
from bidikv_runtime.tests.test_router_handover import refuse_guarded

CHAT = "/v1/chat/completions"
TURN = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}


async def until_metric(rig: Rig, line: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while line not in (await rig.metrics()).splitlines():  # noqa: ASYNC110 - of another task
            await asyncio.sleep(0.01)


async def serve_turn(rig: Rig, headers: dict[str, str] | None = None) -> None:
    async with rig.http.post(CHAT, json=TURN, headers=headers) as response:
        assert response.status == 200
        await response.read()


async def start_turn(rig: Rig, tenant: str = "t") -> asyncio.StreamWriter:
    """A turn whose client can leave."""
    body = json.dumps(TURN)
    _, writer = await rig.connect()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: {tenant}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())
    return writer


async def test_the_stages_of_a_turn_add_up() -> None:
    async with running_rig(prefill=1, decode=1) as rig:
        await serve_turn(rig)
        lines = dict(line.rsplit(" ", 1) for line in (await rig.metrics()).splitlines() if line[0] != "#")
    (path,) = {name.split('"')[1] for name in lines if name.startswith(f"{names.STAGE_SECONDS}_sum")}

    def seconds(stage: str) -> float:
        return float(lines[f'{names.STAGE_SECONDS}_sum{{path="{path}",stage="{stage}"}}'])

    before = sum(seconds(stage) for stage in ("queue", "prefill", "handover", "first_token"))
    assert before == pytest.approx(float(lines[f'{names.TIME_TO_FIRST_TOKEN}_sum{{path="{path}"}}']))
    assert before + seconds("stream") == pytest.approx(float(lines[f'{names.REQUEST_SECONDS}_sum{{path="{path}"}}']))
    assert lines[names.PREFILLS] == lines[names.HANDED_OVER] == "1.0"
    assert lines[f'{names.OUTCOMES}{{outcome="answered"}}'] == "1.0"


async def test_legs_that_run_again_are_no_time_in_the_queue() -> None:
    records: list[TurnRecord] = []
    arrivals: list[float] = []

    async def prefill(exchange: Exchange) -> None:
        arrivals.append(monotonic())
        await exchange.send_json(200, {"usage": {"prompt_tokens": 900}})

    async with running_rig(prefill=1, decode=1) as rig:
        rig.router.proxy._observers = (records.append,)
        rig.behave("prefill", prefill)
        rig.behave("decode", refuse_guarded)
        await serve_turn(rig)
    (record,) = records
    assert (len(arrivals), record.prefills, record.handovers_lost, record.handed_over) == (2, 2, 1, 1)
    assert record.admitted_at <= arrivals[0]
    assert record.prefill_done_at >= arrivals[1]


async def test_an_abandoned_handover_is_pending_until_its_client_leaves() -> None:
    async with running_rig(prefill=1, decode=1) as rig:
        rig.behave("decode", hang)
        writer = await start_turn(rig)
        await rig.next_exchange("decode")
        await until_metric(rig, f"{names.HANDOVERS_PENDING} 1.0")
        writer.transport.abort()
        await until_metric(rig, f"{names.HANDOVERS_PENDING} 0.0")
        text = await rig.metrics()
        assert f'{names.ABANDONED}{{reason="client"}} 1.0' in text
        assert f"{names.PREFILLS} 1.0" in text
        assert f"{names.HANDED_OVER} 0.0" in text


async def test_every_request_is_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    async with running_rig(prefill=1, decode=1, access_log=True) as rig:
        await serve_turn(rig)
        async with rig.http.get("/v1/models"):
            pass
        engines = rig.prefill[0].endpoint.address, rig.decode[0].endpoint.address
    turn, models = (json.loads(line) for line in capfd.readouterr().out.splitlines())
    assert (turn["route"], turn["status"], turn["outcome"]) == ("chat", 200, "answered")
    assert (turn["prefill"], turn["decode"]) == engines
    assert turn["client"] == "127.0.0.1"
    assert turn["body_bytes"] == len(json.dumps(TURN))
    assert turn["chunks"] >= 1
    assert list(turn["stages"]) == ["queue", "prefill", "handover", "first_token", "stream"]
    assert models["route"] == "models"
    assert "trace" not in turn


@pytest.mark.parametrize("sampled", [True, False])
async def test_both_engines_and_the_collector_see_one_trace(sampled: bool) -> None:
    trace, client = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with running_collector() as collector:
        async with running_rig(prefill=1, decode=1, trace_endpoint=collector.endpoint) as rig:
            await serve_turn(rig, {"traceparent": f"00-{trace}-{client}-0{sampled:d}", "tracestate": "a=b"})
            legs = rig.sole_exchange("prefill"), rig.sole_exchange("decode")
        parents = [[value for name, value in leg.headers if name.lower() == "traceparent"] for leg in legs]
        assert parents[0] == parents[1]
        (parent,) = parents[0]
        assert parent.startswith(f"00-{trace}-")
        assert parent.endswith(f"-0{sampled:d}")
        assert client not in parent
        assert [leg.header("tracestate") for leg in legs] == ["a=b", "a=b"]
        spans = collector.spans()
        if sampled:
            assert spans["chat"].span_id.hex() == parent.split("-")[2]
            assert spans["chat"].parent_span_id.hex() == client
        else:
            assert spans == {}


async def test_without_tracing_the_clients_header_passes() -> None:
    header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with running_rig(prefill=1, decode=1) as rig:
        await serve_turn(rig, {"traceparent": header})
        assert rig.sole_exchange("prefill").header("traceparent") == header
        assert rig.sole_exchange("decode").header("traceparent") == header


async def test_debug_pages() -> None:
    async with running_rig(prefill=1, decode=2, debug=True) as rig:
        await serve_turn(rig)
        async with rig.http.get("/debug/sessions") as response:
            (session,) = (await response.json())["sessions"]
        async with rig.http.get("/debug/engines") as response:
            engines = (await response.json())["engines"]
    assert (session["turns"], session["status"], session["route"]) == (1, 200, "chat")
    assert session["decode"] in [engine.endpoint.address for engine in rig.decode]
    assert sorted(engine["role"] for engine in engines) == ["decode", "decode", "prefill"]


async def test_no_debug_pages_unless_asked_for() -> None:
    async with running_rig(prefill=1, decode=1) as rig:
        for path in ("/debug/sessions", "/debug/engines"):
            async with rig.http.get(path) as response:
                assert response.status == 404


@contextlib.asynccontextmanager
async def running_narrow(queue_seconds: float, max_queued: int = 1) -> AsyncIterator[Rig]:
    """A router that lets one prefill leg run, which hangs, and one turn wait."""
    limits = Limits(max_prefills_per_engine=1, max_queued=max_queued, queue_seconds=queue_seconds)
    async with running_rig(prefill=1, decode=1, limits=limits) as rig:
        rig.behave("prefill", hang)
        await start_turn(rig)
        await rig.next_exchange("prefill")
        yield rig


@pytest.fixture
async def narrow() -> AsyncIterator[Rig]:
    async with running_narrow(queue_seconds=10 * WAIT_SECONDS) as rig:
        yield rig


async def test_a_turn_waits_until_prefill_is_free(narrow: Rig) -> None:
    second = asyncio.ensure_future(serve_turn(narrow))
    await until_metric(narrow, f"{names.QUEUED} 1.0")
    assert len(narrow.exchanges("prefill")) == 1
    narrow.behave("prefill", narrow.answer)
    narrow.writers[0].transport.abort()
    await asyncio.wait_for(second, WAIT_SECONDS)
    assert f"{names.QUEUED} 0.0" in await narrow.metrics()


async def test_a_tenants_burst_does_not_delay_another() -> None:
    async with running_narrow(queue_seconds=10 * WAIT_SECONDS, max_queued=4) as rig:
        for place, tenant in enumerate(("a", "a", "a", "b"), start=1):
            await start_turn(rig, tenant)
            await until_metric(rig, f"{names.QUEUED} {place}.0")
        rig.behave("prefill", rig.answer)
        rig.writers[0].transport.abort()
        await asyncio.wait_for(rig.prefill[0].wait_for_exchange(5), WAIT_SECONDS)
        tenants = [exchange.header("authorization") for exchange in rig.exchanges("prefill")]
        assert tenants == ["t", "a", "b", "a", "a"]
        await until_metric(rig, f"{names.PREFILL_SLOTS} 0.0")


async def test_a_full_queue_is_429(narrow: Rig) -> None:
    await start_turn(narrow)
    await until_metric(narrow, f"{names.QUEUED} 1.0")
    async with narrow.http.post(CHAT, json=TURN) as response:
        assert response.status == 429
        assert int(response.headers["retry-after"]) >= 1
        assert "retry later" in (await response.json())["error"]["message"]
    assert f'{names.QUEUE_REFUSALS}{{reason="full"}} 1.0' in await narrow.metrics()


async def test_waiting_too_long_is_503() -> None:
    async with running_narrow(queue_seconds=0.05) as rig:
        async with rig.http.post(CHAT, json=TURN) as response:
            assert response.status == 503
            assert "retry-after" in response.headers
        assert f'{names.QUEUE_REFUSALS}{{reason="timeout"}} 1.0' in await rig.metrics()


async def test_a_client_that_leaves_the_queue_is_noticed(narrow: Rig) -> None:
    second = await start_turn(narrow)
    await until_metric(narrow, f"{names.QUEUED} 1.0")
    second.transport.abort()
    await until_metric(narrow, f'{names.DISCONNECTS}{{phase="queue"}} 1.0')
    assert f"{names.QUEUED} 0.0" in await narrow.metrics()
    assert len(narrow.exchanges("prefill")) == 1
