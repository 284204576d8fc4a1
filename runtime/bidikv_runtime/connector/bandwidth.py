"""The bandwidth to a peer, measured once at the first contact: a read of some of its memory into a scratch buffer.

It shows a slow path (the wrong provider, a far zone) before any request suffers from it, and spares the first request
the transport's set-up of the connection. What is read is thrown away. A probe that fails or takes too long costs no
more than its deadline; until the transport has ended it there is no other, whose figure it would spoil.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Final

POLL_SECONDS: Final = 0.0002


class BandwidthProbe:
    """Used by the thread that shakes hands. ``agent`` is NIXL's."""

    def __init__(self, agent: Any, memory_type: str, address: int, size: int, device: int) -> None:
        """``address`` and ``size``: a buffer of this process that NIXL knows."""
        self._agent = agent
        self._memory_type = memory_type
        self._address, self._size, self._device = address, size, device
        self._stuck: Any = None

    def measure(self, remote_side: Any, length: int, count: int, seconds: float) -> float | None:
        """Bytes per second, or None without a result within ``seconds``.

        Args:
            remote_side: prepared descriptors of the peer.
            length: bytes of each of them.
            count: how many there are.
            seconds: limit for everything.
        """
        deadline = time.monotonic() + seconds
        count = min(count, self._size // length)
        if count == 0 or not self._settle():
            return None
        pieces = [(self._address + number * length, length, self._device) for number in range(count)]
        local_side = self._agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", self._agent.get_xfer_descs(pieces, self._memory_type)
        )
        try:
            if self._read(local_side, remote_side, 1, deadline) is None:  # connects
                return None
            taken = self._read(local_side, remote_side, count, deadline)
            return count * length / taken if taken else None
        finally:
            if self._stuck is None:
                self._agent.release_dlist_handle(local_side)

    def _read(self, local_side: Any, remote_side: Any, count: int, deadline: float) -> float | None:
        """Seconds that it took to read the first ``count`` descriptors."""
        indices = list(range(count))
        handle = self._agent.make_prepped_xfer("READ", local_side, indices, remote_side, indices)
        started = time.perf_counter()
        self._agent.transfer(handle)
        while (state := self._agent.check_xfer_state(handle)) == "PROC":
            if time.monotonic() >= deadline:
                self._stuck = handle
                return None
            time.sleep(POLL_SECONDS)
        taken = time.perf_counter() - started
        self._agent.release_xfer_handle(handle)
        return taken if state == "DONE" else None

    def _settle(self) -> bool:
        """Whether no earlier probe is under way."""
        if self._stuck is not None:
            with contextlib.suppress(Exception):
                if self._agent.check_xfer_state(self._stuck) == "PROC":
                    return False
            with contextlib.suppress(Exception):
                self._agent.release_xfer_handle(self._stuck)
            self._stuck = None
        return True
