"""What this replica knows about the engines right now: the only mutable state that requests share.

The snapshot of engines, their last reports, this replica's own work on them, breakers, what was learnt of durations,
and a short memory of its own turns. Decisions are made in the modules beside it; this class holds what they rest on.
Nothing here waits or does I/O; everything is bounded by the number of engines or by a limit.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from bidikv_runtime.contract import EngineReport, RouterConfig
from bidikv_runtime.router.choice.breaker import Breaker, BreakerLimits, Failure
from bidikv_runtime.router.choice.costs import Overheads, TokensPerByte
from bidikv_runtime.router.choice.decode import choose_candidates, compute_capacity, compute_tier, order_decode
from bidikv_runtime.router.choice.endpoints import Endpoint, Pools, Role, is_ready
from bidikv_runtime.router.choice.engine import Engine, Totals, Work
from bidikv_runtime.router.choice.holdings import Holding, Holdings
from bidikv_runtime.router.choice.memory import Memory
from bidikv_runtime.router.choice.path import (
    Decision,
    Situation,
    TurnFacts,
    choose_path,
    estimate_turn,
)
from bidikv_runtime.router.choice.prefill import choose_prefill, compute_wait
from bidikv_runtime.router.choice.ranking import Rankings
from bidikv_runtime.router.choice.sources import order_sources
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.router.observe.engine_view import EngineView

logger = logging.getLogger(__name__)

_EXPLORE_EVERY: Final = 32
"""Of the turns for which decode alone seems slower, one goes there all the same."""


@dataclass(frozen=True, slots=True)
class Reporting:
    """An engine to be asked for its report, and what is known already."""

    address: str
    """Of its ``Endpoint``."""
    host: str
    port: int
    """Of its reports."""
    epoch: str
    sequence: int
    reads: bool = False
    """Its sessions' KV will be read: where it stops, it is worth waiting for that."""


