"""The connector's scheduler side: publish what this engine holds, look up what other engines hold.

Everything here runs in vLLM's scheduler thread. Two rules make it safe:

- A block is published when its request finishes, before vLLM frees it, and carries a re-use watcher from then on: vLLM
  calls it inside ``get_new_blocks``, before the block can be written again.
- Of a finished request only those blocks are published whose tokens were computed in steps that have ended, by this
  request or by the one whose blocks it found in the prefix cache (``compute_final_tokens``).
"""

from __future__ import annotations

import os
import time
from typing import Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import resolve_block_hashes

from bidikv_runtime import contract
from bidikv_runtime.connector import wire
from bidikv_runtime.connector.compatibility import (
    compute_compatibility,
    drops_last_block,
    explain_refusal,
    validate_engine,
)
from bidikv_runtime.connector.index import PublicationIndex, compute_final_tokens
from bidikv_runtime.connector.lookup_client import LookupClient
from bidikv_runtime.connector.lookup_server import LookupServer
from bidikv_runtime.connector.metadata import Ticket, VerifiedReadMetadata, build_part_id
from bidikv_runtime.connector.reuse import Phase, Read, Reuse
from bidikv_runtime.connector.settings import Settings
from bidikv_runtime.connector.sources import Source, SourcesError, parse_sources
from bidikv_runtime.connector.stats import VerifiedReadStats

logger = init_logger("vllm.bidikv.scheduler")


class VerifiedReadScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """Replaces upstream's decisions (handles, leases, heartbeats) and keeps its handshake listener."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any, settings: Settings) -> None:
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        validate_engine(vllm_config, vllm_version, os.environ, current_platform.device_type, specs)
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.settings = settings
        self.stats = VerifiedReadStats()
        self.index = PublicationIndex()
        self._compatibility = compute_compatibility(vllm_config, vllm_version, os.environ)
        self._digest = self._compatibility.digest()
        self._drop_last = drops_last_block(vllm_config)
        self._client = LookupClient(
            settings.silent_period,
            settings.silent_period_maximum,
            explain=lambda refused: explain_refusal(self._compatibility, self.transfer_tp_size, refused),
            logger=logger,
        )
        self._pool: Any = None
        self._found: dict[str, int] = {}
        """Tokens that an unfinished request found in the local prefix cache."""
        self._reuses: dict[str, Reuse] = {}
        self._reads: dict[str, tuple[Read, list[int]]] = {}
        """Reads to be handed to the workers with this step's metadata, and the local blocks they fill."""
        self._loading: dict[str, Any] = {}
        """Requests (not aborted) whose read is under way."""
        self._reported_blocks = 0
        self._server = LookupServer(
            self.index,
            self._compatibility,
            wire.Peer(engine_id, self.side_channel_host, self.side_channel_port, self.transfer_tp_size),
            settings.lookup_host,
            settings.lookup_port + vllm_config.parallel_config.data_parallel_index,  # as vLLM does for the side channel
            logger,
        )
        logger.info("lookup port %s:%d, engine %s", settings.lookup_host, self._server.port, engine_id)

    def bind_block_pool(self, pool: Any) -> None:
        """Take the scheduler's block pool, whose re-use watchers un-publish."""
        self._pool = pool

    def clear_publications(self) -> None:
        """Forget all published blocks (weights changed, or the cache was reset)."""
        self.index.clear()

    def shutdown(self) -> None:
        self._server.stop()
        self._client.close()
        super().shutdown()

    # --- source -------------------------------------------------------------------------------------------------------

    def request_finished(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Publish the request's full blocks. Never delays their freeing: they stay readable until they are re-used."""
        self._reuses.pop(request.request_id, None)
        found = self._found.pop(request.request_id, 0)
        if self._loading.pop(request.request_id, None) is not None:
            # Aborted during the read: num_computed_tokens already counts tokens whose KV has not arrived.
            return False, None
        final = compute_final_tokens(
            found, request.num_computed_tokens, request.num_in_flight_tokens, request.num_tokens
        )
        hashes = self._hashes(request)
        count = min(final // self.block_size, len(block_ids[0]), len(hashes))
        if count:
            new = self.index.publish([bytes(hashes[i]) for i in range(count)], block_ids[0][:count])
            if new:
                self._watch(new)
        return False, None

    def _watch(self, block_ids: list[int]) -> None:
        # touch and unpin_blocks are vLLM's way to set a watcher. They add and remove one reference; the request still
        # holds its own, so the blocks' place in the free queue is untouched.
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        self._pool.unpin_blocks(blocks, self._on_reuse)

    def _on_reuse(self, block: Any) -> None:
        self.index.unpublish((block.block_id,))

    # --- reader -------------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Nothing: upstream's parameters (handles, heartbeats) have no meaning here."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the local prefix that a source holds.

        Returns:
            ``(None, False)`` to be asked again while sources may still answer, else ``(tokens, True)`` for a read, or
            ``(0, False)``.
        """
        self._found[request.request_id] = num_computed_tokens
        if not request.kv_transfer_params or request.skip_reading_prefix_cache:
            return 0, False
        local = num_computed_tokens // self.block_size
        reuse = self._reuses.get(request.request_id)
        if reuse is None:
            reuse = self._reuses[request.request_id] = Reuse(self._sources(request), self._drop_last)
            self._start_lookup(request, reuse, local)
        elif reuse.is_outdated(local, time.monotonic()):
            self._start_lookup(request, reuse, local)
        if reuse.phase is Phase.ASKING and not self._finish_lookup(reuse, local):
            return None, False
        if reuse.phase is not Phase.MATCHED:
            return 0, False
        tokens = reuse.match(local, self._last_block(request)) * self.block_size
        if tokens < self.settings.minimum_tokens:
            reuse.settle()
            return 0, False
        return tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks for the matched tokens are allocated: hand the read to the workers with this step's metadata."""
        reuse = self._reuses.get(request.request_id)
        if not num_external_tokens or reuse is None or reuse.phase is not Phase.MATCHED:
            return
        count = num_external_tokens // self.block_size
        read = reuse.begin_read(count)
        local_blocks = blocks.get_block_ids()[0][read.first : read.first + count]
        assert len(local_blocks) == count, (read, local_blocks)
        self._reads[request.request_id] = (read, local_blocks)
        self._loading[request.request_id] = request

    def build_connector_meta(self, scheduler_output: Any) -> VerifiedReadMetadata:
        """This step's reads and their tickets."""
        metadata = VerifiedReadMetadata()
        metadata.scheduler_clock = time.perf_counter()
        for request_id, (read, local_blocks) in self._reads.items():
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
                    },
                    local_num_computed_blocks=(read.first + part.offset,),
                    awaiting_kvs=True,
                )
                metadata.tickets[part_id] = Ticket(
                    request_id, len(read.parts), part.offset, part.source, part.epoch, part.blocks, part.publications
                )
        self._reads = {}
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        """Reads that ended in every rank. vLLM has by now cut ``num_computed_tokens`` back to what validated."""
        for request_id in connector_output.finished_recving or ():
            request, reuse = self._loading.pop(request_id, None), self._reuses.get(request_id)
            if request is None or reuse is None or reuse.read is None:
                continue  # aborted during the read
            reuse.settle()
            if request_id in connector_output.failed_recving:
                for part in reuse.read.parts:
                    self._client.avoid(part.source)  # it would cost the next request as much
            expected = reuse.read.count * self.block_size
            reused = max(0, request.num_computed_tokens - reuse.read.first * self.block_size)
            self._record_load(request, reuse, reused, expected - reused)

    def get_kv_connector_stats(self) -> VerifiedReadStats | None:
        """Scheduler-side observations since the last step."""
        published = len(self.index)
        if published != self._reported_blocks:
            self._reported_blocks = published
            self.stats.record(contract.METRIC_PUBLISHED_BLOCKS, published)
        return None if self.stats.is_empty() else self.stats.clone_and_reset()

    def _record_load(self, request: Any, reuse: Reuse, reused: int, discarded: int) -> None:
        assert reuse.read is not None
        for part in reuse.read.parts:
            tokens = min(len(part.blocks) * self.block_size, reused - part.offset * self.block_size)
            if tokens > 0:
                self.stats.record(contract.METRIC_REUSED_TOKENS, tokens, str(part.source), contract.DIRECTION_UNKNOWN)
        if discarded:
            self.stats.record(contract.METRIC_DISCARDED_TOKENS, discarded)

    # --- lookup -------------------------------------------------------------------------------------------------------

    def _sources(self, request: Any) -> tuple[Source, ...]:
        try:
            return parse_sources(request.kv_transfer_params)
        except SourcesError as error:
            logger.warning("request %s reuses nothing: %s", request.request_id, error)
            return ()

    def _hashes(self, request: Any) -> Any:
        return resolve_block_hashes(request.block_hashes, self._pool.hash_block_size, self.block_size)

    def _last_block(self, request: Any) -> int:
        # At least one token is left to compute: its output is the request's next token.
        last: int = min((request.num_tokens - 1) // self.block_size, len(self._hashes(request)))
        return last

    def _start_lookup(self, request: Any, reuse: Reuse, local: int) -> None:
        """Ask all sources at once, then wait a moment in place: most answer within a millisecond."""
        last = min(self._last_block(request), local + wire.MAXIMUM_BLOCKS)
        if not reuse.sources or not reuse.may_ask or (last - local) * self.block_size < self.settings.minimum_tokens:
            reuse.settle()
            return
        answering = [source for source in reuse.sources if not self._client.is_silent(source)]
        sources = [source for source in answering if not self._client.is_refused(source)]
        if not sources:
            self.stats.record(contract.METRIC_LOOKUPS, 1, "refused" if answering else "silent")
            reuse.settle()
            return
        all_hashes = self._hashes(request)
        hashes = [bytes(all_hashes[i]) for i in range(local, last)]

        def build(sequence: int) -> wire.Lookup:
            return wire.Lookup(wire.VERSION, sequence, self._digest, hashes, self.transfer_tp_size)

        now = time.monotonic()
        questions = [self._client.ask(source, build, self.settings.lookup_deadline) for source in sources]
        reuse.start(questions, local, last - local, now)
        self._client.wait(questions, self.settings.inline_wait)

    def _finish_lookup(self, reuse: Reuse, local: int) -> bool:
        """Whether the sources' answers are decided; the request is then matched or settled."""
        self._client.poll()
        now = time.monotonic()
        result = reuse.decide(self.engine_id, local, self.settings.settle_wait, now)
        if result is None:
            return False
        self.stats.record(contract.METRIC_LOOKUPS, 1, result)
        self.stats.record(contract.METRIC_LOOKUP_SECONDS, now - reuse.started)
        return True
