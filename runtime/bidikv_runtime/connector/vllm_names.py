"""Every name of vLLM that the connector leans on, and why: what to look at when it moves.

The list is data. ``e2e/tests/test_vllm_versions.py`` reads the sources of each supported version and says which of
these names are gone or take other parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class VllmName:
    module: str
    name: str
    """Of a class or function; ``Class.member`` for what belongs to a class."""
    why: str
    parameters: tuple[str, ...] | None = None
    """Of a function: the parameters that we pass or, overriding it, receive, in order. None for anything else."""


_TABLE: Final = """
vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector NixlBaseConnector
    __init__(vllm_config, role, kv_cache_config)  called past NixlPullConnector's, which builds upstream's sides
    build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)  ours takes its place
    build_kv_connector_stats(data)                ours takes its place
    get_kv_connector_stats()                      ours takes its place
vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector NixlPullConnector
    start_load_kv(forward_context)                hands the step's metadata to the worker side
vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler
    NixlPullConnectorScheduler                    keeps the handshake listener
vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler NixlBaseConnectorScheduler
    __init__(vllm_config, engine_id, kv_cache_config)  our scheduler side calls it
    set_xfer_handshake_metadata(metadata)         the workers have registered their memory, maybe anew
    transfer_tp_size                              named to readers in every answer
    side_channel_host                             named to readers in every answer
    side_channel_port                             named to readers in every answer
    block_size                                    tokens per block
vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker NixlPullConnectorWorker
    __init__(vllm_config, engine_id, kv_cache_config)  our worker side calls it
    start_load_kv(metadata)                       posts the reads
    _read_blocks_for_req(req_id, meta)            posts one read, maybe from the handshake's callback
vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker NixlBaseConnectorWorker
    _pop_done_transfers(transfers)                holds a completed read back until it is validated
    get_transfer_results()                        ours reports requests in place of parts
    _nixl_handshake(host, port, remote_tp_size, expected_engine_id)  a quick look at the host comes before it
    register_kv_caches(kv_caches)                 the transport is known after it
    shutdown()                                    transfers in quarantine end first
    _recving_transfers                            transfer handles by read
    _recving_metadata                             forgotten with an abandoned read
    _recv_failures                                reads that have failed
    _pending_recv_notifs                          forgotten with an abandoned read
    _invalid_block_ids                            how blocks that did not validate are named to vLLM
    _remote_agents                                which engines have shaken hands
    _registered_descs                             the bandwidth probe's buffer is released with the others
    _mixed_mem_types                              no bandwidth probe then
    region_mem_types                              kind of memory of the probe's buffer
    device_id                                     device of the probe's buffer
    dst_xfer_side_handles                         a peer's prepared descriptors, for the probe
    nixl_wrapper                                  replaced by an agent that sends no notifications
    nixl_backends                                 what was configured
    xfer_stats                                    replaced by our statistics
vllm.distributed.nixl_utils
    NixlWrapper  NIXL's agent class, whose configuration is corrected; None without NIXL
vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata NixlConnectorMetadata
    add_new_req_to_recv(request_id, local_block_ids, kv_transfer_params, local_num_computed_blocks)  one part of a read
    reqs_to_recv                                  the reads of a step
    scheduler_clock                               upstream's workers expect it
vllm.distributed.kv_transfer.kv_connector.v1.base KVConnectorWorkerMetadata
    aggregate(other)                              what the workers say with a step
vllm.distributed.kv_transfer.kv_connector.v1.base KVConnectorTransferResults
    finished_recving                              requests whose read has ended
    failed_recving                                requests that begin anew
vllm.distributed.kv_transfer.kv_connector.v1.base KVConnectorBase_V1
    build_connector_worker_meta()                 carries the workers' report
    requires_kv_delivery                          false for us
    bind_gpu_block_pool(gpu_block_pool)           gives us the block pool
    reset_cache()                                 part of a reset of the prefix cache
vllm.v1.outputs KVConnectorOutput
    kv_connector_worker_meta                      where the workers' report arrives
vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats NixlKVConnectorStats
    reset()                                       ours extends it
    is_empty()                                    ours extends it
    reduce()                                      ours extends it
vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats NixlPromMetrics
    __init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)  ours extends it
    observe(transfer_stats_data, engine_idx)      ours extends it
vllm.distributed.kv_transfer.kv_connector.v1.metrics KVConnectorPromMetrics
    _counter_cls                                  makes our counters
    _gauge_cls                                    makes our gauges
    _histogram_cls                                makes our histograms
