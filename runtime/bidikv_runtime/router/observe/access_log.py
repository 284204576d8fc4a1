"""One JSON line per finished request, for whoever must find one among millions.

Why not ``logging``: it writes within the event loop, so a log collector that stops reading would stop every stream, and
costs a system call per line. Here a line costs about 9 us; a thread writes what gathered, and what it cannot write in
time is dropped and counted.

Invariants: no more than ``MAXIMUM_LINES`` wait, besides as many that are being written; no timer runs while there is
nothing to write. No line holds text of a prompt or a credential: of the session only its digest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import msgspec

from bidikv_runtime.router.observe.record import TurnRecord
from bidikv_runtime.router.observe.stages import compute_first_token_seconds, compute_stages

MAXIMUM_LINES: Final = 16384
"""About 8 MB."""
FLUSH_SECONDS: Final = 0.25


class _Line(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What a line tells; what did not happen is left out."""

    time: datetime
    """When the request had arrived."""
    route: str
    status: int
    outcome: str
    phase: str
    path: str
    seconds: float
    body_bytes: int
    client: str = ""
    reason: str = ""
    session: str = ""
    prefill: str = ""
    decode: str = ""
    prompt_tokens: int = 0
    streamed: bool = False
    chunks: int = 0
    first_token_seconds: float | None = None
    stages: dict[str, float] = {}
    longest_gap_seconds: float | None = None
    retries: int = 0
    handovers_lost: int = 0
    local_refusals: int = 0
    keep_alives: int = 0
    continued: int = 0
    trace: str = ""


_encode: Final = msgspec.json.Encoder().encode


def build_line(record: TurnRecord, now: float) -> bytes:
    """The line of a finished request.

    Args:
        record: its record.
        now: the time at which it ended, in seconds since 1970.
    """
    elapsed = record.ended_at - record.received_at
    first_token = compute_first_token_seconds(record)
    return _encode(
        _Line(
            time=datetime.fromtimestamp(now - elapsed, UTC),
            route=record.route,
            status=record.status,
            outcome=record.outcome,
            phase=record.phase,
            path=record.path,
            seconds=round(elapsed, 6),
            body_bytes=record.body_bytes,
            client=record.client,
            reason=record.reason,
            session=record.session.hex(),
            prefill=record.prefill,
            decode=record.decode,
            prompt_tokens=record.prompt_tokens,
            streamed=record.streamed,
            chunks=record.chunks,
            first_token_seconds=round(first_token, 6) if first_token == first_token else None,
            stages={stage: round(end - begin, 6) for stage, begin, end in compute_stages(record)},
            longest_gap_seconds=round(record.longest_gap, 6) or None,
            retries=record.retries,
            handovers_lost=record.handovers_lost,
            local_refusals=record.local_refusals,
            keep_alives=record.keep_alives,
            continued=record.continued,
            trace=f"{record.trace.trace_id:032x}" if record.trace is not None else "",
        )
    )


class AccessLog:
    """Gathers lines in the event loop and writes them in a thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_drop: Callable[[int], None], descriptor: int = 1) -> None:
        """``on_drop`` is told how many lines were lost; ``descriptor`` is where they go, by default standard output."""
        self._loop = loop
        self._on_drop = on_drop
        self._descriptor = descriptor
        self._lines: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._batches: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self._writing = False
        # A daemon: a reader that never reads must not keep the process from ending.
        threading.Thread(target=self._write_batches, name="access-log", daemon=True).start()

    def write(self, record: TurnRecord) -> None:
        """Log a finished request."""
        if len(self._lines) >= MAXIMUM_LINES:
            self._on_drop(1)
            return
        self._lines.append(build_line(record, time.time()))
        if self._timer is None:
            self._timer = self._loop.call_later(FLUSH_SECONDS, self._flush)

    async def close(self, seconds: float = 2.0) -> None:
        """Write what is left, for at most ``seconds``, and end the thread. Nothing may be logged afterwards."""
        deadline = self._loop.time() + seconds
        while (self._lines or self._writing) and self._loop.time() < deadline:
            self._flush()
            await asyncio.sleep(0.01)
        if self._timer is not None:
            self._timer.cancel()
        if self._lines:
            self._on_drop(len(self._lines))
        self._batches.put(None)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing:  # the reader is slow: gather more, up to the bound
            self._timer = self._loop.call_later(FLUSH_SECONDS, self._flush)
        elif self._lines:
            self._writing = True
            self._batches.put(self._lines)
            self._lines = []

    def _write_batches(self) -> None:
        """The thread."""
        while (batch := self._batches.get()) is not None:
            try:
                self._write_all(b"\n".join([*batch, b""]))
            except OSError:  # nobody reads any more
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._on_drop, len(batch))
            self._writing = False

    def _write_all(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # whoever shares the pipe made it non-blocking
                select.select([], [self._descriptor], [])
