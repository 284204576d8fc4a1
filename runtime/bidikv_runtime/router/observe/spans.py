"""Spans of OpenTelemetry, made from the record of a request when it ends, and sent to a collector.

Why at the end: then serving a request costs no more than an id at its start (``trace_context``), and the stages in a
trace are those of the metrics. A server span covers the request; its children are the stages: about 35 us for all of a
sampled request. Engines that trace as well put their spans below the server span, whose id both legs carry.

Spans wait in OpenTelemetry's batch processor, which sends them in a thread of its own; its queue is bounded
(``OTEL_BSP_MAX_QUEUE_SIZE``), and what does not fit is dropped with a warning. OpenTelemetry's environment variables
apply (``OTEL_SERVICE_NAME``, ``OTEL_EXPORTER_OTLP_HEADERS``, ...).

Only ``tracing`` imports this module: the packages that it needs are an extra.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

from bidikv_runtime.router.observe.record import TurnRecord
from bidikv_runtime.router.observe.stages import compute_stages
from bidikv_runtime.router.observe.trace_context import TraceContext

EXPORT_SECONDS: Final = 5.0
"""Longest time for one batch, its retries included."""
_SERVICE: Final = "bidikv-router"


class Tracer:
    """Sends the spans of requests that are sampled."""

    def __init__(self, endpoint: str) -> None:
        """Start to export to ``endpoint`` (OTLP/HTTP)."""
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: _SERVICE}))
        self._resource = resource
        self._scope = InstrumentationScope(_SERVICE)
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS))

    def export(self, record: TurnRecord) -> None:
        """The request ended: send its spans, if it is sampled."""
        if record.trace is not None and record.trace.sampled:
            for span in self._build_spans(record, record.trace, time.time_ns()):
                self._processor.on_end(span)

    async def close(self, seconds: float = EXPORT_SECONDS) -> None:
        """Send what is left, for at most ``seconds``."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(ended.set)

        # A daemon: a collector that does not answer must not keep the process from ending.
        threading.Thread(target=shut_down, name="trace-shutdown", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), seconds)

    def _build_spans(self, record: TurnRecord, trace: TraceContext, now: int) -> Iterator[ReadableSpan]:
        """The spans of a request that ended at ``now`` (nanoseconds since 1970)."""
        flags = TraceFlags(TraceFlags.SAMPLED)
        server = SpanContext(trace.trace_id, trace.span_id, is_remote=False, trace_flags=flags)
        parent = SpanContext(trace.trace_id, trace.parent_id, is_remote=True, trace_flags=flags)
        failed = Status(StatusCode.ERROR) if record.outcome == "broken" or record.status >= 500 else Status()
        offset = now - int(record.ended_at * 1e9)

        def build(name: str, begin: float, end: float, status: Status, **more: Any) -> ReadableSpan:
            return ReadableSpan(
                name,
                resource=self._resource,
                instrumentation_scope=self._scope,
                start_time=int(begin * 1e9) + offset,
                end_time=int(end * 1e9) + offset,
                status=status,
                **more,
            )

        stages: list[tuple[str, float, float]] = [*compute_stages(record)]
        if record.outcome != "answered":  # what it was at when it ended
            reached = stages[-1][2] if stages else record.received_at
            stages.append((record.phase, reached, record.ended_at))
        for index, (name, begin, end) in enumerate(stages):
            context = SpanContext(trace.trace_id, random.getrandbits(64) or 1, is_remote=False, trace_flags=flags)
            yield build(
                name,
                begin,
                end,
                failed if record.outcome != "answered" and index == len(stages) - 1 else Status(),
                context=context,
                parent=server,
                attributes=_describe_stage(name, record),
            )
        yield build(
            record.route,
            record.received_at,
            record.ended_at,
            failed,
            context=server,
            parent=parent if trace.parent_id else None,
            attributes=_describe(record),
            kind=SpanKind.SERVER,
        )


def _describe_stage(name: str, record: TurnRecord) -> dict[str, AttributeValue]:
    engine = record.prefill if name == "prefill" else "" if name in ("queue", "receive") else record.decode
    return {"server.address": engine} if engine else {}


def _describe(record: TurnRecord) -> dict[str, AttributeValue]:
    """OpenTelemetry's names where it has some."""
    attributes: dict[str, AttributeValue] = {
        "http.response.status_code": record.status,
        "http.request.body.size": record.body_bytes,
        "client.address": record.client,
        "session.id": record.session.hex(),
        "bidikv.path": record.path,
        "bidikv.reason": record.reason,
        "bidikv.outcome": record.outcome,
        "bidikv.phase": record.phase,
        "bidikv.prompt_tokens": record.prompt_tokens,
        "bidikv.retries": record.retries,
        "bidikv.handovers_lost": record.handovers_lost,
        "bidikv.chunks": record.chunks,
        "bidikv.longest_gap_seconds": record.longest_gap,
    }
    return {name: value for name, value in attributes.items() if value}
