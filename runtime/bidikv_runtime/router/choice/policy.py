"""Which engines serve a turn; pure: decide and return.

- Decode: the session's rendezvous ranking over ready engines, so all replicas agree.
- Sources for prefill: the head of the same ranking over all decode engines that still serve. After a scale-up the new
  winner has no history yet, but the former one is next in the ranking; during a drain the leaving one is still offered.
- Prefill: least outstanding prompt bytes; among equals by the session's ranking, so that an idle fleet also reuses
  prefill's own prefix cache.

Engines under suspicion (a connection failed a moment ago) are chosen last, never excluded: with all of them suspected,
trying is better than refusing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.router.choice.ring import compute_weights


def compute_weight(session: bytes, address: str) -> int:
    return int.from_bytes(compute_weights(session, [address.encode()])[0])


def rank_endpoints(session: bytes, endpoints: Sequence[Endpoint], suspects: Collection[str] = ()) -> list[Endpoint]:
    """``endpoints`` by their weight for ``session``, highest first; suspected addresses last."""
    return sorted(
        endpoints,
        key=lambda e: (e.address not in suspects, compute_weight(session, e.address), e.address),
        reverse=True,
    )


def choose_sources(session: bytes, serving: Sequence[Endpoint], count: int) -> list[str]:
    """Lookup addresses of the decode engines that most likely hold the session's KV, at most ``count``."""
    return [endpoint.lookup for endpoint in rank_endpoints(session, serving)[:count]]


def choose_prefill(
    session: bytes,
    ready: Sequence[Endpoint],
    outstanding: Mapping[str, int],
    *,
    suspects: Collection[str] = (),
    exclude: Collection[str] = (),
) -> Endpoint | None:
    """The prefill engine for the turn, or None when there is no other.

    Args:
        session: breaks ties.
        ready: engines that may be chosen.
        outstanding: prompt bytes (as an estimate of tokens) of the running prefill legs per address.
        suspects: addresses to choose last.
        exclude: addresses that failed this very turn.
    """
    candidates = [endpoint for endpoint in ready if endpoint.address not in exclude]
    if not candidates:
        return None
    return min(
        candidates,
        key=lambda e: (e.address in suspects, outstanding.get(e.address, 0), -compute_weight(session, e.address)),
    )
