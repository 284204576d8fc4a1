"""vLLM's own scheduler and block pool, and the connector's scheduler side, over a memory that remembers what it holds.

No model runs. A token's KV is a digest of the KV read at the position before it, of the token and of the weights, so
KV that was computed on a wrong or unwritten prefix is wrong itself, and so is the token that is sampled from it.
``Weights`` computes what an engine with nothing to reuse would hold and say, so every block, read and answer can be
judged.

A step is scheduled, executed and processed in three moments, and a read copies slot by slot: whatever vLLM allows to
happen in between, a test can let happen. Runs in the engine's interpreter (it imports vllm); see ``inside``.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from bidikv_runtime import contract
from bidikv_runtime.connector.metadata import WorkerReport
from e2e.engine.provision import MODEL_LINK

BLOCK = 4
VOCABULARY = 50
DRAFTS = 3
HOST = "127.0.0.1"


def _digest(*parts: Any) -> int:
    return hash(parts)  # PYTHONHASHSEED is fixed; 64 bits are plenty here


@dataclass(frozen=True)
class Prompt:
    """Tokens and all else that vLLM's block hash covers."""

    tokens: tuple[int, ...]
    salt: str | None = None
    adapter: str | None = None
    image: tuple[str, int] | None = None
    """Identifier and position of its one token, which lies in a full block of the first request that has it."""

    def extra(self, position: int) -> Any:
        """What, beside the tokens, the KV at ``position`` depends on."""
        here = self.image[0] if self.image is not None and self.image[1] == position else None
        return (self.salt, self.adapter, here) if position == 0 else here

    def followed_by(self, tokens: Sequence[int]) -> Prompt:
        return replace(self, tokens=self.tokens + tuple(tokens))


class Weights:
    """A model: what KV a prompt has under its weights, and which token comes next."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def compute(self, before: Any, token: int, extra: Any) -> int:
        return _digest(before, token, extra, self.version)

    def sample(self, content: Any) -> int:
        return _digest("sample", content) % VOCABULARY

    def contents(self, prompt: Prompt) -> list[int]:
        """The KV of every token, computed from nothing."""
        return _compute_contents(prompt, self.version)

    def continue_(self, prompt: Prompt, count: int) -> list[int]:
        """The ``count`` tokens that follow."""
        content: Any = self.contents(prompt)[-1]
        result: list[int] = []
        for position in range(len(prompt.tokens), len(prompt.tokens) + count):
            result.append(self.sample(content))
            content = self.compute(content, result[-1], prompt.extra(position))
        return result


@lru_cache(maxsize=4096)
def _compute_contents(prompt: Prompt, version: int) -> list[int]:
    weights = Weights(version)
    result: list[int] = []
    for position, token in enumerate(prompt.tokens):
        result.append(weights.compute(result[-1] if result else None, token, prompt.extra(position)))
    return result


@dataclass
class Turn:
    """One request as its client sees it."""

    request: Any
    prompt: Prompt
    weights: Weights
    """Of the time at which it was sent."""
    answer: list[int] = field(default_factory=list)
    finished: bool = False


@dataclass
class _Sequence:
    """A request in the worker."""

    prompt: Prompt
    tokens: list[int]
    computed: int
    table: list[int]
    drafts: list[int] = field(default_factory=list)


@dataclass
class Copy:
    """One part of a read: blocks of another engine into blocks of this one, ``done`` slots of them so far."""

    part: str
    source: ShadowEngine
    epoch: int
    remote: list[int]
    publications: list[int]
    local: list[int]
    ticket: Any
    source_memory: list[list[Any]]
    """The source's memory when the read began: what a restarted source holds is elsewhere."""
    done: int = 0

    @property
    def complete(self) -> bool:
        return self.done == len(self.local) * BLOCK


