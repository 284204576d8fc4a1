"""The life of a turn: its path, and its legs until one of them has answered.

    path ── local ───────────────────────────► decode leg, which decode refuses when it would compute too much
        └── bidirectional, plain ─► prefill leg ─► decode leg, which decode refuses when it does not find the result

A leg that cannot answer leaves what it learnt in the turn, and the turn begins anew (``decode_leg``).

Cancellation: the server cancels the task of a client that left; leaving an exchange early closes its connection, which
makes vLLM abort the request. Nothing on a turn's way may swallow ``CancelledError``.
"""

from __future__ import annotations

from bidikv_runtime.router.api.continuation import Recorder
from bidikv_runtime.router.api.errors import ApiError
from bidikv_runtime.router.api.legs import build_decode_body, check_fields, may_refuse, needs_prefill, wants_events
from bidikv_runtime.router.api.session import build_response_id, identify
from bidikv_runtime.router.api.splice import Buffer
from bidikv_runtime.router.api.tenant import compute_cache_salt
from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.router.choice.path import TurnFacts
from bidikv_runtime.router.decode_leg import DecodeLeg
from bidikv_runtime.router.prefill_leg import PrefillLeg
from bidikv_runtime.router.turn import Shared, Turn


class Turns:
    """Serves turns; shared by all requests."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._prefill = PrefillLeg(shared)
        self._decode = DecodeLeg(shared)

    async def serve(self, turn: Turn) -> None:
        """Answer a turn.

        Raises:
            ApiError: it cannot be answered; nothing of an engine's answer went to the client.
        """
        try:
            # Bodies are built in a call of their own: a frame that still knew their fields would hold the whole history
            # in memory while decode streams.
            while (pieces := await self._prepare(turn)) is not None and not await self._decode.run(turn, pieces):
                pass
        finally:
            if turn.work is not None:
                turn.work.end()

    async def _prepare(self, turn: Turn) -> list[Buffer] | None:
        """The body of the leg that answers, after the prefill leg if there is one; None when prefill's verdict went to
        the client."""
        request, record = turn.request, turn.record
        fields = check_fields(request.body)
        identity = identify(request.head.headers, fields, request.body)
        session = record.session = identity.session
        turn.tenant = identity.tenant
        turn.decode = self._shared.fleet.choose_decode(session)
        if not turn.decode:  # prefill must not compute for nobody
            raise ApiError(503, "No decode engine is ready; retry later.", retry_after=1)
        if wants_events(fields) and not record.streamed:
            turn.reply.expect_events()
        salt = compute_cache_salt(identity.tenant, fields) if self._shared.config.cache_salt_by_tenant else None
        response_id = build_response_id(session) if record.route == "responses" else ""
        if self._shared.config.continue_streams and turn.recorder is None and wants_events(fields):
            turn.recorder = Recorder.build(record.route, fields)
        turn.guarded = False
        if not needs_prefill(fields, record.route):
            turn.decision = None
            self._count_work(turn, turn.decode[0], 0)
            return build_decode_body(request.body, fields, (), session, cache_salt=salt, response_id=response_id)
        guardable = not turn.handover_lost and may_refuse(fields, record.route)
        facts = TurnFacts(
            session,
            len(request.body),
            identity.first_turn,
            forced=turn.forced,
            repeated=turn.local_refused or not guardable,
        )
        decision = turn.decision = self._shared.fleet.choose_path(facts, turn.decode[0])
        record.path, record.reason = decision.path, decision.reason
        if decision.path == "local":
            turn.guarded = True
            self._count_work(turn, turn.decode[0], decision.uncached_tokens)
            return build_decode_body(
                request.body,
                fields,
                (),
                session,
                compute_limit=decision.limit,
                cache_salt=salt,
                response_id=response_id,
            )
        self._count_work(turn, turn.decode[0], 0)
        prefilled = await self._prefill.run(turn, fields, decision, salt)
        if prefilled is None:
            return None
        engine, answer = prefilled
        turn.guarded = guardable and answer.prompt_tokens is not None
        return build_decode_body(
            request.body,
            fields,
            (engine.lookup,),
            session,
            answer.prompt_tokens if turn.guarded else None,
            token_ids=answer.token_ids,
            cache_salt=salt,
            response_id=response_id,
        )

    def _count_work(self, turn: Turn, endpoint: Endpoint, tokens: int) -> None:
        if turn.work is not None:
            turn.work.end()
        turn.work = self._shared.fleet.decoding(endpoint, tokens)
