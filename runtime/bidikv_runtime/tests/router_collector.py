"""A collector of OpenTelemetry traces (OTLP over HTTP) on loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    """What was received."""

    port: int = 0
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared: requests get no answer."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/traces"

    async def take(self, request: web.Request) -> web.Response:
        self.requests.append(ExportTraceServiceRequest.FromString(await request.read()))
        await self.answering.wait()
        return web.Response(content_type="application/x-protobuf")

    def spans(self) -> dict[str, Span]:
        """By name."""
        spans = [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        assert len({span.span_id for span in spans}) == len(spans)
        return {span.name: span for span in spans}


@contextlib.asynccontextmanager
async def running_collector() -> AsyncIterator[Collector]:
    """A collector that answers."""
    collector = Collector()
    collector.answering.set()
    application = web.Application()
    application.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.port = runner.addresses[0][1]
    try:
        yield collector
    finally:
        collector.answering.set()
        await runner.cleanup()
