"""The report as a router gets it: numbers of this moment, and sessions since the last one."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from bidikv_runtime.connector.cost import CostModel
from bidikv_runtime.connector.hints import Hints
from bidikv_runtime.connector.index import PublicationIndex
from bidikv_runtime.connector.peers import Peers
from bidikv_runtime.connector.report import MAXIMUM_REPORTED_PEERS, READERS_SECONDS, Reporter
from bidikv_runtime.connector.sources import Source
from bidikv_runtime.connector.tally import TransportTally
from bidikv_runtime.connector.transport import TransportInfo
from bidikv_runtime.connector.unread import LEAST_TOKENS
from bidikv_runtime.contract import EngineReport, SessionReport, TransportReport

BLOCK = 16
HASHES = [bytes([number]) for number in range(6)]


class Rig:
    def __init__(self, block_size: int = BLOCK) -> None:
        self.index = PublicationIndex()
        self.peers, self.transport = Peers(1.0, 60.0), TransportTally()
        self.reporter = Reporter("engine-1", self.index, block_size, "abc", self.peers, self.transport)

    def end_turn(self, session: str | None, body_bytes: int = 500) -> None:
        self.index.publish(HASHES, range(6))
        request = SimpleNamespace(num_prompt_tokens=80, num_tokens=100)
        self.reporter.end_turn(request, Hints(session, body_bytes=body_bytes), HASHES)

    def ask(self, query: str = "") -> EngineReport:
        return msgspec.json.decode(self.reporter.answer(query), type=EngineReport)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_an_engine_that_does_nothing(rig: Rig) -> None:
    assert rig.ask() == EngineReport(
        engine="engine-1",
        epoch=str(rig.index.epoch),
        sequence=0,
        compatibility="abc",
        requests=0,
        queued_tokens=0,
        prefill_tokens_per_second=0.0,
        free_blocks=1.0,
    )


def test_sessions_are_unread_only_while_a_router_asks_that_lets_others_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(block_size=LEAST_TOKENS)
    rig.reporter.bind_retention(600.0, lambda: 0)
    rig.end_turn("one")
    now = time.monotonic()
    assert rig.ask().unread_sessions == 0
    assert rig.ask("reads=0").unread_sessions == 0
    assert rig.ask("reads=1").unread_sessions == 1
    assert rig.ask("sessions=0").unread_sessions == 1
    monkeypatch.setattr(time, "monotonic", lambda: now + 2 * READERS_SECONDS)
    assert rig.ask("sessions=0").unread_sessions == 0


def test_load_and_pool(rig: Rig) -> None:
    rig.reporter.bind(SimpleNamespace(free_block_queue=SimpleNamespace(num_free_blocks=25), blocks=range(101)))
    request = SimpleNamespace(request_id="r", num_prompt_tokens=1000, num_computed_tokens=0)
    rig.reporter.load.arrive(request, 200, None)
    rig.reporter.compatibility = "other weights"
    report = rig.ask()
    assert (report.requests, report.queued_tokens) == (1, 800)
    assert report.free_blocks == 0.25
    assert report.compatibility == "other weights"


def test_a_session_is_told_once_to_each_who_says_what_it_knows(rig: Rig) -> None:
    rig.end_turn("s")
    report = rig.ask()
    assert report.sessions == (SessionReport("s", 80, 100, 96, 500),)
    known = f"epoch={report.epoch}&since={report.sequence}"
    assert rig.ask(known).sessions == ()
    rig.index.unpublish([5])
    again = rig.ask(known)
    assert again.sessions == (SessionReport("s", 80, 100, 80, 500),)
    assert again.sequence > report.sequence


@pytest.mark.parametrize(
    "query",
    [
        "",
        "since=1",
        "epoch=another&since=1",
        "epoch={epoch}",
        "epoch={epoch}&since=",
        "epoch={epoch}&since=-1",
        "epoch={epoch}&since=one",
        "epoch={epoch}&since=" + "9" * 400,
        "epoch={epoch}&since=\u0661",
        "%",
        "&&&=",
    ],
)
def test_whoever_knows_nothing_gets_all(rig: Rig, query: str) -> None:
    rig.end_turn("s")
    assert len(rig.ask(query.format(epoch=rig.index.epoch)).sessions) == 1


def test_turns_without_a_session_are_nobodys(rig: Rig) -> None:
    rig.end_turn(None)
    assert rig.ask().sessions == ()


def test_the_speed_is_fitted_once_for_each_report(rig: Rig) -> None:
    fits = []

    def estimate() -> float:
        fits.append(1)
        return 1000.0 * len(fits)

    cost = cast(CostModel, SimpleNamespace(estimate_prefill_speed=estimate))
    for _ in range(5):
        rig.reporter.learn(cost)
    assert rig.ask().prefill_tokens_per_second == 1000.0
    for _ in range(5):
        rig.reporter.learn(cost)
    assert rig.ask().prefill_tokens_per_second == 2000.0
    assert len(fits) == 2


def test_sessions_are_left_out_for_who_does_not_want_them(rig: Rig) -> None:
    rig.end_turn("s")
    rig.end_turn("t")
    for query in ("sessions=0", "epoch=another&since=1&sessions=0"):
        report = rig.ask(query)
        assert (report.sessions, report.held_sessions) == ((), 2)
    assert len(rig.ask("sessions=1").sessions) == 2
    rig.index.unpublish(range(6))
    assert rig.ask("sessions=0").held_sessions == 0


def test_tokens_of_prompts_and_what_of_them_was_read_are_totals(rig: Rig) -> None:
    for prompt, reused in ((100, 64), (50, 0)):
        rig.reporter.count_prompt(prompt)
        rig.reporter.count_reused(reused)
    assert (rig.ask().prompt_tokens, rig.ask().reused_tokens) == (150, 64)


def test_peers_and_transport_are_told(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rig.ask().transport is None
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    silent = [Source("10.0.0.2", 5700 + number) for number in range(MAXIMUM_REPORTED_PEERS + 9)]
    for number, source in enumerate(silent):
        rig.peers.note_silence(source, number / 100, 30.0)
        rig.peers.note_silence(source, 60.0, 61.0)
    rig.peers.note_answer(Source("fd00::1", 5700), 99.0)
    rig.transport.info = TransportInfo("UCX", "tcp", "")
    report = rig.ask()
    assert report.unreachable == tuple(map(str, silent[:MAXIMUM_REPORTED_PEERS]))
    assert report.reached == ("[fd00::1]:5700",)
    assert report.transport == TransportReport("UCX", "tcp")


def test_it_is_json_for_anybody(rig: Rig) -> None:
    rig.end_turn('\u00e9\n"')
    document: dict[str, Any] = json.loads(rig.reporter.answer(""))
    assert document["version"] == 1
    assert document["sessions"][0]["name"] == '\u00e9\n"'


def test_the_pool_of_vllm_has_a_block_that_is_never_free(rig: Rig) -> None:
    rig.reporter.bind(SimpleNamespace(free_block_queue=SimpleNamespace(num_free_blocks=100), blocks=range(101)))
    assert rig.ask().free_blocks == 1.0
