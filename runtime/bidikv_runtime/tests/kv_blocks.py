"""A block pool for tests without vLLM: what the free queue and the policy see of vLLM's, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bidikv_runtime.connector.eviction import TieredQueue


@dataclass(eq=False)
class Block:
    """Stands in for vLLM's ``KVCacheBlock``."""

    block_id: int
    ref_cnt: int = 0
    block_hash: object = None
    prev_free_block: Any = None
    next_free_block: Any = None

    def __repr__(self) -> str:
        return f"Block({self.block_id})"


class Pool:
    """Allocates, frees and touches as vLLM's ``BlockPool`` does; cached content is a number."""

    def __init__(self, count: int) -> None:
        self.blocks = [Block(i) for i in range(count)]
        self.queue = TieredQueue(self.blocks, self.blocks)

    def allocate(self, count: int) -> list[int]:
        """Blocks with new content."""
        taken = self.queue.popleft_n(count)
        for block in taken:
            assert block.ref_cnt == 0
            block.ref_cnt = 1
            block.block_hash = object()
        return [block.block_id for block in taken]

    def touch(self, ids: Sequence[int]) -> None:
        for i in ids:
            if not self.blocks[i].ref_cnt:
                self.queue.remove(self.blocks[i])
            self.blocks[i].ref_cnt += 1

    def free(self, ids: Sequence[int]) -> None:
        """A request's blocks, last first, as vLLM does."""
        freed = []
        for i in reversed(ids):
            self.blocks[i].ref_cnt -= 1
            if not self.blocks[i].ref_cnt:
                freed.append(self.blocks[i])
        self.queue.append_n(freed)

    @property
    def free_ids(self) -> list[int]:
        return [block.block_id for block in self.queue.get_all_free_blocks()]
