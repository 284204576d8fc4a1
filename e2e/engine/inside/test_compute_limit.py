"""What a decode leg may compute at most, and what the engine reports of its load and sessions, on vLLM's scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from bidikv_runtime import contract
from bidikv_runtime.connector.stats import VerifiedReadStats
from bidikv_runtime.contract import EngineReport, SessionReport
from e2e.engine.shadow import BLOCK, Prompt, ShadowEngine, Turn, Weights

STEPS = 200
"""More than any test needs."""
HISTORY = Prompt(tuple(range(12)))
TURN = HISTORY.followed_by(range(20, 30))
"""22 tokens, of which the history is 12."""


class Pair:
    """Two engines that take their steps in turn until nothing is left to do."""

    def __init__(self, asynchronous: bool, counts: Counter[str]) -> None:
        self.counts = counts
        self.engines: dict[str, ShadowEngine] = {}
        weights = Weights()
        self.decode, self.other = (
            ShadowEngine(
                name,
                self.engines,
                weights,
                asynchronous=asynchronous,
                budget=64,
                blocks=32,
                settings={"bidikv_silent_period_seconds": 0},  # a source is asked again at once after a failed read
            )
            for name in ("decode", "other")
        )

    def step(self, *, fail_reads: bool = False) -> None:
        for engine in (self.decode, self.other):
            for request_id in list(engine.reads):
                if fail_reads:
                    engine.fail(request_id)
                    continue
                engine.copy_all(request_id)
                engine.validate(request_id)
            for action, may in (
                (engine.schedule, engine.may_schedule),
                (engine.execute, engine.may_execute),
                (engine.process, engine.may_process),
            ):
                if may:
                    action()
            engine.check()

    def run(self, turn: Turn | None = None, **options: Any) -> Turn | None:
        """Step until both engines are idle."""
        for _ in range(STEPS):
            if self.decode.idle and self.other.idle:
                break
            self.step(**options)
        for engine in (self.decode, self.other):
            assert engine.idle
            engine.check_idle()
        return turn

    def report(self) -> EngineReport:
        report: EngineReport = self.decode.connector.connector_scheduler._reporter.build()
        return report

    def exceeded(self) -> int:
        """Refusals counted since the last call."""
        assert not self.counts[contract.METRIC_HANDOVERS_LOST]
        return self.counts.pop(contract.METRIC_COMPUTE_LIMIT_EXCEEDED, 0)

    def ask(self, prompt: Prompt, limit: int | None, sources: list[str] | None = None, **options: Any) -> bool:
        """Whether a decode leg with this limit is answered; if it is, the answer is right."""
        parameters: dict[str, Any] = {contract.SESSION_PARAM: "s"}
        if limit is not None:
            parameters[contract.COMPUTE_LIMIT_PARAM] = limit
        refused = self.decode.refused
        turn = self.decode.send(prompt, 3, sources or [], parameters=parameters)
        self.run(**options)
        assert turn.finished
        if turn.answer:
            assert turn.answer == turn.weights.continue_(prompt, 3)
        assert (not turn.answer) == (self.decode.refused > refused)
        return bool(turn.answer)

    def hold(self, engine: ShadowEngine, prompt: Prompt) -> None:
        engine.send(prompt, 1)
        self.run()


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    counts: Counter[str] = Counter()
    record = VerifiedReadStats.record

    def count(stats: Any, metric: str, number: float = 1, *labels: str) -> None:
        counts[metric] += int(number)
        record(stats, metric, number, *labels)

    monkeypatch.setattr(VerifiedReadStats, "record", count)
    pair = Pair(request.param, counts)
    yield pair
    for engine in pair.engines.values():
        engine.stop()


@pytest.mark.parametrize(
    ("held", "prompt", "least"),
    [
        pytest.param(None, TURN, 22, id="nothing is here"),
        pytest.param(HISTORY, TURN, 10, id="the history is here"),
        pytest.param(TURN, TURN, 2, id="all full blocks are here"),
        pytest.param(HISTORY, HISTORY, 4, id="all is here: vLLM computes the last block for its last token"),
    ],
)
def test_a_decode_leg_is_refused_from_one_token_over_its_limit_on(
    pair: Pair, held: Prompt | None, prompt: Prompt, least: int
) -> None:
    if held is not None:
        pair.hold(pair.decode, held)
    pair.exceeded()
    assert not pair.ask(prompt, least - 1)
    assert not pair.ask(prompt, 0)  # had it computed the prompt the first time, more of it would be here now
    assert pair.exceeded() == 2
    assert pair.ask(prompt, least)
    assert pair.exceeded() == 0


def test_without_a_limit_it_is_answered(pair: Pair) -> None:
    assert pair.ask(TURN, None)


def test_what_a_source_holds_need_not_be_computed(pair: Pair) -> None:
    pair.hold(pair.other, HISTORY)
    assert not pair.ask(TURN, 9, [pair.other.source])
    assert pair.ask(TURN, 10, [pair.other.source])
    assert pair.decode.accepted == 3


def test_a_read_that_fails_is_computed_within_the_limit_only(pair: Pair) -> None:
    pair.hold(pair.other, HISTORY)
    assert not pair.ask(TURN, 10, [pair.other.source], fail_reads=True)
    assert pair.exceeded() == 1
    assert pair.ask(TURN, 22, [pair.other.source], fail_reads=True)


def test_a_request_for_which_vllm_asks_no_connector_is_answered(pair: Pair) -> None:
    turn = pair.decode.send(TURN, 1, prompt_logprobs=True, parameters={contract.COMPUTE_LIMIT_PARAM: 5})
    pair.run()
    assert turn.answer == turn.weights.continue_(TURN, 1)


def test_a_preempted_request_is_not_refused(pair: Pair) -> None:
    pair.hold(pair.decode, HISTORY)
    turn = pair.decode.send(TURN, 8, parameters={contract.COMPUTE_LIMIT_PARAM: 10})
    for _ in range(STEPS):
        if turn.answer:
            break
        pair.step()
    while pair.decode.steps:
        if pair.decode.may_execute:
            pair.decode.execute()
        pair.decode.process()
    assert pair.decode.reset(running=True)  # nothing is here any more
    assert turn.request.num_preemptions == 1
    pair.run()
    assert turn.answer == turn.weights.continue_(TURN, 8)


def test_a_refusal_is_no_turn_and_leaves_no_load(pair: Pair) -> None:
    assert not pair.ask(TURN, 5)
    assert pair.report().sessions == ()
    assert (pair.report().requests, pair.report().queued_tokens) == (0, 0)


def test_a_turn_is_reported_with_what_is_left_of_it(pair: Pair) -> None:
    pair.decode.send(TURN, 5, parameters={contract.SESSION_PARAM: "s", contract.BODY_BYTES_PARAM: 700})
    pair.decode.send(HISTORY, 1, parameters={contract.SESSION_PARAM: "p", contract.HANDOVER_PARAM: True})
    pair.run()
    assert pair.report().sessions == (SessionReport("s", 22, 27, 24, 700),)
    assert pair.report().free_blocks == 1.0
    for number in range(2):  # together they take 30 of 31 blocks
        pair.decode.send(Prompt(tuple([40 + number] * (14 * BLOCK + 2))), 2)
    pair.run()
    [report] = pair.report().sessions
    assert 0 < report.held_tokens < 24
    assert pair.decode.reset(running=False)
    assert pair.report().sessions == (SessionReport("s", 22, 27, 0, 700),)


def test_a_turn_that_its_client_leaves_is_reported_too(pair: Pair) -> None:
    turn = pair.decode.send(TURN, 9, parameters={contract.SESSION_PARAM: "s"})
    for _ in range(STEPS):
        if len(turn.answer) >= 3:
            break
        pair.step()
    pair.decode.abort(turn)
    pair.run()
    [report] = pair.report().sessions
    assert report.prompt_tokens == 22
    assert report.total_tokens >= 25
    assert report.held_tokens >= 20


def test_load_counts_what_is_left_to_compute(pair: Pair) -> None:
    pair.hold(pair.decode, HISTORY)
    pair.hold(pair.other, HISTORY.followed_by(range(30, 34)))
    pair.decode.send(TURN, 6)
    pair.decode.send(HISTORY.followed_by(range(30, 39)), 1, [pair.other.source])
    assert pair.report().requests == 2
    assert pair.report().queued_tokens == 10 + 9  # before an answer is there, what is here counts
    pair.decode.schedule()
    assert pair.report().queued_tokens <= 5  # one is computed now, one reads a block and computes five tokens
    assert pair.report().free_blocks < 1.0
    pair.run()
    report = pair.report()
    assert (report.requests, report.queued_tokens, report.free_blocks) == (0, 0, 1.0)


def test_other_weights_are_another_compatibility(pair: Pair) -> None:
    first = pair.report().compatibility
    pair.decode.change_weights(None)
    unnamed = pair.report().compatibility
    pair.decode.change_weights("v2")
    assert len({first, unnamed, pair.report().compatibility}) == 3
    pair.other.change_weights("v2")
    other: EngineReport = pair.other.connector.connector_scheduler._reporter.build()
    assert other.compatibility == pair.report().compatibility
