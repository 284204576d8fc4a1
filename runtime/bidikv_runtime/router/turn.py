"""The life of a turn: its path, its legs, and what is tried when one of them fails.

    path ── local ───────────────────────────► decode leg, which decode refuses when it would compute too much
        └── bidirectional, plain ─► prefill leg ─► decode leg, which decode refuses when it does not find the result

What is tried again, and what not:

- Until bytes of an engine's answer went to the client, a leg that failed (broken connection, 5xx) is sent to another
  engine, within the retry budget. The KV is still at prefill when decode fails, so that only decode is asked again; a
  lone decode engine is asked again after another prefill leg.
- A refused decode leg (``contract.HANDOVER_LOST``) leads to both legs, once; then decode answers in any case.
- An engine's verdict (4xx, or 5xx after the last try) goes to the client with its status, headers and body.
- Once the answer began it can only be ended, with an error event for a stream of events; or, by option, continued on
  another engine from what the client has got.

Cancellation: the server cancels the task of a client that left; leaving an exchange early closes its connection, which
makes vLLM abort the request. Nothing here may swallow ``CancelledError``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from bidikv_runtime.contract import PATH_HEADER, RouterConfig
from bidikv_runtime.router.admission import Admission
from bidikv_runtime.router.api.continuation import Recorder, Rewriter
from bidikv_runtime.router.api.errors import ApiError
from bidikv_runtime.router.api.legs import (
    PrefillAnswer,
    bound_prefill_answer,
    build_decode_body,
    build_prefill_body,
    check_fields,
    may_refuse,
    may_reuse_tokens,
    needs_prefill,
    parse_prefill_answer,
    wants_events,
)
from bidikv_runtime.router.api.session import Identity, build_response_id, identify
from bidikv_runtime.router.api.splice import Buffer, Fields, compute_length
from bidikv_runtime.router.api.tenant import compute_cache_salt
from bidikv_runtime.router.choice.budget import RetryBudget
from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.router.choice.engine import Work
from bidikv_runtime.router.choice.fleet import Fleet
from bidikv_runtime.router.choice.path import Decision, TurnFacts
from bidikv_runtime.router.exchange import Exchanges
from bidikv_runtime.router.http.client import ClientConnection, Request
from bidikv_runtime.router.http.http1 import ResponseHead, finish_request_head
from bidikv_runtime.router.http.upstream import AnswerTimedOut, ConnectionLost, UpstreamConnection, UpstreamError
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.router.observe.metrics import Leg, RetryReason, RouterMetrics
from bidikv_runtime.router.observe.record import Path, TurnRecord
from bidikv_runtime.router.reply import Reply

logger = logging.getLogger(__name__)

_PATH_HEADER: Final = PATH_HEADER.encode("ascii")
_RETRIED_STATUS: Final = frozenset({500, 502, 503, 504})
_SUCCESS: Final = range(200, 300)
_MOST_TRIES: Final = 3
"""Of one leg, on different engines."""
_MOST_CONTINUED: Final = 3
"""How often one stream may go on elsewhere."""


@dataclass(slots=True)
class Turn:
    """What the legs of one request share."""

    request: Request
    client: ClientConnection
    record: TurnRecord
    reply: Reply
    forwarded: bytes
    """The head that both legs send, up to its framing."""
    forced: Path | None = None
    identity: Identity | None = None
    decode: list[Endpoint] = field(default_factory=list)
    """In the order to try."""

    @property
    def engine(self) -> Endpoint:
        """The decode engine that was asked last."""
        return next(e for e in self.decode if e.address == self.record.decode)

    decision: Decision | None = None
    work: Work | None = None
    """At the decode engine that is to answer."""
    guarded: bool = False
    """The decode leg tells what decode must find or may compute, and may be refused for it."""
    local_refused: bool = False
    handover_lost: bool = False
    repeated: bool = False
    """Both legs were sent again because the only decode engine failed."""
    recorder: Recorder | None = None
    """Follows a stream that may have to go on elsewhere."""


class Turns:
    """Serves turns; shared by all requests."""

    def __init__(
        self,
        config: RouterConfig,
        limits: Limits,
        fleet: Fleet,
        exchanges: Exchanges,
        admission: Admission,
        budget: RetryBudget,
        metrics: RouterMetrics,
    ) -> None:
        self._config = config
        self._limits = limits
        self._fleet = fleet
        self._exchanges = exchanges
        self._admission = admission
        self._budget = budget
        self._metrics = metrics

    async def serve(self, turn: Turn) -> None:
        """Answer a turn.

        Raises:
            ApiError: it cannot be answered; nothing of an engine's answer went to the client.
        """
        try:
            # Bodies are built in a call of their own: a frame that still knew their fields would hold the whole history
            # in memory while decode streams.
            while (pieces := await self._prepare(turn)) is not None and not await self._answer(turn, pieces):
                pass
        finally:
            if turn.work is not None:
                turn.work.end()

    async def _prepare(self, turn: Turn) -> list[Buffer] | None:
        """The body of the leg that answers, after the prefill leg if there is one; None when prefill's verdict went to
        the client."""
        request, record = turn.request, turn.record
        fields = check_fields(request.body)
        identity = turn.identity = identify(request.head.headers, fields, request.body)
        record.session = identity.session
        turn.decode = self._fleet.choose_decode(identity.session)
        if not turn.decode:  # prefill must not compute for nobody
            raise ApiError(503, "No decode engine is ready; retry later.", retry_after=1)
        if wants_events(fields) and not record.streamed:
            turn.reply.expect_events()
        salt = compute_cache_salt(identity.tenant, fields) if self._config.cache_salt_by_tenant else None
        response_id = build_response_id(identity.session) if record.route == "responses" else ""
        if self._config.continue_streams and turn.recorder is None and wants_events(fields):
            turn.recorder = Recorder.build(record.route, fields)
        turn.guarded = False
        if not needs_prefill(fields, record.route):
            turn.decision = None
            self._begin_work(turn, turn.decode[0], 0)
            return build_decode_body(
                request.body, fields, (), identity.session, cache_salt=salt, response_id=response_id
            )
        guardable = not turn.handover_lost and may_refuse(fields, record.route)
        facts = TurnFacts(
            identity.session,
            len(request.body),
            identity.first_turn,
            forced=turn.forced,
            repeated=turn.local_refused or not guardable,
        )
        decision = turn.decision = self._fleet.choose_path(facts, turn.decode[0])
        record.path, record.reason = decision.path, decision.reason
        if decision.path == "local":
            turn.guarded = True
            self._begin_work(turn, turn.decode[0], decision.uncached_tokens)
            return build_decode_body(
                request.body,
                fields,
                (),
                identity.session,
                compute_limit=decision.limit,
                cache_salt=salt,
                response_id=response_id,
            )
        self._begin_work(turn, turn.decode[0], 0)
        prefilled = await self._prefill_in_turn(turn, fields, decision, salt)
        if prefilled is None:
            return None
        engine, answer = prefilled
        turn.guarded = guardable and answer.prompt_tokens is not None
        return build_decode_body(
            request.body,
            fields,
            (engine.lookup,),
            identity.session,
            answer.prompt_tokens if turn.guarded else None,
            token_ids=answer.token_ids,
            cache_salt=salt,
            response_id=response_id,
        )

    def _begin_work(self, turn: Turn, endpoint: Endpoint, tokens: int) -> None:
        if turn.work is not None:
            turn.work.end()
        turn.work = self._fleet.decoding(endpoint, tokens)

    # --- the prefill leg ---

    async def _prefill_in_turn(
        self, turn: Turn, fields: Fields, decision: Decision, salt: bytes | None
    ) -> tuple[Endpoint, PrefillAnswer] | None:
        admission, record = self._admission, turn.record
        if not admission.try_enter():
            record.phase = "queue"
            assert turn.identity is not None
            await admission.wait(turn.identity.tenant)
        try:
            if not record.prefills:  # else both legs run again, which is no time in the queue
                record.admitted_at = monotonic()
            record.phase = "prefill"
            return await self._prefill(turn, fields, decision, salt)
        finally:
            admission.leave()

    async def _prefill(
        self, turn: Turn, fields: Fields, decision: Decision, salt: bytes | None
    ) -> tuple[Endpoint, PrefillAnswer] | None:
        """Run the prefill leg: where the prompt's KV is now, or None when the engine's verdict went to the client.

        Raises:
            ApiError: no engine gave an answer.
        """
        record, session, decode = turn.record, turn.record.session, turn.decode[0]
        body_bytes = len(turn.request.body)
        # For a first turn, too: what prompts have in common is found by its content.
        sources = self._fleet.choose_sources(session, decode, self._config.source_count)
        with_ids = self._wants_token_ids(decision) and may_reuse_tokens(fields, record.route)
        pieces = build_prefill_body(
            fields,
            sources,
            session,
            route=record.route,
            body_bytes=body_bytes,
            cache_salt=salt,
            return_tokens=with_ids,
        )
        bound = bound_prefill_answer(record.route, body_bytes, returns_tokens=with_ids)
        head = finish_request_head(turn.forwarded, compute_length(pieces))
        seconds = self._limits.prefill_seconds
        tried: list[str] = []
        while True:
            endpoint = self._fleet.choose_prefill(session, decode, tried)
            if endpoint is None:
                raise ApiError(503, "No prefill engine is ready; retry later.", retry_after=1)
            tried.append(endpoint.address)
            may_retry = len(tried) < _MOST_TRIES and self._fleet.choose_prefill(session, decode, tried) is not None
            record.prefill = endpoint.address
            record.prefill_sent_at = monotonic()
            work = self._fleet.prefilling(endpoint, decision.uncached_tokens)
            try:
                connection, answer = await self._exchanges.open(
                    "prefill", endpoint, head, pieces, first_byte_seconds=seconds, idle_seconds=seconds
                )
                try:
                    if answer.status in _SUCCESS:
                        body = await _read_bounded(connection, bound)
                        return endpoint, self._take_prefilled(turn, endpoint, decision, body)
                    if not (answer.status in _RETRIED_STATUS and may_retry and self._budget.withdraw()):
                        await self._relay_verdict(turn, connection, answer)
                        return None
                    self._retry(turn, "prefill", "status")
                finally:
                    connection.release()
            except UpstreamError as error:
                if isinstance(error, AnswerTimedOut) or not (may_retry and self._budget.withdraw()):
                    raise explain_failure("Prefill", endpoint, error) from error
                self._retry(turn, "prefill", "connection")
            finally:
                work.end()

    def _wants_token_ids(self, decision: Decision) -> bool:
        least = self._limits.token_ids_from
        return 0 < least <= decision.prompt_tokens

    def _take_prefilled(self, turn: Turn, endpoint: Endpoint, decision: Decision, body: bytes | None) -> PrefillAnswer:
        record = turn.record
        answer = parse_prefill_answer(body) if body is not None else PrefillAnswer()
        record.prefill_done_at = monotonic()
        record.prefills += 1
        record.prompt_tokens = answer.prompt_tokens or 0
        if answer.prompt_tokens is None:
            record.unannounced += 1
            if self._config.missing_prefill == "Fail":
                raise ApiError(502, "The prefill engine did not say what it computed; check its version.")
        self._fleet.observe_prefill(
            endpoint, decision, answer.prompt_tokens, record.prefill_done_at - record.prefill_sent_at
        )
        return answer

    # --- the leg that answers ---

    async def _answer(self, turn: Turn, pieces: list[Buffer]) -> bool:
        """Run the leg that answers, on the session's engine or the next in its ranking.

        Returns:
            False when nothing was answered: begin anew with what ``turn`` has learnt.

        Raises:
            ApiError: no engine gave an answer.
        """
        record = turn.record
        record.phase = "decode"
        length = compute_length(pieces)
        head = finish_request_head(turn.forwarded, length, guarded=turn.guarded)
        engines = turn.decode[:_MOST_TRIES]
        for endpoint in engines:
            last = endpoint is engines[-1]
            self._send_work(turn, endpoint)
            try:
                connection, answer = await self._exchanges.open(
                    "decode",
                    endpoint,
                    head,
                    pieces,
                    first_byte_seconds=self._limits.decode_first_byte_seconds,
                    idle_seconds=self._limits.decode_idle_seconds,
                )
            except UpstreamError as error:
                if isinstance(error, AnswerTimedOut):
                    raise explain_failure("Decode", endpoint, error) from error
                if not self._may_try_again(turn, last):
                    raise explain_failure("Decode", endpoint, error) from error
                self._retry(turn, "decode", "connection")
                if last:
                    return False
                continue
            record.decode_head_at = monotonic()
            try:
                if answer.lost_handover:
                    if turn.guarded and self._take_refusal(turn):
                        return False
                elif answer.status in _RETRIED_STATUS and self._may_try_again(turn, last):
                    self._retry(turn, "decode", "status")
                    if last:
                        return False
                    continue
                elif record.prefills > record.handed_over + record.handovers_lost:
                    record.handed_over += 1
                pieces.clear()
                return await self._relay_answer(turn, connection, answer)
            finally:
                connection.release()
        raise AssertionError("the last engine's answer or error ends the loop")

    def _send_work(self, turn: Turn, endpoint: Endpoint) -> None:
        record = turn.record
        if record.decode != endpoint.address and record.decode:
            self._begin_work(turn, endpoint, 0)
        record.decode = endpoint.address
        record.decode_sent_at = monotonic()
        if turn.work is not None:
            turn.work.send()

    def _may_try_again(self, turn: Turn, last: bool) -> bool:
        """Whether the leg may go to the next engine; from the last one both legs begin anew, once."""
        if last and (len(turn.decode) > 1 or turn.repeated):
            return False
        if not self._budget.withdraw():
            return False
        turn.repeated = turn.repeated or last
        return True

    def _take_refusal(self, turn: Turn) -> bool:
        """Decode refused; whether the turn begins anew."""
        record = turn.record
        if record.path == "local":
            record.local_refusals += 1
            turn.local_refused = True
            self._fleet.note_local(record.session, refused=True)
            self._metrics.count_retry("decode", "local")
            return True
        record.handovers_lost += 1
        if not self._budget.withdraw():
            return False
        turn.handover_lost = True
        self._retry(turn, "prefill", "handover")
        return True

    async def _relay_answer(self, turn: Turn, connection: UpstreamConnection, head: ResponseHead) -> bool:
        record, reply, client = turn.record, turn.reply, turn.client
        record.phase = "stream"
        reply.on_first_byte = lambda: self._note_first_byte(turn)
        if self._config.debug:
            reply.extra = [(_PATH_HEADER, record.path.encode("ascii"))]
        recorder = turn.recorder
        if recorder is None:
            client.release_body(turn.request)
        try:
            await reply.relay(connection, head, Rewriter(recorder) if recorder and record.continued else recorder)
        except UpstreamError as error:
            logger.warning("The answer of %s broke off: %s", connection.endpoint.address, error)
            if isinstance(error, ConnectionLost):
                self._fleet.note_failure(turn.engine, "broken")
            if recorder is not None:
                if ending := recorder.build_ending():
                    reply.end_events(ending)
                    return True
                if self._continue(turn, recorder):
                    return False
            reply.end_broken(connection, "The decode engine broke off its answer; send the request again.")
            return True
        if recorder is not None:
            if recorder.failed and self._continue(turn, recorder):
                return False
            reply.end_events(recorder.release())
        if head.status in _SUCCESS:
            self._note_turn(turn)
        return True

    def _note_turn(self, turn: Turn) -> None:
        record, decision = turn.record, turn.decision
        if decision is None:
            return
        if decision.path == "local":
            self._fleet.note_local(record.session, refused=False)
        self._fleet.note_turn(record.session, turn.engine, record.body_bytes, record.prompt_tokens or None)

    def _continue(self, turn: Turn, recorder: Recorder) -> bool:
        """Whether a broken stream goes on elsewhere; the turn's body is then what is left to do."""
        request, record = turn.request, turn.record
        if record.continued >= _MOST_CONTINUED:
            return False
        follow_up = recorder.build_follow_up(request.body, check_fields(request.body))
        if follow_up is None or not self._budget.withdraw():
            return False
        logger.info("Going on with the answer of %s on another engine", turn.engine.address)
        request.body = b"".join(follow_up)
        record.continued += 1
        turn.local_refused = turn.handover_lost = turn.repeated = False
        return True

    def _note_first_byte(self, turn: Turn) -> None:
        """A streamed answer's first byte went out."""
        record, decision = turn.record, turn.decision
        self._metrics.observe_first_token(record)
        if turn.work is not None:
            turn.work.finish_prompt()
        if decision is not None and not record.retries and not record.local_refusals:
            began = record.decode_sent_at if decision.path == "local" else record.prefill_sent_at
            self._fleet.observe_first_byte(decision, record.first_byte_at - began)

    # --- parts ---

    async def _relay_verdict(self, turn: Turn, connection: UpstreamConnection, head: ResponseHead) -> None:
        try:
            await turn.reply.relay(connection, head)
        except UpstreamError:
            turn.reply.end_broken(connection, "The prefill engine broke off its answer; send the request again.")

    def _retry(self, turn: Turn, leg: Leg, reason: RetryReason) -> None:
        turn.record.retries += 1
        self._metrics.count_retry(leg, reason)


async def _read_bounded(connection: UpstreamConnection, bound: int) -> bytes | None:
    """An answer that no client gets; None when it is longer than ``bound``, of which nothing is kept.

    Raises:
        UpstreamError: it broke off.
    """
    body = bytearray()

    def keep(data: bytes) -> None:
        if len(body) <= bound:
            body.extend(data)

    await connection.relay(keep, decoded=True)
    return bytes(body) if len(body) <= bound else None


def explain_failure(role: str, endpoint: Endpoint, error: UpstreamError) -> ApiError:
    """The answer to a client when no engine gave one."""
    logger.warning("%s engine %s failed: %s", role, endpoint.address, error)
    status = 504 if isinstance(error, AnswerTimedOut) else 502
    return ApiError(
        status, f"The {role.lower()} engine gave no answer: {error}; send the request again.", retry_after=1
    )
