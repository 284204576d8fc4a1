"""The connector's worker side: upstream's NIXL reads, each confirmed by its source before vLLM may use it.

Every rank reads its own shard and asks for itself. A rank that must discard blocks names them to vLLM as invalid, which
cuts the request back to the leading blocks that every rank could confirm and recomputes the rest.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.nixl_utils import NixlWrapper
from vllm.logger import init_logger

from bidikv_runtime.connector import wire
from bidikv_runtime.connector.agent import BackendError, QuietAgent, agent_settings, explain_missing_backend
from bidikv_runtime.connector.lookup_client import LookupClient, Question
from bidikv_runtime.connector.metadata import Ticket, VerifiedReadMetadata
from bidikv_runtime.connector.settings import Settings
from bidikv_runtime.connector.stats import VerifiedReadStats

logger = init_logger("vllm.bidikv.worker")

SLOW_READ = 10.0
"""Seconds after which a read that is still under way is logged."""


@dataclass
class Loading:
    """One read of this rank."""

    ticket: Ticket
    started: float
    warn_at: float
    question: Question | None = None


class VerifiedReadWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any, settings: Settings) -> None:
        affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        try:
            with agent_settings(NixlWrapper, settings.progress_delay_us):
                super().__init__(vllm_config, engine_id, kv_cache_config)
        except Exception as error:
            backends = vllm_config.kv_transfer_config.get_from_extra_config("backends", ["UCX"])
            if NixlWrapper is not None and (reason := explain_missing_backend(NixlWrapper, backends)) is not None:
                raise BackendError(reason) from error
            raise
        if affinity is not None:
            os.sched_setaffinity(0, affinity)  # on CPU, upstream binds the whole worker to the last core of each node
        self.settings = settings
        self.nixl_wrapper: Any = QuietAgent(self.nixl_wrapper)
        self.xfer_stats = VerifiedReadStats()
        self._client = LookupClient(settings.silent_period)
        self._loading: dict[str, Loading] = {}

    def shutdown(self) -> None:
        super().shutdown()
        if hasattr(self, "_client"):
            self._client.close()

    def start_load_kv(self, metadata: VerifiedReadMetadata) -> None:
        """Post this step's reads (and those whose handshake has ended since)."""
        now = time.monotonic()
        for request_id, ticket in metadata.tickets.items():
            self._loading[request_id] = Loading(ticket, now, now + SLOW_READ)
        super().start_load_kv(metadata)

    def get_transfer_results(self) -> Any:
        """Upstream's results; a read that failed before its validation is counted here, whatever the cause."""
        results = super().get_transfer_results()
        for request_id in results.finished_recving:
            if self._loading.pop(request_id, None) is not None and request_id in results.failed_recving:
                self.xfer_stats.record_validate_failure("read_failed")
        return results

    def _nixl_handshake(self, host: str, port: int, *arguments: Any, **options: Any) -> Any:
        """Upstream's handshake, which waits five seconds for a host that is gone, behind a short connection attempt."""
        with socket.create_connection((host, port), timeout=self.settings.connect_deadline):
            pass
        return super()._nixl_handshake(host, port, *arguments, **options)

    def _pop_done_transfers(self, transfers: dict[str, list[Any]]) -> tuple[set[str], set[str]]:
        """Hold back reads that have completed until their source has confirmed them."""
        if transfers is not self._recving_transfers:
            unheld: tuple[set[str], set[str]] = super()._pop_done_transfers(transfers)
            return unheld
        self._warn_about_slow_reads()
        done, failed = super()._pop_done_transfers(transfers)
        completed = {
            request_id: self._loading[request_id]
            for request_id in done
            if request_id in self._loading and request_id not in failed and request_id not in self._recv_failures
        }
        questions = [question for loading in completed.values() if (question := self._ask(loading)) is not None]
        if questions:
            self._client.poll()
            self._client.wait(questions, self.settings.validate_wait)
        for request_id, loading in completed.items():
            if loading.question is None or loading.question.open:
                done.discard(request_id)
                transfers[request_id] = []  # no handle outstanding, not done either: seen again in the next step
            else:
                self._conclude(request_id, loading, loading.question)
        return done, failed

    def _ask(self, loading: Loading) -> Question | None:
        """The question whether this completed read is valid, sent at the first call."""
        if loading.question is None:
            ticket = loading.ticket

            def build(sequence: int) -> wire.Validate:
                return wire.Validate(
                    wire.VERSION, sequence, ticket.epoch, list(ticket.blocks), list(ticket.publications)
                )

            loading.question = self._client.ask(ticket.source, build, self.settings.validate_deadline)
        return loading.question

    def _conclude(self, request_id: str, loading: Loading, question: Question) -> None:
        """Keep the confirmed leading blocks; name the others to vLLM as invalid."""
        ticket = loading.ticket
        del self._loading[request_id]
        self.xfer_stats.record_read(time.monotonic() - loading.started)
        reply = question.reply
        if isinstance(reply, wire.Validated) and reply.epoch == ticket.epoch:
            valid = max(0, min(reply.valid, len(ticket.blocks)))
            reason = "reallocated"
        else:
            valid = 0
            reason = "silent" if reply is None else "restarted"
        if valid < len(ticket.blocks):
            self.xfer_stats.record_validate_failure(reason)
            local = self._recving_metadata[request_id].local_block_ids[0]
            self._invalid_block_ids.put(set(local[valid:]))
            logger.info(
                "request %s: %d of %d blocks read from %s are valid (%s), the rest is recomputed",
                request_id,
                valid,
                len(ticket.blocks),
                ticket.source,
                reason,
            )

    def _warn_about_slow_reads(self) -> None:
        """Say once that a read is still under way, and why nobody ends it.

        Releasing a transfer in progress would be no way out: NIXL 1.5.1 over TCP then reports success, and the peer's
        data still arrives (measured: all of 32 MiB, written into memory that the reader had taken back). So the blocks
        stay with their request until the transport says that the transfer is over. The death of the peer's process
        ends it at once.
        """
        now = time.monotonic()
        for request_id, loading in self._loading.items():
            if now >= loading.warn_at:
                loading.warn_at = float("inf")
                logger.warning(
                    "request %s: the read of %d blocks from %s is still under way after %.0f s; it keeps its blocks "
                    "until the transport ends it",
                    request_id,
                    len(loading.ticket.blocks),
                    loading.ticket.source,
                    SLOW_READ,
                )
