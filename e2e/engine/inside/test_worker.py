"""The worker over vLLM's own code, with a NIXL agent and sources that do what the test says."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from bidikv_runtime.connector import wire
from bidikv_runtime.connector.agent import ReadingAgent
from bidikv_runtime.connector.metadata import VerifiedReadMetadata, WorkerReport
from bidikv_runtime.connector.reads import Reads
from bidikv_runtime.connector.settings import parse_settings
from bidikv_runtime.connector.sources import Source
from bidikv_runtime.connector.stats import VerifiedReadStats
from bidikv_runtime.connector.ticket import ReadReport, Ticket, build_part_id
from bidikv_runtime.connector.transfer_quarantine import TransferQuarantine
from bidikv_runtime.connector.transport import TransportInfo
from bidikv_runtime.connector.worker import VerifiedReadWorker

A, B = Source("10.0.0.1", 5700), Source("10.0.0.2", 5700)
ALL = 99


class Agent:
    """NIXL: a transfer is under way until the test sets its state."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.released: list[str] = []

    def check_xfer_state(self, handle: str) -> str:
        return self.states[handle]

    def get_xfer_telemetry(self, handle: str) -> Any:
        return SimpleNamespace(totalBytes=1000, descCount=4, xferDuration=2_000_000, postDuration=10)

    def release_xfer_handle(self, handle: str) -> None:
        self.released.append(handle)


class Answer:
    """A question about a part, answered as the test has it by now."""

    def __init__(self, source: Source, epoch: int, valid: Mapping[Source, int | None]) -> None:
        self._source, self._epoch, self._valid = source, epoch, valid

    @property
    def open(self) -> bool:
        return self._valid.get(self._source, ALL) is None

    @property
    def reply(self) -> wire.Validated:
        valid = self._valid.get(self._source, ALL)
        assert valid is not None
        return wire.Validated(1, self._epoch, valid)


class Client:
    """Sources: how many blocks each confirms, by default all; None while it has not answered."""

    def __init__(self) -> None:
        self.valid: dict[Source, int | None] = {}

    def ask(self, source: Source, build: Callable[[int], wire.Validate], seconds: float) -> Answer:
        return Answer(source, build(1).epoch, self.valid)

    def poll(self) -> None:
        pass

    def wait(self, questions: Sequence[Any], seconds: float) -> None:
        pass


