"""HTTPS: what differs from plain connections, and certificates that change."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
from pathlib import Path

import pytest
import trustme

from bidikv_runtime.contract import RouterConfig
from bidikv_runtime.router.choice.endpoints import Pools
from bidikv_runtime.router.http.client import ClientConnection, Request
from bidikv_runtime.router.http.http1 import build_local_response
from bidikv_runtime.router.http.tls import CERTIFICATE_FILE, KEY_FILE, Certificate, TlsError
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.router.wiring import Router
from bidikv_runtime.tests.router_engine import WAIT_SECONDS, hang, running_engines
from bidikv_runtime.tests.router_rig import read_response
from bidikv_runtime.tests.router_server import Waiting, running_server

GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def folder(authority: trustme.CA, tmp_path: Path) -> Path:
    write_certificate(authority, tmp_path)
    return tmp_path


def write_certificate(authority: trustme.CA, folder: Path) -> bytes:
    """A new certificate and key for 127.0.0.1; the certificate as clients see it."""
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(folder / CERTIFICATE_FILE)
    issued.private_key_pem.write_to_path(folder / KEY_FILE)
    return ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())


async def connect(authority: trustme.CA, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2", "http/1.1"])
    authority.configure_trust(context)
    async with asyncio.timeout(WAIT_SECONDS):
        return await asyncio.open_connection("127.0.0.1", port, ssl=context)


async def test_requests_are_served_and_the_connection_is_kept(authority: trustme.CA, folder: Path) -> None:
    body = bytes(range(256)) * 4096  # 1 MiB
    async with running_server(certificate=Certificate(folder)) as running:
        reader, writer = await connect(authority, running.port)
        tls = writer.get_extra_info("ssl_object")
        assert (tls.selected_alpn_protocol(), tls.version() in ("TLSv1.2", "TLSv1.3")) == ("http/1.1", True)
        for sent in (b"", b"small", body, b"again"):
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(sent) + sent)
            status, headers, received = await read_response(reader)
            assert (status, received) == (200, sent)
            assert "connection" not in headers
        writer.transport.abort()


@pytest.mark.parametrize("politely", [True, False])
async def test_a_client_that_leaves_is_noticed_at_once(authority: trustme.CA, folder: Path, politely: bool) -> None:
    waiting = Waiting()
    async with running_server(waiting.serve, certificate=Certificate(folder)) as running, asyncio.timeout(WAIT_SECONDS):
        _, writer = await connect(authority, running.port)
        writer.write(GET)
        await waiting.arrived.wait()
        if politely:
            writer.close()  # with TLS's goodbye
        else:
            writer.transport.abort()
        await waiting.left.wait()


async def test_a_turn_through_the_whole_router(authority: trustme.CA, folder: Path) -> None:
    history = {"role": "user", "content": "x" * 1_000_000}
    turn = json.dumps({"model": "m", "messages": [history], "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(turn)
    async with running_engines(2) as [prefill, decode], asyncio.timeout(3 * WAIT_SECONDS):
        config = RouterConfig("", "", "", "m", local_limit_tokens=0, tls_dir=str(folder))
        router = Router(config, Limits())
        router.take_pools(Pools((prefill.endpoint,), (decode.endpoint,)))
        port = await router.listen("127.0.0.1", 0)
        try:
            reader, writer = await connect(authority, port)
            for _ in range(2):  # the connection is kept
                writer.write(head + turn)
                received = await reader.readuntil(b"0\r\n\r\n")
                assert received.startswith(b"HTTP/1.1 200 OK\r\n")
                assert b"[DONE]" in received
            assert decode.exchanges[1].json["messages"] == [history]

            prefill.behave = hang
            writer.write(head + turn)
            exchange = await prefill.wait_for_exchange(3)
            writer.transport.abort()
            await exchange.wait_closed_by_router()
        finally:
            await router.close()


async def test_a_refused_client_reads_why(authority: trustme.CA, folder: Path) -> None:
    # TLS cannot close one direction: the router goes on reading, so that the client gets an answer and no reset.
    async with running_server(limits=Limits(max_body_bytes=1000), certificate=Certificate(folder)) as running:
        reader, writer = await connect(authority, running.port)
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 300000\r\n\r\n" + bytes(300_000))
        status, headers, _ = await read_response(reader)
        assert (status, headers["connection"]) == (413, "close")
        async with asyncio.timeout(WAIT_SECONDS):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            while running.server.connections:  # noqa: ASYNC110 -- nothing announces it
                await asyncio.sleep(0.01)
        writer.transport.abort()


async def test_a_client_that_does_not_read_stalls_only_itself(authority: trustme.CA, folder: Path) -> None:
    stalled = asyncio.Event()
    size = 32 * 1024 * 1024

    async def flood(request: Request, client: ClientConnection) -> None:
        client.write(build_local_response(200, bytes(size)))
        if client.stalled:
            stalled.set()

    async with running_server(flood, certificate=Certificate(folder)) as running, asyncio.timeout(2 * WAIT_SECONDS):
        reader, writer = await connect(authority, running.port)
        writer.write(GET + GET)
        await stalled.wait()
        for _ in range(2):  # the second one is served when the first has been read
            assert len((await read_response(reader))[2]) == size
        writer.transport.abort()


async def test_plain_http_on_the_tls_port_ends(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_server(certificate=Certificate(folder)) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(GET)
        with contextlib.suppress(ConnectionError):
            assert b"HTTP/1.1" not in await asyncio.wait_for(reader.read(), WAIT_SECONDS)
        writer.close()


async def test_old_protocol_versions_are_refused(folder: Path) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    async with running_server(certificate=Certificate(folder)) as running:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.wait_for(asyncio.open_connection("127.0.0.1", running.port, ssl=context), WAIT_SECONDS)


# --- certificates ---


async def test_a_renewed_certificate_is_used_without_a_restart(
    authority: trustme.CA, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def shown(port: int) -> bytes:
        _, writer = await connect(authority, port)
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.transport.abort()
        assert isinstance(der, bytes)
        return der

    certificate = Certificate(folder)
    async with running_server(certificate=certificate) as running:
        first = await shown(running.port)
        kept_reader, kept = await connect(authority, running.port)
        certificate.apply_change()
        assert await shown(running.port) == first

        renewed = write_certificate(authority, folder)
        certificate.apply_change()
        assert renewed != first
        assert await shown(running.port) == renewed
        kept.write(GET)
        assert (await read_response(kept_reader))[0] == 200  # connections from before go on
        kept.transport.abort()

        (folder / KEY_FILE).write_text("no key")
        with caplog.at_level(logging.WARNING):
            certificate.apply_change()
        assert "was not renewed" in caplog.text
        assert await shown(running.port) == renewed

        last = write_certificate(authority, folder)
        certificate.apply_change()
        assert await shown(running.port) == last


async def test_changes_are_looked_for_by_themselves(authority: trustme.CA, folder: Path) -> None:
    certificate = Certificate(folder)
    before = certificate._newest
    certificate.watch(asyncio.get_running_loop(), seconds=0.01)
    try:
        write_certificate(authority, folder)
        async with asyncio.timeout(WAIT_SECONDS):
            while certificate._newest is before:  # noqa: ASYNC110 -- nothing announces it
                await asyncio.sleep(0.01)
    finally:
        certificate.close()


@pytest.mark.parametrize("name", [CERTIFICATE_FILE, KEY_FILE])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(TlsError, match=rf"{name}: cannot be read \(No such file or directory\); mount a Secret"):
        Certificate(folder)


def test_a_key_of_another_certificate_is_named(authority: trustme.CA, folder: Path) -> None:
    authority.issue_cert("127.0.0.1").private_key_pem.write_to_path(folder / KEY_FILE)
    with pytest.raises(TlsError, match=r"tls\.key: is not the key of tls\.crt"):
        Certificate(folder)


@pytest.mark.parametrize("name", [CERTIFICATE_FILE, KEY_FILE])
def test_what_is_not_pem_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("nonsense")
    with pytest.raises(TlsError, match=r"tls\.crt or tls\.key is not PEM"):
        Certificate(folder)
