"""The reader's side of the protocol: what a request reads from others instead of computing it.

Runs in vLLM's scheduler thread, which asks about a waiting request as often as it tries to place it. So a request's
questions are sent once, when it arrives, and most of their answers are there when it is looked at first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bidikv_runtime import contract
from bidikv_runtime.connector import cost, wire
from bidikv_runtime.connector.choice import Part
from bidikv_runtime.connector.cost import RECOMPUTE, Decision
from bidikv_runtime.connector.hints import Hints
from bidikv_runtime.connector.lookup_client import LookupClient
from bidikv_runtime.connector.reuse import Phase, Read, Reuse
from bidikv_runtime.connector.settings import Settings

logger = logging.getLogger("vllm.bidikv.matcher")


@dataclass(frozen=True)
class Engine:
    """What a matcher has to know of its own engine."""

    engine_id: str
    block_size: int
    tensor_parallel_size: int
    block_bytes: int
    """KV of one block in one rank."""
    block_pieces: int
    """Separate pieces of memory of one block in one rank."""
    drop_last: bool
    """See ``choose_parts``."""


@dataclass
class Reader:
    """One request."""

    request_id: str
    hints: Hints
    reuse: Reuse
    digest: bytes
    """What its sources must be equal in."""
    hashes: Sequence[bytes]
    """Of the prompt's blocks, the partly filled last one included if it can be handed over."""
    tokens: int
    """Of the prompt."""
    expected: int = 0
    """Tokens that its read is to bring."""
    decision: Decision | None = None
    admitted_at: float = 0.0
    """When its blocks were allocated, and reading or computing began."""
    decided_end: int = 0
    """Tokens of the prompt up to which ``decision`` reaches."""


