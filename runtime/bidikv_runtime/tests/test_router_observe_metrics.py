"""What the metrics make of records: times, balances, and an exposition that Prometheus can read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as ReferenceHistogram
from prometheus_client.parser import text_string_to_metric_families

from bidikv_runtime.router.observe import metrics as names
from bidikv_runtime.router.observe.engine_view import EngineView
from bidikv_runtime.router.observe.instruments import Counter, Histogram
from bidikv_runtime.router.observe.metrics import RouterMetrics
from bidikv_runtime.router.observe.overview import build_overview
from bidikv_runtime.router.observe.record import TurnRecord
from bidikv_runtime.router.observe.stages import compute_stages
from bidikv_runtime.tests.router_records import STREAM


class Scrape:
    """The exposition, as Prometheus reads it."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self.samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(metrics.render().decode())
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float | None:
        return self.samples.get((name, tuple(sorted(labels.items()))))

    def total(self, name: str) -> float:
        return sum(value for (found, _), value in self.samples.items() if found == name)

    def seconds(self, name: str, **labels: str) -> tuple[float | None, float | None]:
        """Sum and count of a histogram."""
        return self.value(f"{name}_sum", **labels), self.value(f"{name}_count", **labels)


def observe(*records: TurnRecord) -> Scrape:
    metrics = RouterMetrics(100)
    for record in records:
        metrics.begin(record)
        metrics.observe_first_token(record)
        metrics.observe(record)
    return Scrape(metrics)


def test_a_stream_by_the_long_path() -> None:
    scrape = observe(STREAM)
    path = "bidirectional"
    stages = {"queue": 0.25, "prefill": 0.75, "handover": 0.5, "first_token": 0.25, "stream": 2.25}
    for stage, seconds in stages.items():
        assert scrape.seconds(names.STAGE_SECONDS, path=path, stage=stage) == (seconds, 1), stage
    assert scrape.seconds(names.TIME_TO_FIRST_TOKEN, path=path) == (1.75, 1)
    assert scrape.seconds(names.REQUEST_SECONDS, path=path) == (4.0, 1)
    assert scrape.seconds(names.INTER_TOKEN_SECONDS) == (0.5, 1)
    assert scrape.seconds(names.LONGEST_GAP_SECONDS) == (0.75, 1)
    assert scrape.seconds(names.BODY_BYTES) == (5000, 1)
    assert scrape.value(names.REQUESTS, route="chat", code="200") == 1
    assert scrape.value(names.PATHS, path=path, reason="history") == 1
    assert scrape.value(names.OUTCOMES, outcome="answered") == 1
    assert scrape.value(names.SESSIONS) == scrape.value(names.SESSIONS_REMEMBERED) == 1


@pytest.mark.parametrize(
    ("record", "stages", "first_token"),
    [
        pytest.param(
            replace(STREAM, streamed=False, first_byte_at=13.5, chunks=1),
            {"queue": 0.25, "prefill": 0.75, "answer": 3.0},
            None,
            id="one document: its first byte says nothing of the first token",
        ),
        pytest.param(
            replace(STREAM, path="local", prefills=0, handed_over=0, prefill_done_at=math.nan),
            {"queue": 0.25, "first_token": 1.5, "stream": 2.25},
            1.75,
            id="decode alone",
        ),
        pytest.param(
            replace(STREAM, admitted_at=math.nan),
            {"prefill": 1.0, "handover": 0.5, "first_token": 0.25, "stream": 2.25},
            1.75,
            id="never queued",
        ),
        pytest.param(
            replace(STREAM, outcome="broken"),
            {"queue": 0.25, "prefill": 0.75, "handover": 0.5, "first_token": 0.25},
            1.75,
            id="a stream that broke has no end to be timed",
        ),
        pytest.param(
            replace(STREAM, outcome="disconnected", phase="decode", first_byte_at=math.nan, decode_head_at=math.nan),
            {"queue": 0.25, "prefill": 0.75},
            None,
            id="gone before the first byte",
        ),
        pytest.param(
            replace(STREAM, streamed=False, status=400, prefill_done_at=math.nan, prefills=0, handed_over=0),
            {"queue": 0.25, "answer": 3.75},
            None,
            id="an engine's verdict",
        ),
    ],
)
def test_stages(record: TurnRecord, stages: dict[str, float], first_token: float | None) -> None:
    scrape = observe(record)
    found = {
        dict(labels)["stage"]: value
        for (name, labels), value in scrape.samples.items()
        if name == f"{names.STAGE_SECONDS}_sum"
    }
    assert found == stages
    assert scrape.value(f"{names.TIME_TO_FIRST_TOKEN}_sum", path=record.path) == first_token


