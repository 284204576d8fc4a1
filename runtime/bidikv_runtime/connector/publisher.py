"""What this engine offers to others: publish at a request's end, un-publish on re-use.

Everything here runs in vLLM's scheduler thread. Three rules make it safe:

- A block is published when its request finishes, before vLLM frees it, and carries a re-use watcher from then on: vLLM
  calls it inside ``get_new_blocks``, before the block can be written again.
- Of a finished request only those blocks are published whose tokens were computed in steps that have ended, by this
  request or by the one whose blocks it found in the prefix cache (``compute_final_tokens``).
- Nothing is published that was computed, or rests on what was computed, with weights of before (``weights``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bidikv_runtime.connector.index import PublicationIndex, compute_final_tokens
from bidikv_runtime.connector.weights import StaleBlocks


class Publisher:
    """Source side of the protocol. The pool is vLLM's ``BlockPool``."""

    def __init__(self, block_size: int, index: PublicationIndex) -> None:
        self._block_size, self._index = block_size, index
        self._pool: Any = None
        self._found: dict[str, int] = {}
        """Tokens that an unfinished request found in the local prefix cache."""
        self._begun: set[str] = set()
        self._stale = StaleBlocks()

    def bind(self, pool: Any) -> None:
        """Take the scheduler's block pool, whose re-use watchers un-publish."""
        self._pool = pool

    def clear(self) -> None:
        """Forget all published blocks, and what unfinished requests would publish: the weights may have changed."""
        self._index.clear()
        self._stale.change(self._pool, list(self._begun))

    def begin(self, request_id: str) -> None:
        """A request has arrived."""
        self._begun.add(request_id)

    def found(self, request_id: str, tokens: int) -> None:
        """A request is being admitted and has found ``tokens`` in the local prefix cache."""
        self._found[request_id] = tokens

    def admit(self, request_id: str, block_ids: Sequence[int]) -> None:
        """A request is admitted with these blocks, what it found in the local prefix cache first."""
        count = self._found[request_id] // self._block_size
        self._stale.admit(request_id, block_ids[:count], block_ids[count:])

    @property
    def follows(self) -> bool:
        """Whether ``grow`` has to be told: stale KV may still be found."""
        return bool(self._stale)

    def grow(self, request_id: str, block_ids: Sequence[int]) -> None:
        """A request under way was given more blocks."""
        self._stale.grow(request_id, block_ids)

    def finish(
        self,
        request: Any,
        block_ids: Sequence[int],
        hashes: Sequence[bytes],
        hash_tail: Callable[[int], bytes | None] | None = None,
    ) -> list[int]:
        """Publish the full blocks of a request that ends, and its tail if that has a hash; returns them.

        Args:
            request: vLLM's ``Request``.
            block_ids: its blocks.
            hashes: of its full blocks, as other engines ask for them.
            hash_tail: gives the hash of the partly filled block that ends its first so many tokens.
        """
        found = self._found.get(request.request_id, 0)
        stale = request.request_id in self._stale
        self.drop(request.request_id, block_ids)
        if stale:
            return []
        final = compute_final_tokens(
            found, request.num_computed_tokens, request.num_in_flight_tokens, request.num_tokens
        )
        count = min(final // self._block_size, len(block_ids), len(hashes))
        published, contents = list(block_ids[:count]), [bytes(hashes[position]) for position in range(count)]
        if hash_tail and count == final // self._block_size < len(block_ids) and (tail := hash_tail(final)):
            published.append(block_ids[count])
            contents.append(tail)
        if new := self._index.publish(contents, published):
            self._watch(new)
        return published

    def drop(self, request_id: str, block_ids: Sequence[int]) -> None:
        """A request ends that must not publish."""
        self._found.pop(request_id, None)
        self._begun.discard(request_id)
        self._stale.end(self._pool, request_id, block_ids)

    def _watch(self, block_ids: list[int]) -> None:
        # touch and unpin_blocks are vLLM's way to set a watcher. They add and remove one reference; the request still
        # holds its own, so the blocks' place in the free queue is untouched.
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        self._pool.unpin_blocks(blocks, self._on_reuse)

    def _on_reuse(self, block: Any) -> None:
        # vLLM drops the watcher with this call; a block that is published again gets a new one.
        self._index.unpublish((block.block_id,))
