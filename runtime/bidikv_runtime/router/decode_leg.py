"""The leg that answers: sent to the session's decode engine, relayed to the client, tried again, continued elsewhere.

What is tried again:

- Until bytes of an answer went to the client, a leg that failed (broken connection, 5xx) goes to the next engine within
  the retry budget: the KV is still at prefill. A lone decode engine is asked again after another prefill leg.
- A refusal (``contract.HANDOVER_LOST``) makes the turn begin anew: a local one on the other path, another one with both
  legs, once, within the budget; then decode answers in any case.
- An engine's verdict (4xx, or 5xx after the last try) goes to the client with its status, headers and body.

Once the answer began it can only be ended, with an error event for a stream of events; or, by option, it goes on with
another engine from what the client has got.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import Final

from bidikv_runtime.contract import PATH_HEADER
from bidikv_runtime.router.api.continuation import Recorder, Rewriter
from bidikv_runtime.router.api.legs import check_fields
from bidikv_runtime.router.api.splice import Buffer, compute_length
from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.router.http.http1 import ResponseHead, finish_request_head
from bidikv_runtime.router.http.upstream import (
    AnswerTimedOut,
    ConnectFailed,
    ConnectionLost,
    UpstreamConnection,
    UpstreamError,
)
from bidikv_runtime.router.observe.metrics import Leg, RetryReason
from bidikv_runtime.router.turn import MOST_REACHED, MOST_TRIES, RETRIED_STATUS, SUCCESS, Shared, Turn, explain_failure

logger = logging.getLogger(__name__)

_PATH_HEADER: Final = PATH_HEADER.encode("ascii")
_MOST_CONTINUED: Final = 3
"""How often one stream may go on elsewhere."""


class DecodeLeg:
    """Runs decode legs; shared by all requests."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    async def run(self, turn: Turn, pieces: list[Buffer]) -> bool:
        """Have the session's decode engine answer, or the next one in its order.

        Args:
            turn: with its decode engines chosen.
            pieces: of the leg's body; emptied when they are not needed any more.

        Returns:
            False when nothing was answered: begin anew with what ``turn`` has learnt.

        Raises:
            ApiError: no engine gave an answer.
        """
        record = turn.record
        record.phase = "decode"
        length = compute_length(pieces)
        head = finish_request_head(turn.forwarded, length, guarded=turn.guarded)
        engines = turn.decode[:MOST_TRIES]
        refused = 0
        for tried, endpoint in enumerate(engines, start=1):
            last = tried == len(engines) or tried - refused >= MOST_REACHED
            self._count_work(turn, endpoint)
            record.decode = endpoint.address
            if not record.continued:
                record.decode_sent_at = monotonic()
            try:
                connection, answer = await self._shared.exchanges.open(
                    "decode",
                    endpoint,
                    head,
                    pieces,
                    first_byte_seconds=self._shared.limits.decode_first_byte_seconds,
                    idle_seconds=self._shared.limits.decode_idle_seconds,
                )
            except UpstreamError as error:
                if isinstance(error, ConnectFailed):  # it does not know the request
                    refused += 1
                    last = tried == len(engines)
                if isinstance(error, AnswerTimedOut) or not self._may_try_again(turn, last):
                    raise explain_failure("Decode", endpoint, error) from error
                self._retry(turn, "decode", "connection")
                if last:
                    return False
                continue
            if not record.continued:
                record.decode_head_at = monotonic()
            try:
                if answer.lost_handover:
                    if turn.guarded and self._take_refusal(turn, endpoint):
                        return False
                elif answer.status in RETRIED_STATUS and self._may_try_again(turn, last):
                    self._retry(turn, "decode", "status")
                    if last:
                        return False
                    continue
                elif record.prefills > record.handed_over + record.handovers_lost:
                    record.handed_over += 1
                pieces.clear()
                return await self._relay(turn, endpoint, connection, answer)
            finally:
                connection.release()
        raise AssertionError("the last engine's answer or error ends the loop")

    def _count_work(self, turn: Turn, endpoint: Endpoint) -> None:
        if endpoint is not turn.decode[0]:  # whose work was counted when it was chosen
            if turn.work is not None:
                turn.work.end()
            turn.work = self._shared.fleet.decoding(endpoint)
        if turn.work is not None:
            turn.work.send()

    def _may_try_again(self, turn: Turn, last: bool) -> bool:
        """Whether the leg may go to the next engine; from the last one both legs begin anew, once."""
        if last and (len(turn.decode) > 1 or turn.repeated):
            return False
        if not self._shared.budget.withdraw():
            return False
        turn.repeated = turn.repeated or last
        return True

    def _take_refusal(self, turn: Turn, engine: Endpoint) -> bool:
        """Decode refused; whether the turn begins anew."""
        record = turn.record
        if record.path == "local":
            record.local_refusals += 1
            turn.local_refused = True
            if engine is turn.decode[0]:  # of another one, nobody expected it to hold the session
                self._shared.fleet.note_local(record.session, refused=True)
            self._shared.metrics.count_retry("decode", "local")
            return True
        record.handovers_lost += 1
        if not self._shared.budget.withdraw():
            return False
        turn.handover_lost = True
        self._retry(turn, "prefill", "handover")
        return True

    async def _relay(self, turn: Turn, engine: Endpoint, connection: UpstreamConnection, head: ResponseHead) -> bool:
        record, reply = turn.record, turn.reply
        record.phase = "stream"
        reply.on_first_byte = lambda: self._note_first_byte(turn)
        if self._shared.config.debug:
            reply.extra = [(_PATH_HEADER, record.path.encode("ascii"))]
        # Only a stream that is written in the router's own chunks can go on: of anything else (an error, a document, a
        # stream for HTTP/1.0) nobody would follow what the client has got.
        recorder = turn.recorder if reply.may_rewrite(head) else None
        if recorder is None:
            turn.client.release_body(turn.request)
        try:
            await reply.relay(connection, head, Rewriter(recorder) if recorder and record.continued else recorder)
        except UpstreamError as error:
            logger.warning("The answer of %s broke off: %s", engine.address, error)
            if isinstance(error, ConnectionLost):
                self._shared.fleet.note_failure(engine, "broken")
            if recorder is not None:
                if ending := recorder.build_ending():
                    reply.end_events(ending)
                    return True
                # For a client that takes nothing, another engine would only work until the same end.
                if not turn.client.stalled and self._continue(turn, recorder):
                    return False
            reply.end_broken(connection, "The decode engine broke off its answer; send the request again.")
            return True
        if recorder is not None:
            if recorder.failed and self._continue(turn, recorder):
                return False
            reply.end_events(recorder.release())
        if head.status in SUCCESS:
            self._note_turn(turn, engine)
        return True

    def _note_turn(self, turn: Turn, engine: Endpoint) -> None:
        record, decision = turn.record, turn.decision
        if decision is None:
            return
        if decision.path == "local":
            self._shared.fleet.note_local(record.session, refused=False)
        self._shared.fleet.note_turn(record.session, engine, record.body_bytes, record.prompt_tokens or None)

    def _continue(self, turn: Turn, recorder: Recorder) -> bool:
        """Whether a broken stream goes on elsewhere; the turn's body is then what is left to do."""
        request, record = turn.request, turn.record
        if record.continued >= _MOST_CONTINUED:
            return False
        follow_up = recorder.build_follow_up(request.body, check_fields(request.body))
        if follow_up is None or not self._shared.budget.withdraw():
            return False
        logger.info("Going on with the answer of %s on another engine", record.decode)
        request.body = b"".join(follow_up)
        record.continued += 1
        turn.local_refused = turn.handover_lost = turn.repeated = False
        return True

    def _note_first_byte(self, turn: Turn) -> None:
        """A streamed answer's first byte went out."""
        record, decision = turn.record, turn.decision
        self._shared.metrics.observe_first_token(record)
        if turn.work is not None:
            turn.work.finish_prompt()
        if decision is not None and not record.retries and not record.local_refusals:
            began = record.decode_sent_at if decision.path == "local" else record.prefill_sent_at
            self._shared.fleet.observe_first_byte(decision, record.first_byte_at - began)

    def _retry(self, turn: Turn, leg: Leg, reason: RetryReason) -> None:
        turn.record.retries += 1
        self._shared.metrics.count_retry(leg, reason)
