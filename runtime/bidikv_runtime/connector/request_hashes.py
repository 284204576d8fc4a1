"""The hashes by which a request's blocks are published and asked for: vLLM's own, scoped by adapter, and the tail's."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_block_hashes

from bidikv_runtime import contract
from bidikv_runtime.connector.adapters import Adapters
from bidikv_runtime.connector.tail import compute_tail_hash


class RequestHashes:
    """The pool is vLLM's ``BlockPool``; requests are vLLM's ``Request``."""

    def __init__(self, block_size: int, adapters: Adapters) -> None:
        self._block_size, self._adapters = block_size, adapters
        self._hash_function = get_hash_fn_by_name(contract.HASH_ALGORITHM)
        self._pool: Any = None

    def bind(self, pool: Any) -> None:
        """Take the scheduler's block pool, which knows the size of the blocks that vLLM hashes."""
        self._pool = pool

    def find(self, request: Any, *, tail: bool = False) -> Sequence[bytes]:
        """Of a request's full blocks, then of its partly filled last one if ``tail``; none that must not be shared."""
        hashes = self._adapters.scope(self._own(request), request.lora_request)
        last = self.find_tail(request, request.num_tokens) if tail else None
        return hashes if last is None else [*hashes, last]

    def find_tail(self, request: Any, tokens: int) -> bytes | None:
        """Of the partly filled block that ends the request's first ``tokens`` tokens."""
        own = compute_tail_hash(request, self._own(request), self._block_size, tokens, self._hash_function)
        shared = self._adapters.scope([own], request.lora_request) if own else ()
        return bytes(shared[0]) if shared else None

    def estimate_cached(self, request: Any) -> int:
        """Blocks of the request's local prefix, as it stands now. By bisection, 10 us for any length: vLLM evicts a
        sequence from its end; if it has lost one in the middle, the number may be of either part."""
        hashes = self._own(request)
        return bisect_left(range(len(hashes)), True, key=lambda block: not self._is_cached(hashes[block]))

    def _is_cached(self, content: bytes) -> bool:
        return self._pool.get_cached_block(content, [0]) is not None

    def _own(self, request: Any) -> Sequence[bytes]:
        hashes: Sequence[bytes] = resolve_block_hashes(
            request.block_hashes, self._pool.hash_block_size, self._block_size
        )
        return hashes