TIMES = st.lists(st.floats(0, 1000), min_size=6, max_size=6).map(sorted)


@given(TIMES, st.sets(st.integers(1, 4)), st.booleans(), st.integers(0, 1))
def test_stages_follow_each_other_and_add_up(
    times: list[float], missing: set[int], streamed: bool, prefills: int
) -> None:
    received, admitted, prefill_done, head, first, ended = (
        math.nan if index in missing else time for index, time in enumerate(times)
    )
    record = TurnRecord(
        received,
        admitted_at=admitted,
        prefill_done_at=prefill_done if prefills else math.nan,
        decode_head_at=head,
        first_byte_at=first,
        ended_at=ended,
        streamed=streamed,
        prefills=prefills,
        status=200,
    )
    stages = compute_stages(record)
    reached = received
    for _, begin, end in stages:
        assert begin == reached
        assert end >= begin
        reached = end
    if not streamed or not math.isnan(first):
        assert reached == ended
    assert len({stage for stage, _, _ in stages}) == len(stages)


@pytest.mark.parametrize(
    ("record", "abandoned"),
    [
        (STREAM, {}),
        (replace(STREAM, handed_over=0, outcome="disconnected"), {"client": 1}),
        (replace(STREAM, handed_over=0, outcome="refused"), {"decode": 1}),
        (replace(STREAM, prefills=2, handovers_lost=1), {"lost": 1}),
        (
            replace(STREAM, prefills=2, handed_over=0, handovers_lost=1, outcome="disconnected"),
            {"lost": 1, "client": 1},
        ),
        (replace(STREAM, handed_over=0, handovers_lost=1, outcome="refused"), {"lost": 1}),
    ],
)
def test_handovers_balance(record: TurnRecord, abandoned: dict[str, int]) -> None:
    scrape = observe(record)
    for reason in ("client", "decode", "lost"):
        assert scrape.value(names.ABANDONED, reason=reason) == abandoned.get(reason, 0)
    done, read = scrape.value(names.PREFILLS), scrape.value(names.HANDED_OVER)
    assert done is not None
    assert read is not None
    assert done - read - scrape.total(names.ABANDONED) == 0
    assert scrape.value(names.HANDOVERS_PENDING) == 0
    assert scrape.value(names.HANDOVERS_LOST) == abandoned.get("lost", 0)


def test_a_handover_is_pending_until_decode_answers() -> None:
    metrics = RouterMetrics(100)
    record = replace(STREAM, prefills=0, handed_over=0)
    metrics.begin(record)
    seen = []
    for change in ({"prefills": 1}, {"handed_over": 1}):
        for name, value in change.items():
            setattr(record, name, value)
        scrape = Scrape(metrics)
        seen.append((scrape.value(names.HANDOVERS_PENDING), scrape.value(names.IN_FLIGHT)))
    metrics.observe(record)
    scrape = Scrape(metrics)
    seen.append((scrape.value(names.HANDOVERS_PENDING), scrape.value(names.IN_FLIGHT)))
    assert seen == [(1, 1), (0, 1), (0, 0)]


@pytest.mark.parametrize(
    ("change", "name", "labels", "value"),
    [
        ({"outcome": "disconnected", "phase": "queue"}, names.DISCONNECTS, {"phase": "queue"}, 1),
        ({"outcome": "broken"}, names.BROKEN_STREAMS, {}, 1),
        ({"outcome": "refused"}, names.OUTCOMES, {"outcome": "refused"}, 1),
        ({"keep_alives": 7}, names.KEEP_ALIVES, {}, 7),
        ({"continued": 2}, names.CONTINUED, {}, 2),
        ({"local_refusals": 1}, names.LOCAL_REFUSALS, {}, 1),
        ({"unannounced": 1}, names.UNANNOUNCED, {}, 1),
        ({"status": 0, "outcome": "disconnected"}, names.REQUESTS, {"route": "chat", "code": "0"}, None),
        ({"reason": ""}, names.PATHS, {"path": "bidirectional", "reason": ""}, None),
        ({"route": "passed"}, names.SESSIONS, {}, 0),
    ],
)
def test_what_happened_is_counted(change: dict[str, Any], name: str, labels: dict[str, str], value: int | None) -> None:
    assert observe(replace(STREAM, **change)).value(name, **labels) == value


