"""Requests of the bench itself to its API server: as little work per call as Python allows. I/O."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import aiohttp

from bidikv_operator import names
from bidikv_operator.kinds import Kind
from e2e.bench.operator.control_plane import URL, ControlPlane

Object = dict[str, Any]
T = TypeVar("T")

CALL_LIMIT_SECONDS: Final = 60.0
CONNECTIONS: Final = 8


class BenchError(Exception):
    """The API server refused what the bench asked for."""


class Client:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def call(self, method: str, path: str, body: bytes | None = None, content_type: str = "") -> bytes:
        headers = {"Content-Type": content_type} if content_type else {}
        timeout = aiohttp.ClientTimeout(total=CALL_LIMIT_SECONDS)
        async with self._session.request(method, URL + path, data=body, headers=headers, timeout=timeout) as response:
            answer = await response.read()
            if response.status >= 300:
                raise BenchError(f"{method} {path}: {response.status} {answer[:500].decode()}")
            return answer

    async def apply(self, path: str, body: bytes) -> bytes:
        """Server-side apply, as the operator does."""
        query = f"?fieldManager={names.FIELD_MANAGER}&force=true"
        return await self.call("PATCH", path + query, body, "application/apply-patch+yaml")

    async def list(self, kind: Kind, *, label_selector: str = "") -> Object:
        query = f"?labelSelector={label_selector}" if label_selector else ""
        answer: Object = json.loads(await self.call("GET", kind.path(None) + query))
        return answer

    @asynccontextmanager
    async def watch(
        self, kind: Kind, version: str, *, label_selector: str = ""
    ) -> AsyncIterator[AsyncIterator[Object]]:
        """Events of all namespaces after ``version``; the watch is open when the context is entered."""
        query = {"watch": "true", "resourceVersion": version}
        if label_selector:
            query["labelSelector"] = label_selector
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.get(URL + kind.path(None), params=query, timeout=timeout) as response:
            if response.status != 200:
                raise BenchError(f"watch of {kind.plural}: {response.status}")

            async def events() -> AsyncIterator[Object]:
                async for line in response.content:
                    yield json.loads(line)

            yield events()


@asynccontextmanager
async def connect(control_plane: ControlPlane) -> AsyncIterator[Client]:
    trust = ssl.create_default_context(cafile=str(control_plane.authority))
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=trust),
        headers={"Authorization": f"Bearer {control_plane.token}", "User-Agent": "bench", "Accept": "application/json"},
        read_bufsize=2**22,
    ) as session:
        yield Client(session)


async def do_all(work: Callable[[T], Awaitable[object]], items: Iterable[T]) -> None:
    """Work on all items, a few at a time."""
    waiting = iter(items)

    async def serve() -> None:
        for item in waiting:
            await work(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(serve())
