"""How vLLM's own scheduler ends requests that a connector refuses."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import FinishReason, Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from bidikv_runtime import contract
from bidikv_runtime.connector.refusal import ask_again, may_refuse, refuse
from e2e.engine.provision import MODEL_LINK

BLOCK = 4
BLOCKS = 64
STEPS = 50
"""More than the work here needs."""


class Connector:
    """As much of a connector as vLLM's scheduler asks for. Requests called ``lost...`` are refused."""

    requires_kv_delivery = False
    supports_divergent_local_hybrid_hits = False

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.finished: list[tuple[str, RequestStatus]] = []
        self.read_first: set[str] = set()
        """Requests that are read for before they are refused."""
        self.reading: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: None  # hooks that do nothing

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        self.asked.append(request.request_id)
        if request.request_id in self.read_first:
            self.read_first.discard(request.request_id)
            self.reading[request.request_id] = request
            return 3 * BLOCK, True
        if request.request_id.startswith("lost"):
            assert may_refuse(request)
            refuse(request, "3 of 900 tokens arrived")
            return None, False
        return 0, False

    def update_connector_output(self, output: Any) -> None:
        for name in output.finished_recving or ():
            ask_again(self.reading.pop(name))

    def request_finished(self, request: Any, blocks: Any) -> tuple[bool, None]:
        self.finished.append((request.request_id, request.status))
        return False, None

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return (0,)

    def has_pending_block_frees(self) -> bool:
        return False

    def has_pending_push_work(self) -> bool:
        return False

    def take_events(self) -> tuple[()]:
        return ()

    def get_external_cache_hit_sources(self, *arguments: Any) -> dict[str, int]:
        return {}


@cache
def build_config(policy: str) -> Any:
    """vLLM's configuration (it takes seconds to build)."""
    config = EngineArgs(
        model=str(MODEL_LINK),
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=128,
        max_num_seqs=2,
        scheduling_policy=policy,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    return config


class Engine:
    """vLLM's scheduler with a worker that always samples token 7."""

    def __init__(self, asynchronous: bool, policy: str) -> None:
        config = build_config(policy)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        memory = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)])
        scheduler_class = AsyncScheduler if asynchronous else Scheduler
        self.scheduler: Any = scheduler_class(config, memory, StructuredOutputManager(config), block_size=BLOCK)
        self.connector = self.scheduler.connector = Connector()
        self.scheduler.recompute_kv_load_failures = True
        self.pool = self.scheduler.kv_cache_manager.block_pool
        hash_function = get_hash_fn_by_name(contract.HASH_ALGORITHM)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(BLOCK, hash_function)
        self.free = self.pool.get_num_free_blocks()
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}

    def send(self, name: str, length: int) -> Any:
        parameters = SamplingParams(max_tokens=3, ignore_eos=True)
        request = Request(name, [len(self.tokens)] * length, parameters, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        self.tokens[name] = []
        return request

    def step(self, transfers: KVConnectorOutput | None = None) -> None:
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            names, {name: i for i, name in enumerate(names)}, [[7] for _ in names], kv_connector_output=transfers
        )
        for answers in self.scheduler.update_from_output(output, result).values():
            for answer in answers.outputs:
                self.tokens[answer.request_id] += answer.new_token_ids
                if answer.finish_reason is not None:
                    assert answer.request_id not in self.reasons, "finished twice"
                    self.reasons[answer.request_id] = answer.finish_reason

    def run(self) -> None:
        """Step until there is nothing to do, and check that nothing is left."""
        for _ in range(STEPS):
            if not self.scheduler.has_requests():
                break
            self.step()
        assert not self.scheduler.has_requests()
        assert not self.scheduler.requests
        assert not self.scheduler.deferred_waiting
        assert self.pool.get_num_free_blocks() == self.free


@pytest.fixture(params=[(True, "fcfs"), (False, "fcfs"), (True, "priority")], ids=str)
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(*request.param)


def test_a_refused_request_ends_with_an_error_and_no_token(engine: Engine) -> None:
    engine.send("lost", 30)
    engine.run()
    assert engine.tokens == {"lost": []}
    assert engine.reasons == {"lost": FinishReason.ERROR}
    assert engine.connector.asked == ["lost"]
    assert engine.connector.finished == [("lost", RequestStatus.FINISHED_ERROR)]


def test_other_requests_go_on(engine: Engine) -> None:
    for name in ("first", "lost 1", "second", "lost 2", "third", "lost 3"):
        engine.send(name, 30)
    engine.run()
    assert {name for name, reason in engine.reasons.items() if reason is FinishReason.ERROR} == {
        *("lost 1", "lost 2", "lost 3")
    }
    assert all(tokens == ([] if "lost" in name else [7] * 3) for name, tokens in engine.tokens.items())


def test_a_request_is_refused_after_a_read_that_failed(engine: Engine) -> None:
    engine.connector.read_first.add("lost")
    engine.send("other", 30)
    request = engine.send("lost", 30)
    engine.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    blocks = engine.scheduler.kv_cache_manager.get_block_ids("lost")[0]
    engine.step(KVConnectorOutput(finished_recving={"lost"}, invalid_block_ids=set(blocks[1:])))
    engine.run()
    assert engine.connector.asked.count("lost") == 2
    assert engine.reasons == {"other": FinishReason.LENGTH, "lost": FinishReason.ERROR}
    assert engine.tokens == {"other": [7] * 3, "lost": []}


def test_a_client_may_leave_meanwhile(engine: Engine) -> None:
    engine.send("lost", 30)
    engine.step()
    engine.scheduler.finish_requests("lost", RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert engine.connector.finished == [("lost", RequestStatus.FINISHED_ABORTED)]


def test_what_has_been_answered_in_part_may_not_be_refused(engine: Engine) -> None:
    request = engine.send("answered", 30)
    assert may_refuse(request)
    while not engine.tokens["answered"]:
        engine.step()
    assert not may_refuse(request)
    engine.run()


def test_the_reason_is_the_text_of_the_error(engine: Engine) -> None:
    request = engine.send("reason", 30)
    refuse(request, "3 of 900 tokens arrived")
    assert str(request.structured_output_request.grammar) == f"{contract.HANDOVER_LOST}: 3 of 900 tokens arrived"
