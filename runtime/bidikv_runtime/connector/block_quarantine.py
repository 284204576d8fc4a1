"""Blocks of abandoned reads: kept out of use until nothing can write to them any more.

A transfer that is under way cannot be stopped: NIXL 1.5.1 over TCP reports its release as a success and writes all of
it afterwards (measured with 32 MiB). So a request whose read takes too long goes on in other blocks, and these keep one
reference of their own until every rank has said that its transfer has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class BlockQuarantine:
    """Used by the scheduler's thread. The pool is vLLM's ``BlockPool``."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[list[Any], int]] = {}  # request -> (blocks, ranks that have yet to release)

    def __len__(self) -> int:
        return sum(len(blocks) for blocks, _ in self._held.values())

    @property
    def requests(self) -> list[str]:
        return list(self._held)

    def hold(self, pool: Any, request_id: str, block_ids: Sequence[int], ranks: int) -> None:
        """``ranks`` more ranks have abandoned the request's read into these blocks, which it still holds itself."""
        blocks, waiting = self._held.get(request_id, ([], 0))
        if not blocks:
            blocks = [pool.blocks[block_id] for block_id in block_ids]
            pool.touch(blocks)
        self._held[request_id] = (blocks, waiting + ranks)

    def release(self, pool: Any, request_id: str, ranks: int) -> None:
        """In ``ranks`` ranks the transfer has ended; with the last one the blocks may be used again."""
        held = self._held.get(request_id)
        if held is None:
            return
        blocks, waiting = held
        if waiting > ranks:
            self._held[request_id] = (blocks, waiting - ranks)
            return
        del self._held[request_id]
        pool.free_blocks(reversed(blocks))
