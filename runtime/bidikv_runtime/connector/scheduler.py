"""The connector's scheduler side: what vLLM's scheduler calls, handed on to the two sides of the protocol.

``Publisher`` is the source (publish, un-publish), ``Matcher`` the reader (look up, choose). This class keeps the state
of each unfinished request and speaks vLLM's language. All of it runs in the scheduler's thread, ``describe`` aside.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict, replace
from typing import Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from bidikv_runtime import contract
from bidikv_runtime.connector import eviction, wire
from bidikv_runtime.connector.adapters import Adapters
from bidikv_runtime.connector.block_quarantine import BlockQuarantine
from bidikv_runtime.connector.compatibility import (
    compute_compatibility,
    drops_last_block,
    explain_refusal,
    validate_engine,
)
from bidikv_runtime.connector.cost import CostModel
from bidikv_runtime.connector.hints import parse_hints
from bidikv_runtime.connector.index import PublicationIndex
from bidikv_runtime.connector.lookup_client import LookupClient
from bidikv_runtime.connector.lookup_server import LookupServer
from bidikv_runtime.connector.matcher import Engine, Matcher, Reader
from bidikv_runtime.connector.metadata import VerifiedReadMetadata, WorkerReport
from bidikv_runtime.connector.publisher import Publisher
from bidikv_runtime.connector.refusal import ask_again, may_refuse, refuse
from bidikv_runtime.connector.report import Reporter
from bidikv_runtime.connector.request_hashes import RequestHashes
from bidikv_runtime.connector.retention import Retention
from bidikv_runtime.connector.reuse import Read, Reuse
from bidikv_runtime.connector.settings import Settings
from bidikv_runtime.connector.sources import Source, SourcesError, parse_sources
from bidikv_runtime.connector.state import PATH, StateServer
from bidikv_runtime.connector.stats import VerifiedReadStats
from bidikv_runtime.connector.step_clock import StepClock
from bidikv_runtime.connector.tally import TransportTally
from bidikv_runtime.connector.ticket import Ticket, build_part_id
from bidikv_runtime.connector.tokens import load_tokens
from bidikv_runtime.connector.weights import draw_unnamed, watch_weights

logger = init_logger("vllm.bidikv.scheduler")


class VerifiedReadScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """Replaces upstream's decisions (handles, leases, heartbeats) and keeps its handshake listener."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any, settings: Settings) -> None:
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        validate_engine(vllm_config, vllm_version, os.environ, current_platform.device_type, specs)
        tokens = load_tokens(os.environ, logger)
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.settings = settings
        self.stats = VerifiedReadStats()
        self.index = PublicationIndex()
        self._compatibility = compute_compatibility(vllm_config, vllm_version, os.environ)
        self._client = LookupClient(
            settings.silent_period,
            settings.silent_period_maximum,
            tokens=tokens,
            explain=lambda refused: explain_refusal(self._compatibility, self.transfer_tp_size, refused),
            logger=logger,
        )
        [group] = kv_cache_config.kv_cache_groups
        self._engine = Engine(
            engine_id,
            self.block_size,
            self.transfer_tp_size,
            block_bytes=group.kv_cache_spec.page_size_bytes * len(group.layer_names),
            block_pieces=len(group.layer_names),
            drop_last=drops_last_block(vllm_config),
        )
        backends = vllm_config.kv_transfer_config.get_from_extra_config("backends", ["UCX"])
        self._cost = CostModel(backends[0], vllm_config.scheduler_config.max_num_batched_tokens)
        self._hashes = RequestHashes(self.block_size, Adapters(logger))
        self._matcher = Matcher(self._engine, settings, self._client, self._cost, self.stats)
        self._publisher = Publisher(self.block_size, self.index)
        self._transport = TransportTally()
        self._reporter = Reporter(
            engine_id,
            self.index,
            self.block_size,
            self._compatibility.digest().hex(),
            self._client.peers,
            self._transport,
        )
        self._retention: Retention | None = None
        self._clock = StepClock()
        self._quarantine = BlockQuarantine()
        self._pool: Any = None
        self._readers: dict[str, Reader] = {}
        """Unfinished requests that came with sources."""
        self._reads: dict[str, tuple[Read, list[int], str]] = {}
        """Reads to be handed to the workers with this step's metadata, the local blocks that they fill, the session."""
        self._loading: dict[str, tuple[Any, list[int]]] = {}
        """Requests whose read is under way, those aborted meanwhile included, and the blocks it fills."""
        self._recomputing: dict[str, Any] = {}
        """Requests that compute by choice what they could have read, until it shows whether that was right."""
        self._reported: dict[tuple[str, ...], int] = {}
        """Values of gauges and totals that /metrics has been told."""
        data_parallel_index = vllm_config.parallel_config.data_parallel_index  # as vLLM does for the side channel
        self._server = LookupServer(
            self.index,
            self._compatibility,
            self._build_peer(),
            settings.lookup_host,
            settings.lookup_port + data_parallel_index,
            logger,
            tokens,
            self._reporter.note_interest,
        )
        self._state_server: StateServer | None = None
        if settings.state_port:
            answers = {
                PATH: lambda query: json.dumps(self.describe()).encode(),
                contract.REPORT_PATH: self._reporter.answer,
            }
            self._state_server = StateServer(
                settings.lookup_host, settings.state_port + data_parallel_index, tokens, answers, logger
            )
        if tokens is None:
            logger.warning(
                "peers are not authenticated: set %s to a file with a token, or close the lookup port to all but peers",
                contract.ENV_TOKEN_FILE,
            )
        self._end_watch = watch_weights(EngineCore, self.weights_changed, self.weights_named)
        logger.info("lookup port %s:%d, engine %s", settings.lookup_host, self._server.port, engine_id)

    def bind_block_pool(self, pool: Any) -> None:
        """Take the scheduler's block pool: its re-use watchers un-publish, its free queue is ordered by retention."""
        self._pool = pool
        self._reporter.bind(pool)
        self._hashes.bind(pool)
        self._publisher.bind(pool)
        retention = Retention(eviction.install(pool), self.settings, self.block_size, self._cost.estimate_prefill)
        self._retention = retention
        self._reporter.bind_retention(
            self.settings.retention_idle,
            lambda: retention.count_unread_handovers(self._server.has_read, time.monotonic()),
        )

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        """The workers have registered their memory: at the start and, since vLLM 0.33, anew after each sleep."""
        super().set_xfer_handshake_metadata(metadata)
        self._server.replace_peer(self._build_peer())

    def clear_publications(self) -> None:
        """Weights or cache changed: forget what is published and found, and publish nothing of what began before."""
        self._publisher.clear()
        for reader in self._readers.values():
            if reader.request_id not in self._loading:
                reader.reuse.settle()
        if self._retention is not None:
            self._retention.clear()

    def weights_changed(self) -> None:
        """Share KV with nobody until the new weights have a name."""
        self.weights_named(draw_unnamed())
        self.clear_publications()
        logger.warning(
            "the weights may have changed: KV is shared with other engines again when they are named (weight_version)"
        )

    def weights_named(self, name: str) -> None:
        """Share KV with the engines whose weights have this name."""
        self._compatibility = replace(self._compatibility, weights=name)
        self._server.replace_compatibility(self._compatibility)
        self._reporter.compatibility = self._compatibility.digest().hex()
        self._client.forget_refusals()

    def shutdown(self) -> None:
        self._end_watch()
        if self._state_server is not None:
            self._state_server.stop()
        self._server.stop()
        self._client.close()
        super().shutdown()

    # --- a request's life ---------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Ask the request's sources before it is its turn: their answers travel while others are scheduled."""
        hints = parse_hints(request.kv_transfer_params)
        self._publisher.begin(request.request_id)
        assert self._retention is not None
        self._retention.request_arrived(hints.session, time.monotonic())
        # vLLM computes a request that skips its prefix cache in any case; it takes neither tokens nor a refusal for it.
        skips = request.skip_reading_prefix_cache
        sources = () if skips else self._sources(request)
        cached = 0 if skips else self._hashes.estimate_cached(request)
        reader: Reader | None = None
        if not skips and (sources or hints.prefilled_tokens or hints.compute_limit is not None):
            reader = self._readers[request.request_id] = Reader(
                request.request_id,
                hints,
                Reuse(sources, self._engine.drop_last),
                self._compatibility.digest(),
                self._hashes.find(request, tail=hints.prefilled_tokens > 0),
                request.num_tokens,
            )
            self._matcher.ask(reader, cached)
        self._reporter.load.arrive(request, cached * self.block_size, reader)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that a source holds beyond the local prefix; None while the sources' answers are outstanding.

        vLLM calls this whenever it tries to place the request; the answer may be given back unused.
        """
        self._publisher.found(request.request_id, num_computed_tokens)
        reader = self._readers.get(request.request_id)
        tokens = 0
        if reader is not None:
            matched = self._matcher.match(reader, num_computed_tokens // self.block_size)
            if matched is None:
                return None, False
            tokens = matched
            if self._misses_too_much(request, reader, num_computed_tokens + tokens):
                self._refuse(request, reader, num_computed_tokens + tokens)
                return None, False
        self._reporter.load.place(request.request_id, num_computed_tokens + tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request is admitted: hand its read, if it has one, to the workers with this step's metadata."""
        self._publisher.admit(request.request_id, blocks.get_block_ids()[0])
        reader = self._readers.get(request.request_id)
        if reader is None:
            return
        if not num_external_tokens:
            if reader.decision is not None:
                reader.admitted_at = time.monotonic()
                self._recomputing[request.request_id] = request
            return
        read = self._matcher.begin_read(reader, num_external_tokens)
        local_blocks = blocks.get_block_ids()[0][read.first : read.first + read.count]
        assert len(local_blocks) == read.count, (read, local_blocks)
        self._reads[request.request_id] = (read, local_blocks, reader.hints.session or "")
        self._loading[request.request_id] = (request, local_blocks)

    def request_finished(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Publish the request's full blocks. Never delays their freeing: they stay readable until they are re-used."""
        self._readers.pop(request.request_id, None)
        self._recomputing.pop(request.request_id, None)
        self._reporter.load.leave(request.request_id)
        self._reporter.count_prompt(request.num_prompt_tokens)
        hints, hashes = parse_hints(request.kv_transfer_params), self._hashes.find(request)
        handover = hints.handover and request.status != RequestStatus.FINISHED_ABORTED
        published: list[int] = []
        if request.request_id in self._loading:
            # Aborted during the read: num_computed_tokens already counts tokens whose KV has not arrived.
            self._publisher.drop(request.request_id, block_ids[0])
        else:
            published = self._publisher.finish(
                request,
                block_ids[0],
                hashes,
                (lambda tokens: self._hashes.find_tail(request, tokens)) if handover else None,
            )
        if not (hints.handover or request.status == RequestStatus.FINISHED_ERROR):
            self._reporter.end_turn(request, hints, hashes)
        assert self._retention is not None
        self._retention.request_finished(hints.session, hints.expect, published, time.monotonic(), handover)
        return False, None

    # --- a step -------------------------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> VerifiedReadMetadata:
        """This step's reads and their tickets."""
        now = time.monotonic()
        self._clock.scheduled(scheduler_output, now)
        if self._publisher.follows:
            cached = scheduler_output.scheduled_cached_reqs
            for request_id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
                if new_blocks is not None and request_id not in cached.resumed_req_ids:
                    self._publisher.grow(request_id, new_blocks[0])
        self._matcher.begin_step(scheduler_output.num_scheduled_tokens)
        if self._retention is not None:
            if validated := self._server.take_read_blocks():
                self._retention.blocks_read(validated, now)
            self._retention.expire(now)
        metadata = VerifiedReadMetadata()
        metadata.scheduler_clock = time.perf_counter()
        for request_id, (read, local_blocks, session) in self._reads.items():
            for number, part in enumerate(read.parts):
                part_id = build_part_id(request_id, number)
                metadata.add_new_req_to_recv(
                    request_id=part_id,
                    local_block_ids=(local_blocks[part.offset : part.offset + len(part.blocks)],),
                    kv_transfer_params={
                        "remote_block_ids": (list(part.blocks),),
                        "remote_engine_id": part.peer.engine_id,
                        "remote_request_id": request_id,
                        "remote_host": part.peer.host,
                        "remote_port": part.peer.port,
                        "tp_size": part.peer.tensor_parallel_size,
                        "remote_registration_generation": part.peer.registration,  # since vLLM 0.33
                    },
                    local_num_computed_blocks=(read.first + part.offset,),
                    awaiting_kvs=True,
                )
                metadata.tickets[part_id] = Ticket(
                    request_id,
                    len(read.parts),
                    part.offset,
                    part.source,
                    part.epoch,
                    part.blocks,
                    part.publications,
                    session,
                )
        self._reads = {}
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers say. vLLM has by now cut ``num_computed_tokens`` back to what validated."""
        if (ended := self._clock.ended(time.monotonic())) is not None:
            step, seconds = ended
            self._cost.record_step(step.prefills, step.decodes, seconds)
            self._reporter.learn(self._cost)
        report = connector_output.kv_connector_worker_meta or WorkerReport()
        self._take_report(report)
        for request_id in connector_output.finished_recving or ():
            request, _ = self._loading.pop(request_id)
            reader = self._readers.get(request_id)
            if reader is None:
                continue  # aborted during the read
            read = reader.reuse.read
            assert read is not None
            reused = max(0, request.num_computed_tokens - read.first * self.block_size)
            self._matcher.end_read(reader, reused)
            self._reporter.count_reused(reused)
            logger.info(
                "request %s: %d tokens were here, %d of %d at %s read and validated in %.1f ms, %d to compute",
                request_id,
                read.first * self.block_size,
                reused,
                reader.expected,
                " and ".join(str(part.source) for part in read.parts),
                (time.monotonic() - reader.admitted_at) * 1e3,
                request.num_tokens - request.num_computed_tokens,
            )
            if reused < reader.expected and self._misses_too_much(request, reader, request.num_computed_tokens):
                ask_again(request)  # and refuse it there
        for request_id, request in list(self._recomputing.items()):
            reader = self._readers[request_id]
            self._matcher.computed(reader, request.num_computed_tokens - request.num_in_flight_tokens)
            if reader.decision is None:
                del self._recomputing[request_id]

    def get_kv_connector_stats(self) -> VerifiedReadStats | None:
        """Scheduler-side observations since the last step."""
        self._report_gauge(len(self.index), contract.METRIC_PUBLISHED_BLOCKS)
        self._report_gauge(len(self._quarantine), contract.METRIC_QUARANTINED_BLOCKS)
        for decision, count in self._cost.decisions.items():
            self._report_total(count, contract.METRIC_COST_DECISIONS, decision)
        for decision, count in self._cost.regrets.items():
            self._report_total(count, contract.METRIC_COST_REGRETS, decision)
        if self._retention is not None:
            for reason, blocks in self._retention.held_blocks.items():
                self._report_gauge(blocks, contract.METRIC_HELD_BLOCKS, reason)
            for (reason, end), count in self._retention.take_ended().items():
                self.stats.record(contract.METRIC_HOLDS_ENDED, count, reason, end)
        return None if self.stats.is_empty() else self.stats.clone_and_reset()

    def describe(self) -> dict[str, Any]:
        """State for people, JSON types only. The state server's thread calls it: every part may be read at any time."""
        return {
            "engine": self.engine_id,
            "epoch": self.index.epoch,
            "protocol": wire.VERSION,
            "lookup_port": self._server.port,
            "compatibility": self._compatibility.describe(),
            "tensor_parallel_size": self.transfer_tp_size,
            "published_blocks": len(self.index),
            "reads_under_way": len(self._loading),
            "quarantined_blocks": len(self._quarantine),
            "transport": asdict(info) if (info := self._transport.info) else None,
            "bandwidths": self._transport.list_bandwidths(),
            "server": self._server.describe(),
            "client": self._client.describe(),
            "cost": self._cost.describe(),
            "retention": self._retention.describe() if self._retention else None,
        }

    # --- parts --------------------------------------------------------------------------------------------------------

    def _build_peer(self) -> wire.Peer:
        registration = getattr(self, "_registration_generation", 0)  # since vLLM 0.33
        return wire.Peer(
            self.engine_id, self.side_channel_host, self.side_channel_port, self.transfer_tp_size, registration
        )

    def _take_report(self, report: WorkerReport) -> None:
        now = time.monotonic()
        for source in report.failed_sources:
            self._client.avoid(source)  # it would cost the next request as much
            self._transport.note_failure()
        for source, rate in report.bandwidths.items():
            self._transport.note_bandwidth(source, rate, now)
            self.stats.record(contract.METRIC_PEER_BANDWIDTH, rate, str(source))
        for read in report.reads:
            self._transport.note_read(read.source, read.bytes, now)
            # Its end was noticed up to a step late; nothing is learnt from one that began and ended between two looks.
            self._cost.record_read(str(read.source), read.bytes, read.descriptors, read.seconds - read.slack)
        for request_id, ranks in report.quarantined.items():
            if request_id in self._loading:
                self._quarantine.hold(self._pool, request_id, self._loading[request_id][1], ranks)
        for request_id, ranks in report.released.items():
            self._quarantine.release(self._pool, request_id, ranks)
        if report.transport is not None:
            self._transport.info = report.transport
            self.stats.record(contract.METRIC_TRANSPORT_INFO, 1, report.transport.backend, report.transport.provider)

    def _misses_too_much(self, request: Any, reader: Reader, held: int) -> bool:
        """Whether a decode leg that has ``held`` tokens is to be refused, because it would compute too much: of what
        prefill has computed before, or of the prompt as a whole if it was sent without a prefill leg."""
        return may_refuse(request) and (_exceeds_limit(request, reader, held) or self._is_lost(request, reader, held))

    def _is_lost(self, request: Any, reader: Reader, held: int) -> bool:
        announced = min(reader.hints.prefilled_tokens, request.num_tokens)
        return bool(0 < self.settings.recompute_limit_tokens < announced - held)

    def _refuse(self, request: Any, reader: Reader, held: int) -> None:
        if _exceeds_limit(request, reader, held):
            metric, level = contract.METRIC_COMPUTE_LIMIT_EXCEEDED, logging.INFO
            limit, missing = reader.hints.compute_limit, request.num_tokens - held
            reason = f"{missing} tokens of its prompt are not here and at most {limit} may be computed: prefill first"
        else:
            metric, level = contract.METRIC_HANDOVERS_LOST, logging.WARNING
            reason = f"{held} of {reader.hints.prefilled_tokens} announced tokens were found: prefill again"
        logger.log(level, "request %s is refused: %s", request.request_id, reason)
        self.stats.record(metric)
        refuse(request, reason)

    def _report_gauge(self, value: int, name: str, *labels: str) -> None:
        if self._reported.get((name, *labels), 0) != value:
            self._reported[name, *labels] = value
            self.stats.record(name, value, *labels)

    def _report_total(self, total: int, name: str, *labels: str) -> None:
        if new := total - self._reported.get((name, *labels), 0):
            self._reported[name, *labels] = total
            self.stats.record(name, new, *labels)

    def _sources(self, request: Any) -> tuple[Source, ...]:
        try:
            return parse_sources(request.kv_transfer_params)
        except SourcesError as error:
            logger.warning("request %s reuses nothing: %s", request.request_id, error)
            return ()


def _exceeds_limit(request: Any, reader: Reader, held: int) -> bool:
    limit = reader.hints.compute_limit
    return limit is not None and bool(request.num_tokens - held > limit)
