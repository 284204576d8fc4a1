"""KV of earlier weights is followed until nobody can find it; watchers hear of changes in order."""

from __future__ import annotations

from typing import Any

import pytest

from bidikv_runtime.connector.weights import StaleBlocks, draw_unnamed, watch_weights


class Pool:
    def __init__(self, size: int) -> None:
        self.blocks = list(range(size))
        self.evicted: list[set[int]] = []

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted.append(set(block_ids))


def test_an_idle_engine_only_empties_its_cache() -> None:
    pool, stale = Pool(4), StaleBlocks()
    stale.change(pool, [])
    assert pool.evicted == [{0, 1, 2, 3}]
    assert not stale
    stale.admit("new", [], [1, 2])
    assert "new" not in stale


def test_a_request_is_stale_when_it_was_under_way_or_builds_on_what_was() -> None:
    pool, stale = Pool(8), StaleBlocks()
    stale.change(pool, ["old"])
    assert "old" in stale
    stale.admit("fresh", [], [1, 2])
    assert "fresh" not in stale
    stale.admit("on fresh", [1, 2], [3])
    assert "on fresh" not in stale
    stale.admit("on old", [4], [5])
    assert "on old" in stale


def test_blocks_change_sides_with_the_request_that_takes_them() -> None:
    pool, stale = Pool(8), StaleBlocks()
    stale.change(pool, ["old"])
    stale.admit("fresh", [], [1])
    stale.grow("fresh", [2])
    stale.grow("old", [2])
    stale.admit("on both", [1, 2], [])
    assert "on both" in stale


def test_the_last_stale_request_ends_it() -> None:
    pool, stale = Pool(4), StaleBlocks()
    stale.change(pool, ["first", "second"])
    stale.admit("fresh", [], [0])
    stale.end(pool, "fresh", [0])
    assert stale
    stale.end(pool, "first", [0, 1])
    assert pool.evicted[1:] == [{1}]
    stale.end(pool, "second", [2])
    assert pool.evicted[2:] == [{1, 2, 3}]
    assert not stale
    stale.admit("next", [1, 2, 3], [])
    assert "next" not in stale


def test_a_second_change_makes_everything_stale_again() -> None:
    pool, stale = Pool(4), StaleBlocks()
    stale.change(pool, ["old"])
    stale.admit("fresh", [], [1])
    stale.change(pool, ["old", "fresh"])
    assert "fresh" in stale
    stale.end(pool, "old", [])
    assert stale
    stale.end(pool, "fresh", [1])
    assert not stale


def build_core() -> Any:
    class Core:
        calls: list[Any]

        def collective_rpc(self, method: Any, timeout: float | None = None) -> list[Any]:
            if method == "broken":
                raise RuntimeError("broken")
            return [method]

        def set_weight_version(self, weight_version: str) -> None:
            self.version = weight_version

        def sleep(self, level: int = 1, mode: str = "abort") -> str:
            return f"{level} {mode}"

    return Core


def test_a_sleep_that_discards_the_weights_is_a_change() -> None:
    core, seen = build_core(), []
    end = watch_weights(core, lambda: seen.append("change"), lambda name: None)
    assert core().sleep() == "1 abort"
    assert core().sleep(1, mode="keep") == "1 keep"
    assert seen == []
    assert core().sleep(level=2) == "2 abort"
    assert core().sleep(2, "wait") == "2 wait"
    assert seen == ["change"] * 2
    end()


def test_watchers_hear_of_changes_and_names_until_they_end() -> None:
    core, seen = build_core(), []
    ends = [
        watch_weights(core, lambda: seen.append("first"), lambda name: seen.append(f"first {name}")),
        watch_weights(core, lambda: seen.append("second"), lambda name: seen.append(f"second {name}")),
    ]
    assert core().collective_rpc("update_weights") == ["update_weights"]
    assert core().collective_rpc("compute_weight_checksums") == ["compute_weight_checksums"]
    with pytest.raises(RuntimeError, match="broken"):
        core().collective_rpc("broken")
    assert seen == ["first", "second"] * 2
    ends[0]()
    ends[0]()
    core().set_weight_version("v2")
    assert seen[4:] == ["second v2"]


def test_unnamed_weights_are_like_no_others() -> None:
    assert len({draw_unnamed() for _ in range(100)}) == 100
