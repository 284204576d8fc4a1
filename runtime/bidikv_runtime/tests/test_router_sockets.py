"""Options on real connections."""

from __future__ import annotations

import asyncio
import socket

import pytest

from bidikv_runtime.router.http.sockets import watch_peer
from bidikv_runtime.tests.router_rig import read_response
from bidikv_runtime.tests.router_server import running_server


@pytest.mark.parametrize(("reads_promptly", "expected"), [(True, 30_000), (False, 0)])
async def test_vanished_peers_are_noticed(reads_promptly: bool, expected: int) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        sock = writer.get_extra_info("socket")
        watch_peer(sock, reads_promptly=reads_promptly)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == expected
        writer.close()


async def test_accepted_connections_inherit_the_options_of_the_listener() -> None:
    async with running_server() as running:
        reader, writer = await running.connect()
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await read_response(reader))[0] == 200
        transport = next(iter(running.server.connections))._transport
        assert transport is not None
        sock = transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
