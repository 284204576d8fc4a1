"""The order of a read's descriptors, so that NIXL can join them. Pure.

NIXL 1.5.1 joins descriptors that follow each other both in the list and, at both ends, in one registered region. A
request's blocks often lie side by side and come in the wrong order: vLLM frees a request from its end, so the blocks
that the next one gets descend. Measured over TCP on loopback, 750 blocks in 32 regions of 8 KiB, blocks descending at
both ends: as they come 24,000 pieces, 21 ms to post and 387 ms to read; sorted 32 pieces, 5 ms and 262 ms. Sorting
costs 0.1 ms. (Where one end ascends and the other descends nothing can be joined, and nothing is lost.)
"""

from __future__ import annotations

from typing import Any


def sort_pairs(local: Any, remote: Any) -> tuple[Any, Any]:
    """The pairs ``(local[i], remote[i])`` of descriptor indices in ascending order of ``local``.

    Descriptors are numbered by region, then by address: ascending indices are ascending addresses within a region.

    Args:
        local: one-dimensional numpy array, as vLLM passes it to NIXL.
        remote: the same, of equal length.
    """
    if (local[1:] > local[:-1]).all():
        return local, remote
    order = local.argsort(kind="stable")
    return local[order], remote[order]
