"""The publication index: which KV blocks of this engine other engines may read, by content hash.

Invariants, on which the protocol's correctness rests:

1. A block is in the index only while its content is final and belongs to its hash.
2. A block leaves the index before its content can change (``unpublish`` runs inside the allocation that re-uses it).
3. A publication number is never used twice. So a reader that finds the same number for a block after its read as before
   knows that the block was not re-allocated in between, even to the same content.
4. Nothing is kept per reader: a lookup changes nothing.

One thread (the scheduler's) changes the index, any thread asks. Questions take no lock, so that neither side ever waits
for the other: each entry is one dictionary item, read in one step. A lookup that runs beside a change may thus mix old
and new entries, which is no fault: it is a hint, and each block of it is proved by its number after the read. A
validation compares each block's number at some moment after the question came, hence after the read had ended.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, Final

from bidikv_runtime.connector.wire import MAXIMUM_RUNS, Run

SLICE: Final = 4096
"""Hashes looked up in one go: no other thread of the interpreter runs meanwhile (0.1-0.7 us for each)."""


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
        self._changing = threading.Lock()
        self._entry_of_hash: dict[bytes, tuple[int, int]] = {}  # hash -> (block, publication number)
        self._hash_of_block: dict[int, bytes] = {}
        self._number_of_block: dict[int, int] = {}
        self._next_number = 1
        self.changes = 0
        """Goes up after every change, so that others can tell that nothing has changed."""

    def __len__(self) -> int:
        return len(self._number_of_block)

    def publish(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> list[int]:
        """Publish ``blocks[i]`` under ``hashes[i]``; returns the blocks that are new and need a re-use watcher.

        A block that is already published under its hash keeps its number: its content is the same, and readers in
        flight stay valid. Two blocks of equal content may both be published; lookups give the later one.
        """
        new: list[int] = []
        with self._changing:
            for content, block in zip(hashes, blocks, strict=True):
                published = self._hash_of_block.get(block)
                if published != content:
                    if published is not None:
                        self._remove(block)
                    self._number_of_block[block] = self._next_number
                    self._hash_of_block[block] = content
                    self._next_number += 1
                    new.append(block)
                self._entry_of_hash[content] = (block, self._number_of_block[block])
            self.changes += len(new)
        return new

    def unpublish(self, blocks: Iterable[int]) -> int:
        """Remove blocks that are about to be re-used; returns how many were published."""
        with self._changing:
            removed = sum(self._remove(block) for block in blocks)
            self.changes += removed
        return removed

    def clear(self) -> None:
        """Remove everything. Numbers go on, so that reads in flight fail their validation."""
        with self._changing:
            removed = len(self._number_of_block)
            self._number_of_block.clear()
            self._hash_of_block.clear()
            self._entry_of_hash.clear()
            self.changes += removed

    def lookup(self, hashes: Sequence[bytes]) -> list[Run]:
        """The first ``MAXIMUM_RUNS`` maximal runs of published blocks among ``hashes``, in order."""
        entries: list[tuple[int, int] | None] = []
        for begin in range(0, len(hashes), SLICE):
            entries.extend(map(self._entry_of_hash.get, hashes[begin : begin + SLICE]))
        runs: list[Run] = []
        start = 0
        while len(runs) < MAXIMUM_RUNS:
            while start < len(entries) and entries[start] is None:
                start += 1
            if start == len(entries):
                break
            end = _find_gap(entries, start)
            run: list[Any] = entries[start:end]
            runs.append(Run(start, list(map(itemgetter(0), run)), list(map(itemgetter(1), run))))
            start = end
        return runs

    def count_leading(self, hashes: Sequence[bytes]) -> int:
        """How many are published before the first one that is not."""
        entries = self._entry_of_hash
        for position, content in enumerate(hashes):
            if content not in entries:
                return position
        return len(hashes)

    def validate(self, blocks: Sequence[int], numbers: Sequence[int]) -> int:
        """How many leading blocks still carry these publication numbers."""
        current = list(map(self._number_of_block.get, blocks))
        if current == list(numbers):
            return len(current)
        for position, (number, expected) in enumerate(zip(current, numbers, strict=True)):
            if number != expected:
                return position
        return len(current)

    def _remove(self, block: int) -> bool:
        if self._number_of_block.pop(block, None) is None:
            return False
        content = self._hash_of_block.pop(block)
        entry = self._entry_of_hash.get(content)
        if entry is not None and entry[0] == block:
            del self._entry_of_hash[content]
        return True


def _find_gap(entries: list[tuple[int, int] | None], start: int) -> int:
    try:
        return entries.index(None, start)
    except ValueError:
        return len(entries)
