"""The state port: JSON for those who may see it, and nobody can keep it busy or make it fail."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bidikv_runtime.connector import state as module
from bidikv_runtime.connector.state import StatePortError, StateServer
from bidikv_runtime.connector.tokens import Tokens

LOG = logging.getLogger("test")
HOST = "127.0.0.1"
TOKEN = "token-0123456789"
STATE = {"epoch": 7, "sources": [{"source": "10.0.0.1:5700"}]}


@pytest.fixture(autouse=True)
def stop_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)


def answers(get_state: Callable[[], Any] = lambda: STATE) -> dict[str, Callable[[str], bytes]]:
    return {"/state": lambda query: json.dumps(get_state()).encode(), "/echo": lambda query: json.dumps(query).encode()}


@contextmanager
def serving(
    get_state: Callable[[], Any] = lambda: STATE, tokens: Tokens | None = None, host: str = HOST
) -> Iterator[StateServer]:
    server = StateServer(host, 0, tokens, answers(get_state), LOG)
    try:
        yield server
    finally:
        server.stop()


def ask(
    server: StateServer, method: str = "GET", path: str = "/state", token: str | None = None, host: str = HOST
) -> tuple[int, Any, http.client.HTTPResponse]:
    with closing(http.client.HTTPConnection(host, server.port, timeout=10)) as connection:
        connection.request(method, path, headers={} if token is None else {"Authorization": token})
        response = connection.getresponse()
        body = response.read()
        return response.status, json.loads(body) if body else None, response


def test_answers_are_json() -> None:
    with serving() as server:
        status, body, response = ask(server)
        assert (status, body) == (200, STATE)
        assert response.getheader("Content-Type") == "application/json"
        assert ask(server, path="/state?verbose")[0] == 200
        assert ask(server, path="/echo?a=1&b=?")[:2] == (200, "a=1&b=?")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_ipv6() -> None:
    with serving(host="::1") as server:
        assert ask(server, host="::1")[0] == 200


@pytest.mark.parametrize("path", ["/", "/states", "/state/", "/metrics"])
def test_other_paths_are_not_found(path: str) -> None:
    with serving() as server:
        assert ask(server, path=path)[:2] == (404, {"error": "there is only /state and /echo"})


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_other_methods_are_not_allowed(method: str) -> None:
    with serving() as server:
        status, _, response = ask(server, method)
        assert (status, response.getheader("Allow")) == (405, "GET")


def test_a_token_is_wanted_when_there_are_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"first-token-123456\n{TOKEN}\n")
    with serving(tokens=Tokens(path, LOG)) as server:
        for authorization in (None, "", TOKEN, "Bearer", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xff"):
            status, body, response = ask(server, token=authorization)
            assert (status, response.getheader("WWW-Authenticate")) == (401, "Bearer")
            assert "epoch" not in body
        assert ask(server, token=f"Bearer {TOKEN}")[0] == 200
        assert ask(server, token=f"bearer  {TOKEN}")[0] == 200
        assert ask(server, path="/other")[0] == 401


def test_a_state_that_cannot_be_had_is_a_server_error_and_the_port_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Mapping[str, Any]:
        raise KeyError("x")

    states: list[Callable[[], Mapping[str, Any]]] = [lambda: {"bad": object()}, fail, lambda: STATE]
    with serving(lambda: states.pop(0)()) as server:
        assert [ask(server)[0] for _ in range(3)] == [500, 500, 200]
    assert [record.getMessage() for record in caplog.records] == ["the connector's /state cannot be had"] * 2


def test_slow_clients_hold_up_nobody() -> None:
    with serving() as server, ExitStack() as stack:
        for _ in range(module.MAXIMUM_CLIENTS - 1):
            slow = stack.enter_context(socket.create_connection((HOST, server.port)))
            slow.sendall(b"GET /state HTTP/1.1\r\n")
        assert ask(server)[0] == 200
        assert is_served(slow)


def is_served(client: socket.socket) -> bool:
    client.sendall(b"\r\n")
    client.settimeout(10)
    return client.recv(4096).startswith(b"HTTP/1.0 200")


def test_more_clients_than_there_are_places_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAXIMUM_CLIENTS", 2)
    entered, leave = threading.Semaphore(0), threading.Event()

    def wait() -> Mapping[str, Any]:
        entered.release()
        assert leave.wait(10)
        return STATE

    with serving(wait) as server, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ask, server) for _ in range(2)]
        for _ in waiting:
            assert entered.acquire(timeout=10)
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            ask(server)
        leave.set()
        assert [answer.result()[0] for answer in waiting] == [200, 200]
        assert ask(server)[0] == 200


def test_a_client_that_drips_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLIENT_SECONDS", 0.3)
    with serving() as server, socket.create_connection((HOST, server.port)) as slow:
        slow.settimeout(0.05)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                slow.sendall(b"G")  # a byte now and then: each one begins the socket's own time-out anew
                if slow.recv(1) == b"":
                    return
            except TimeoutError:
                continue
            except OSError:
                return
        pytest.fail("it is served for ever")


@pytest.mark.parametrize("data", [b"\r\n\r\n", b"\x00" * 100, b"GET /state\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b""])
def test_garbage_is_survived(data: bytes) -> None:
    with serving() as server:
        with socket.create_connection((HOST, server.port)) as client:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            client.settimeout(10)
            while client.recv(4096):
                pass
        assert ask(server)[0] == 200


def test_a_port_in_use_is_one_sentence() -> None:
    with (
        serving() as server,
        pytest.raises(StatePortError, match=rf"port {HOST}:{server.port} cannot be opened .*: set"),
    ):
        StateServer(HOST, server.port, None, answers(), LOG)


def test_stop_ends_the_thread_and_frees_the_port() -> None:
    before = set(threading.enumerate())
    with serving() as server:
        [started] = set(threading.enumerate()) - before
    server.stop()
    assert not started.is_alive()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            StateServer(HOST, server.port, None, answers(), LOG).stop()
            return
        except StatePortError:
            time.sleep(0.05)
    pytest.fail("the port is still in use")
