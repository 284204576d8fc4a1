"""The leg that computes a prompt's KV: admitted, sent to the engine of the shortest wait, tried again elsewhere.

After a broken connection or a 5xx it goes to another engine, within the retry budget. An engine that was silent for too
long is no reason to have another one compute the same: that is an error. An engine's verdict goes to the client.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from bidikv_runtime.router.api.errors import ApiError
from bidikv_runtime.router.api.legs import (
    PrefillAnswer,
    bound_prefill_answer,
    build_prefill_body,
    may_reuse_tokens,
    parse_prefill_answer,
)
from bidikv_runtime.router.api.splice import Fields, compute_length
from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.router.choice.path import Decision
from bidikv_runtime.router.http.http1 import ResponseHead, finish_request_head
from bidikv_runtime.router.http.upstream import AnswerTimedOut, ConnectFailed, UpstreamConnection, UpstreamError
from bidikv_runtime.router.observe.metrics import RetryReason
from bidikv_runtime.router.turn import MOST_REACHED, MOST_TRIES, RETRIED_STATUS, SUCCESS, Shared, Turn, explain_failure


class PrefillLeg:
    """Runs prefill legs; shared by all requests."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    async def run(
        self, turn: Turn, fields: Fields, decision: Decision, salt: bytes | None
    ) -> tuple[Endpoint, PrefillAnswer] | None:
        """Wait for a slot, then have a prefill engine compute the prompt.

        Args:
            turn: with its decode engines chosen.
            fields: of the client's body.
            decision: the turn's path.
            salt: encoded ``cache_salt``, or None.

        Returns:
            Where the prompt's KV is now, and what prefill says; None when the engine's verdict went to the client.

        Raises:
            ApiError: no engine gave an answer, or the turn was not admitted.
        """
        admission, record = self._shared.admission, turn.record
        if not admission.try_enter():
            record.phase = "queue"
            await admission.wait(turn.tenant)
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
        record, session, decode = turn.record, turn.record.session, turn.decode[0]
        body_bytes = len(turn.request.body)
        sources: list[str] = []
        if decision.path != "plain" or decision.reason != "forced":
            # For a first turn, too: what prompts have in common is found by its content.
            sources = self._shared.fleet.choose_sources(session, decode, self._shared.config.source_count)
        least = self._shared.limits.token_ids_from
        with_ids = 0 < least <= decision.prompt_tokens and may_reuse_tokens(fields, record.route)
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
        seconds = self._shared.limits.prefill_seconds
        tried: list[str] = []
        refused = 0
        while True:
            endpoint = self._shared.fleet.choose_prefill(session, decode, tried)
            if endpoint is None:
                raise ApiError(503, "No prefill engine is ready; retry later.", retry_after=1)
            tried.append(endpoint.address)
            record.prefill = endpoint.address
            began = monotonic()
            if not record.continued:
                record.prefill_sent_at = began
            work = self._shared.fleet.prefilling(endpoint, decision.uncached_tokens)
            try:
                connection, answer = await self._shared.exchanges.open(
                    "prefill", endpoint, head, pieces, first_byte_seconds=seconds, idle_seconds=seconds
                )
                try:
                    if answer.status in SUCCESS:
                        body = await self._read(endpoint, connection, bound)
                        return endpoint, self._take_answer(turn, endpoint, decision, body, began)
                    if answer.status not in RETRIED_STATUS or not self._may_try_again(turn, decode, tried, refused):
                        await self._relay_verdict(turn, connection, answer)
                        return None
                    reason: RetryReason = "status"
                finally:
                    connection.release()
            except UpstreamError as error:
                refused += isinstance(error, ConnectFailed)
                if isinstance(error, AnswerTimedOut) or not self._may_try_again(turn, decode, tried, refused):
                    raise explain_failure("Prefill", endpoint, error) from error
                reason = "connection"
            finally:
                work.end()
            record.retries += 1
            self._shared.metrics.count_retry("prefill", reason)

    def _may_try_again(self, turn: Turn, decode: Endpoint, tried: Sequence[str], refused: int) -> bool:
        if len(tried) >= MOST_TRIES or len(tried) - refused >= MOST_REACHED:
            return False
        if self._shared.fleet.choose_prefill(turn.record.session, decode, tried) is None:
            return False
        return self._shared.budget.withdraw()

    async def _read(self, endpoint: Endpoint, connection: UpstreamConnection, bound: int) -> bytearray | None:
        """The answer; None when it is longer than ``bound``, of which nothing is kept."""
        body = bytearray()

        def keep(data: bytes) -> None:
            if len(body) <= bound:
                body.extend(data)

        try:
            await connection.relay(keep, decoded=True)
        except UpstreamError:
            self._shared.fleet.note_failure(endpoint, "broken")
            raise
        return body if len(body) <= bound else None

    def _take_answer(
        self, turn: Turn, endpoint: Endpoint, decision: Decision, body: bytearray | None, began: float
    ) -> PrefillAnswer:
        record = turn.record
        answer = parse_prefill_answer(body) if body is not None else PrefillAnswer()
        now = monotonic()
        if not record.continued:
            record.prefill_done_at = now
        record.prefills += 1
        record.prompt_tokens = answer.prompt_tokens or 0
        if answer.prompt_tokens is None:
            record.unannounced += 1
            if self._shared.config.missing_prefill == "Fail":
                raise ApiError(502, "The prefill engine did not say what it computed; check its version.")
        self._shared.fleet.observe_prefill(endpoint, decision, answer.prompt_tokens, now - began)
        return answer

    async def _relay_verdict(self, turn: Turn, connection: UpstreamConnection, head: ResponseHead) -> None:
        try:
            await turn.reply.relay(connection, head)
        except UpstreamError:
            turn.reply.end_broken(connection, "The prefill engine broke off its answer; send the request again.")
