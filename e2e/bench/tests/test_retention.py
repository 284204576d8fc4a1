"""The retention policy on small agent traces: never worse than vLLM's order, and better where it can tell more."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from e2e.bench.retention.__main__ import Cell, build_settings, build_table, compute_cell, write_report
from e2e.bench.retention.replay import Replay, compute_next_uses
from e2e.bench.retention.workload import (
    AGENTS,
    AGENTS_AND_SINGLES,
    AGENTS_ANNOUNCED,
    BLOCK_TOKENS,
    CHATS,
    Request,
    build_trace,
    compute_working_set,
)

SEEDS = (21,)
AWARE = "SessionAware 0.6"
TRAFFIC = {
    "agents": replace(AGENTS, duration=3000),
    "announced": replace(AGENTS_ANNOUNCED, duration=3000),
    "singles": replace(AGENTS_AND_SINGLES, duration=3000),
    "chats": replace(CHATS, duration=3000),
}


@cache
def cells(traffic: str, pool: float) -> tuple[Cell, ...]:
    return tuple(compute_cell(traffic, TRAFFIC[traffic], pool, seed, (0.6,)) for seed in SEEDS)


def total(traffic: str, pool: float, policy: str) -> float:
    return sum(cell.outcomes[policy].recompute_seconds for cell in cells(traffic, pool))


@pytest.mark.parametrize("pool", [0.75, 1.25])
@pytest.mark.parametrize("traffic", sorted(TRAFFIC))
def test_session_aware_is_not_worse_than_lru(traffic: str, pool: float) -> None:
    assert total(traffic, pool, AWARE) <= 1.03 * total(traffic, pool, "LRU")


@pytest.mark.parametrize(
    ("traffic", "pool", "share"),
    [("agents", 1.25, 0.95), ("announced", 1.25, 0.8), ("singles", 0.75, 0.97), ("singles", 1.25, 0.85)],
)
def test_session_aware_saves_where_it_can_tell_what_is_dead(traffic: str, pool: float, share: float) -> None:
    assert total(traffic, pool, AWARE) < share * total(traffic, pool, "LRU")


@pytest.mark.parametrize("pool", [0.75, 1.25])
@pytest.mark.parametrize("traffic", sorted(TRAFFIC))
def test_the_optimum_and_no_cache_bound_both(traffic: str, pool: float) -> None:
    for cell in cells(traffic, pool):
        tokens = {policy: outcome.recomputed_tokens for policy, outcome in cell.outcomes.items()}
        assert 0 < tokens["optimum"] <= min(tokens["LRU"], tokens[AWARE])
        assert max(tokens["LRU"], tokens[AWARE]) < tokens["none"]


def test_tokens_are_new_reused_or_computed_again() -> None:
    trace = build_trace(TRAFFIC["agents"], SEEDS[0])
    outcome = Replay(trace, round(compute_working_set(trace)), "LRU", build_settings(0.3)).run()
    seen: set[int] = set()
    new = 0
    for request in trace:
        new += sum(key not in seen for key in request.keys[: request.prompt_blocks])
        seen.update(request.keys)
    assert outcome.prompt_tokens == new * BLOCK_TOKENS + outcome.reused_tokens + outcome.recomputed_tokens


def test_the_optimum_keeps_what_is_needed_first() -> None:
    def request(start: float, *keys: int) -> Request:
        return Request(start, start + 0.5, None, None, keys, len(keys))

    trace = [request(0, 1, 2), request(1, 3, 4), request(2, 5), request(3, 3, 4), request(4, 1, 2)]
    assert compute_next_uses(trace)[0] == (4, 4)
    outcome = {
        policy: Replay(trace, 4, policy, build_settings(0.3)).run().recomputed_tokens // BLOCK_TOKENS
        for policy in ("none", "LRU", "optimum")
    }
    # LRU loses block 2, then finds 3 and 4, then 1. The optimum gives up 2 as well: 1 and 2 are needed last.
    assert outcome == {"none": 4, "LRU": 1, "optimum": 1}
    assert Replay([*trace[:3], request(3, 1, 2)], 4, "optimum", build_settings(0.3)).run().recomputed_tokens == 0


def test_requests_that_do_not_fit_are_counted_and_leave_nothing_behind() -> None:
    big = Request(0.0, 10.0, "a", None, tuple(range(3)), 3)
    other = Request(1.0, 2.0, "b", None, tuple(range(10, 13)), 3)
    later = Request(11.0, 12.0, "b", None, tuple(range(10, 13)), 3)
    for policy in ("LRU", "SessionAware", "optimum"):
        outcome = Replay([big, other, later], 4, policy, build_settings(0.3)).run()
        assert outcome.turned_away == 1
        assert outcome.recomputed_tokens == 3 * BLOCK_TOKENS


def test_equal_seeds_give_equal_traces() -> None:
    assert build_trace(TRAFFIC["agents"], 5) == build_trace(TRAFFIC["agents"], 5)
    assert build_trace(TRAFFIC["agents"], 5) != build_trace(TRAFFIC["agents"], 6)


def test_the_trace_has_the_shape_of_its_sources() -> None:
    trace = build_trace(replace(AGENTS, duration=4 * 3600.0), 7)
    first: dict[str | None, Request] = {}
    turns: dict[str | None, int] = {}
    for request in trace:
        first.setdefault(request.session, request)
        turns[request.session] = turns.get(request.session, 0) + 1
    mains = [request for request in first.values() if request.prompt_blocks * BLOCK_TOKENS > 40_000]
    starts = sorted(request.prompt_blocks * BLOCK_TOKENS for request in mains)
    assert 42_000 < starts[len(starts) // 2] < 52_000
    assert max(request.prompt_blocks for request in trace) * BLOCK_TOKENS <= AGENTS.context_limit
    assert 1 in turns.values()
    assert max(turns.values()) > 100


def test_table_and_report_name_every_policy(tmp_path: Path) -> None:
    small = replace(CHATS, duration=600)
    cell = compute_cell("chats", small, 1.0, 1, (0.3, 0.9))
    assert "SessionAware 0.3" in build_table([cell])
    write_report([cell], 600, tmp_path / "bench" / "retention.json")
    report = json.loads((tmp_path / "bench" / "retention.json").read_text())
    assert set(report["cells"][0]["outcomes"]) == {"none", "LRU", "SessionAware 0.3", "SessionAware 0.9", "optimum"}
