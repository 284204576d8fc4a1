"""What this router knows about the engines right now: the snapshot, the load it put on them, and fresh failures.

The only mutable state that requests share. Everything is bounded by the number of engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bidikv_runtime.router.choice.endpoints import Endpoint, Pools


class Fleet:
    """Engines and their outstanding work."""

    def __init__(self, clock: Callable[[], float], suspect_seconds: float) -> None:
        self._clock = clock
        self._suspect_seconds = suspect_seconds
        self._suspected_until: dict[str, float] = {}
        self.pools = Pools()
        self.known = False
        """Whether a first snapshot arrived."""
        self.outstanding: dict[str, int] = {}
        """Address -> prompt bytes of running prefill legs."""

    def replace(self, pools: Pools) -> None:
        """Take a new snapshot; requests that already chose keep their engines."""
        self.pools = pools
        self.known = True
        present = {endpoint.address for endpoint in (*pools.prefill, *pools.decode)}
        self._suspected_until = {a: until for a, until in self._suspected_until.items() if a in present}

    def explain_unready(self) -> str | None:
        """Why no turn can be served now; None when one can."""
        return self.pools.explain_unready() if self.known else "The list of engines has not arrived yet."

    def suspect(self, endpoint: Endpoint) -> None:
        """Note a failed connection."""
        self._suspected_until[endpoint.address] = self._clock() + self._suspect_seconds

    def clear(self, endpoint: Endpoint) -> None:
        """Note that the engine answered."""
        self._suspected_until.pop(endpoint.address, None)

    def suspects(self) -> frozenset[str]:
        """Addresses to choose last now."""
        if not self._suspected_until:
            return frozenset()
        now = self._clock()
        return frozenset(address for address, until in self._suspected_until.items() if until > now)

    @contextmanager
    def working(self, endpoint: Endpoint, prompt_bytes: int) -> Iterator[None]:
        """Count ``prompt_bytes`` as outstanding on ``endpoint`` while the block runs."""
        address = endpoint.address
        self.outstanding[address] = self.outstanding.get(address, 0) + prompt_bytes
        try:
            yield
        finally:
            left = self.outstanding[address] - prompt_bytes
            if left:
                self.outstanding[address] = left
            else:
                del self.outstanding[address]


class RetryBudget:
    """Lets retries be a share of requests, with a reserve for bursts.

    Why: when every engine fails, unlimited retries double the load on what is left.
    """

    def __init__(self, ratio: float, reserve: float) -> None:
        self._ratio = ratio
        self._reserve = reserve
        self._balance = reserve

    def deposit(self) -> None:
        """Count one request."""
        self._balance = min(self._reserve, self._balance + self._ratio)

    def withdraw(self) -> bool:
        """Take one retry; false when none is left."""
        if self._balance < 1:
            return False
        self._balance -= 1
        return True
