"""What really moves the KV: NIXL's backend, the provider below it, and whether that is what was configured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TransportInfo:
    """What one rank reads with."""

    backend: str
    """NIXL's backend, for example UCX or LIBFABRIC."""
    provider: str
    """What the backend moves bytes with, for example efa, rdma, tcp or shm; ``unknown`` when that cannot be told."""
    detail: str
    warning: str | None = None
    """One sentence, when KV moves slower than the configuration makes one expect."""