def test_streamed_answers_are_held_against_the_objectives() -> None:
    metrics = RouterMetrics(100, ttft_objective=0.5, itl_objective=0.1)
    for seconds, chunks in ((0.5, 11), (0.6, 11), (0.1, 1)):
        record = TurnRecord(received_at=10.0, status=200, streamed=True, first_byte_at=10.0 + seconds, chunks=chunks)
        record.last_byte_at = record.ended_at = record.first_byte_at + 1.1
        metrics.observe_first_token(record)
        metrics.observe(record)
    metrics.observe_first_token(TurnRecord(received_at=10.0, status=503, streamed=False, first_byte_at=11.0))
    scrape = Scrape(metrics)
    name = "bidikv_router_objective_turns_total"
    assert scrape.value(name, objective="ttft", met="yes") == 2
    assert scrape.value(name, objective="ttft", met="no") == 1
    assert scrape.value(name, objective="itl", met="yes") == 0
    assert scrape.value(name, objective="itl", met="no") == 2
    assert scrape.value("bidikv_router_objective_seconds", objective="itl") == 0.1


def test_without_objectives_nothing_is_told_of_them() -> None:
    assert b"objective=" not in RouterMetrics(1).render()


def test_no_label_names_a_session_or_an_engine_of_a_request() -> None:
    text = RouterMetrics(10)
    text.observe(STREAM)
    exposition = text.render().decode()
    assert STREAM.session.hex() not in exposition
    assert "10.0.0." not in exposition


def test_sessions_are_remembered_within_a_bound() -> None:
    metrics = RouterMetrics(2)
    for session in (b"a", b"b", b"a", b"c", b"a", b"b"):
        metrics.note_session(session)
    scrape = Scrape(metrics)
    assert scrape.value(names.SESSIONS) == 4, "a, b, c, and b again, which had been forgotten"
    assert scrape.value(names.SESSIONS_REMEMBERED) == 2


def test_engines_are_shown_while_they_are_there() -> None:
    metrics = RouterMetrics(10)
    engines = [
        EngineView("prefill", "p:1", load=9.0),
        EngineView("decode", "d:1", load=6.0, breaker="open", report_age=0.5),
        EngineView("decode", "d:2", load=2.0, breaker="half_open"),
        EngineView("decode", "d:3", load=50.0, state="terminating"),
    ]
    metrics.read_engines = lambda: engines
    scrape = Scrape(metrics)
    assert scrape.value(names.ENGINE_LOAD, role="decode", engine="d:1") == 6
    assert scrape.value(names.ENGINE_BREAKER, role="decode", engine="d:1") == 2
    assert scrape.value(names.ENGINE_BREAKER, role="decode", engine="d:2") == 1
    assert scrape.value(names.ENGINE_BREAKER, role="prefill", engine="p:1") == 0
    assert scrape.value(names.ENGINE_REPORT_AGE, role="decode", engine="d:1") == 0.5
    assert scrape.value(names.ENGINE_REPORT_AGE, role="decode", engine="d:2") == math.inf
    assert scrape.value(names.LOAD_IMBALANCE) == 1.5, "6 over the mean of 6 and 2: only engines that get requests count"
    engines.clear()
    scrape = Scrape(metrics)
    assert scrape.value(names.ENGINE_LOAD, role="decode", engine="d:1") is None
    assert scrape.value(names.LOAD_IMBALANCE) == 1


BOUNDS = (0.1, 0.5, 1.0, 10.0)


@given(st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0, 20))))
def test_a_histogram_counts_like_the_reference(values: Sequence[float]) -> None:
    registry = CollectorRegistry()
    reference = ReferenceHistogram("h", "help", ["a"], buckets=BOUNDS, registry=registry)
    own = Histogram("h", "help", BOUNDS, ["a"])
    for value in values:
        reference.labels("x").observe(value)
        own.observe(("x",), value)
    expected = [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
    assert list(own.render()) == expected


def test_unknown_times_are_left_out() -> None:
    histogram = Histogram("h", "help", BOUNDS)
    histogram.observe((), math.nan)
    assert "h_count 0.0" in list(histogram.render())


@given(st.text(max_size=20))
def test_label_values_are_escaped(value: str) -> None:
    counter = Counter("c_total", "help", ["label"])
    counter.add((value,))
    text = "\n".join([*counter.render(), ""])
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert [(sample.labels, sample.value) for sample in samples] == [({"label": value}, 1.0)]


def test_the_overview_is_that_of_the_code() -> None:
    path = Path(names.__file__).with_name("METRICS.md")
    assert path.read_text() == build_overview(), "run python -m bidikv_runtime.router.observe.overview > METRICS.md"
