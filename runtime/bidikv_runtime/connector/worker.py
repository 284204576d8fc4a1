"""The connector's worker side: upstream's NIXL reads, each confirmed by its source before vLLM may use it.

Every rank reads its own shard and asks for itself. A rank that must discard blocks names them to vLLM as invalid, which
cuts the request back to the leading blocks that every rank could confirm and recomputes the rest. To upstream's code
each part of a request's read is a request of its own; vLLM hears of the request once, when all parts have ended.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.nixl_utils import NixlWrapper
from vllm.logger import init_logger

from bidikv_runtime.connector import wire
from bidikv_runtime.connector.agent import BackendError, ReadingAgent, agent_settings, explain_missing_backend
from bidikv_runtime.connector.bandwidth import BandwidthProbe
from bidikv_runtime.connector.compatibility import validate_specs
from bidikv_runtime.connector.lookup_client import LookupClient, Question
from bidikv_runtime.connector.metadata import VerifiedReadMetadata, WorkerReport
from bidikv_runtime.connector.reads import Part, Reads
from bidikv_runtime.connector.settings import Settings
from bidikv_runtime.connector.stats import VerifiedReadStats
from bidikv_runtime.connector.ticket import ReadReport
from bidikv_runtime.connector.tokens import load_tokens
from bidikv_runtime.connector.transfer_quarantine import TransferQuarantine
from bidikv_runtime.connector.transport import describe_transport, list_open_devices

logger = init_logger("vllm.bidikv.worker")

MAXIMUM_BANDWIDTHS: Final = 256
"""Engines whose bandwidth waits to be reported."""


class VerifiedReadWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any, settings: Settings) -> None:
        validate_specs([group.kv_cache_spec for group in kv_cache_config.kv_cache_groups])
        affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        try:
            with agent_settings(NixlWrapper, settings.progress_delay_us):
                super().__init__(vllm_config, engine_id, kv_cache_config)
        except Exception as error:
            backends = vllm_config.kv_transfer_config.get_from_extra_config("backends", ["UCX"])
            if NixlWrapper is not None and (reason := explain_missing_backend(NixlWrapper, backends)) is not None:
                raise BackendError(reason) from error
            raise
        if absent := [name for name in self.nixl_backends if name not in self.nixl_wrapper.backends]:
            reason = explain_missing_backend(NixlWrapper, absent)  # NIXL skips a backend whose plugin it does not find
            raise BackendError(reason or f"NIXL has not loaded its backend {absent[0]}: see its log")
        if affinity is not None:
            os.sched_setaffinity(0, affinity)  # on CPU, upstream binds the whole worker to the last core of each node
        self.settings = settings
        self._agent = self.nixl_wrapper
        self.nixl_wrapper: Any = ReadingAgent(self._agent)
        self.xfer_stats = VerifiedReadStats()
        self._client = LookupClient(
            settings.silent_period,
            settings.silent_period_maximum,
            tokens=load_tokens(os.environ, logger),
            logger=logger,
        )
        self._reads = Reads()
        self._quarantine = TransferQuarantine(self.nixl_wrapper)
        self._report = WorkerReport()
        self._looked = time.monotonic()
        """When the transfers were looked at last."""
        self._probe: BandwidthProbe | None = None
        self._scratch: Any = None
        self._bandwidths: dict[str, float] = {}
        """Bytes per second, written by the handshake thread, of engines that no read has begun from: the read tells by
        what address requests name them."""

    def shutdown(self) -> None:
        if hasattr(self, "_client"):
            self._client.close()
            # Not left to upstream, whose shutdown ends at the first handle that NIXL does not let go.
            for part_id, handles in self._recving_transfers.items():
                self._quarantine.hold(part_id, part_id, "", handles)
            self._recving_transfers.clear()
            self._quarantine.close()
        super().shutdown()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Upstream's registration; then what the agent reads with is known, and peers may be measured."""
        super().register_kv_caches(kv_caches)
        agent = self.nixl_wrapper
        transport = describe_transport(self.nixl_backends, list(agent.backends), os.environ, list_open_devices())
        self._report.transport = transport
        say = logger.warning if transport.warning else logger.info
        say("KV is read with %s over %s (%s)", transport.backend, transport.provider, transport.detail)
        if transport.warning:
            logger.warning("%s", transport.warning)
        if self.settings.probe_bytes and not self._mixed_mem_types:
            # After upstream's: its metadata, which peers read by, do not name this buffer.
            cache = next(iter(kv_caches.values()))
            self._scratch = torch.empty(self.settings.probe_bytes, dtype=torch.uint8, device=cache.device)
            address, size = self._scratch.data_ptr(), self._scratch.nbytes
            descriptors = agent.get_reg_descs([(address, size, self.device_id, "")], self.region_mem_types[0])
            agent.register_memory(descriptors, backends=self.nixl_backends)
            self._registered_descs.append(descriptors)
            self._probe = BandwidthProbe(self._agent, self.region_mem_types[0], address, size, self.device_id)

    # --- what vLLM calls with every step, in this order ---------------------------------------------------------------

    def start_load_kv(self, metadata: VerifiedReadMetadata) -> None:
        """Post this step's reads (and those whose handshake has ended since)."""
        now = time.monotonic()
        for part_id, ticket in metadata.tickets.items():
            [local_blocks] = metadata.reqs_to_recv[part_id].local_block_ids
            self._reads.start(part_id, Part(ticket, local_blocks, now, now + self.settings.read_deadline))
        super().start_load_kv(metadata)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """The requests whose reads have ended in this rank, in place of upstream's results, which are about parts."""
        results = super().get_transfer_results()
        for part_id in results.failed_recving:
            if (part := self._reads.find(part_id)) is not None:
                self._fail(part_id, part, "read_failed")
        self._release_quarantined()
        finished, failed = set[str](), set[str]()
        for outcome in self._reads.take_outcomes():
            finished.add(outcome.request_id)
            if outcome.failed:
                failed.add(outcome.request_id)
            if outcome.invalid_blocks:
                self._invalid_block_ids.put(set(outcome.invalid_blocks))
        return KVConnectorTransferResults(
            finished_sending=results.finished_sending, finished_recving=finished, failed_recving=failed
        )

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """What the scheduler side should know of since the last call."""
        report, self._report = self._report, WorkerReport()
        return report if report != WorkerReport() else None

    # --- transfers ----------------------------------------------------------------------------------------------------

    def _nixl_handshake(
        self, host: str, port: int, remote_tp_size: int, expected_engine_id: str, *arguments: Any, **options: Any
    ) -> Any:
        """Upstream's handshake, which waits five seconds for a host that is gone and holds up all others meanwhile,
        behind a short look whether anybody is there: a zmq listener greets whoever connects, a frozen one does not.

        Runs in upstream's handshake thread, one peer at a time.
        """
        with socket.create_connection((host, port), timeout=self.settings.connect_deadline) as probe:
            if not probe.recv(1):
                raise ConnectionError(f"{host}:{port} closes the connection without a greeting")
        shaken = super()._nixl_handshake(host, port, remote_tp_size, expected_engine_id, *arguments, **options)
        try:
            self._measure(expected_engine_id)
        except Exception:
            logger.warning("The bandwidth to engine %s could not be measured", expected_engine_id, exc_info=True)
        return shaken

    def _measure(self, engine_id: str) -> None:
        """Measure the bandwidth to the first of an engine's ranks that this one reads from."""
        if self._probe is None or not (sides := self.dst_xfer_side_handles.get(engine_id)):
            return
        side = sides[min(sides)]
        if (shape := self.nixl_wrapper.shape_of(side)) is None:
            return
        length, count = shape
        rate = self._probe.measure(side, length, count, self.settings.connect_deadline)
        if rate is None:
            logger.warning("Engine %s does not let its bandwidth be measured in time", engine_id)
            return
        logger.info("Engine %s is read at %.0f MB/s", engine_id, rate / 1e6)
        if len(self._bandwidths) >= MAXIMUM_BANDWIDTHS:
            self._bandwidths.clear()
        self._bandwidths[engine_id] = rate

    def _read_blocks_for_req(self, part_id: str, meta: Any) -> None:
        """Post the transfers of a part, unless it was abandoned while its handshake went on."""
        part = self._reads.find(part_id)
        if part is None:
            return
        super()._read_blocks_for_req(part_id, meta)
        part.handles = list(self._recving_transfers.get(part_id, ()))
        if part.handles and (rate := self._bandwidths.pop(meta.remote.engine_id, None)) is not None:
            self._report.bandwidths[part.ticket.source] = rate

    def _pop_done_transfers(self, transfers: dict[str, list[Any]]) -> tuple[set[str], set[str]]:
        """Hold back reads that have completed until their source has confirmed them; abandon those that are overdue."""
        done, failed = super()._pop_done_transfers(transfers)
        if transfers is not self._recving_transfers:
            return done, failed
        completed = {
            part_id: part
            for part_id in done - failed - self._recv_failures
            if (part := self._reads.find(part_id)) is not None
        }
        now = time.monotonic()
        for part in completed.values():
            if not part.transferred:
                self._complete(part, now - self._looked)
        self._looked = now
        self._validate(completed)
        for part_id, part in completed.items():
            if part.valid is None:
                done.discard(part_id)
                transfers[part_id] = []  # no handle outstanding, not done either: seen again in the next step
        self._abandon_overdue(time.monotonic(), ended=done)
        return done, failed

    def _complete(self, part: Part, since_last_look: float) -> None:
        """The transport has delivered all of a part."""
        part.transferred = True
        telemetry = self.nixl_wrapper.take_telemetry(part.handles)
        part.handles = []
        seconds = max((t.xferDuration for t in telemetry), default=0) / 1e6
        self._report.reads.append(
            ReadReport(
                part.ticket.source,
                bytes=sum(t.totalBytes for t in telemetry),
                descriptors=sum(t.descCount for t in telemetry),
                seconds=seconds,
                slack=min(seconds, since_last_look),
            )
        )

    def _fail(self, part_id: str, part: Part, reason: str, *, quarantined: bool = False) -> None:
        """A part has ended without its blocks."""
        self.nixl_wrapper.take_telemetry(part.handles)  # of those of its transfers that did end
        self._report.failed_sources.add(part.ticket.source)
        self.xfer_stats.record_validate_failure(reason)
        self._reads.end(part_id, 0, failed=True, quarantined=quarantined)

    # --- validation ---------------------------------------------------------------------------------------------------

    def _validate(self, parts: dict[str, Part]) -> None:
        """Ask at once about all parts that have completed, and end those whose answer is there.

        Waits for new answers only, and only a moment: one takes about a millisecond, the next step up to a second.
        """
        asked = [question for part in parts.values() if part.question is None and (question := self._ask(part))]
        if parts:
            self._client.poll()
            self._client.wait(asked, self.settings.validate_wait)
        for part_id, part in parts.items():
            if part.question is not None and not part.question.open:
                self._conclude(part_id, part, part.question)

    def _ask(self, part: Part) -> Question | None:
        """Send the question whether this completed part is valid."""
        ticket = part.ticket

        def build(sequence: int) -> wire.Validate:
            pairs = list(ticket.blocks), list(ticket.publications)
            return wire.Validate(wire.VERSION, sequence, ticket.epoch, *pairs, ticket.session)

        part.asked = time.monotonic()
        part.question = self._client.ask(ticket.source, build, self.settings.validate_deadline)
        return part.question

    def _conclude(self, part_id: str, part: Part, question: Question) -> None:
        """Keep the leading blocks that the source confirms."""
        ticket, reply, now = part.ticket, question.reply, time.monotonic()
        self.xfer_stats.record_read(now - part.started)
        self.xfer_stats.record_validate_seconds(now - part.asked)
        if isinstance(reply, wire.Validated) and reply.epoch == ticket.epoch:
            valid = max(0, min(reply.valid, len(ticket.blocks)))
            reason = "reallocated"
        else:
            valid = 0
            reason = "silent" if reply is None else "restarted"
        if valid < len(ticket.blocks):
            self.xfer_stats.record_validate_failure(reason)
            logger.info(
                "request %s: %d of %d blocks read from %s are valid (%s), the rest is recomputed",
                ticket.request_id,
                valid,
                len(ticket.blocks),
                ticket.source,
                reason,
            )
        self._reads.end(part_id, valid)

    # --- reads that take too long -------------------------------------------------------------------------------------

    def _abandon_overdue(self, now: float, ended: set[str]) -> None:
        """End the reads that are past their deadline; those of ``ended`` have failed just now."""
        for part_id in self._reads.find_overdue(now):
            part = self._reads.find(part_id)
            if part is None or part_id in ended:
                continue
            handles, meta = self._recving_transfers.pop(part_id, []), self._recving_metadata.pop(part_id)
            self._pending_recv_notifs.pop(part_id, None)
            logger.warning(
                "request %s: the read of %d blocks from %s is given up after %.1f s, they are recomputed%s",
                part.ticket.request_id,
                len(part.ticket.blocks),
                part.ticket.source,
                now - part.started,
                " in other blocks; its own stay out of use until the transport has ended it" if handles else "",
            )
            if handles:
                self._hold(part_id, part, meta, handles)
            self._fail(part_id, part, "overdue", quarantined=bool(handles))

    def _hold(self, part_id: str, part: Part, meta: Any, handles: Sequence[Any]) -> None:
        request_id = part.ticket.request_id
        if self._quarantine.hold(part_id, request_id, meta.remote.engine_id, handles):
            self._report.quarantined[request_id] = 1
        # Upstream keeps the connection to an engine that has an entry here.
        self._recving_metadata[_quarantined(part_id)] = meta

    def _release_quarantined(self) -> None:
        parts, requests = self._quarantine.poll()
        for part_id in parts:
            del self._recving_metadata[_quarantined(part_id)]
        for request_id in requests:
            self._report.released[request_id] = 1
            logger.info("request %s: the transport has ended the read that was given up", request_id)

    def _engines_with_inflight_transfers(self) -> set[str]:
        engines: set[str] = super()._engines_with_inflight_transfers()
        return engines | self._quarantine.engines


def _quarantined(part_id: str) -> str:
    return f"{part_id} in quarantine"