class Fleet:
    """Engines, what they do and what they hold."""

    def __init__(
        self,
        clock: Callable[[], float],
        limits: Limits,
        config: RouterConfig,
        random_source: random.Random | None = None,
    ) -> None:
        """
        Args:
            clock: seconds, monotonic.
            limits: bounds.
            config: what the operator asked for.
            random_source: for the breakers' jitter; tests give a seeded one.
        """
        self.now = clock
        """The clock."""
        self._limits = limits
        self._config = config
        self._random = random_source or random.Random()
        self._breaker_limits = BreakerLimits(
            limits.breaker_failures, limits.breaker_seconds, limits.breaker_max_seconds, limits.probe_seconds
        )
        self.pools = Pools()
        self.known = False
        """Whether a first snapshot arrived."""
        self._prefill: dict[str, Engine] = {}
        self._decode: dict[str, Engine] = {}
        self._ready_prefill: list[Engine] = []
        self._leaving_prefill: list[Engine] = []
        """They terminate and still serve."""
        self._warming: set[Engine] = set()
        self._unwell: set[Engine] = set()
        """Their breaker is not closed."""
        self._candidates = 0
        self._totals = Totals()
        self._typical_speed = 0.0
        self._decode_rankings = Rankings()
        self._prefill_rankings: dict[str, Rankings] = {}
        """By compatibility of the decode engine: of the prefill engines for it."""
        self._memory = Memory(limits.max_sessions_remembered)
        self._holdings = Holdings(clock, self._memory)
        self._tokens_per_byte = TokensPerByte()
        self._local_overheads = Overheads()
        self._prefill_overheads = Overheads()
        self._slower = 0
        """Turns for which decode alone seemed slower."""
        self.on_change: Callable[[], None] | None = None
        """Called after a new snapshot, and when work begins after there was none."""
        self._expects_reports = False
        self._unreported: set[str] = set()
        """Engines that have not been asked yet: what fits them is unknown."""
        self._known_at = 0.0

    # --- what comes in ---

    def replace(self, pools: Pools) -> None:
        """Take a new snapshot; requests that already chose keep their engines."""
        now = self.now()
        before = set(self.pools.ready_decode) if self.known else None
        self._prefill = self._match(self._prefill, pools.prefill, "prefill")
        self._decode = self._match(self._decode, pools.decode, "decode")
        known_ready = {endpoint.address for endpoint in before} if before is not None else None
        for endpoint in pools.ready_decode:
            # With no ready engine before there is nobody who could take the sessions meanwhile.
            if known_ready and endpoint.address not in known_ready and self._limits.warm_seconds > 0:
                self._decode[endpoint.address].warm_from = now
        serving = {e.address for e in (*pools.serving_prefill, *pools.serving_decode) if e.state_port}
        if self._expects_reports:
            earlier = {e.address for e in (*self.pools.serving_prefill, *self.pools.serving_decode)}
            self._unreported |= serving - earlier
        self._unreported &= serving
        if not self.known:
            self._known_at = now
        self.pools = pools
        self.known = True
        self._ready_prefill = [self._prefill[endpoint.address] for endpoint in pools.ready_prefill]
        self._leaving_prefill = [self._prefill[e.address] for e in pools.serving_prefill if not is_ready(e)]
        self._decode_rankings = Rankings([self._decode[endpoint.address] for endpoint in pools.serving_decode])
        self._holdings.forget()
        present = {*self._prefill.values(), *self._decode.values()}
        self._unwell &= present
        self._warming = {engine for engine in self._decode.values() if engine.warm_from is not None}
        self._judge_decode()
        if self.on_change is not None:
            self.on_change()

    def _match(self, known: dict[str, Engine], endpoints: tuple[Endpoint, ...], role: Role) -> dict[str, Engine]:
        matched: dict[str, Engine] = {}
        for endpoint in endpoints:
            engine = known.get(endpoint.address)
            if engine is None:
                engine = self._build_engine(endpoint, role)
            engine.endpoint = endpoint
            matched[endpoint.address] = engine
        for address, engine in known.items():
            if address not in matched:
                engine.candidate = False
        return matched

    def take_report(self, endpoint_address: str, report: EngineReport | None) -> None:
        """Take an engine's report; None: it does not report (any more)."""
        now = self.now()
        is_first = endpoint_address in self._unreported
        self._unreported.discard(endpoint_address)
        self._holdings.forget()
        for engine in self._find(endpoint_address):
            before = engine.compatibility
            engine.take_report(report, now)
            if is_first or engine.compatibility != before:
                self._judge_decode()
            if report is not None:
                for session in report.sessions[-1:]:  # one is enough for a moving average
                    self._tokens_per_byte.observe(session.body_bytes, session.prompt_tokens)
        speeds = [engine.speed for engine in self._ready_prefill if engine.speed > 0]
        self._typical_speed = sum(speeds) / len(speeds) if speeds else 0.0

    def note_silence(self, endpoint_address: str, *, keep: bool) -> None:
        """No report came; ``keep`` leaves the last one in force until it is too old."""
        oldest = self.now() - self._limits.report_keep_seconds
        if keep and any(engine.reported_at > oldest for engine in self._find(endpoint_address)):
            return
        self.take_report(endpoint_address, None)

    def expect_reports(self) -> None:
        """From now on somebody asks for reports: the fleet is not ready before the first ones came or failed to."""
        self._expects_reports = True

    def list_reporting(self) -> list[Reporting]:
        """Engines to be asked for reports."""
        listed: dict[str, Reporting] = {}
        for engine in (*self._ready_prefill, *self._leaving_prefill, *self._decode_rankings.engines):
            endpoint, last = engine.endpoint, engine.report
            if endpoint.state_port:
                epoch, sequence = (last.epoch, last.sequence) if last is not None else ("", 0)
                listed.setdefault(
                    endpoint.address,
                    Reporting(
                        endpoint.address,
                        endpoint.host,
                        endpoint.state_port,
                        epoch,
                        sequence,
                        self._will_be_read(engine),
                    ),
                )
        return list(listed.values())

    def _will_be_read(self, engine: Engine) -> bool:
        """Whether the engine's sessions will be read where they go. Not when it leaves as the last one of its group:
        where they go computes them anew, and as long as they go nowhere they stay."""
        return self._config.reuse == "Bidirectional" and (
            not engine.endpoint.terminating
            or any(
                other is not engine and other.tier <= 1 and is_ready(other.endpoint) and other.fits(engine)
                for other in self._decode_rankings.engines
            )
        )

    def _judge_decode(self) -> None:
        """Find the tier of every decode engine, and which ones are candidates.

        Engines that may read each other's KV are a group. Sessions go where both roles of a group are ready; where no
        group is whole, engines that leave serve on for as long as they are there.
        """
        self._prefill_rankings.clear()
        engines = list(self._decode.values())
        ready = [engine for engine in engines if is_ready(engine.endpoint)]
        prefill = [engine for engine in self._ready_prefill if self._has_reported(engine)]
        for engine in engines:
            engine.tier = 3
        for engine in ready:
            engine.tier = compute_tier(engine, prefill) if self._has_reported(engine) else 2
        if not any(engine.tier <= 1 for engine in ready):
            for engine in self._decode_rankings.engines:
                engine.tier = compute_tier(engine, (*self._ready_prefill, *self._leaving_prefill))
        chosen = choose_candidates(engines)
        for engine in engines:
            engine.candidate = False
        for engine in chosen:
            engine.candidate = True
        self._candidates = len(chosen)
        self._totals.load = sum(engine.load for engine in chosen)

    def _has_reported(self, engine: Engine) -> bool:
        """Whether it was asked: what does not report fits every engine, as far as known."""
        return engine.endpoint.address not in self._unreported

    # --- what is chosen ---

    def explain_unready(self) -> str | None:
        """Why no turn can be served now; None when one can."""
        if not self.known:
            return "The list of engines has not arrived yet."
        if self._unreported and self.now() - self._known_at < 2 * self._limits.report_timeout_seconds:
            return "The engines' first reports have not arrived yet."
        return self.pools.explain_unready()

    def choose_decode(self, session: bytes) -> list[Endpoint]:
        """Decode engines for a turn of ``session`` in the order to try; none when none is ready."""
        now, engines = 0.0, float(self._candidates)
        if self._warming:
            now = self.now()
            engines -= self._warm_up(now)
        chosen = order_decode(
            self._decode_rankings.get(session),
            self._find_holdings(session),
            compute_capacity(self._totals.load, engines, self._limits.spill_floor),
            now=now,
            warm_seconds=self._limits.warm_seconds,
        )
        return [engine.endpoint for engine in chosen]

    def choose_sources(self, session: bytes, decode: Endpoint, count: int) -> list[str]:
        """Lookup addresses of decode engines that most likely hold the session's KV, at most ``count``."""
        if self._config.reuse != "Bidirectional" or count <= 0:
            return []
        engine = self._resolve(self._decode, decode, "decode")
        chosen = order_sources(self._decode_rankings.get(session), self._find_holdings(session), engine, count)
        return [source.endpoint.lookup for source in chosen]

    def choose_prefill(self, session: bytes, decode: Endpoint, exclude: Collection[str] = ()) -> Endpoint | None:
        """The prefill engine for a turn that ``decode`` will answer; None when there is no other."""
        engine = self._resolve(self._decode, decode, "decode")
        chosen = choose_prefill(
            self._find_prefill(engine).get(session),
            decode.zone,
            exclude,
            typical_speed=self._typical_speed,
            zone_margin_seconds=self._limits.zone_margin_seconds,
        )
        return chosen.endpoint if chosen is not None else None

    def choose_path(self, turn: TurnFacts, decode: Endpoint) -> Decision:
        """Which way a turn takes that ``decode`` will answer."""
        engine = self._resolve(self._decode, decode, "decode")
        usual = self._tokens_per_byte.estimate(turn.body_bytes)
        own: Holding | None = None
        best: Holding | None = None
        for holding in self._find_holdings(turn.session):
            if holding.engine is engine:
                own = holding
            if (best is None or holding.held_tokens > best.held_tokens) and holding.engine.fits(engine):
                best = holding
        at_decode = estimate_turn(own, turn.body_bytes, usual)
        noted = self._memory.get(turn.session)
        wait = math.inf
        for prefill in self._find_prefill(engine).engines:
            wait = min(wait, compute_wait(prefill, self._typical_speed))
            if not wait:
                break
        decision = choose_path(
            Situation(
                turn=turn,
                reuse=self._config.reuse == "Bidirectional",
                local_limit=self._config.local_limit_tokens,
                at_decode=at_decode,
                known_at_decode=own is not None,
                at_sources=at_decode if best is own else estimate_turn(best, turn.body_bytes, usual),
                known_at_sources=best is not None,
                refused=noted is not None and noted.skip > 0,
                backlog=engine.queued_tokens,
                backlog_limit=self._limits.local_backlog_tokens,
                streams=engine.load,
                stall_seconds=self._limits.local_stall_seconds,
                decode_speed=engine.speed or self._typical_speed,
                prefill_speed=self._typical_speed,
                prefill_wait=wait,
                local_overhead=self._local_overheads.estimate(at_decode.prompt_tokens),
                prefill_overhead=self._prefill_overheads.estimate(at_decode.prompt_tokens),
                explore=self._slower % _EXPLORE_EVERY == _EXPLORE_EVERY - 1,
            )
        )
        if decision.reason in ("slower", "explore"):
            self._slower += 1
        return decision

    def _find_prefill(self, decode: Engine) -> Rankings:
        """Prefill engines that fit ``decode``: the ready ones, or those that leave where there are no others."""
        found = self._prefill_rankings.get(decode.compatibility)
        if found is None:
            ready = [engine for engine in self._ready_prefill if engine.fits(decode)]
            leaving = [engine for engine in self._leaving_prefill if engine.fits(decode)]
            known = [engine for engine in ready if self._has_reported(engine)]
            found = self._prefill_rankings[decode.compatibility] = Rankings(known or ready or leaving)
        return found

    def _find_holdings(self, session: bytes) -> list[Holding]:
        return self._holdings.find(session, self._decode_rankings.engines, self._decode)

    def _warm_up(self, now: float) -> float:
        """How much of the candidates is still to come, in engines."""
        missing = 0.0
        for engine in list(self._warming):
            left = 0.0 if engine.warm_from is None else 1 - (now - engine.warm_from) / self._limits.warm_seconds
            if left <= 0:
                engine.warm_from = None
                self._warming.discard(engine)
            elif engine.candidate:
                missing += left
        return missing

    # --- what happens ---

    def prefilling(self, endpoint: Endpoint, tokens: int) -> Work:
        """A prefill leg that computes about ``tokens`` goes out; :meth:`Work.end` when it is over."""
        return self._begin(self._prefill, endpoint, "prefill", tokens, sent=True)

    def decoding(self, endpoint: Endpoint, tokens: int = 0, *, sent: bool = False) -> Work:
        """A turn will be answered by ``endpoint``, from now until :meth:`Work.end`.

        Args:
            endpoint: as :meth:`choose_decode` gave it.
            tokens: of the prompt, that it computes itself; until :meth:`Work.finish_prompt`.
            sent: its request goes out now; else :meth:`Work.send` when it does.
        """
        return self._begin(self._decode, endpoint, "decode", tokens, sent=sent)

    def _begin(self, engines: dict[str, Engine], endpoint: Endpoint, role: Role, tokens: int, *, sent: bool) -> Work:
        if not self._totals.works and self.on_change is not None:
            self.on_change()
        return Work(self._resolve(engines, endpoint, role), tokens, sent=sent)

    def _resolve(self, engines: dict[str, Engine], endpoint: Endpoint, role: Role) -> Engine:
        """The engine, or a stand-in of which nothing is known: it may have left while a request waited."""
        return engines.get(endpoint.address) or self._build_engine(endpoint, role)

    def _build_engine(self, endpoint: Endpoint, role: Role) -> Engine:
        return Engine(endpoint, role, Breaker(self._breaker_limits, self._random), self._totals)

    @property
    def busy(self) -> bool:
        """Whether any work of this replica is under way."""
        return self._totals.works > 0

    def note_failure(self, endpoint: Endpoint, kind: Failure) -> None:
        """An engine failed."""
        now = self.now()
        for engine in self._find(endpoint.address):
            if engine.breaker.note_failure(kind, now):
                if engine not in self._unwell:
                    logger.warning("The %s engine %s is left alone (%s)", engine.role, endpoint.address, kind)
                self._unwell.add(engine)
                self._judge_decode()

    def note_success(self, endpoint: Endpoint, began: float | None = None) -> None:
        """An engine answered what it was asked at ``began`` by the fleet's clock (just now unless given)."""
        now = self.now()
        for engine in self._find(endpoint.address):
            if engine.breaker.note_success(now, now if began is None else began):
                self._unwell.discard(engine)
                self._judge_decode()

    def _find(self, address: str) -> list[Engine]:
        return [e for e in (self._prefill.get(address), self._decode.get(address)) if e is not None]

    def due_probes(self) -> list[Endpoint]:
        """Engines to be asked for their health now; each counts as asked, its answer is a failure or success."""
        if not self._unwell:
            return []
        now = self.now()
        return [engine.endpoint for engine in self._unwell if engine.breaker.take_probe(now)]

    def observe_prefill(
        self, endpoint: Endpoint, decision: Decision, prompt_tokens: int | None, seconds: float
    ) -> None:
        """A prefill leg succeeded.

        Args:
            endpoint: its engine.
            decision: as :meth:`choose_path` gave it.
            prompt_tokens: as its answer tells; None when it does not.
            seconds: from its request to its answer.
        """
        engine = self._prefill.get(endpoint.address)
        if engine is not None and engine.report is None and prompt_tokens and seconds > 0:
            computed = prompt_tokens - max(0, decision.prompt_tokens - decision.uncached_tokens)
            engine.observe_speed(computed, seconds)

    def observe_first_byte(self, decision: Decision, seconds: float) -> None:
        """The first byte of a streamed answer came ``seconds`` after its first leg went out."""
        if not math.isnan(decision.compute_seconds):
            overheads = self._local_overheads if decision.path == "local" else self._prefill_overheads
            overheads.observe(decision.prompt_tokens, seconds - decision.compute_seconds)

    def note_local(self, session: bytes, *, refused: bool) -> None:
        """A decode engine answered alone, or refused to."""
        self._memory.note_local(session, refused=refused)

    def note_turn(self, session: bytes, decode: Endpoint, body_bytes: int, prompt_tokens: int | None) -> None:
        """A turn was answered to its end just now."""
        if prompt_tokens:
            self._tokens_per_byte.observe(body_bytes, prompt_tokens)
        else:
            holdings = self._find_holdings(session)
            last = next((h for h in holdings if h.engine.endpoint.address == decode.address), None)
            prompt_tokens = estimate_turn(last, body_bytes, self._tokens_per_byte.estimate(body_bytes)).prompt_tokens
        self._memory.note_turn(session, decode.address, body_bytes, prompt_tokens, self.now())
        self._holdings.forget()

    # --- what others see ---

    def describe(self) -> list[EngineView]:
        """Every known engine at this moment."""
        now = self.now()
        return [engine.describe(now) for engine in (*self._prefill.values(), *self._decode.values())]
