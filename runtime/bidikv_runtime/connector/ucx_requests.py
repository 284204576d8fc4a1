"""A reader that dies must not take its source along: UCX's request memory is zeroed before use.

Over TCP, UCX answers a read in software: its source keeps a request for each reply that waits for the socket. When the
reader's process dies, UCX 1.22 (in NIXL 1.5.1) ends these as if they were its own sends (``ucp_request_send_state_ff``)
and frees memory handles by a data type (``send.datatype``) that nothing has set (``ucp_get_req_handler``): it is
whatever malloc returned, and the process ends with SIGSEGV. Measured, 2,000 replies of 32 KiB, reader killed at a
random moment: the source ended so in 4 of 14 cases without this, in 0 of 136 with it.

What this does not correct: a source aborts when it takes in a request whose reader is gone already
(``ucp_request_try_send``), see "Known limits" of this folder's README.

Zero means "contiguous, no handle", which is right. UCX itself has the allocator that returns zeroed pages
(``ucs_mpool_chunk_mmap``); its pool of requests takes its allocator from a table in writable data, once per 128
requests. So two pointers are exchanged, both for functions of UCX, before the first pool exists.

Invariant: nothing is written unless the table holds exactly the two functions that it is known to hold.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

TABLE: Final = "ucp_request_mpool_ops"
"""UCX's table of a pool's functions; the first two are those that allocate and free a chunk."""
REPLACED: Final = ("ucs_mpool_hugetlb_malloc", "ucs_mpool_hugetlb_free")
ZEROING: Final = ("ucs_mpool_chunk_mmap", "ucs_mpool_chunk_munmap")


def zero_requests(library: Any) -> str | None:
    """Let UCX's requests lie in zeroed memory from now on.

    Args:
        library: a ``ctypes.CDLL`` through which UCX's symbols are found, such as NIXL's plugin.

    Returns:
        Why that is not possible with this UCX, as one sentence; None when it is done, or was before.
    """
    try:
        table = (ctypes.c_void_p * 2).in_dll(library, TABLE)
        replaced, zeroing = (
            [ctypes.cast(library[name], ctypes.c_void_p).value for name in names] for names in (REPLACED, ZEROING)
        )
    except (AttributeError, ValueError) as error:
        return f"this UCX has other symbols ({error})"
    if list(table) == zeroing:
        return None
    if list(table) != replaced:
        return f"this UCX allocates its requests differently ({TABLE} is not what it is in UCX 1.22)"
    table[0], table[1] = zeroing
    return None
