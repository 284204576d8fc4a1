"""The reader's side before a real lookup port: ask early, wait little, choose by cost, count what came of it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from bidikv_runtime import contract
from bidikv_runtime.connector import wire
from bidikv_runtime.connector.cost import Decision, Part
from bidikv_runtime.connector.hints import Hints
from bidikv_runtime.connector.index import PublicationIndex
from bidikv_runtime.connector.lookup_client import LookupClient
from bidikv_runtime.connector.lookup_server import LookupServer
from bidikv_runtime.connector.matcher import Engine, Matcher, Reader
from bidikv_runtime.connector.reuse import ANSWER_LIFE, Phase, Reuse
from bidikv_runtime.connector.settings import Settings
from bidikv_runtime.connector.sources import Source
from bidikv_runtime.tests.test_connector_lookup import COMPATIBILITY

SIZE = 32
SETTINGS = Settings("127.0.0.1", 1, lookup_deadline=5.0, inline_wait=5.0, settle_wait=5.0)
ENGINE = Engine("reader", SIZE, 1, block_bytes=1000, block_pieces=4, drop_last=False)


class Stats:
    def __init__(self) -> None:
        self.counts: Counter[tuple[Any, ...]] = Counter()

    def record(self, metric: str, number: float = 1, *labels: str) -> None:
        self.counts[metric, *labels] += int(number) if number == int(number) else 1


class Cost:
    """Chooses as it is told and keeps what it was asked."""

    def __init__(self, kind: str = "pull") -> None:
        self.kind, self.asked, self.outcomes = kind, list[Any](), list[float]()

    def choose(self, parts: Sequence[Part], context: int, tokens: int, busy: bool) -> Decision:
        self.asked.append((list(parts), context, tokens, busy))
        return Decision(self.kind, 1.0, 2.0)

    def record_outcome(self, decision: Decision, seconds: float) -> None:
        self.outcomes.append(seconds)


def content(position: int) -> bytes:
    return b"content %020d" % position


class Rig:
    """A reader and one source that has published the first ``published`` blocks."""

    def __init__(self, published: int, cost: Cost | None = None, settings: Settings = SETTINGS) -> None:
        self.index = PublicationIndex()
        blocks = list(range(100, 100 + published))
        self.index.publish([content(i) for i in range(published)], blocks)
        peer = wire.Peer("source", "127.0.0.1", 5600, 1)
        self.server = LookupServer(self.index, COMPATIBILITY, peer, "127.0.0.1", 0, logging.getLogger("test"))
        self.source = Source("127.0.0.1", self.server.port)
        self.client = LookupClient(1.0)
        self.stats, self.cost = Stats(), cost or Cost()
        self.matcher = Matcher(ENGINE, settings, self.client, self.cost, self.stats)  # type: ignore[arg-type]

    def reader(self, tokens: int, hints: Hints | None = None) -> Reader:
        blocks = -(-tokens // SIZE) if hints and hints.prefilled_tokens else tokens // SIZE
        contents = [content(position) for position in range(blocks)]
        return Reader("r", hints or Hints(), Reuse((self.source,)), COMPATIBILITY.digest(), contents, tokens)

    def close(self) -> None:
        self.client.close()
        self.server.stop()


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    rigs: list[Rig] = []
    yield rigs
    for rig in rigs:
        rig.close()


def test_a_match_is_read_and_counted(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(published=10))
    reader = rig.reader(tokens=12 * SIZE, hints=Hints(handover=True))
    rig.matcher.ask(reader, local=2)
    assert rig.matcher.match(reader, local=2) == 8 * SIZE
    assert rig.cost.asked == [([(str(rig.source), 8000, 4)], 2 * SIZE, 8 * SIZE, False)]
    read = rig.matcher.begin_read(reader, 8 * SIZE)
    assert (read.first, read.parts[0].blocks) == (2, tuple(range(102, 110)))
    rig.matcher.end_read(reader, reused=6 * SIZE)
    counts = rig.stats.counts
    assert counts[contract.METRIC_LOOKUPS, "hit"] == 1
    assert counts[contract.METRIC_REUSED_TOKENS, str(rig.source), contract.DIRECTION_FROM_DECODE] == 6 * SIZE
    assert counts[contract.METRIC_DISCARDED_TOKENS,] == 2 * SIZE
    assert len(rig.cost.outcomes) == 1
    assert rig.matcher.match(reader, local=2) == 0  # once is enough


def test_a_decode_leg_reads_the_partly_filled_last_block(rigs: list[Rig]) -> None:
    """vLLM then computes the last token again: it needs its output."""
    tokens = 9 * SIZE + 5
    rigs.append(rig := Rig(published=10))
    reader = rig.reader(tokens, hints=Hints(prefilled_tokens=tokens))
    rig.matcher.ask(reader, local=2)
    assert rig.matcher.match(reader, local=2) == 7 * SIZE + 5
    assert rig.matcher.begin_read(reader, 7 * SIZE + 5).parts[0].blocks == tuple(range(102, 110))
    rig.matcher.end_read(reader, reused=7 * SIZE + 5)
    counts = rig.stats.counts
    assert counts[contract.METRIC_REUSED_TOKENS, str(rig.source), contract.DIRECTION_FROM_PREFILL] == 7 * SIZE + 5
    assert (contract.METRIC_DISCARDED_TOKENS,) not in counts


def test_without_the_last_block_the_full_ones_are_read(rigs: list[Rig]) -> None:
    tokens = 9 * SIZE + 5
    rigs.append(rig := Rig(published=9))
    reader = rig.reader(tokens, hints=Hints(prefilled_tokens=tokens))
    rig.matcher.ask(reader, local=0)
    assert rig.matcher.match(reader, local=0) == 9 * SIZE


def test_an_engine_that_runs_others_is_busy(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(published=10))
    for running, busy in ((["r"], False), (["r", "other"], True), ([], False)):
        rig.matcher.begin_step(running)
        reader = rig.reader(tokens=12 * SIZE)
        rig.matcher.ask(reader, local=0)
        rig.matcher.match(reader, local=0)
        assert rig.cost.asked[-1][-1] is busy


def test_one_token_is_left_to_compute(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(published=10))
    reader = rig.reader(tokens=10 * SIZE)
    rig.matcher.ask(reader, local=0)
    assert rig.matcher.match(reader, local=0) == 9 * SIZE


def test_the_local_prefix_may_change_between_question_and_match(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(published=10))
    reader = rig.reader(tokens=12 * SIZE)
    rig.matcher.ask(reader, local=4)
    assert rig.matcher.match(reader, local=6) == 4 * SIZE
    assert rig.matcher.match(reader, local=1) == 9 * SIZE  # asked again
    assert rig.matcher.begin_read(reader, 9 * SIZE).parts[0].blocks == tuple(range(101, 110))


def test_a_request_that_has_waited_for_long_asks_again(rigs: list[Rig]) -> None:
    """Its answers came long ago, and nobody has looked at them."""
    rigs.append(rig := Rig(published=10))
    reader = rig.reader(tokens=12 * SIZE)
    rig.matcher.ask(reader, local=0)
    rig.client.wait(reader.reuse.questions, 5.0)
    rig.index.unpublish(range(104, 110))
    reader.reuse.started -= ANSWER_LIFE + 1
    assert rig.matcher.match(reader, local=0) == 4 * SIZE
    assert reader.reuse.lookups == 2


def test_little_is_not_asked_for(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(published=10))
    reader = rig.reader(tokens=2 * SIZE)
    rig.matcher.ask(reader, local=1)
    assert reader.reuse.phase is Phase.SETTLED
    assert rig.matcher.match(reader, local=1) == 0
    assert not rig.stats.counts


def test_what_is_cheaper_to_compute_is_computed(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(published=10, cost=Cost("recompute")))
    reader = rig.reader(tokens=12 * SIZE)
    rig.matcher.ask(reader, local=0)
    assert rig.matcher.match(reader, local=0) == 0
    assert rig.matcher.match(reader, local=0) == 0
    assert len(rig.cost.asked) == 1
    rig.matcher.computed(reader, 9 * SIZE)
    assert not rig.cost.outcomes
    rig.matcher.computed(reader, 10 * SIZE)
    rig.matcher.computed(reader, 11 * SIZE)
    assert len(rig.cost.outcomes) == 1


@pytest.mark.parametrize("hints", [Hints(prefilled_tokens=12 * SIZE), Hints(compute_limit=3 * SIZE)])
def test_a_decode_leg_reads_whatever_the_cost(rigs: list[Rig], hints: Hints) -> None:
    rigs.append(rig := Rig(published=10, cost=Cost("recompute")))
    reader = rig.reader(tokens=12 * SIZE, hints=hints)
    rig.matcher.ask(reader, local=0)
    assert rig.matcher.match(reader, local=0) == 10 * SIZE
    assert not rig.cost.asked


def test_waiting_in_place_has_one_budget_for_all_requests_of_a_step(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(published=1, settings=Settings("127.0.0.1", 1, lookup_deadline=60.0, inline_wait=0.05)))
    rig.server.stop()
    readers = [rig.reader(tokens=12 * SIZE) for _ in range(20)]
    for reader in readers:
        rig.matcher.ask(reader, local=0)
    for _ in range(2):
        began = time.monotonic()
        assert [rig.matcher.match(reader, local=0) for reader in readers] == [None] * 20
        assert rig.stats.counts[contract.METRIC_LOOKUP_WAIT_SECONDS,] <= 2
        assert time.monotonic() - began >= 0.04
        rig.matcher.begin_step([])


def test_a_source_that_is_avoided_is_not_asked(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(published=10))
    rig.client.avoid(rig.source)
    reader = rig.reader(tokens=12 * SIZE)
    rig.matcher.ask(reader, local=0)
    assert rig.matcher.match(reader, local=0) == 0
    assert rig.stats.counts[contract.METRIC_LOOKUPS, "silent"] == 1
