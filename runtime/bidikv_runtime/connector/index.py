"""The publication index: which KV blocks of this engine other engines may read, by content hash.

Invariants, on which the protocol's correctness rests:

1. A block is in the index only while its content is final and belongs to its hash.
2. A block leaves the index before its content can change (``unpublish`` runs inside the allocation that re-uses it).
3. A publication number is never used twice. So a reader that finds the same number for a block after its read as before
   knows that the block was not re-allocated in between, even to the same content.
4. Nothing is kept per reader: a lookup changes nothing.

All methods may be called from any thread: the scheduler publishes, the lookup server's thread answers.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Sequence


def compute_final_tokens(found: int, computed: int, in_flight: int, total: int) -> int:
    """Leading tokens of a finished request whose KV is certainly written, its own and what it found in the cache.

    vLLM caches a block when it schedules its computation. So what a request found at its admission may be computed by
    another request in the very step in which this one starts, and an abort can come before that step has ended. A step
    of this request that has ended is the proof that they are written: it ran with or after theirs.

    Args:
        found: tokens found in the local prefix cache at the request's (last) admission.
        computed: vLLM's count of computed tokens, what was found included.
        in_flight: of these, tokens of steps that have not ended.
        total: all tokens, prompt and output; the last one was sampled and has no KV yet.
    """
    ended = computed - in_flight
    return max(0, min(ended, total - 1)) if ended > found else 0


class PublicationIndex:
    """Published blocks: at most one entry per block of the pool, so its size is bounded by the pool."""

    def __init__(self) -> None:
        self.epoch = secrets.randbits(62)
        """Drawn per process: what a reader learnt from an earlier process at this address never validates here."""
        self._lock = threading.Lock()
        self._block_of_hash: dict[bytes, int] = {}
        self._entry_of_block: dict[int, tuple[bytes, int]] = {}  # block -> (hash, publication number)
        self._next_number = 1

    def __len__(self) -> int:
        return len(self._entry_of_block)

    def publish(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> list[int]:
        """Publish ``blocks[i]`` under ``hashes[i]``; returns the blocks that are new and need a re-use watcher.

        A block that is already published under its hash keeps its number: its content is the same, and readers in
        flight stay valid. Two blocks of equal content may both be published; lookups give the later one.
        """
        new: list[int] = []
        with self._lock:
            for content, block in zip(hashes, blocks, strict=True):
                entry = self._entry_of_block.get(block)
                if entry is None or entry[0] != content:
                    if entry is not None:
                        self._remove(block)
                    self._entry_of_block[block] = (content, self._next_number)
                    self._next_number += 1
                    new.append(block)
                self._block_of_hash[content] = block
        return new

    def unpublish(self, blocks: Iterable[int]) -> int:
        """Remove blocks that are about to be re-used; returns how many were published."""
        with self._lock:
            return sum(self._remove(block) for block in blocks)

    def clear(self) -> None:
        """Remove everything. Numbers go on, so that reads in flight fail their validation."""
        with self._lock:
            self._block_of_hash.clear()
            self._entry_of_block.clear()

    def lookup(self, hashes: Iterable[bytes]) -> tuple[list[int], list[int]]:
        """Blocks and publication numbers of the longest leading run of ``hashes`` that is published."""
        blocks: list[int] = []
        numbers: list[int] = []
        with self._lock:
            for content in hashes:
                block = self._block_of_hash.get(content)
                if block is None:
                    break
                blocks.append(block)
                numbers.append(self._entry_of_block[block][1])
        return blocks, numbers

    def validate(self, blocks: Sequence[int], numbers: Sequence[int]) -> int:
        """How many leading blocks still carry these publication numbers."""
        with self._lock:
            for position, (block, number) in enumerate(zip(blocks, numbers, strict=True)):
                entry = self._entry_of_block.get(block)
                if entry is None or entry[1] != number:
                    return position
        return len(blocks)

    def _remove(self, block: int) -> bool:
        entry = self._entry_of_block.pop(block, None)
        if entry is None:
            return False
        if self._block_of_hash.get(entry[0]) == block:
            del self._block_of_hash[entry[0]]
        return True
