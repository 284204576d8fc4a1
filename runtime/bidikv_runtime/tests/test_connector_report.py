"""The report as a router gets it: numbers of this moment, and sessions since the last one."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from bidikv_runtime.connector.cost import CostModel
from bidikv_runtime.connector.hints import Hints
from bidikv_runtime.connector.index import PublicationIndex
from bidikv_runtime.connector.report import Reporter
from bidikv_runtime.contract import EngineReport, SessionReport

BLOCK = 16
HASHES = [bytes([number]) for number in range(6)]


class Rig:
    def __init__(self) -> None:
        self.index = PublicationIndex()
        self.reporter = Reporter("engine-1", self.index, BLOCK, "abc")

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


def test_it_is_json_for_anybody(rig: Rig) -> None:
    rig.end_turn('\u00e9\n"')
    document: dict[str, Any] = json.loads(rig.reporter.answer(""))
    assert document["version"] == 1
    assert document["sessions"][0]["name"] == '\u00e9\n"'


def test_the_pool_of_vllm_has_a_block_that_is_never_free(rig: Rig) -> None:
    rig.reporter.bind(SimpleNamespace(free_block_queue=SimpleNamespace(num_free_blocks=100), blocks=range(101)))
    assert rig.ask().free_blocks == 1.0