class Worker(VerifiedReadWorker):
    """As after ``register_kv_caches``; what upstream's constructor needs a model for is set by hand."""

    def __init__(self) -> None:
        self.agent, self.sources = Agent(), Client()
        self._client: Any = self.sources
        self.settings = parse_settings({}, {}, "10.0.0.9")
        self.nixl_wrapper = ReadingAgent(self.agent)
        self.xfer_stats = VerifiedReadStats()
        self._reads, self._quarantine = Reads(), TransferQuarantine(self.nixl_wrapper)
        self._report, self._looked, self._bandwidths = WorkerReport(), 0.0, {}
        self._recving_metadata: dict[str, Any] = {}
        self._recving_transfers: defaultdict[str, list[str]] = defaultdict(list)
        self._recv_failures: set[str] = set()
        self._pending_recv_notifs: dict[str, Any] = {}
        self._failed_recv_reqs: queue.Queue[str] = queue.Queue()
        self._invalid_block_ids: queue.Queue[set[int]] = queue.Queue()
        self._ready_requests: queue.Queue[Any] = queue.Queue()
        self._replicated_pcp_done_sending: set[str] = set()
        self._reqs_to_process: set[str] = set()
        self._failed_remote_engines: set[str] = set()
        self._reqs_to_send: dict[str, float] = {}
        self._physical_blocks_per_logical_kv_block, self.pcp_rank, self.tp_rank = 1, 0, 0
        self._is_hma_required = self.use_host_buffer = self.enable_permute_local_kv = False
        self.enable_heterogeneous_attn_post_process = self.use_mla = False
        self.transfer_topo = SimpleNamespace(
            get_engine_info=lambda engine: SimpleNamespace(remote_block_size=16, remote_physical_blocks_per_logical=1),
            block_size_ratio=lambda size: 1,
        )
        self.hung: set[str] = set()

    def _get_new_notifs(self) -> set[str]:
        return set()

    def _cleanup_remote_engines(self) -> None:
        pass

    def _sync_device_after_direct_recv(self, done: set[str]) -> None:
        pass

    def _send_heartbeats(self, metadata: Any) -> None:
        pass

    def _log_failure(self, **context: Any) -> None:
        pass

    def read(self, request_id: str, *lengths: int) -> None:
        """A request reads ``lengths`` blocks from A and B; its blocks here are 100, 101, ..."""
        metadata, offset = VerifiedReadMetadata(), 0
        for number, length in enumerate(lengths):
            part_id, blocks = build_part_id(request_id, number), tuple(range(offset, offset + length))
            metadata.add_new_req_to_recv(
                request_id=part_id,
                local_block_ids=([100 + block for block in blocks],),
                kv_transfer_params={
                    "remote_block_ids": (list(blocks),),
                    "remote_engine_id": f"engine {number}",
                    "remote_request_id": request_id,
                    "remote_host": "10.0.0.1",
                    "remote_port": 5600,
                    "tp_size": 1,
                },
                local_num_computed_blocks=(offset,),
                awaiting_kvs=True,
            )
            metadata.tickets[part_id] = Ticket(request_id, len(lengths), offset, (A, B)[number], 7, blocks, blocks)
            offset += length
        self.start_load_kv(metadata)

    def step(self) -> tuple[set[str], set[str], set[int], WorkerReport]:
        """Finished and failed requests, invalid blocks, and the report of one step."""
        results = self.get_transfer_results()
        invalid = self.get_block_ids_with_load_errors()
        report = self.build_connector_worker_meta() or WorkerReport()
        return results.finished_recving, results.failed_recving, invalid, report

    def overdue(self, part_id: str) -> None:
        part = self._reads.find(part_id)
        assert part is not None
        part.deadline = 0.0


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    def post(self: Worker, part_id: str, meta: Any) -> None:
        """In place of upstream's: a peer that hangs is still shaking hands, others get a transfer."""
        if meta.remote.engine_id not in self.hung:
            self.agent.states[part_id] = "PROC"
            self._recving_transfers[part_id].append(part_id)

    monkeypatch.setattr(NixlPullConnectorWorker, "_read_blocks_for_req", post)
    return Worker()


def states(worker: Worker, **states: str) -> None:
    worker.agent.states |= {name.replace("_", "/"): state for name, state in states.items()}


def test_a_read_ends_once_it_is_transferred_and_validated(worker: Worker) -> None:
    worker.sources.valid |= {A: None}
    worker.read("r", 3)
    assert worker.step() == (set(), set(), set(), WorkerReport())
    states(worker, r="DONE")
    finished, failed, invalid, report = worker.step()
    assert (finished, failed, invalid) == (set(), set(), set())
    [read] = report.reads
    assert replace(read, slack=0.0) == ReadReport(A, 1000, 4, 2.0)
    worker.sources.valid |= {A: 3}
    assert worker.step() == ({"r"}, set(), set(), WorkerReport())
    assert worker.agent.released == ["r"]
    assert worker.step() == (set(), set(), set(), WorkerReport())


def test_the_rest_of_a_read_that_is_not_valid_is_recomputed(worker: Worker) -> None:
    worker.sources.valid |= {A: 1}
    worker.read("r", 3)
    states(worker, r="DONE")
    finished, failed, invalid, _ = worker.step()
    assert (finished, failed, invalid) == ({"r"}, set(), {101, 102})


@pytest.mark.parametrize("last", ["r", "r/1"])
def test_a_request_ends_with_its_last_part(worker: Worker, last: str) -> None:
    worker.read("r", 2, 3)
    first = "r/1" if last == "r" else "r"
    worker.agent.states[first] = "DONE"
    assert worker.step()[:3] == (set(), set(), set())
    worker.agent.states[last] = "DONE"
    assert worker.step()[:3] == ({"r"}, set(), set())