vllm.v1.core.block_pool BlockPool
    get_new_blocks(num_blocks)  the one place that hands blocks out; it calls the re-use watchers first
    _notify_reuse(blocks)                         un-publishes, inside get_new_blocks and on a reset
    touch(blocks)  one more reference: with unpin_blocks it sets a re-use watcher; quarantine
    unpin_blocks(blocks, on_reuse)                sets the re-use watcher
    free_blocks(ordered_blocks)                   ends a quarantine
    evict_blocks(block_ids)                       KV of earlier weights is found no more
    get_cached_block(block_hash, kv_cache_group_ids)  how much of a prompt is cached on arrival
    blocks                                        blocks by id
    hash_block_size                               tokens per block hash
    free_block_queue                              replaced by one with tiers, which knows how many blocks are free
vllm.v1.core.kv_cache_utils FreeKVCacheBlockQueue
    popleft()                                     the tiered queue has it
    popleft_n(n)                                  the tiered queue has it
    remove(block)                                 the tiered queue has it
    append(block)                                 the tiered queue has it
    append_n(blocks)                              the tiered queue has it
    prepend_n(blocks)                             the tiered queue has it
    get_all_free_blocks()                         the tiered queue has it
vllm.v1.core.kv_cache_utils KVCacheBlock
    ref_cnt                                       whether a block is free
    block_id                                      names a block
vllm.v1.core.kv_cache_utils
    generate_block_hash_extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)  part of a tail's hash
    hash_block_tokens(hash_function, parent_block_hash, curr_block_token_ids, extra_keys)  hashes a prompt's tail
    resolve_block_hashes(block_hashes, hash_block_size, block_size)  block hashes for our block size
vllm.utils.hashing
    get_hash_fn_by_name(hash_fn_name)             hashes a prompt's tail
vllm.v1.request Request
    num_computed_tokens                           what was scheduled
    num_in_flight_tokens                          of it, what steps have not ended yet
    num_tokens                                    prompt and output
    num_prompt_tokens                             what is left to compute, and the reported size of a turn
    num_preemptions                               whether part of the answer may be out already
    block_hashes                                  content addresses
    kv_transfer_params                            sources and hints
    lora_request                                  adapters scope the hashes
    skip_reading_prefix_cache                     such a request must compute everything
    structured_output_request                     carries a refusal
vllm.v1.request RequestStatus
    FINISHED_ABORTED                              no hand-over follows
    FINISHED_ERROR                                a refused request is no turn of its session
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR         how a refused request ends
vllm.v1.structured_output.request StructuredOutputRequest
    _grammar                                      an exception there ends the request
vllm.v1.core.sched.output SchedulerOutput
    scheduled_cached_reqs                         blocks given to requests under way
vllm.v1.core.sched.output CachedRequestData
    new_block_ids                                 blocks given to requests under way
    resumed_req_ids                               requests that were admitted again
vllm.v1.core.sched.scheduler Scheduler
    _handle_blocked_waiting_request(request)      ends a request whose grammar is an exception
    _update_waiting_for_remote_kv(request)        caches what a read brought, recomputes the rest
vllm.v1.engine.core EngineCore
    collective_rpc(method, timeout, args, kwargs)  calls that may change weights
    sleep(level)                                  discards the weights from level 2 on
    set_weight_version(weight_version)            names new weights
vllm.config.speculative SpeculativeConfig
    uses_draft_kv_cache()                         whose KV lies in the blocks
    use_eagle_block_drop()                        the last block of a hit is dropped then
vllm.v1.kv_cache_interface
    FullAttentionSpec                             a supported KV cache
    MLAAttentionSpec                              a supported KV cache
vllm.v1.kv_cache_interface UniformTypeKVCacheSpecs
    kv_cache_specs                                layers of one kind and several sizes
"""
"""A module and, if they share one, the class; below, each name with its parameters and two spaces before the reason."""


def _parse(table: str) -> tuple[VllmName, ...]:
    names: list[VllmName] = []
    module, owner = "", ""
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            module, _, owner = line.partition(" ")
            continue
        signature, _, why = line.strip().partition("  ")
        name, bracket, parameters = signature.rstrip(")").partition("(")
        names.append(
            VllmName(
                module,
                f"{owner}.{name}" if owner else name,
                why.strip(),
                tuple(filter(None, parameters.split(", "))) if bracket else None,
            )
        )
    return tuple(names)


NAMES: Final = _parse(_TABLE)
