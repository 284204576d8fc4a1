"""The engine's report to routers (``contract.EngineReport``), put together when one asks.

What it takes from the scheduler's thread is read beside it and may be a step apart: reports are hints. The scheduler's
thread does not wait for a report, and without routers nothing is put together at all.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

import msgspec

from bidikv_runtime.connector.cost import CostModel
from bidikv_runtime.connector.hints import Hints
from bidikv_runtime.connector.index import PublicationIndex
from bidikv_runtime.connector.load import Load
from bidikv_runtime.connector.sessions import Sessions, build_turn
from bidikv_runtime.contract import EngineReport


class Reporter:
    """Methods are the scheduler's thread's, but for ``build`` and ``answer``."""

    def __init__(self, engine_id: str, index: PublicationIndex, block_size: int, compatibility: str) -> None:
        """``compatibility`` is equal for engines that may read each other's KV; it may be set anew at any time."""
        self.compatibility = compatibility
        self.load = Load(block_size)
        self._engine_id, self._epoch = engine_id, str(index.epoch)
        self._sessions = Sessions(index, block_size)
        self._pool: Any = None
        self._speed = 0.0
        self._speed_is_old = True
        self._one_at_a_time = threading.Lock()

    def bind(self, pool: Any) -> None:
        """Take vLLM's ``BlockPool``, whose free blocks are reported."""
        self._pool = pool

    def end_turn(self, request: Any, hints: Hints, hashes: Sequence[bytes]) -> None:
        """A decode leg has ended, and its full blocks are published under ``hashes`` as far as they are.

        Args:
            request: vLLM's ``Request``.
            hints: of the request.
            hashes: of its full blocks.
        """
        if hints.session is not None:
            tokens = request.num_prompt_tokens, request.num_tokens
            self._sessions.end_turn(build_turn(hints.session, *tokens, hints.body_bytes, hashes))

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
        pool = self._pool
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
        )

    def answer(self, query: str) -> bytes:
        """The report as JSON. What makes no sense in ``epoch=...&since=...`` counts as absent."""
        values = parse_qs(query, max_num_fields=8)
        since = values.get("since", [""])[0]
        known = int(since) if since.isascii() and since.isdigit() and len(since) < 20 else 0
        return msgspec.json.encode(self.build(values.get("epoch", [""])[0], known))
