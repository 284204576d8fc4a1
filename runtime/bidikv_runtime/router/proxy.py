"""The application behind the server: takes a request, sends it its way, and sees to it that its end is told.

A turn goes to ``turn.py``. Everything else reaches one engine (:meth:`Proxy._pass_on`), all of them (``models.py``) or
none (health, metrics, debug).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

from bidikv_runtime.contract import PATH_HEADER, RouterConfig
from bidikv_runtime.router.admission import Admission
from bidikv_runtime.router.api.errors import ApiError
from bidikv_runtime.router.api.legs import build_passed_body, check_fields
from bidikv_runtime.router.api.models import build_list
from bidikv_runtime.router.api.routes import Target, choose_route
from bidikv_runtime.router.api.session import identify, parse_response_id
from bidikv_runtime.router.api.splice import Buffer, compute_length
from bidikv_runtime.router.choice.budget import RetryBudget
from bidikv_runtime.router.choice.fleet import Fleet
from bidikv_runtime.router.exchange import Exchanges
from bidikv_runtime.router.http.client import ClientConnection, Request
from bidikv_runtime.router.http.http1 import build_forwarded_head, build_local_response, finish_request_head
from bidikv_runtime.router.http.pool import UpstreamPool
from bidikv_runtime.router.http.upstream import AnswerTimedOut, ConnectFailed, ConnectionLost, UpstreamError
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.router.models import ModelList
from bidikv_runtime.router.observe.metrics import RouterMetrics
from bidikv_runtime.router.observe.record import Path, TurnRecord
from bidikv_runtime.router.observe.trace_context import TRACEPARENT, start_trace
from bidikv_runtime.router.reply import Reply
from bidikv_runtime.router.turn import MOST_REACHED, MOST_TRIES, Shared, Turn, explain_failure
from bidikv_runtime.router.turns import Turns

logger = logging.getLogger(__name__)

_PATH_HEADER: Final = PATH_HEADER.encode("ascii")
_FORCED: Final[dict[bytes, Path]] = {b"local": "local", b"bidirectional": "bidirectional", b"plain": "plain"}
_TEXT: Final = b"text/plain; charset=utf-8"
_EXPOSITION: Final = b"text/plain; version=1.0.0; charset=utf-8"

Observer = Callable[[TurnRecord], None]
"""Told of each request when it has ended."""


class Proxy:
    """Serves all requests."""

    def __init__(
        self,
        config: RouterConfig,
        limits: Limits,
        fleet: Fleet,
        pool: UpstreamPool,
        metrics: RouterMetrics,
        observers: Sequence[Observer] = (),
        debug: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """
        Args:
            config: what the operator asked for.
            limits: bounds.
            fleet: what is known of the engines.
            pool: connections to them.
            metrics: counts and times.
            observers: besides metrics.
            debug: gives the JSON document of a path under /debug; None when there is none.
        """
        self._config = config
        self._limits = limits
        self._fleet = fleet
        self._deadlines = pool.deadlines
        self._metrics = metrics
        self._observers = tuple(observers)
        self._debug = debug
        self.admission = Admission(pool.loop, limits, metrics.count_queue_refusal)
        self._exchanges = Exchanges(pool, fleet, metrics)
        self._models = ModelList(pool)
        self._budget = RetryBudget(limits.retry_ratio, limits.retry_reserve)
        self._turns = Turns(Shared(config, limits, fleet, self._exchanges, self.admission, self._budget, metrics))
        self._in_flight = 0
        self.draining = False

    async def serve(self, request: Request, client: ClientConnection) -> None:
        """Serve one request (the :data:`server.Application`)."""
        head = request.head
        record = TurnRecord(request.received_at, body_bytes=len(request.body))
        reply = Reply(client, request, record, self._deadlines, self._limits.comment_seconds)
        try:
            target = choose_route(head.method, head.path)
        except ApiError as error:
            self.refuse(error)
            raise
        if target.route == "local":
            client.write(self._build_local(request, client))
            return
        record.route = target.route
        self._metrics.begin(record)
        self._in_flight += 1
        try:
            if self._in_flight > self._limits.max_in_flight:
                raise ApiError(503, "The router has too many requests in flight; retry later.", retry_after=1)
            self._budget.deposit()
            await self._serve_remote(request, client, target, record, reply)
        except ApiError as error:
            reply.refuse(error)
        except asyncio.CancelledError:
            record.outcome = "disconnected"
            raise
        except BaseException:
            if client.response_started:  # the server can only cut it off
                record.outcome = "broken"
            else:
                record.outcome, record.status = "refused", 500  # the server writes it
            raise
        finally:
            self._in_flight -= 1
            reply.finish()
            record.ended_at = monotonic()
            self._tell(record)

    def _tell(self, record: TurnRecord) -> None:
        """Tell of an ended request; whoever cannot take it must not harm what the client has got."""
        for observe in (self._metrics.observe, *self._observers):
            try:
                observe(record)
            except Exception:
                logger.exception("A finished request could not be recorded")

    def refuse(self, error: ApiError) -> None:
        """Count a request that the server refused, or that has no route."""
        self._metrics.count_refusal(error.status)

    def _build_local(self, request: Request, client: ClientConnection) -> bytes:
        path = request.head.path
        status, body, kind = 200, b"", _TEXT
        if path == b"/metrics":
            body, kind = self._metrics.render(), _EXPOSITION
        elif path == b"/ready":
            reason = "The router is shutting down." if self.draining else self._fleet.explain_unready()
            status, body = (503, reason.encode()) if reason else (200, b"Ready.")
        elif path.startswith(b"/debug/"):
            if self._debug is None:
                raise ApiError(404, "Start the router with debug on to see /debug.")
            body, kind = self._debug(path), b"application/json"
        return build_local_response(
            status, body, content_type=kind, close=client.will_close, with_body=request.head.method != b"HEAD"
        )

    async def _serve_remote(
        self, request: Request, client: ClientConnection, target: Target, record: TurnRecord, reply: Reply
    ) -> None:
        head = request.head
        if self._observers:
            record.client = client.peer
        if self._config.trace_endpoint:
            record.trace = start_trace(head.fields.get(TRACEPARENT), self._config.trace_ratio)
        if target.route == "models":
            await self._serve_models(request, client, target, record)
            return
        forwarded = build_forwarded_head(head, record.trace.header() if record.trace is not None else None)
        turn = Turn(request, client, record, reply, forwarded)
        if self._config.debug:
            turn.forced = _FORCED.get(head.fields.get(_PATH_HEADER, b""))
        if target.route == "passed":
            await self._pass_on(turn, target)
        else:
            await self._turns.serve(turn)

    async def _serve_models(
        self, request: Request, client: ClientConnection, target: Target, record: TurnRecord
    ) -> None:
        models = await self._models.get(
            request.head, self._fleet.pools.ready_decode or self._fleet.pools.serving_decode
        )
        if target.item:
            model = models.get(target.item.decode("utf-8", "replace"))
            if model is None:
                raise ApiError(404, "No engine serves this model; GET /v1/models lists those that are served.")
            body = bytes(model)
        else:
            body = build_list(models)
        record.status = 200
        client.write(build_local_response(200, body, close=client.will_close))

    async def _pass_on(self, turn: Turn, target: Target) -> None:
        """Serve what is no turn: by one engine, or the next one if no connection to it can be had."""
        request, record = turn.request, turn.record
        # In a call of its own: a frame that still knew the body's fields would hold it while the answer is relayed.
        pieces = _prepare_passed(request, target, record)
        record.phase = "decode"
        has_body = request.head.method == b"POST"
        head = finish_request_head(turn.forwarded, compute_length(pieces) if has_body else None)
        engines = self._fleet.choose_decode(record.session)[:MOST_TRIES]
        if not engines:
            raise ApiError(503, "No decode engine is ready; retry later.", retry_after=1)
        reached = 0
        for endpoint in engines:
            record.decode = endpoint.address
            work = self._fleet.decoding(endpoint, sent=True)
            try:
                connection, answer = await self._exchanges.open(
                    "decode",
                    endpoint,
                    head,
                    pieces if has_body else (),
                    first_byte_seconds=self._limits.decode_first_byte_seconds,
                    idle_seconds=self._limits.decode_idle_seconds,
                )
                try:
                    record.phase = "stream"
                    turn.client.release_body(request)
                    pieces = ()
                    await turn.reply.relay(connection, answer)
                except UpstreamError as error:
                    logger.warning("The answer of %s broke off: %s", endpoint.address, error)
                    if isinstance(error, ConnectionLost):
                        self._fleet.note_failure(endpoint, "broken")
                    turn.reply.end_broken(connection, "The engine broke off its answer; send the request again.")
                finally:
                    connection.release()
                return
            except UpstreamError as error:
                reached += not isinstance(error, ConnectFailed)
                is_last = endpoint is engines[-1] or reached >= MOST_REACHED or isinstance(error, AnswerTimedOut)
                if is_last or not self._budget.withdraw():
                    raise explain_failure("Decode", endpoint, error) from error
                record.retries += 1
                self._metrics.count_retry("decode", "connection")
            finally:
                work.end()


def _prepare_passed(request: Request, target: Target, record: TurnRecord) -> Sequence[Buffer]:
    """The body for the engine; finds the session."""
    if target.item:  # a stored response: its id names the session, and so the engine
        record.session = parse_response_id(target.item.decode("latin-1")) or b""
        return [request.body]
    if _is_multipart(request):  # a form (audio) has no field that takes KV parameters
        return [request.body]
    fields = check_fields(request.body)
    record.session = identify(request.head.headers, fields, request.body).session
    return build_passed_body(request.body, fields)


def _is_multipart(request: Request) -> bool:
    kind = request.head.fields.get(b"content-type", b"")
    return kind.strip().lower().startswith(b"multipart/form-data")
