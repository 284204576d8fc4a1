"""Traces: ids at the start of a request, and spans at its end, as a collector receives them."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.proto.trace.v1.trace_pb2 import Status as SpanStatus

from bidikv_runtime.router.config import ConfigError
from bidikv_runtime.router.observe import spans as spans_module
from bidikv_runtime.router.observe.record import TurnRecord
from bidikv_runtime.router.observe.trace_context import start_trace
from bidikv_runtime.router.observe.tracing import build_tracer
from bidikv_runtime.tests.router_collector import Collector, running_collector
from bidikv_runtime.tests.router_engine import WAIT_SECONDS
from bidikv_runtime.tests.router_records import STREAM

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLIENT = f"00-{TRACE}-{PARENT}-01".encode()
FORM = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-0([01])")


# --- the context ---


@pytest.mark.parametrize(
    ("header", "continued", "sampled"),
    [
        (CLIENT, True, True),
        (CLIENT[:-2] + b"00", True, False),
        (CLIENT[:-2] + b"03", True, True),
        (b"cc" + CLIENT[2:] + b"-what-comes-later", True, True),
        (CLIENT + b"-extra", False, True),
        (b"ff" + CLIENT[2:], False, True),
        (CLIENT.upper(), False, True),
        (CLIENT.replace(TRACE.encode(), b"0" * 32), False, True),
        (CLIENT.replace(PARENT.encode(), b"0" * 16), False, True),
        (CLIENT[:-1], False, True),
        (CLIENT + b"\n", False, True),
        (b"", False, True),
        (None, False, True),
    ],
)
def test_the_clients_trace_is_continued_if_it_is_one(header: bytes | None, continued: bool, sampled: bool) -> None:
    trace = start_trace(header, ratio=1.0)
    assert (f"{trace.trace_id:032x}" == TRACE) == continued
    assert (f"{trace.parent_id:016x}" == PARENT) == continued
    assert trace.sampled == sampled
    match = FORM.fullmatch(trace.header())
    assert match is not None
    assert int(match[1], 16) == trace.trace_id
    assert int(match[2], 16) == trace.span_id != trace.parent_id
    assert bool(int(match[3])) == sampled


@given(st.binary(max_size=80), st.floats(0, 1))
def test_any_header_gives_a_usable_context(header: bytes, ratio: float) -> None:
    trace = start_trace(header, ratio)
    assert FORM.fullmatch(trace.header())
    assert trace.trace_id
    assert trace.span_id


def test_the_ratio_decides_for_new_traces_only() -> None:
    assert not any(start_trace(None, 0.0).sampled for _ in range(100))
    assert all(start_trace(None, 1.0).sampled for _ in range(100))
    share = sum(start_trace(None, 0.25).sampled for _ in range(4000)) / 4000
    assert 0.2 < share < 0.3, "seven standard deviations"
    assert start_trace(CLIENT, 0.0).sampled


# --- the spans ---


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with running_collector() as collector:
        yield collector


def attributes(span: Span) -> dict[str, object]:
    return {item.key: getattr(item.value, str(item.value.WhichOneof("value"))) for item in span.attributes}


async def export(collector: Collector, *records: TurnRecord) -> dict[str, Span]:
    tracer = build_tracer(collector.endpoint)
    for record in records:
        tracer.export(record)
    await tracer.close(WAIT_SECONDS)
    return collector.spans()


async def test_a_turn_becomes_a_server_span_with_its_stages(collector: Collector) -> None:
    trace = start_trace(CLIENT, 0.0)
    before = time.time_ns()
    spans = await export(collector, replace(STREAM, trace=trace, client="10.9.9.9", retries=1))
    after = time.time_ns()
    assert set(spans) == {"chat", "queue", "prefill", "handover", "first_token", "stream"}
    server = spans.pop("chat")
    assert server.kind == Span.SPAN_KIND_SERVER
    assert (server.trace_id.hex(), server.parent_span_id.hex()) == (TRACE, PARENT)
    assert int.from_bytes(server.span_id) == trace.span_id, "what the engines were told"
    assert before <= server.end_time_unix_nano <= after
    assert server.end_time_unix_nano - server.start_time_unix_nano == 4_000_000_000
    assert server.status.code == SpanStatus.STATUS_CODE_UNSET
    assert attributes(server) == {
        "http.response.status_code": 200,
        "http.request.body.size": 5000,
        "client.address": "10.9.9.9",
        "session.id": (b"s" * 16).hex(),
        "bidikv.path": "bidirectional",
        "bidikv.reason": "history",
        "bidikv.outcome": "answered",
        "bidikv.phase": "stream",
        "bidikv.prompt_tokens": 1200,
        "bidikv.retries": 1,
        "bidikv.chunks": 5,
        "bidikv.longest_gap_seconds": 0.75,
    }
    reached = server.start_time_unix_nano
    for name in ("queue", "prefill", "handover", "first_token", "stream"):
        span = spans[name]
        assert (span.trace_id, span.parent_span_id) == (server.trace_id, server.span_id)
        assert span.start_time_unix_nano == reached
        reached = span.end_time_unix_nano
    assert reached == server.end_time_unix_nano
    assert attributes(spans["queue"]) == {}
    assert attributes(spans["prefill"]) == {"server.address": "10.0.0.1:8000"}
    assert attributes(spans["stream"]) == {"server.address": "10.0.0.2:8000"}
    resource = collector.requests[0].resource_spans[0].resource
    assert {item.key: item.value.string_value for item in resource.attributes}["service.name"] == "bidikv-router"


async def test_a_new_trace_has_no_parent(collector: Collector) -> None:
    spans = await export(collector, replace(STREAM, trace=start_trace(None, 1.0)))
    assert spans["chat"].parent_span_id == b""


async def test_the_span_in_which_a_request_broke_off_says_so(collector: Collector) -> None:
    spans = await export(collector, replace(STREAM, trace=start_trace(None, 1.0), outcome="broken"))
    failed = {name for name, span in spans.items() if span.status.code == SpanStatus.STATUS_CODE_ERROR}
    assert failed == {"chat", "stream"}
    assert spans["stream"].end_time_unix_nano == spans["chat"].end_time_unix_nano


async def test_a_client_that_left_is_no_error_of_the_router(collector: Collector) -> None:
    record = TurnRecord(5.0, outcome="disconnected", phase="queue", ended_at=6.0, trace=start_trace(None, 1.0))
    spans = await export(collector, record)
    assert set(spans) == {"passed", "queue"}
    assert spans["queue"].end_time_unix_nano - spans["queue"].start_time_unix_nano == 1_000_000_000
    assert {span.status.code for span in spans.values()} == {SpanStatus.STATUS_CODE_UNSET}


async def test_what_is_not_sampled_is_not_sent(collector: Collector) -> None:
    unsampled = replace(STREAM, trace=start_trace(CLIENT[:-2] + b"00", 1.0))
    assert await export(collector, unsampled, replace(STREAM, trace=None)) == {}
    assert collector.requests == []


async def test_a_collector_that_does_not_answer_does_not_hold_up_the_end(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans_module, "EXPORT_SECONDS", 100 * WAIT_SECONDS)
    collector.answering.clear()
    tracer = build_tracer(collector.endpoint)
    tracer.export(replace(STREAM, trace=start_trace(None, 1.0)))
    await asyncio.wait_for(tracer.close(0.05), WAIT_SECONDS)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, spans_module.__name__)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"trace_endpoint is set, .*opentelemetry.* install bidikv\[tracing\]"):
        build_tracer("http://127.0.0.1:1/v1/traces")


def test_a_router_without_traces_does_not_load_opentelemetry() -> None:
    code = "import sys, bidikv_runtime.router.__main__; print(sum('opentelemetry' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "0\n"
