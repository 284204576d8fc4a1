"""What is left to do: prompts less what is cached, found at a source or computed."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from bidikv_runtime.connector.load import Load, Measure
from bidikv_runtime.connector.matcher import Reader

BLOCK = 16


@dataclass
class Request:
    """Stands in for vLLM's."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int = 0


def reader(blocks: int) -> Reader:
    return cast(Reader, SimpleNamespace(reuse=SimpleNamespace(peek=lambda: blocks)))


def test_a_request_is_counted_from_its_arrival_to_its_end() -> None:
    load = Load(BLOCK)
    assert load.measure() == Measure(0, 0)
    request = Request("a", 1000)
    load.arrive(request, 100, None)
    load.arrive(Request("b", 50), 0, None)
    assert load.measure() == Measure(2, 950)
    load.place("a", 320)
    assert load.measure() == Measure(2, 730)
    request.num_computed_tokens = 990
    assert load.measure() == Measure(2, 60)
    request.num_computed_tokens = 1200  # decoding
    assert load.measure() == Measure(2, 50)
    load.leave("a")
    load.leave("b")
    load.leave("b")
    assert load.measure() == Measure(0, 0)


def test_what_a_source_has_counts_before_the_scheduler_comes_to_the_request() -> None:
    load = Load(BLOCK)
    load.arrive(Request("a", 1000), 160, reader(50))
    assert load.measure().queued_tokens == 200
    load.place("a", 160)  # it is computed all the same
    assert load.measure().queued_tokens == 840


def test_a_preempted_request_has_its_prompt_before_it_again() -> None:
    load = Load(BLOCK)
    request: Any = Request("a", 1000)
    load.arrive(request, 0, None)
    load.place("a", 0)
    request.num_computed_tokens = 1010
    assert load.measure().queued_tokens == 0
    request.num_computed_tokens = 0
    assert load.measure().queued_tokens == 1000
    load.place("a", 992)
    assert load.measure().queued_tokens == 8


def test_what_did_not_arrive_is_not_counted() -> None:
    load = Load(BLOCK)
    load.place("unknown", 100)
    assert load.measure() == Measure(0, 0)
