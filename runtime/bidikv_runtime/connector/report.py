"""The engine's report to routers (``contract.EngineReport``), put together when one asks.

What it takes from the scheduler's thread is read beside it and may be a step apart: reports are hints. The scheduler's
thread does not wait for a report, and without routers nothing is put together at all.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from bidikv_runtime.connector.cost import CostModel
from bidikv_runtime.connector.hints import Hints
from bidikv_runtime.connector.index import PublicationIndex
from bidikv_runtime.connector.load import Load
from bidikv_runtime.connector.peers import Peers
from bidikv_runtime.connector.sessions import Sessions, build_turn
from bidikv_runtime.connector.tally import TransportTally
from bidikv_runtime.contract import EXPECT_OVER, EngineReport

MAXIMUM_REPORTED_PEERS: Final = 64
"""Of those that are reached, and of those that are not."""
READERS_SECONDS: Final = 15.0
"""For so long after a router's question its sessions may still be read. An idle router asks every 5 s."""


class Reporter:
    """Methods are the scheduler's thread's, but for ``note_interest``, ``build`` and ``answer``."""

    def __init__(
        self,
        engine_id: str,
        index: PublicationIndex,
        block_size: int,
        compatibility: str,
        peers: Peers,
        transport: TransportTally,
    ) -> None:
        """
        Args:
            engine_id: vLLM's name of the engine.
            index: its publications.
            block_size: tokens of a KV block.
            compatibility: equal for engines that may read each other's KV; it may be set anew at any time.
            peers: what is known of the sources that were asked.
            transport: what has been read from them.
        """
        self.compatibility = compatibility
        self._peers, self._transport = peers, transport
        self._prompt_tokens = self._reused_tokens = 0
        self.load = Load(block_size)
        self._engine_id, self._epoch = engine_id, str(index.epoch)
        self._sessions = Sessions(index, block_size)
        self._count_unread_handovers: Callable[[], int] = lambda: 0
        self._pool: Any = None
        self._speed = 0.0
        self._speed_is_old = True
        self._one_at_a_time = threading.Lock()
        self._readers_until = -math.inf

    def bind(self, pool: Any) -> None:
        """Take vLLM's ``BlockPool``, whose free blocks are reported."""
        self._pool = pool

    def bind_retention(self, idle_seconds: float, count_unread_handovers: Callable[[], int]) -> None:
        """Take for how long a session's next turn is waited for, and what counts hand-overs; any thread calls it."""
        self._sessions.unread.idle_seconds = idle_seconds
        self._count_unread_handovers = count_unread_handovers

    def end_turn(self, request: Any, hints: Hints, hashes: Sequence[bytes]) -> None:
        """A decode leg has ended, and its full blocks are published under ``hashes`` as far as they are.

        Args:
            request: vLLM's ``Request``.
            hints: of the request.
            hashes: of its full blocks.
        """
        if hints.session is not None:
            tokens = request.num_prompt_tokens, request.num_tokens
            is_last = hints.expect == EXPECT_OVER
            turn = build_turn(hints.session, *tokens, hints.body_bytes, hashes, time.monotonic(), is_last)
            self._sessions.end_turn(turn)

    def note_interest(self, session: str, has_read: bool) -> None:
        """Another engine asks for a session's KV, or has read valid KV of it. For the lookup port's thread."""
        self._sessions.note_interest(session, time.monotonic(), has_read=has_read)

    def count_prompt(self, tokens: int) -> None:
        """A request with so many prompt tokens has ended."""
        self._prompt_tokens += tokens

    def count_reused(self, tokens: int) -> None:
        """KV of so many tokens was read from other engines and validated."""
        self._reused_tokens += tokens

    def learn(self, cost: CostModel) -> None:
        """A step has ended. Fitting costs takes a millisecond: it is done once for each report."""
        if self._speed_is_old:
            self._speed_is_old = False
            self._speed = cost.estimate_prefill_speed()

    def build(self, epoch: str = "", since: int = 0) -> EngineReport:
        """The report for a router that has seen all up to ``since`` of an ``epoch``. Any thread may call it."""
        self._speed_is_old = True
        load = self.load.measure()
        with self._one_at_a_time:
            sessions = self._sessions.collect(since if epoch == self._epoch else 0)
            sequence = self._sessions.sequence
            now = time.monotonic()
            unread_sessions = self._sessions.unread.count(now) if now < self._readers_until else 0
            held = self._sessions.count_held()
        pool = self._pool
        unreachable, reached = self._peers.judge(time.monotonic())
        return EngineReport(
            engine=self._engine_id,
            epoch=self._epoch,
            sequence=sequence,
            compatibility=self.compatibility,
            requests=load.requests,
            queued_tokens=load.queued_tokens,
            prefill_tokens_per_second=self._speed,
            free_blocks=pool.free_block_queue.num_free_blocks / (len(pool.blocks) - 1) if pool else 1.0,
            sessions=tuple(sessions),
            unread_sessions=unread_sessions,
            unread_handovers=self._count_unread_handovers(),
            held_sessions=held,
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused_tokens,
            unreachable=tuple(str(source) for source in unreachable[:MAXIMUM_REPORTED_PEERS]),
            reached=tuple(str(source) for source in reached[-MAXIMUM_REPORTED_PEERS:]),
            transport=self._transport.build(),
        )

    def answer(self, query: str) -> bytes:
        """The report as JSON. What makes no sense in ``epoch=...&since=...`` counts as absent; with ``sessions=0`` no
        session is listed. ``reads=1``: the asking router lets others read sessions' KV."""
        values = parse_qs(query, max_num_fields=8)
        since = values.get("since", [""])[0]
        if values.get("reads") == ["1"]:
            self._readers_until = time.monotonic() + READERS_SECONDS
        known = int(since) if since.isascii() and since.isdigit() and len(since) < 20 else 0
        report = self.build(values.get("epoch", [""])[0], known)
        return msgspec.json.encode(replace(report, sessions=()) if values.get("sessions") == ["0"] else report)
