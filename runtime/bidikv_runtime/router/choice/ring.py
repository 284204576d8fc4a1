"""Rendezvous (highest random weight) hashing; pure.

Why: every router replica must choose the same decode engine for a session without talking to the others, and when an
engine comes or goes only the sessions that it wins or held may move (Thaler and Ravishankar, 1998). Weights come from
BLAKE2b: equal in every process and version of Python, unlike ``hash``.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


def compute_weight(key: bytes, name: str) -> int:
    """Weight of ``name`` for ``key``: 64 uniform bits (``key`` may have at most 64 bytes)."""
    return int.from_bytes(blake2b(name.encode(), key=key, digest_size=8).digest())


def rank(key: bytes, names: Iterable[str]) -> list[str]:
    """``names`` from the highest to the lowest weight for ``key``; the order of ``names`` does not matter."""
    return sorted(names, key=lambda name: (compute_weight(key, name), name), reverse=True)
