"""The KV connector of a simulated engine: the real one's parts, with a pause in the place of each NIXL transfer.

Looking up, publishing, validating, choosing, holding, refusing and reporting are the product's own code; only what
binds it to vLLM's classes (``connector/scheduler.py``) and the workers are written anew. A read takes as long as the
simulation says and then asks its source whether the blocks are still the same, over the real protocol.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from bidikv_runtime import contract
from bidikv_runtime.connector import wire
from bidikv_runtime.connector.choice import Part
from bidikv_runtime.connector.compatibility import Compatibility, explain_refusal
from bidikv_runtime.connector.cost import CostModel
from bidikv_runtime.connector.hints import parse_hints
from bidikv_runtime.connector.index import PublicationIndex
from bidikv_runtime.connector.lookup_client import LookupClient
from bidikv_runtime.connector.lookup_server import LookupServer
from bidikv_runtime.connector.matcher import Engine as MatcherEngine
from bidikv_runtime.connector.matcher import Matcher, Reader
from bidikv_runtime.connector.publisher import Publisher
from bidikv_runtime.connector.report import Reporter
from bidikv_runtime.connector.retention import Retention
from bidikv_runtime.connector.reuse import Read, Reuse
from bidikv_runtime.connector.settings import Settings
from bidikv_runtime.connector.sources import Source, SourcesError, parse_sources
from bidikv_runtime.connector.state import PATH, StateServer
from bidikv_runtime.connector.tally import TransportTally
from bidikv_runtime.connector.tokens import load_tokens
from bidikv_runtime.connector.transport import EFA_DRIVER, LIBFABRIC, TransportInfo
from e2e.simengine.blocks import BlockHasher, BlockPool
from e2e.simengine.faults import Faults
from e2e.simengine.metrics import Metrics
from e2e.simengine.settings import Engine

if TYPE_CHECKING:
    from e2e.simengine.engine import Request

logger = logging.getLogger(__name__)

LAYERS: Final = 32
POLL_SECONDS: Final = 0.001
"""Between two looks for the answer whether a read is valid."""
REFUSED: Final = -1


@dataclass(frozen=True)
class _Transfer:
    """A part that was read."""

    valid: int
    """Leading blocks."""
    reason: str
    """Why not all of them are valid, as a metric's label; empty when all are."""