def test_a_part_that_fails_keeps_what_came_before_it(worker: Worker) -> None:
    worker.read("r", 2, 3)
    states(worker, r="DONE", r_1="ERR")
    finished, failed, invalid, report = worker.step()
    assert (finished, failed, invalid) == ({"r"}, set(), {102, 103, 104})
    assert report.failed_sources == {B}


def test_a_part_is_nothing_without_the_one_before_it(worker: Worker) -> None:
    worker.read("r", 2, 3)
    states(worker, r="ERR", r_1="DONE")
    finished, failed, invalid, report = worker.step()
    assert (finished, failed, invalid) == ({"r"}, {"r"}, {100, 101, 102, 103, 104})
    assert report.failed_sources == {A}


def test_an_overdue_transfer_is_quarantined_until_it_has_ended(worker: Worker) -> None:
    worker.read("r", 2, 3)
    worker.read("s", 2)
    states(worker, r="DONE")
    assert worker.step()[0] == set()
    worker.overdue("r/1")
    finished, failed, invalid, report = worker.step()
    assert (finished, failed, invalid) == ({"r"}, {"r"}, {102, 103, 104})
    assert (report.quarantined, report.released, report.failed_sources) == ({"r": 1}, {}, {B})
    assert worker._engines_with_inflight_transfers() == {"engine 0", "engine 1"}
    assert "r/1" not in worker.agent.released

    states(worker, s="DONE")
    assert worker.step()[:2] == ({"s"}, set())
    assert "r/1" not in worker.agent.released
    busy = {meta.remote.engine_id for meta in worker._recving_metadata.values()}
    assert busy == {"engine 1"}  # by which vLLM keeps a replaced peer's connection
    states(worker, r_1="DONE")
    assert worker.step() == (set(), set(), set(), WorkerReport(released={"r": 1}))
    assert "r/1" in worker.agent.released
    assert (worker._engines_with_inflight_transfers(), worker._recving_metadata) == (set(), {})


def test_an_overdue_handshake_needs_no_quarantine_and_posts_nothing_afterwards(worker: Worker) -> None:
    worker.hung = {"engine 0"}
    worker.read("r", 2)
    worker.overdue("r")
    finished, failed, invalid, report = worker.step()
    assert (finished, failed, invalid) == ({"r"}, {"r"}, {100, 101})
    assert report == WorkerReport(failed_sources={A})
    worker.hung = set()
    worker._ready_requests.put(("r", SimpleNamespace(remote=SimpleNamespace(engine_id="engine 0"))))
    worker.start_load_kv(VerifiedReadMetadata())
    assert worker._recving_transfers == {}
    worker._failed_recv_reqs.put("r")
    assert worker.step() == (set(), set(), set(), WorkerReport())


def test_a_read_that_waits_for_its_source_is_not_overdue(worker: Worker) -> None:
    worker.sources.valid |= {A: None}
    worker.read("r", 2)
    states(worker, r="DONE")
    worker.step()
    worker.overdue("r")
    assert worker.step()[0] == set()
    worker.sources.valid |= {A: 2}
    assert worker.step()[:3] == ({"r"}, set(), set())


def test_a_failure_in_the_very_step_of_the_deadline(worker: Worker) -> None:
    worker.read("r", 2)
    worker.overdue("r")
    states(worker, r="ERR")
    finished, failed, invalid, report = worker.step()
    assert (finished, failed, invalid) == ({"r"}, {"r"}, {100, 101})
    assert report.quarantined == {}


def test_reports_of_ranks_add_up() -> None:
    read = ReadReport(A, 10, 1, 0.1)
    fine, slow = TransportInfo("UCX", "tcp", ""), TransportInfo("UCX", "efa", "", "UCX reads over EFA")
    one = WorkerReport([read], {"r": 1}, {"s": 1}, {A}, fine, {A: 2.0, B: 5.0})
    two = WorkerReport([read], {"r": 1, "t": 1}, {}, {B}, slow, {A: 3.0})
    assert one.aggregate(two) == WorkerReport([read, read], {"r": 2, "t": 1}, {"s": 1}, {A, B}, slow, {A: 2.0, B: 5.0})
    assert two.aggregate(one) == one.aggregate(two)
    assert one.aggregate(WorkerReport()) == one
