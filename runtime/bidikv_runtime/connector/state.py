"""The connector's state over HTTP, as JSON: for people, dashboards and the operator, and a report for routers.

Each request has a thread of its own, so that a slow client holds up nobody; there are at most ``MAXIMUM_CLIENTS``, for
at most ``CLIENT_SECONDS`` each. No answer needs an engine step. With a token file, it wants a token: the answers name
peers and sessions.
"""

from __future__ import annotations

import io
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any, Final

from bidikv_runtime.connector.tokens import Tokens

PATH: Final = "/state"
CLIENT_SECONDS: Final = 5.0
"""For one client: all of its request, and again for taking the answer."""
MAXIMUM_CLIENTS: Final = 16
"""At a time; the connections of others are closed at once."""
STOP_SECONDS: Final = 5.0
POLL_SECONDS: Final = 0.5
"""How often the idle thread looks whether it is to stop: 2 wake-ups a second."""


class StatePortError(RuntimeError):
    """The state port cannot be opened."""


class StateServer:
    """Opens the port at construction and serves it until ``stop``."""

    def __init__(
        self,
        host: str,
        port: int,
        tokens: Tokens | None,
        answers: Mapping[str, Callable[[str], bytes]],
        logger: logging.Logger,
    ) -> None:
        """
        Args:
            host: an IP address.
            port: 0 takes any free port; ``port`` then holds it.
            tokens: clients must show one of them; None answers everybody.
            answers: by path, what gives the JSON text for a query. It is called in a thread of this server, beside all
                other threads of the engine and other calls of itself: it must be safe there, and quick.
            logger: for an answer that cannot be had.

        Raises:
            StatePortError: one sentence that names the address and the remedy.
        """
        self.tokens, self.answers, self.logger = tokens, answers, logger
        try:
            self._server = _Server((host, port), self)
        except OSError as error:
            raise StatePortError(
                f"the state port {host}:{port} cannot be opened ({error.strerror}): set bidikv_state_port in "
                "kv_connector_extra_config to a free port, or to 0 for none"
            ) from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_SECONDS,), daemon=True, name="bidikv-state"
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the port. May be called again."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(STOP_SECONDS)
        self._server.server_close()


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], owner: StateServer) -> None:
        self.owner = owner
        self._places = threading.BoundedSemaphore(MAXIMUM_CLIENTS)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # Past HTTPServer's own, which looks the host's name up: that can take seconds in a pod.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread to be had
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is no event."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "bidikv", ""

    timeout = CLIENT_SECONDS

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_UntilDeadline(self.connection, time.monotonic() + CLIENT_SECONDS))

    def do_GET(self) -> None:
        owner = self.server.owner
        path, _, query = self.path.partition("?")
        answer = owner.answers.get(path)
        if not self._is_authorised(owner.tokens):
            self._refuse(HTTPStatus.UNAUTHORIZED, "send a token of this engine's token file as bearer token")
        elif answer is None:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is only {' and '.join(owner.answers)}")
        else:
            try:
                body = answer(query)
            except Exception:
                owner.logger.exception("the connector's %s cannot be had", path)
                self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"{path} cannot be had, see the engine's log")
            else:
                self._send(HTTPStatus.OK, body)

    def refuse(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is allowed")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = refuse

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: whoever can reach the port could fill the log."""

    def _is_authorised(self, tokens: Tokens | None) -> bool:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        return tokens is None or (scheme.lower() == "bearer" and tokens.accepts(token.strip()))

    def _refuse(self, status: HTTPStatus, error: str) -> None:
        self._send(status, json.dumps({"error": error}).encode())

    def _send(self, status: HTTPStatus, body: bytes) -> None:
        body += b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _UntilDeadline(io.RawIOBase):
    """Reads from a socket until a moment. The socket's own time-out begins anew with every byte."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request did not come in time")
        self._connection.settimeout(left)
        count = self._connection.recv_into(buffer)
        self._connection.settimeout(CLIENT_SECONDS)  # for the answer
        return count