class Matcher:
    """Times are of ``time.monotonic``."""

    def __init__(
        self, engine: Engine, settings: Settings, client: LookupClient, model: cost.CostModel, stats: Any
    ) -> None:
        self._engine, self._settings, self._client, self._cost = engine, settings, client, model
        self._stats = stats
        self._wait_left = settings.inline_wait
        self._running: frozenset[str] = frozenset()

    def begin_step(self, running: Iterable[str]) -> None:
        """The scheduler has finished a pass, which runs these requests: in the next one it may wait in place again, for
        all requests together."""
        self._wait_left = self._settings.inline_wait
        self._running = frozenset(running)

    def ask(self, reader: Reader, local: int) -> None:
        """Send the request's questions to all its sources, unless there is nothing to gain; never waits.

        Args:
            reader: the request.
            local: blocks of its local prefix.
        """
        reuse = reader.reuse
        last = min(self._last_block(reader), local + wire.MAXIMUM_BLOCKS)
        worth_asking = (last - local) * self._engine.block_size >= self._settings.minimum_tokens
        if not reuse.sources or not reuse.may_ask or not worth_asking:
            reuse.settle()
            return
        answering = [source for source in reuse.sources if not self._client.is_silent(source)]
        sources = [source for source in answering if not self._client.is_refused(source)]
        if not sources:
            self._stats.record(contract.METRIC_LOOKUPS, 1, "refused" if answering else "silent")
            reuse.settle()
            return
        asked = [bytes(reader.hashes[position]) for position in range(local, last)]

        def build(sequence: int) -> wire.Lookup:
            size, session = self._engine.tensor_parallel_size, reader.hints.session or ""
            return wire.Lookup(wire.VERSION, sequence, reader.digest, asked, size, session)

        now = time.monotonic()
        questions = [self._client.ask(source, build, self._settings.lookup_deadline) for source in sources]
        reuse.start(questions, local, last - local, now)

    def match(self, reader: Reader, local: int) -> int | None:
        """Tokens to read after a local prefix of ``local`` blocks; None while answers are worth waiting for."""
        reuse = reader.reuse
        for _ in range(2):  # what is decided may be outdated: a request can wait for long before it is looked at first
            if reuse.is_outdated(local, time.monotonic()):
                self.ask(reader, local)
            if reuse.phase is Phase.ASKING and not self._decide(reader, local):
                return None
        if reuse.phase is not Phase.MATCHED:
            return 0
        blocks, size = reuse.match(local, self._last_block(reader)), self._engine.block_size
        tokens = max(0, min((local + blocks) * size, reader.tokens) - local * size)
        if tokens < self._settings.minimum_tokens or not self._is_cheaper(reader, local, tokens):
            reuse.settle()
            return 0
        return tokens

    def begin_read(self, reader: Reader, tokens: int) -> Read:
        """The request's blocks are allocated: read ``tokens`` tokens of the match."""
        reader.admitted_at, reader.expected = time.monotonic(), tokens
        return reader.reuse.begin_read(-(-tokens // self._engine.block_size))

    def end_read(self, reader: Reader, reused: int) -> None:
        """The read has ended in every rank and ``reused`` of its tokens are valid."""
        read, size = reader.reuse.read, self._engine.block_size
        assert read is not None
        reader.reuse.settle()
        for part in read.parts:
            before = part.offset * size
            tokens = min(len(part.blocks) * size, reused - before)
            if tokens > 0:
                self._stats.record(contract.METRIC_REUSED_TOKENS, tokens, str(part.source), reader.hints.direction)
            if tokens == min(len(part.blocks) * size, reader.expected - before):
                self._client.trust(part.source)
        if discarded := reader.expected - reused:
            self._stats.record(contract.METRIC_DISCARDED_TOKENS, discarded)
        if reader.decision is not None:
            self._judge(reader)

    def computed(self, reader: Reader, tokens: int) -> None:
        """A request that recomputes by choice has computed ``tokens`` tokens so far."""
        if reader.decision is not None and reader.reuse.phase is Phase.SETTLED and tokens >= reader.decided_end:
            self._judge(reader)

    def _last_block(self, reader: Reader) -> int:
        # Of a prompt that is there in full vLLM computes the last token again: its output is the next token. Only a
        # decode leg comes to that, and it alone reads the last block for it.
        if reader.hints.prefilled_tokens:
            return len(reader.hashes)
        return min((reader.tokens - 1) // self._engine.block_size, len(reader.hashes))

    def _decide(self, reader: Reader, local: int) -> bool:
        """Whether the sources' answers are decided; the request is then matched or settled."""
        reuse, began = reader.reuse, time.monotonic()
        self._client.poll()
        result = reuse.decide(self._engine.engine_id, local, self._settings.settle_wait, began)
        if result is None and not reuse.waited and self._wait_left > 0:
            reuse.waited = True
            self._client.wait(reuse.questions, self._wait_left)
            waited = time.monotonic() - began
            self._wait_left -= waited
            self._stats.record(contract.METRIC_LOOKUP_WAIT_SECONDS, waited)
            result = reuse.decide(self._engine.engine_id, local, self._settings.settle_wait, began + waited)
        if result is None:
            return False
        seconds = time.monotonic() - reuse.started
        self._stats.record(contract.METRIC_LOOKUPS, 1, result)
        self._stats.record(contract.METRIC_LOOKUP_SECONDS, seconds)
        logger.debug(
            "request %s: lookup after block %d: %s in %.1f ms", reader.request_id, local, result, seconds * 1e3
        )
        return True

    def _is_cheaper(self, reader: Reader, local: int, tokens: int) -> bool:
        """Whether to read the match, by the cost model. Decided once for a request.

        A decode leg always reads: what it computes itself would be taken from the tokens of others.
        """
        decodes = reader.hints.prefilled_tokens or reader.hints.compute_limit is not None
        if self._settings.cost_model == "AlwaysPull" or decodes:
            return True
        offer, context = reader.reuse.offer, local * self._engine.block_size
        assert offer is not None
        if reader.decision is None:
            parts = [self._measure(part) for part in offer.parts]
            reader.decision = self._cost.choose(parts, context, tokens, busy=bool(self._running - {reader.request_id}))
            reader.admitted_at, reader.decided_end = time.monotonic(), context + tokens
        return reader.decision.kind != RECOMPUTE

    def _measure(self, part: Part) -> cost.Part:
        """What reading a part costs in one rank; contiguous blocks are read in one piece."""
        runs = 1 + sum(abs(after - before) != 1 for before, after in pairwise(part.blocks))
        return cost.Part(
            str(part.source), len(part.blocks) * self._engine.block_bytes, runs * self._engine.block_pieces
        )

    def _judge(self, reader: Reader) -> None:
        decision, reader.decision = reader.decision, None
        assert decision is not None
        self._cost.record_outcome(decision, time.monotonic() - reader.admitted_at)
