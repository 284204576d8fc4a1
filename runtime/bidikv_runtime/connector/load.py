"""What the engine still has to do: its unfinished requests and the prompt tokens that it will have to compute.

vLLM exports numbers of requests; a request may be one token or a hundred thousand of them. For the scheduler's thread,
except for ``measure``, which any thread may call: it reads copies, and what it adds up may be a step apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from bidikv_runtime.connector.matcher import Reader


class Measure(NamedTuple):
    requests: int
    """Unfinished ones."""
    queued_tokens: int
    """Of their prompts: neither cached or found at a source, nor computed yet."""


@dataclass(slots=True)
class _Entry:
    request: Any
    """vLLM's ``Request``."""
    reader: Reader | None
    held: int
    """Leading tokens that are cached here or will be read, as known."""
    placed: bool = False
    """The scheduler has tried to place it: what is held is exact."""


class Load:
    """Unfinished requests."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._entries: dict[str, _Entry] = {}

    def arrive(self, request: Any, cached: int, reader: Reader | None) -> None:
        """A request has arrived, of whose prompt the first ``cached`` tokens are here."""
        self._entries[request.request_id] = _Entry(request, reader, cached)

    def place(self, request_id: str, held: int) -> None:
        """The scheduler is about to place a request, the first ``held`` tokens of whose prompt need no computing."""
        if (entry := self._entries.get(request_id)) is not None:
            entry.held, entry.placed = held, True

    def leave(self, request_id: str) -> None:
        """A request has ended."""
        self._entries.pop(request_id, None)

    def measure(self) -> Measure:
        """What is left to do."""
        entries = list(self._entries.values())
        return Measure(len(entries), sum(map(self._count_left, entries)))

    def _count_left(self, entry: _Entry) -> int:
        held = max(entry.held, entry.request.num_computed_tokens)
        if not entry.placed and entry.reader is not None:
            held = max(held, entry.reader.reuse.peek() * self._block_size)
        return max(0, int(entry.request.num_prompt_tokens - held))
