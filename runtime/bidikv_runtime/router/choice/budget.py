"""How many retries the router affords itself; pure."""

from __future__ import annotations


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
