"""A quarantined block has exactly one reference more, from the first rank's report to the last rank's release."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from bidikv_runtime.connector.block_quarantine import BlockQuarantine


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id, self.references = block_id, 1


class Pool:
    def __init__(self) -> None:
        self.blocks = [Block(number) for number in range(8)]

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.references += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.references -= 1

    @property
    def references(self) -> list[int]:
        return [block.references for block in self.blocks]


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_are_kept_until_every_rank_has_released(ranks: int) -> None:
    pool, quarantine = Pool(), BlockQuarantine()
    for _ in range(ranks):
        quarantine.hold(pool, "a", [2, 3], 1)
    assert pool.references == [1, 1, 2, 2, 1, 1, 1, 1]
    assert len(quarantine) == 2
    for _ in range(ranks - 1):
        quarantine.release(pool, "a", 1)
        assert len(quarantine) == 2
    quarantine.release(pool, "a", 1)
    assert pool.references == [1] * 8
    assert len(quarantine) == 0


def test_requests_are_kept_apart() -> None:
    pool, quarantine = Pool(), BlockQuarantine()
    quarantine.hold(pool, "a", [0], 2)
    quarantine.hold(pool, "b", [1], 1)
    quarantine.release(pool, "b", 1)
    quarantine.release(pool, "unknown", 1)
    assert pool.references[:2] == [2, 1]
    assert quarantine.requests == ["a"]
