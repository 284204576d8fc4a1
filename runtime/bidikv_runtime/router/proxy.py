"""The life of a request: which route, which legs, what happens when one of them fails.

A turn (chat or completions) has two legs: prefill computes the prompt's KV, reading the history from the decode engines
that are offered to it; decode reads that KV and answers. The answer is relayed as it comes.

What may be tried again, and what not:

- Before the first byte for the client a leg may be sent once more, to another engine, within the retry budget. Prefill:
  after a broken connection or a 5xx. Decode: after a broken connection; the KV is still at prefill.
- A decode engine that does not find what prefill has just computed refuses rather than compute a long prompt among its
  streams (``contract.HANDOVER_LOST``). Then both legs are run again, once, within the same budget; this time decode is
  asked to answer in any case.
- An engine's verdict (4xx, or 5xx after the last try) goes to the client with its status, headers and body.
- Once the answer began it can only be ended: with an error event for a stream of events, else by closing.

Cancellation: the server cancels the task of a client that left; leaving an exchange early closes its connection, which
makes vLLM abort the request. Nothing here may swallow ``CancelledError``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from bidikv_runtime.contract import RouterConfig
from bidikv_runtime.router.api.errors import ApiError, build_stream_error
from bidikv_runtime.router.api.legs import (
    build_decode_body,
    build_passed_body,
    build_prefill_body,
    check_fields,
    is_batch,
    needs_prefill,
    parse_prefilled,
)
from bidikv_runtime.router.api.session import derive_session
from bidikv_runtime.router.api.splice import Buffer, Fields, compute_length
from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.router.choice.fleet import Fleet, RetryBudget
from bidikv_runtime.router.choice.policy import choose_prefill, choose_sources, rank_endpoints
from bidikv_runtime.router.http.http1 import (
    ResponseHead,
    build_forwarded_head,
    build_local_response,
    build_response_head,
    finish_request_head,
)
from bidikv_runtime.router.http.server import ClientConnection, Request
from bidikv_runtime.router.http.upstream import (
    AnswerTimedOut,
    ConnectFailed,
    ConnectionLost,
    UpstreamConnection,
    UpstreamError,
    UpstreamPool,
)
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.router.observe.metrics import Path, RouterMetrics
from bidikv_runtime.router.observe.record import Phase, Route

logger = logging.getLogger(__name__)

_TURNS: Final[dict[bytes, Route]] = {b"/v1/chat/completions": "chat", b"/v1/completions": "completions"}
_PASSED: Final = (b"/tokenize", b"/detokenize")
_REFUSED: Final = (b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter")
"""They would change one engine only; prefill and decode must serve the same adapters."""
_RETRIED_STATUS: Final = frozenset({500, 502, 503, 504})
_SUCCESS: Final = range(200, 300)
_PREFILL_ANSWER_BYTES: Final = 64 * 1024
"""Of a longer answer of a prefill leg (one token, its usage) nothing is kept."""


@dataclass(slots=True)
class _Turn:
    """What the legs of one request share."""

    request: Request
    client: ClientConnection
    route: Route
    session: bytes = b""
    path: Path = "direct"
    phase: Phase = "receive"
    forwarded: bytes = b""
    """The head that both legs send, up to its framing; built once."""
    guarded: bool = False
    """The decode leg tells how much was prefilled, and may be refused for it."""
    handover_lost: bool = False
    """It was refused, and both legs run again."""


@dataclass(frozen=True, slots=True)
class _Prefilled:
    """A prefill leg that succeeded."""

    engine: Endpoint
    tokens: int | None
    """Of the prompt, as its answer reports."""


class Proxy:
    """The application behind the server."""

    def __init__(
        self, config: RouterConfig, limits: Limits, fleet: Fleet, pool: UpstreamPool, metrics: RouterMetrics
    ) -> None:
        self._config = config
        self._limits = limits
        self._fleet = fleet
        self._pool = pool
        self._metrics = metrics
        self._budget = RetryBudget(limits.retry_ratio, limits.retry_reserve)
        self._loop = pool.loop
        self._in_flight = 0
        metrics.in_flight.set_function(lambda: self._in_flight)
        self.draining = False

    async def serve(self, request: Request, client: ClientConnection) -> None:
        """Serve one request (the :data:`server.Application`)."""
        method, path = request.head.method, request.head.path
        if method in (b"GET", b"HEAD") and path in (b"/health", b"/ready", b"/metrics"):
            self._serve_local(request, client)
            return
        try:
            if self._in_flight >= self._limits.max_in_flight:
                raise ApiError(503, "The router has too many requests in flight; retry later.", retry_after=1)
            turn = _Turn(request, client, route=self._choose_route(method, path))
        except ApiError as error:
            self.refuse(error)
            raise
        self._in_flight += 1
        try:
            await self._serve_remote(turn)
        except asyncio.CancelledError:
            self._metrics.count_disconnect(turn.phase)
            raise
        except ApiError as error:
            self._metrics.count_answer(turn.route, error.status)
            raise
        finally:
            self._in_flight -= 1

    def refuse(self, error: ApiError) -> None:
        """Count a request that the server or a route refused."""
        self._metrics.count_answer("local", error.status)

    # --- routes ---

    def _choose_route(self, method: bytes, path: bytes) -> Route:
        # The engine would decode the one and cut off the other, past the checks here.
        if method == b"POST" and (b"%" in path or b"#" in path):
            raise ApiError(404, "The path must not contain percent-encoded characters or '#'.")
        if path in _REFUSED:
            raise ApiError(404, "Adapters are not managed through the router; give them to the engines at start.")
        if method == b"POST":
            if path in _TURNS:
                return _TURNS[path]
            if path.startswith(b"/v1/") or path in _PASSED:
                return "passed"
        elif method == b"GET" and (path == b"/v1/models" or path.startswith(b"/v1/models/")):
            return "models"
        if path in _TURNS or path in _PASSED or path == b"/v1/models":
            raise ApiError(405, f"{method.decode()} is not allowed here.")
        raise ApiError(404, "The router serves the OpenAI API under /v1, /health, /ready and /metrics.")

    def _serve_local(self, request: Request, client: ClientConnection) -> None:
        status, body, kind = 200, b"", b"text/plain; charset=utf-8"
        if request.head.path == b"/metrics":
            body, kind = self._metrics.render(), b"text/plain; version=1.0.0; charset=utf-8"
        elif request.head.path == b"/ready":
            reason = "The router is shutting down." if self.draining else self._fleet.explain_unready()
            status, body = (503, reason.encode()) if reason else (200, b"Ready.")
        client.write(
            build_local_response(
                status,
                body,
                content_type=kind,
                close=client.will_close,
                with_body=request.head.method != b"HEAD",
            )
        )

    async def _serve_remote(self, turn: _Turn) -> None:
        self._budget.deposit()
        # In a call of its own: a frame that still knew the body's fields would hold the whole history in memory while
        # decode streams.
        while (pieces := await self._prepare_decode(turn)) is not None and not await self._decode(turn, pieces):
            turn.handover_lost = True

    async def _prepare_decode(self, turn: _Turn) -> list[Buffer] | None:
        """The body of the leg that answers, after a turn's prefill leg; None when prefill's verdict was relayed."""
        request = turn.request
        if turn.route == "models":
            return []
        if turn.route == "passed" and _is_multipart(request):
            return [request.body]  # files (audio): a form has no field that takes kv_transfer_params as an object
        fields = check_fields(request.body)
        turn.session = derive_session(request.head.headers, fields)
        if turn.route == "passed":
            return build_passed_body(request.body, fields)
        self._metrics.note_session(turn.session)
        sources: list[str] = []
        prefilled: int | None = None
        # Without a decode engine the decode leg explains; prefill must not compute for nobody.
        if needs_prefill(fields) and self._fleet.pools.ready_decode:
            result = await self._prefill(turn, fields)
            if result is None:
                return None
            sources = [result.engine.lookup]
            # Of a batch one prompt may be refused when another's answer has begun.
            if not turn.handover_lost and not is_batch(fields):
                prefilled = result.tokens
        turn.guarded = prefilled is not None
        return build_decode_body(request.body, fields, sources, turn.session, prefilled)

    # --- the prefill leg ---

    async def _prefill(self, turn: _Turn, fields: Fields) -> _Prefilled | None:
        """Run the prefill leg; where the prompt's KV is now, or None when the engine's verdict went to the client.

        Raises:
            ApiError: no engine gave an answer.
        """
        turn.phase = "prefill"
        offered: list[str] = []
        turn.path = "oneway"
        if self._config.reuse == "Bidirectional":
            turn.path = "bidirectional"
            offered = choose_sources(turn.session, self._fleet.pools.serving_decode, self._config.source_count)
        pieces = build_prefill_body(fields, offered, turn.session)
        length = compute_length(pieces)
        tried: set[str] = set()
        while True:
            endpoint = choose_prefill(
                turn.session,
                self._fleet.pools.ready_prefill,
                self._fleet.outstanding,
                suspects=self._fleet.suspects(),
                exclude=tried,
            )
            if endpoint is None:
                raise ApiError(503, "No prefill engine is ready; retry later.", retry_after=1)
            tried.add(endpoint.address)
            may_retry = len(tried) == 1 and self._has_other(self._fleet.pools.ready_prefill, tried)
            began = self._loop.time()
            try:
                with self._fleet.working(endpoint, length):
                    async with self._exchange(
                        turn, endpoint, pieces, length, self._limits.prefill_seconds, self._limits.prefill_seconds
                    ) as (connection, head):
                        if head.status in _SUCCESS:
                            answer = await _read_small(connection, head)
                            self._metrics.observe_prefill(turn.path, self._loop.time() - began)
                            return _Prefilled(endpoint, parse_prefilled(answer))
                        if not (head.status in _RETRIED_STATUS and may_retry and self._budget.withdraw()):
                            await self._relay(turn, connection, head)
                            return None
                        self._metrics.count_retry("prefill", "status")
            except UpstreamError as error:
                if turn.client.response_started:
                    return None  # the relay of a verdict broke and was ended there
                if isinstance(error, AnswerTimedOut) or not (may_retry and self._budget.withdraw()):
                    raise self._explain("Prefill", endpoint, error) from error
                self._metrics.count_retry("prefill", "connection")

    # --- the decode leg ---

    async def _decode(self, turn: _Turn, pieces: list[Buffer]) -> bool:
        """Run the leg that answers: on the session's engine, or the next in its ranking.

        Returns:
            False when nothing was answered because the hand-over was lost: run both legs again.
        """
        turn.phase = "decode"
        ranking = rank_endpoints(turn.session, self._fleet.pools.ready_decode, self._fleet.suspects())[:2]
        if not ranking:
            raise ApiError(503, "No decode engine is ready; retry later.", retry_after=1)
        length = compute_length(pieces)
        for attempt, endpoint in enumerate(ranking, start=1):
            try:
                async with self._exchange(
                    turn,
                    endpoint,
                    pieces,
                    length,
                    self._limits.decode_first_byte_seconds,
                    self._limits.decode_idle_seconds,
                ) as (connection, head):
                    pieces.clear()
                    if turn.guarded and head.lost_handover:
                        self._metrics.handovers_lost.add()
                        if self._budget.withdraw():
                            self._metrics.count_retry("prefill", "handover")
                            return False
                    turn.client.release_body(turn.request)
                    await self._relay(turn, connection, head)
                return True
            except UpstreamError as error:
                if turn.client.response_started:
                    return True  # ended by the relay
                last = attempt == len(ranking)
                if last or isinstance(error, AnswerTimedOut) or not self._budget.withdraw():
                    raise self._explain("Decode", endpoint, error) from error
                self._metrics.count_retry("decode", "connection")
        raise AssertionError("the last attempt returns or raises")

    async def _relay(self, turn: _Turn, connection: UpstreamConnection, head: ResponseHead) -> None:
        """Write the engine's answer to the client as it comes.

        Raises:
            UpstreamError: the answer broke off; the client's response was ended as well as its form allows.
        """
        client, http10 = turn.client, turn.request.head.http10
        ends_with_connection = head.length is None and not head.bodyless and (http10 or not head.chunked)
        if ends_with_connection:
            client.close_after_response()
        self._metrics.count_answer(turn.route, head.status)
        client.attach(connection)
        client.write(build_response_head(head, chunked=head.chunked and not http10, close=client.will_close))
        measured = turn.phase == "decode" and head.is_event_stream and head.status in _SUCCESS

        if turn.phase == "decode":
            turn.phase = "stream"
        try:
            await connection.relay(client.write, decoded=http10)
        except UpstreamError as error:
            self._metrics.broken_streams.add()
            logger.warning("The answer of %s broke off: %s", connection.endpoint.address, error)
            self._end_broken(client, connection, head, ends_with_connection)
            raise
        finally:
            client.attach(None)
            if measured and connection.pieces:
                self._metrics.observe_first_token(turn.path, connection.first_at - turn.request.received_at)

    def _end_broken(
        self, client: ClientConnection, connection: UpstreamConnection, head: ResponseHead, ends_with_connection: bool
    ) -> None:
        """Say within a stream of events that it broke; anything else can only be cut off."""
        client.close_after_response()
        event = build_stream_error("The decode engine broke off its answer; send the request again.")
        if head.is_event_stream and ends_with_connection:
            client.write(event)
        elif head.is_event_stream and head.chunked and connection.at_chunk_boundary:
            client.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
        else:
            client.abort()

    # --- one exchange with an engine ---

    @contextlib.asynccontextmanager
    async def _exchange(
        self,
        turn: _Turn,
        endpoint: Endpoint,
        pieces: Sequence[Buffer],
        length: int,
        first_byte_seconds: float,
        idle_seconds: float,
    ) -> AsyncIterator[tuple[UpstreamConnection, ResponseHead]]:
        """Send the leg to ``endpoint`` and wait for its head; leaving the block ends or cancels the exchange.

        Raises:
            UpstreamError: no answer; a broken connection also puts the engine under suspicion.
        """
        if not turn.forwarded:
            turn.forwarded = build_forwarded_head(turn.request.head)
        request_head = finish_request_head(
            turn.forwarded,
            None if turn.route == "models" else length,
            guarded=turn.guarded and turn.phase == "decode",
        )
        fresh = False
        while True:
            connection: UpstreamConnection | None = None
            try:
                connection = await self._pool.acquire(endpoint, fresh=fresh)
                head = await connection.send(
                    request_head,
                    pieces,
                    first_byte_seconds=first_byte_seconds,
                    idle_seconds=idle_seconds,
                )
            except ConnectionLost as error:
                if error.stale and not fresh:
                    self._metrics.count_retry("prefill" if turn.phase == "prefill" else "decode", "stale")
                    fresh = True
                    continue
                self._fleet.suspect(endpoint)
                raise
            except ConnectFailed:
                self._fleet.suspect(endpoint)
                raise
            except BaseException:
                if connection is not None:
                    connection.abort()
                raise
            self._fleet.clear(endpoint)
            try:
                yield connection, head
            finally:
                connection.release()
            return

    @staticmethod
    def _has_other(ready: Sequence[Endpoint], tried: set[str]) -> bool:
        return any(endpoint.address not in tried for endpoint in ready)

    @staticmethod
    def _explain(leg: str, endpoint: Endpoint, error: UpstreamError) -> ApiError:
        status = 504 if isinstance(error, AnswerTimedOut) else 502
        logger.warning("%s engine %s failed: %s", leg, endpoint.address, error)
        return ApiError(status, f"The {leg.lower()} engine gave no answer: {error}; send the request again.")


async def _read_small(connection: UpstreamConnection, head: ResponseHead) -> bytes:
    """Take an answer that no client gets to its end; nothing is kept of one that is long or comes in chunks.

    Raises:
        UpstreamError: the answer broke off.
    """
    body = bytearray()
    kept = head.length is not None and head.length <= _PREFILL_ANSWER_BYTES

    def keep(data: bytes) -> None:
        if kept:
            body.extend(data)

    await connection.relay(keep)
    return bytes(body)


def _is_multipart(request: Request) -> bool:
    kind = request.head.header(b"content-type")
    return kind is not None and kind.strip().lower().startswith(b"multipart/form-data")
