"""Socket options that notice a peer which vanished without closing (a lost node, a dropped NAT entry).

Without them a stream whose engine's node died stays silent until the idle limit, and a turn whose client's machine died
holds its engine for as long.
"""

from __future__ import annotations

import socket
from typing import Final, Protocol

_IDLE_SECONDS: Final = 15
_INTERVAL_SECONDS: Final = 5
_PROBES: Final = 3
_UNACKNOWLEDGED_MILLISECONDS: Final = 1000 * (_IDLE_SECONDS + _INTERVAL_SECONDS * _PROBES)


class HasOptions(Protocol):
    """A TCP socket, or what uvloop shows of one."""

    def setsockopt(self, level: int, name: int, value: int, /) -> None:
        """As of ``socket.socket``."""


def watch_peer(sock: HasOptions, *, reads_promptly: bool) -> None:
    """Let the kernel break the connection about 30 s after the peer vanished.

    Args:
        sock: of a connection, or a listening one: what it accepts inherits the options (Linux).
        reads_promptly: also break it when sent bytes stay unacknowledged for so long. Wrong for clients: Linux counts a
            peer that is alive but does not read, too.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    if reads_promptly:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MILLISECONDS)