class Connector:
    """Methods are called in the event loop's thread, which stands for vLLM's scheduler and workers."""

    def __init__(
        self, engine: Engine, settings: Settings, pool: BlockPool, hasher: BlockHasher, faults: Faults, metrics: Metrics
    ) -> None:
        """Opens the lookup and the state port."""
        self._simulation, self._settings, self._size = engine.simulation, settings, engine.block_size
        self._hasher, self._pool, self._faults, self._metrics = hasher, pool, faults, metrics
        self._block_bytes = self._simulation.token_bytes * self._size // engine.tensor_parallel_size
        self.engine_id = str(uuid.uuid4())
        self.compatibility = build_compatibility(engine)
        self.index = PublicationIndex()
        self._tokens = tokens = load_tokens(os.environ, logger)
        self._client = LookupClient(
            settings.silent_period,
            settings.silent_period_maximum,
            tokens=tokens,
            explain=lambda refused: explain_refusal(self.compatibility, engine.tensor_parallel_size, refused),
            logger=logger,
        )
        self._cost = CostModel(engine.backend, engine.step_tokens)
        matcher_engine = MatcherEngine(
            self.engine_id, self._size, engine.tensor_parallel_size, self._block_bytes, LAYERS, drop_last=False
        )
        self._matcher = Matcher(matcher_engine, settings, self._client, self._cost, metrics)
        self._publisher = Publisher(self._size, self.index)
        self._publisher.bind(pool)
        self._transport = TransportTally()
        self._transport.info = describe_simulated_transport(engine)
        digest = self.compatibility.digest().hex()
        self.reporter = Reporter(self.engine_id, self.index, self._size, digest, self._client.peers, self._transport)
        self.reporter.bind(pool)
        self._retention = Retention(pool.free_block_queue, settings, self._size, self._cost.estimate_prefill)
        self.reporter.bind_retention(
            settings.retention_idle,
            lambda: self._retention.count_unread_handovers(self._server.has_read, time.monotonic()),
        )
        self._readers: dict[str, Reader] = {}
        self._loading: set[str] = set()
        self._peer = wire.Peer(
            self.engine_id, engine.side_channel_host, engine.side_channel_port, engine.tensor_parallel_size
        )
        self._server = self._open_lookup_port()
        self._is_silent = False
        faults.on_silent = self._set_silent
        self._set_silent(faults.now.silent)
        self._state: StateServer | None = None
        if settings.state_port:
            answers = {
                PATH: lambda query: json.dumps(self.describe()).encode(),
                contract.REPORT_PATH: self.reporter.answer,
            }
            self._state = StateServer(settings.lookup_host, settings.state_port, tokens, answers, logger)

    def close(self) -> None:
        """Close the ports."""
        if self._state is not None:
            self._state.stop()
        self._server.stop()
        self._client.close()

    # --- a request's life ---------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Ask the request's sources before it is its turn."""
        hints = parse_hints(request.kv_transfer_params)
        self._publisher.begin(request.request_id)
        self._retention.request_arrived(hints.session, time.monotonic())
        skips = request.skip_reading_prefix_cache
        sources = () if skips else _find_sources(request)
        cached = 0 if skips else self._pool.estimate_cached(request.block_hashes)
        reader: Reader | None = None
        if not skips and (sources or hints.prefilled_tokens or hints.compute_limit is not None):
            tail = self._find_tail(request, request.num_tokens) if hints.prefilled_tokens else None
            hashes = [*request.block_hashes, *([tail] if tail else ())]
            reader = self._readers[request.request_id] = Reader(
                request.request_id, hints, Reuse(sources), self.compatibility.digest(), hashes, request.num_tokens
            )
            self._matcher.ask(reader, cached)
        self.reporter.load.arrive(request, cached * self._size, reader)

    def match(self, request: Request, local: int) -> int | None:
        """Tokens that a source holds beyond the ``local`` cached ones; None while answers are outstanding, ``REFUSED``
        when the request is to end with an error."""
        self._publisher.found(request.request_id, local)
        reader, tokens = self._readers.get(request.request_id), 0
        if reader is not None:
            matched = self._matcher.match(reader, local // self._size)
            if matched is None:
                return None
            tokens = matched
            if self._refuses(request, reader, local + tokens):
                return REFUSED
        self.reporter.load.place(request.request_id, local + tokens)
        return tokens

    def admit(self, request: Request, external: int) -> Read | None:
        """The request has its blocks; what is to be read into them."""
        self._publisher.admit(request.request_id, [block.block_id for block in request.blocks])
        reader = self._readers.get(request.request_id)
        if reader is None:
            return None
        if not external:
            if reader.decision is not None:
                reader.admitted_at = time.monotonic()
            return None
        self._loading.add(request.request_id)
        return self._matcher.begin_read(reader, external)

    async def read(self, request: Request, read: Read) -> bool:
        """Read, validate, and set the request's computed tokens; whether it is now to end with an error."""
        session = parse_hints(request.kv_transfer_params).session or ""
        transfers = await asyncio.gather(*(self._transfer(part, session) for part in read.parts))
        self._loading.discard(request.request_id)
        reader = self._readers.get(request.request_id)
        if reader is None:  # aborted meanwhile
            return False
        valid = 0
        for part, transfer in zip(read.parts, transfers, strict=True):
            valid += transfer.valid
            if transfer.valid < len(part.blocks):
                self._metrics.record(contract.METRIC_VALIDATE_FAILURES, 1, transfer.reason)
                break
        reused = min(valid * self._size, reader.expected)
        request.num_computed_tokens = read.first * self._size + reused
        expected = reader.expected
        self._matcher.end_read(reader, reused)
        self.reporter.count_reused(reused)
        return reused < expected and self._refuses(request, reader, request.num_computed_tokens)

    def request_finished(self, request: Request, *, aborted: bool, failed: bool) -> None:
        """Publish; to be called before the request's blocks are freed."""
        self._readers.pop(request.request_id, None)
        self.reporter.load.leave(request.request_id)
        self.reporter.count_prompt(request.num_prompt_tokens)
        hints = parse_hints(request.kv_transfer_params)
        handover = hints.handover and not aborted
        blocks = [block.block_id for block in request.blocks]
        published: list[int] = []
        if request.request_id in self._loading:
            self._publisher.drop(request.request_id, blocks)
        else:
            published = self._publisher.finish(
                request,
                blocks,
                request.block_hashes,
                (lambda tokens: self._find_tail(request, tokens)) if handover else None,
            )
        if not (hints.handover or failed):
            self.reporter.end_turn(request, hints, request.block_hashes)
        self._retention.request_finished(hints.session, hints.expect, published, time.monotonic(), handover)

    def end_step(
        self, running: Collection[Request], prefills: Sequence[tuple[int, int]], decodes: int, seconds: float
    ) -> None:
        """A step has ended: learn from it."""
        now = time.monotonic()
        self._matcher.begin_step(request.request_id for request in running)
        self._cost.record_step(prefills, decodes, seconds)
        self.reporter.learn(self._cost)
        if validated := self._server.take_read_blocks():
            self._retention.blocks_read(validated, now)
        self._retention.expire(now)
        for request in running:
            reader = self._readers.get(request.request_id)
            if reader is not None and reader.decision is not None:
                self._matcher.computed(reader, request.num_computed_tokens - request.num_in_flight_tokens)

    # --- what can be seen ---------------------------------------------------------------------------------------------

    def observe(self) -> None:
        """Bring the gauges and totals of /metrics up to date."""
        self._metrics.record(contract.METRIC_PUBLISHED_BLOCKS, len(self.index))
        for decision, count in self._cost.decisions.items():
            self._metrics.raise_to(contract.METRIC_COST_DECISIONS, count, decision)
        for decision, count in self._cost.regrets.items():
            self._metrics.raise_to(contract.METRIC_COST_REGRETS, count, decision)
        for reason, blocks in self._retention.held_blocks.items():
            self._metrics.record(contract.METRIC_HELD_BLOCKS, blocks, reason)
        for (reason, end), count in self._retention.take_ended().items():
            self._metrics.record(contract.METRIC_HOLDS_ENDED, count, reason, end)

    def describe(self) -> dict[str, Any]:
        """``/state``. The state server's thread calls it."""
        return {
            "engine": self.engine_id,
            "epoch": self.index.epoch,
            "protocol": wire.VERSION,
            "simulated": True,
            "lookup_port": self._server.port,
            "compatibility": self.compatibility.describe(),
            "published_blocks": len(self.index),
            "reads_under_way": len(self._loading),
            "quarantined_blocks": 0,
            "transport": asdict(self._transport.info) if self._transport.info else None,
            "bandwidths": self._transport.list_bandwidths(),
            "server": self._server.describe(),
            "client": self._client.describe(),
            "cost": self._cost.describe(),
            "retention": self._retention.describe(),
        }

    # --- the lookup port ----------------------------------------------------------------------------------------------

    def _open_lookup_port(self) -> LookupServer:
        settings = self._settings
        return LookupServer(
            self.index,
            self.compatibility,
            self._peer,
            settings.lookup_host,
            settings.lookup_port,
            logger,
            self._tokens,
            self.reporter.note_interest,
        )

    def _set_silent(self, silent: bool) -> None:
        if silent and not self._is_silent:
            self._server.stop()
        elif self._is_silent and not silent:
            self._server = self._open_lookup_port()
        self._is_silent = silent

    # --- parts --------------------------------------------------------------------------------------------------------

    async def _transfer(self, part: Part, session: str) -> _Transfer:
        size = len(part.blocks) * self._block_bytes
        seconds = self._simulation.read_seconds + size / self._simulation.read_bytes_per_second
        seconds *= self._faults.slow
        if seconds > self._settings.read_deadline:
            await asyncio.sleep(self._settings.read_deadline)
            self._client.avoid(part.source)
            self._transport.note_failure()
            return _Transfer(0, "overdue")
        began = time.monotonic()
        await asyncio.sleep(seconds)
        read = time.monotonic()
        self._cost.record_read(str(part.source), size, LAYERS, read - began)
        if str(part.source) not in self._transport.list_bandwidths():
            self._transport.note_bandwidth(
                part.source, self._simulation.read_bytes_per_second / self._faults.slow, read
            )
        self._transport.note_read(part.source, size, read)

        def build(sequence: int) -> wire.Validate:
            pairs = list(part.blocks), list(part.publications)
            return wire.Validate(wire.VERSION, sequence, part.epoch, *pairs, session)

        question = self._client.ask(part.source, build, self._settings.validate_deadline)
        while question.open:
            self._client.poll()
            if question.open:
                await asyncio.sleep(POLL_SECONDS)
        reply, ended = question.reply, time.monotonic()
        self._metrics.record(contract.METRIC_READ_BYTES, size)
        self._metrics.record(contract.METRIC_READ_SECONDS, ended - began)
        self._metrics.record(contract.METRIC_VALIDATE_SECONDS, ended - read)
        if not isinstance(reply, wire.Validated):
            return _Transfer(0, "silent")
        valid = min(reply.valid, len(part.blocks)) if reply.epoch == part.epoch else 0
        reason = "restarted" if reply.epoch != part.epoch else "reallocated" if valid < len(part.blocks) else ""
        return _Transfer(valid, reason)

    def _find_tail(self, request: Request, tokens: int) -> bytes | None:
        return self._hasher.compute_tail(request.block_hashes, request.tokens, tokens, request.cache_salt)

    def _refuses(self, request: Request, reader: Reader, held: int) -> bool:
        """Whether the request ends with an error because it would compute too much (``scheduler._misses_too_much``)."""
        if request.num_output_tokens or request.num_preemptions:
            return False
        limit = reader.hints.compute_limit
        if limit is not None and request.num_tokens - held > limit:
            self._metrics.record(contract.METRIC_COMPUTE_LIMIT_EXCEEDED)
            return True
        announced = min(reader.hints.prefilled_tokens, request.num_tokens)
        if 0 < self._settings.recompute_limit_tokens < announced - held:
            self._metrics.record(contract.METRIC_HANDOVERS_LOST)
            return True
        return False


def describe_simulated_transport(engine: Engine) -> TransportInfo:
    """What the engine says that it reads with."""
    backend = engine.simulation.backend or engine.backend
    expected = EFA_DRIVER if backend == LIBFABRIC else "tcp"
    return TransportInfo(backend, engine.simulation.provider or expected, "simulated")


def build_compatibility(engine: Engine) -> Compatibility:
    """Equal for simulated engines of one model, revision, type, block size, seed and vLLM."""
    return Compatibility(
        model=engine.model,
        revision=engine.revision,
        model_config=f"simulated, {engine.simulation.token_bytes} bytes per token",
        dtype=engine.dtype,
        kv_cache_dtype="auto",
        quantization="None",
        block_size=str(engine.block_size),
        hash_block_size=str(engine.block_size),
        hash_algorithm=contract.HASH_ALGORITHM,
        hash_seed=engine.hash_seed,
        attention="MLA",  # any tensor parallel sizes may be paired
        kv_heads="1",
        head_size="576",
        layers=str(LAYERS),
        kv_layout="LBHNC",
        drafts="none",
        vllm=engine.simulation.vllm_version,
    )


def _find_sources(request: Request) -> tuple[Source, ...]:
    try:
        return parse_sources(request.kv_transfer_params)
    except SourcesError as error:
        logger.warning("request %s reuses nothing: %s", request.request_id, error)
        return ()
