"""The router as a process of its own, with engines that are named on its command line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence

from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.tests.router_engine import WAIT_SECONDS

START_SECONDS = 60.0


class RouterProcess:
    """A started router and where it listens."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    async def exit_status(self) -> int:
        """Wait for the end of the process."""
        return await asyncio.wait_for(self.process.wait(), WAIT_SECONDS)


@contextlib.asynccontextmanager
async def running_router(
    prefill: Sequence[Endpoint],
    decode: Sequence[Endpoint],
    *flags: str,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[RouterProcess]:
    """A router process that is killed at the end if it still runs; ``environment`` is added to this process's."""
    # The kernel ends it when its parent dies, so an interrupted run leaves none behind.
    setpriv = shutil.which("setpriv")
    process = await asyncio.create_subprocess_exec(
        *([setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []),
        *(sys.executable, "-m", "bidikv_runtime.router", "--host", "127.0.0.1", "--port", "0"),
        *("--static-prefill", _name(prefill), "--static-decode", _name(decode)),
        *flags,
        env=os.environ | dict(environment or {}),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    drained: asyncio.Task[bytes] | None = None
    try:
        async with asyncio.timeout(START_SECONDS):
            while not (match := re.search(rb"Listening on .*:(\d+)", line := await process.stderr.readline())):
                assert line, "the router ended before it listened"
        drained = asyncio.create_task(process.stderr.read())
        yield RouterProcess(process, int(match[1]))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        if drained is not None:
            await drained


def _name(endpoints: Sequence[Endpoint]) -> str:
    return ",".join(
        f"{endpoint.address}@{endpoint.lookup_port}" + (f"@{endpoint.state_port}" if endpoint.state_port else "")
        for endpoint in endpoints
    )
