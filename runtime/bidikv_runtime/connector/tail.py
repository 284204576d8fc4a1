"""The last, partly filled block of a prompt: handed over from prefill to decode like the full ones.

vLLM hashes full blocks only. Without the tail, decode computes up to a block of tokens after a context of thousands, as
a prefill step of its own. So prefill publishes the tail of a prompt that is about to be handed over under a hash of the
same kind: of the block before it, the tail's tokens, and vLLM's extra keys (adapter, multimodal items). Whoever has the
same prompt computes the same hash, nobody else does: another number of tokens gives another hash.

The tail has no place in vLLM's prefix cache. It is freed as a block without content and handed out again first, unless
the hand-over's hold keeps it; a re-use un-publishes it like any other block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens


def compute_tail_hash(
    request: Any, hashes: Sequence[bytes], block_size: int, tokens: int, hash_function: Callable[[Any], bytes]
) -> bytes | None:
    """Hash of the block that holds the last of a request's first ``tokens`` tokens, None if these fill it.

    Args:
        request: vLLM's ``Request``.
        hashes: vLLM's own of its full blocks.
        block_size: tokens.
        tokens: how far the prompt reaches.
        hash_function: vLLM's, of the prefix cache.
    """
    full = tokens // block_size
    start = full * block_size
    if start == tokens or not 0 < full <= len(hashes):  # vLLM 0.33 may hash a block only with tokens after it
        return None
    extra_keys, _ = generate_block_hash_extra_keys(request, start, tokens, 0)
    return bytes(hash_block_tokens(hash_function, hashes[full - 1], request.all_token_ids[start:tokens], extra_keys))
