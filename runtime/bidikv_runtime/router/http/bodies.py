"""Memory of large bodies, used again.

Why: for every large body the C library asks the kernel for memory and gives it back, and the kernel clears each page of
it. Together that is about a fifth of what this layer spends on a 1 MB request.

Invariant: memory is given to a new body only when nothing refers to the old one any more, whoever had a view of it for
whatever reason. Python knows: every view of a bytearray (memoryview, ``msgspec.Raw``, a transport's queue) counts as a
reference to it.
"""

from __future__ import annotations

import sys
from typing import Final

_SMALLEST: Final = 128 * 1024
"""Below it the allocator keeps memory by itself (glibc's M_MMAP_THRESHOLD)."""
_LARGEST: Final = 4 * 1024 * 1024
_MOST_BYTES: Final = 8 * 1024 * 1024
_UNUSED: Final = 2
"""References to a kept bytearray that nobody uses: the list's, and the argument of ``getrefcount``."""


class BodyMemory:
    """Bytearrays that carried a body; bounded in bytes."""

    def __init__(self) -> None:
        self._kept: list[bytearray] = []
        self.kept_bytes = 0

    def take(self, length: int) -> bytearray:
        """A bytearray of ``length`` bytes, with any content."""
        if length >= _SMALLEST:
            for index in range(len(self._kept)):
                size = len(self._kept[index])
                # A bytearray that shrinks below half of its memory gives the rest back.
                if size // 2 <= length <= 2 * size and sys.getrefcount(self._kept[index]) == _UNUSED:
                    body = self._kept.pop(index)
                    self.kept_bytes -= size
                    if length <= size:
                        del body[length:]
                    else:
                        body += bytes(length - size)
                    return body
        return bytearray(length)

    def keep(self, body: bytes | bytearray) -> None:
        """``body`` is not needed any more by whoever calls; others may still look at it."""
        if not isinstance(body, bytearray) or not _SMALLEST <= len(body) <= _LARGEST:
            return
        self._kept.append(body)
        self.kept_bytes += len(body)
        while self.kept_bytes > _MOST_BYTES:
            self.kept_bytes -= len(self._kept.pop(0))
