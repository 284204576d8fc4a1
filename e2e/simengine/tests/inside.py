"""A simulated engine within the test's process, without sockets: the application is called as a server would."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from e2e.simengine.asgi import Message
from e2e.simengine.engine import EngineCore, Request
from e2e.simengine.faults import Faults, FaultSet
from e2e.simengine.metrics import Metrics
from e2e.simengine.server import Server
from e2e.simengine.settings import Engine, parse_engine

WAIT_SECONDS = 20.0
FAST = {"BIDIKV_SIM_PREFILL_TOKENS_PER_SECOND": "1e8", "BIDIKV_SIM_STEP_SECONDS": "0", "BIDIKV_SIM_DECODE_SECONDS": "0"}


@dataclass
class Answer:
    """What the application has sent."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(b"".join(self.pieces))

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events; the one that ends it aside."""
        lines = b"".join(self.pieces).splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith(b"data: ") and line != b"data: [DONE]"]


class Inside:
    """The engine; ``request`` speaks ASGI to it."""

    def __init__(self, engine: Engine, core: EngineCore, server: Server, faults: Faults) -> None:
        self.engine, self.core, self.server, self.faults = engine, core, server, faults

    async def request(self, method: str, path: str, body: Any = None, *, leave: asyncio.Event | None = None) -> Answer:
        """One request; its client goes away when ``leave`` is set."""
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        answer, left = Answer(), leave or asyncio.Event()
        messages: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> Message:
            if not messages:
                await left.wait()
                return {"type": "http.disconnect"}
            return messages.pop()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status, answer.headers = message["status"], dict(message["headers"])
            else:
                answer.pieces.append(message["body"])

        scope = {"type": "http", "method": method, "path": path, "headers": []}
        async with asyncio.timeout(WAIT_SECONDS):
            await self.server(scope, receive, send)
        return answer

    async def wait_for_request(self) -> Request:
        """The one that the core has, as soon as it has one."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                if requests := self.core.requests:
                    [request] = requests
                    return request
                await asyncio.sleep(0.001)

    async def chat(self, text: str, **parameters: Any) -> Answer:
        return await self.request(
            "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **parameters}
        )


@contextlib.asynccontextmanager
async def running_inside(
    *arguments: str, environment: Mapping[str, str] = FAST, faults: FaultSet | None = None
) -> AsyncIterator[Inside]:
    """An engine without a connector whose steps run."""
    engine, ignored = parse_engine(arguments, environment)
    assert not ignored
    state = Faults(faults or FaultSet())
    core = EngineCore(engine, state, Metrics("simulated", connector=False))
    steps = asyncio.create_task(core.run())
    try:
        yield Inside(engine, core, Server(engine, core, state), state)
    finally:
        steps.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await steps