@dataclass
class Step:
    """A step between its scheduling and the processing of its output."""

    output: Any
    tables: dict[str, list[int]]
    """Block table of each request in it."""
    fresh: set[str]
    """Requests that begin or resume with it: the worker knows nothing of their positions before."""
    result: ModelRunnerOutput | None = None
    written: set[int] = field(default_factory=set)
    """Blocks that it wrote to, once it has run."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class ShadowEngine:
    """One engine. ``engines`` holds all of them by engine id, so that a read finds its source."""

    def __init__(
        self,
        name: str,
        engines: dict[str, ShadowEngine],
        weights: Weights,
        *,
        blocks: int = 16,
        asynchronous: bool = False,
        drafts: bool = False,
        policy: str = "fcfs",
        budget: int = 12,
        settings: dict[str, Any] | None = None,
        choose: Callable[[int], int] = lambda bound: 0,
    ) -> None:
        self.name, self.engines, self.weights, self.choose = name, engines, weights, choose
        self.asynchronous, self.drafts = asynchronous, drafts
        self.lookup_port = free_port()
        self.memory: list[list[Any]] = [[None] * BLOCK for _ in range(blocks)]
        self.steps: deque[Step] = deque()
        self.turns: dict[str, Turn] = {}
        self.reads: dict[str, list[Copy]] = {}
        self.truth: dict[bytes, tuple[Prompt, int]] = {}
        """By block hash: a prompt that has it, and the block's number in it."""
        self.abandoned: dict[str, list[Copy]] = {}
        """Reads that took too long: the transport may still write."""
        self.accepted = self.rejected = self.refused = 0
        self._sequences: dict[str, _Sequence] = {}
        self._numbers = 0
        self._results: list[tuple[str, list[int], bool]] = []
        """Reads that ended and were not reported yet: request, its invalid blocks, failed in transport."""
        self._quarantined: dict[str, int] = {}
        self._released: dict[str, int] = {}
        config = self._configure(policy, budget, settings or {})
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.async_scheduling = asynchronous
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)])
        scheduler_class = AsyncScheduler if asynchronous else Scheduler
        self.scheduler = scheduler_class(config, cache, StructuredOutputManager(config), block_size=BLOCK)
        hash_function = get_hash_fn_by_name(contract.HASH_ALGORITHM)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK, hash_function)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.connector: Any = self.scheduler.get_kv_connector()
        engines[self.connector.engine_id] = self

    def _configure(self, policy: str, budget: int, settings: dict[str, Any]) -> Any:
        transfer = contract.kv_transfer_config(fabric="TCP", lookup_port=self.lookup_port)
        # Patient, so that a busy machine cannot turn an answer into a silence; no state port.
        transfer["kv_connector_extra_config"] |= {
            "bidikv_minimum_tokens": BLOCK,
            "bidikv_inline_wait_ms": 100,
            "bidikv_lookup_deadline_ms": 5000,
            "bidikv_state_port": 0,
            "bidikv_cost_model": "AlwaysPull",
            "bidikv_recompute_limit_tokens": 2 * BLOCK,
        } | settings
        drafting = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 2}
        return EngineArgs(
            model=str(MODEL_LINK),
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=64,
            max_num_batched_tokens=budget,
            max_num_seqs=8,
            enable_prefix_caching=True,
            prefix_caching_hash_algo=contract.HASH_ALGORITHM,
            scheduling_policy=policy,
            kv_transfer_config=transfer,
            speculative_config=drafting if self.drafts else None,
        ).create_engine_config()

    # --- what a client does -------------------------------------------------------------------------------------------

    @property
    def source(self) -> str:
        return f"{HOST}:{self.lookup_port}"

    @property
    def index(self) -> Any:
        return self.connector.connector_scheduler.index

    def send(
        self,
        prompt: Prompt,
        max_tokens: int,
        sources: Sequence[str] = (),
        *,
        prompt_logprobs: bool = False,
        priority: int = 0,
        parameters: dict[str, Any] | None = None,
    ) -> Turn:
        """Send one request; its answer grows while the engine steps."""
        self._numbers += 1
        transfer = {contract.SOURCES_PARAM: list(sources)} | (parameters or {}) if sources or parameters else None
        adapter = prompt.adapter and LoRARequest(prompt.adapter, 1 + len(prompt.adapter), f"/adapters/{prompt.adapter}")
        features = []
        if prompt.image is not None:
            place = PlaceholderRange(offset=prompt.image[1], length=1)
            features = [MultiModalFeatureSpec(None, "image", prompt.image[0], place)]
        request = Request(
            f"{self.name}-{self._numbers}",
            list(prompt.tokens),
            SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                prompt_logprobs=1 if prompt_logprobs else None,
                extra_args={contract.KV_TRANSFER_PARAMS: transfer} if transfer else None,
            ),
            None,
            cache_salt=prompt.salt,
            lora_request=adapter or None,
            mm_features=features,
            priority=priority,
            block_hasher=self._hasher,
        )
        request.mm_features = []  # hashed by now; there is no encoder to run
        turn = Turn(request, prompt, self.weights)
        self.turns[request.request_id] = turn
        self._learn(turn)
        self.scheduler.add_request(request)
        return turn

    def abort(self, turn: Turn) -> None:
        """The client leaves, or the front end has found a stop string."""
        self.scheduler.finish_requests(turn.request.request_id, RequestStatus.FINISHED_ABORTED)
        turn.finished = True

    def reset(self, running: bool) -> bool:
        """vLLM's reset of the prefix cache; with ``running``, requests are preempted for it. Whether it succeeded."""
        try:
            return bool(self.scheduler.reset_prefix_cache(running))
        except RuntimeError:  # blocks are still in use by reads, or by a step under way
            return False

    def change_weights(self, name: str | None) -> None:
        """Another model from now on, as far as the engine core tells its connector; ``name`` is the weight version."""
        self.weights = Weights(self.weights.version + 1)
        self.connector.connector_scheduler.weights_changed()
        if name is not None:
            self.connector.connector_scheduler.weights_named(name)

    def forget_refusals(self) -> None:
        """As if the time had passed for which refusals are remembered."""
        self.connector.connector_scheduler._client.forget_refusals()

    # --- one step in its three moments --------------------------------------------------------------------------------

    @property
    def may_schedule(self) -> bool:
        """As vLLM's engine core: one step at a time, or two with asynchronous scheduling."""
        wanted = self.scheduler.has_requests() or self._released  # the latter waits for the next request in vLLM
        return bool(wanted) and len(self.steps) < (2 if self.asynchronous else 1)

    def schedule(self) -> None:
        """Schedule a step; its reads begin."""
        output = self.scheduler.schedule()
        tables = {
            request_id: list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0])
            for request_id in output.num_scheduled_tokens
        }
        fresh = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        self.steps.append(Step(output, tables, fresh))
        metadata = output.kv_connector_metadata
        for part, meta in metadata.reqs_to_recv.items():
            ticket = metadata.tickets[part]
            source = self.engines[meta.remote.engine_id]
            copy = Copy(
                part,
                source,
                ticket.epoch,
                list(meta.remote.block_ids[0]),
                list(ticket.publications),
                list(meta.local_block_ids[0]),
                ticket,
                source.memory,
            )
            assert len(copy.remote) == len(copy.local) == len(copy.publications)
            self.reads.setdefault(ticket.request_id, []).append(copy)

    @property
    def may_execute(self) -> bool:
        return any(step.result is None for step in self.steps)

    def execute(self) -> None:
        """The worker runs the oldest step that has not run yet."""
        step = next(step for step in self.steps if step.result is None)
        output = step.output
        for request_id in output.finished_req_ids:
            self._sequences.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            prompt = self.turns[new.req_id].prompt
            self._sequences[new.req_id] = _Sequence(
                prompt, list(new.prompt_token_ids), new.num_computed_tokens, list(new.block_ids[0])
            )
        cached = output.scheduled_cached_reqs
        for number, request_id in enumerate(cached.req_ids):
            sequence = self._sequences[request_id]
            blocks = cached.new_block_ids[number]
            if request_id in cached.resumed_req_ids:
                sequence.table = list(blocks[0])
                sequence.computed = cached.num_computed_tokens[number]
                sequence.tokens = list(cached.all_token_ids[request_id])
            elif blocks is not None:
                sequence.table += blocks[0]
            assert sequence.computed <= cached.num_computed_tokens[number]
            assert sequence.computed == cached.num_computed_tokens[number] or (self.asynchronous and self.drafts)
        self._write(step)
        sampled = [self._sample(request_id, output) for request_id in output.num_scheduled_tokens]
        names = list(output.num_scheduled_tokens)
        step.result = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)

    def _write(self, step: Step) -> None:
        """KV of the step's tokens by position: a request may attend to what another one writes in this step."""
        rows: list[tuple[int, str]] = []
        for request_id, count in step.output.num_scheduled_tokens.items():
            sequence = self._sequences[request_id]
            rows += [(position, request_id) for position in range(sequence.computed, sequence.computed + count)]
            self._fill_drafts(sequence, step.output.scheduled_spec_decode_tokens.get(request_id))
        written: set[tuple[int, int]] = set()
        for position, request_id in sorted(rows):
            sequence = self._sequences[request_id]
            block, slot = sequence.table[position // BLOCK], position % BLOCK
            assert (block, slot) not in written, "two requests write one slot in one step"
            written.add((block, slot))
            step.written.add(block)
            tokens = sequence.tokens + sequence.drafts
            before = self._read(sequence, position - 1) if position else None
            self.memory[block][slot] = self.weights.compute(before, tokens[position], sequence.prompt.extra(position))

    def _read(self, sequence: _Sequence, position: int) -> Any:
        content = self.memory[sequence.table[position // BLOCK]][position % BLOCK]
        return object() if content is None else content  # unwritten memory is like nothing else

    def _fill_drafts(self, sequence: _Sequence, scheduled: list[int] | None) -> None:
        """Drafts that the scheduler leaves to the worker (-1, asynchronous scheduling) are made here."""
        if scheduled is None:
            sequence.drafts = []
        elif scheduled and scheduled[0] == -1:
            sequence.drafts = self._draft(sequence)[: len(scheduled)]
        else:
            sequence.drafts = list(scheduled)

    def _draft(self, sequence: _Sequence) -> list[int]:
        drafts = self.weights.continue_(replace(sequence.prompt, tokens=tuple(sequence.tokens)), DRAFTS)
        right = self.choose(DRAFTS + 1)
        return [token if i < right else (token + 1) % VOCABULARY for i, token in enumerate(drafts)]

    def _sample(self, request_id: str, output: Any) -> list[int]:
        """Tokens sampled for a request, accepted drafts first; none in the middle of its prefill."""
        sequence = self._sequences[request_id]
        end = sequence.computed + output.num_scheduled_tokens[request_id]
        drafts = sequence.drafts
        if end < len(sequence.tokens):
            sequence.computed = end
            return []
        position = len(sequence.tokens) - 1
        sampled = [self.weights.sample(self._read(sequence, position))]
        for draft in drafts[: end - len(sequence.tokens)]:
            if draft != sampled[-1]:
                break
            position += 1
            sampled.append(self.weights.sample(self._read(sequence, position)))
        sequence.computed = position + 1
        sequence.tokens += sampled
        sequence.drafts = []
        return sampled

    @property
    def may_process(self) -> bool:
        return bool(self.steps) and self.steps[0].result is not None

    def process(self) -> None:
        """The scheduler takes the oldest step's output, and what became of reads."""
        step = self.steps.popleft()
        assert step.result is not None
        step.result.kv_connector_output = self._report()
        outputs = self.scheduler.update_from_output(step.output, step.result)
        for group in outputs.values():
            for output in group.outputs:
                turn = self.turns[output.request_id]
                turn.answer += output.new_token_ids
                turn.finished = turn.finished or output.finish_reason is not None
                self.refused += output.finish_reason == FinishReason.ERROR
        if self.drafts and not self.asynchronous and step.output.num_scheduled_tokens:
            names = [name for name in step.output.num_scheduled_tokens if name in self._sequences]
            drafts = [self._draft(self._sequences[name]) for name in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
        for turn in self.turns.values():
            self._learn(turn)

    def _learn(self, turn: Turn) -> None:
        prompt = replace(turn.prompt, tokens=tuple(turn.request.all_token_ids))
        for number, content in enumerate(turn.request.block_hashes):
            self.truth.setdefault(bytes(content), (prompt, number))

    # --- reads --------------------------------------------------------------------------------------------------------

    def copy(self, request_id: str, slots: int) -> None:
        """Let the transport move some slots of the first part that is not complete."""
        self._move(next(part for part in self.reads[request_id] if not part.complete), slots)

    def copy_all(self, request_id: str) -> None:
        """Let the transport move all that is left of a read."""
        for part in self.reads[request_id]:
            self._move(part, len(part.local) * BLOCK)

    def _move(self, part: Copy, slots: int) -> None:
        for _ in range(min(slots, len(part.local) * BLOCK - part.done)):
            block, slot = divmod(part.done, BLOCK)
            self.memory[part.local[block]][slot] = part.source_memory[part.remote[block]][slot]
            part.done += 1

    def may_validate(self, request_id: str) -> bool:
        return all(part.complete for part in self.reads[request_id])

    def validate(self, request_id: str) -> None:
        """Ask the sources whether what was read is still published; only the leading valid blocks count."""
        parts = self.reads.pop(request_id)
        assert all(part.complete for part in parts), "validation comes after the read"
        valid = 0
        for part in parts:
            index = part.source.index
            count = index.validate(part.remote, part.publications) if index.epoch == part.epoch else 0
            valid += count
            if count < len(part.local):
                break
        self._judge(request_id, parts, valid)
        self._results.append((request_id, [block for part in parts for block in part.local][valid:], False))

    def fail(self, request_id: str) -> None:
        """The transport gives up, somewhere in the middle."""
        self.reads.pop(request_id)
        self._results.append((request_id, [], True))

    def abandon(self, request_id: str) -> None:
        """The read has taken too long. Its request goes on elsewhere, its transfers go on, too."""
        self.abandoned[request_id] = self.reads.pop(request_id)
        self._results.append((request_id, [], True))
        self._quarantined[request_id] = 1

    def end_abandoned(self, request_id: str) -> None:
        """All that was left of an abandoned read is written, at last."""
        for part in self.abandoned.pop(request_id):
            self._move(part, len(part.local) * BLOCK)
        self._released[request_id] = 1

    def _judge(self, request_id: str, parts: Sequence[Copy], valid: int) -> None:
        """What the protocol promises: an accepted block holds the KV of the reader's own tokens."""
        turn = self.turns[request_id]
        if turn.weights is not self.weights:
            return  # its KV is of two models, here as in vLLM
        first = self._first_block(turn, parts)
        contents = self.weights.contents(turn.prompt.followed_by(turn.request.output_token_ids))
        local = [block for part in parts for block in part.local]
        for number, block in enumerate(local[:valid]):
            start = (first + number) * BLOCK
            expected = contents[start : start + BLOCK]  # the last block may be filled in part
            right = self.memory[block][: len(expected)] == expected
            assert right, f"{request_id} accepts block {first + number} with foreign KV"
        self.accepted += valid
        self.rejected += len(local) - valid

    def _first_block(self, turn: Turn, parts: Sequence[Copy]) -> int:
        table = self.scheduler.kv_cache_manager.get_block_ids(turn.request.request_id)[0]
        return int(table.index(parts[0].local[0]))

    def _report(self) -> KVConnectorOutput | None:
        if not (self._results or self._released):
            return None
        meta = WorkerReport(quarantined=self._quarantined, released=self._released)
        self._quarantined, self._released = {}, {}
        report = KVConnectorOutput(finished_recving=set(), kv_connector_worker_meta=meta)
        for request_id, invalid, failed in self._results:
            assert report.finished_recving is not None
            report.finished_recving.add(request_id)
            report.invalid_block_ids |= set(invalid)
            if failed:
                report.failed_recving.add(request_id)
        self._results = []
        return report

    # --- what must hold -----------------------------------------------------------------------------------------------

    def published(self) -> Iterator[tuple[bytes, int]]:
        """Hash and block of everything that a lookup would find."""
        for content in self.truth:
            for run in self.index.lookup([content]):
                yield content, run.blocks[0]

    def check(self) -> None:
        """Each published block holds what its hash says and nothing is about to write to it."""
        written = self._under_way()
        for content, block in self.published():
            prompt, number = self.truth[content]
            expected = self.weights.contents(prompt)[number * BLOCK : (number + 1) * BLOCK]
            assert self.memory[block] == expected, f"{self.name} publishes block {block} with foreign KV"
            assert block not in written, f"{self.name} publishes block {block} while it is written to"

    def _under_way(self) -> set[int]:
        """Blocks that a step or read under way has written to or may yet write to."""
        reads = [*self.reads.values(), *self.abandoned.values()]
        blocks = {block for parts in reads for part in parts for block in part.local}
        positions = {request_id: sequence.computed for request_id, sequence in self._sequences.items()}
        for step in self.steps:
            blocks |= step.written
            if step.result is not None:
                continue
            starts = {new.req_id: new.num_computed_tokens for new in step.output.scheduled_new_reqs}
            cached = step.output.scheduled_cached_reqs
            starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            for request_id, count in step.output.num_scheduled_tokens.items():
                start = starts[request_id] if request_id in step.fresh else positions[request_id]
                table = step.tables[request_id]
                blocks |= {table[position // BLOCK] for position in range(start, start + count)}
                # All of its drafts may be rejected: the next step then begins as much earlier.
                rejected = len(step.output.scheduled_spec_decode_tokens.get(request_id, ()))
                positions[request_id] = start + count - rejected
        return blocks

    @property
    def idle(self) -> bool:
        return not (self.scheduler.has_requests() or self.steps or self.reads or self.abandoned or self._released)

    def check_idle(self) -> None:
        """Nothing leaks: with no request left, every block is free, and nothing is reported as left to do."""
        assert self.pool.get_num_free_blocks() == len(self.memory) - 1
        report = self.connector.connector_scheduler._reporter.build()
        assert (report.requests, report.queued_tokens, report.free_blocks) == (0, 0, 1.0)

    def stop(self) -> None:
        self.scheduler.shutdown()
