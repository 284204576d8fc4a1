"""A network of this thread's own for a while: tests then use fixed ports of loopback beside a cluster that has them.

Linux keeps the network namespace per thread, and what a thread starts inherits it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

NEW_NETWORK: Final = 0x40000000
"""CLONE_NEWNET of ``linux/sched.h``."""


@contextmanager
def own_network(addresses: Sequence[str] = ()) -> Iterator[None]:
    """Give the calling thread a network namespace with loopback alone, which also has ``addresses``.

    Raises:
        OSError: not allowed; it needs root.
    """
    library = ctypes.CDLL(None, use_errno=True)
    original = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(library.unshare(NEW_NETWORK), "a network namespace of one's own needs root")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            for address in addresses:
                subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)
            yield
        finally:
            _check(library.setns(original, NEW_NETWORK), "the thread's first network namespace is gone")
    finally:
        os.close(original)


def _check(status: int, explanation: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{explanation}: {os.strerror(number)}")
