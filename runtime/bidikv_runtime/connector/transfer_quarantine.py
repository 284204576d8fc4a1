"""Transfers that were abandoned and may still write: watched until the transport says that they have ended.

NIXL cannot stop a transfer. Releasing one that is under way reports success over TCP, and the peer's data still arrives
(measured with NIXL 1.5.1: all of 32 MiB, written into memory that the reader had taken back). So a handle is released
only after its transfer has ended, and the scheduler side keeps the blocks out of use until then (``BlockQuarantine``).
The death of the peer's process ends a transfer at once; a peer that is frozen does so when it runs on, or dies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class _Held:
    request_id: str
    engine_id: str
    handles: list[Any]


class TransferQuarantine:
    """Used by the worker's main thread."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        """Parts whose transfers have not ended."""
        return len(self._held)

    @property
    def engines(self) -> set[str]:
        """Engines whose descriptors and connections these transfers still use."""
        return {held.engine_id for held in self._held.values()}

    def hold(self, part_id: str, request_id: str, engine_id: str, handles: Sequence[Any]) -> bool:
        """Watch the handles of an abandoned part; whether it is the first of its request here."""
        first = all(held.request_id != request_id for held in self._held.values())
        self._held[part_id] = _Held(request_id, engine_id, list(handles))
        return first

    def poll(self) -> tuple[list[str], list[str]]:
        """Parts whose transfers have all ended since the last call, and requests without any other part here."""
        parts, requests = [], []
        for part_id, held in list(self._held.items()):
            held.handles = [handle for handle in held.handles if not self._has_ended(handle)]
            if not held.handles:
                del self._held[part_id]
                parts.append(part_id)
                if all(other.request_id != held.request_id for other in self._held.values()):
                    requests.append(held.request_id)
        return parts, requests

    def close(self) -> None:
        """The engine stops: let go of every transfer, ended or not; nobody will use the blocks any more."""
        for held in self._held.values():
            for handle in held.handles:
                with contextlib.suppress(Exception):  # NIXL keeps what it cannot release
                    self._agent.release_xfer_handle(handle)
        self._held.clear()

    def _has_ended(self, handle: Any) -> bool:
        # A failed transfer has ended when its release succeeds, as in vLLM's own code.
        with contextlib.suppress(Exception):
            if self._agent.check_xfer_state(handle) == "PROC":
                return False
        try:
            self._agent.release_xfer_handle(handle)
        except Exception:
            return False
        return True
