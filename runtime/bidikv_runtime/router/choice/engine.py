"""One engine as this replica knows it: what it reported, corrected by what was sent to it since; pure.

Reports are up to a second old and hold every replica's work; what this replica itself began and ended since is exact.
Load in requests is therefore *others* (reported, less this replica's own at that time) plus this replica's own now. For
prompt tokens, of which the engine computes some every step, it is the reported number moved by what this replica began
and ended since, but at least what it began since. Without reports only this replica's own work counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from bidikv_runtime.contract import MAXIMUM_REPORTED_SESSIONS, EngineReport, SessionReport
from bidikv_runtime.router.choice.breaker import Breaker
from bidikv_runtime.router.choice.endpoints import Endpoint, Role, is_ready
from bidikv_runtime.router.observe.engine_view import EngineView

_MOST_SESSIONS: Final = 2 * MAXIMUM_REPORTED_SESSIONS
"""Known per engine; the ones reported longest ago are forgotten."""

_LEAST_FREE: Final = 0.05
"""Share of KV blocks."""
_LEAST_MEASURED: Final = 256
"""Tokens: shorter prompts take mostly other time than computing."""
_SHARE: Final = 0.1
"""Weight of a new observation of speed."""

Tier = Literal[0, 1, 2, 3]
"""Of a decode engine, the lower the better: prefill of its compatibility in its zone (0), elsewhere (1), none (2); not
ready (3)."""


@dataclass(slots=True)
class Totals:
    """Sums over engines, kept while they change."""

    load: int = 0
    """Of the candidates for decode."""
    works: int = 0
    """Pieces of work of this replica under way."""


class Engine:
    """What the router knows of one engine."""

    __slots__ = (
        "breaker",
        "candidate",
        "compatibility",
        "endpoint",
        "full",
        "held",
        "load",
        "queued_tokens",
        "report",
        "reported_at",
        "reports",
        "role",
        "speed",
        "tier",
        "tokens",
        "tokens_at_report",
        "tokens_since_report",
        "totals",
        "unsent",
        "warm_from",
        "works",
        "works_at_report",
    )

    def __init__(self, endpoint: Endpoint, role: Role, breaker: Breaker, totals: Totals) -> None:
        self.endpoint = endpoint
        self.role: Role = role
        self.breaker = breaker
        self.totals = totals
        self.warm_from: float | None = None
        """When it joined a running fleet; None when it was there before or has its full share."""
        self.tier: Tier = 0
        self.candidate = False
        """Decode: may be chosen, and counts in ``totals.load``."""
        self.report: EngineReport | None = None
        """Without its sessions: these are in ``held``."""
        self.reported_at = float("-inf")
        self.reports = 0
        """How many came: tells work that began before the last one."""
        self.compatibility = ""
        """Empty: unknown, fits every engine."""
        self.speed = 0.0
        """Prompt tokens per second; 0 when unknown."""
        self.full = False
        """By its last report requests use nearly all of its KV blocks: a new one would wait, or make another wait."""
        self.held: dict[str, SessionReport] = {}
        """By name of the session; the most recently reported one last."""
        self.load = 0
        """Unfinished requests, of all replicas and as far as known."""
        self.works = 0
        """This replica's pieces of work that were sent."""
        self.works_at_report = 0
        self.unsent = 0
        """Turns of this replica that will come here: their prefill leg runs."""
        self.queued_tokens = 0
        """Prompt tokens that the engine has yet to compute, as far as known."""
        self.tokens = 0
        """Prompt tokens of this replica's work here."""
        self.tokens_at_report = 0
        self.tokens_since_report = 0
        """Of ``tokens``: of work begun since the last report."""

    def fits(self, other: Engine) -> bool:
        """Whether the two may read each other's KV, as far as known."""
        return self.compatibility == other.compatibility or not self.compatibility or not other.compatibility

    def take_report(self, report: EngineReport | None, now: float) -> None:
        """Take a report that has just come; None: the engine does not report (any more)."""
        if report is None:
            if self.report is None:
                return
            self.report, self.compatibility, self.speed, self.full = None, "", 0.0, False
            self.held.clear()
        else:
            if self.report is not None and self.report.epoch != report.epoch:
                self.held.clear()
            self._take_sessions(report.sessions)
            self.report, self.reported_at = report, now
            self.compatibility, self.speed = report.compatibility, report.prefill_tokens_per_second
            self.full = report.free_blocks < _LEAST_FREE
        self.reports += 1
        self.works_at_report, self.tokens_at_report, self.tokens_since_report = self.works, self.tokens, 0
        self._count_load()
        self._count_tokens()

    def _take_sessions(self, sessions: tuple[SessionReport, ...]) -> None:
        held = self.held
        for session in sessions:
            held.pop(session.name, None)
            if session.held_tokens > 0:
                held[session.name] = session
        while len(held) > _MOST_SESSIONS:
            del held[next(iter(held))]

    def _count_load(self) -> None:
        others = 0 if self.report is None else max(0, self.report.requests - self.works_at_report)
        load = others + self.works + self.unsent
        if self.candidate:
            self.totals.load += load - self.load
        self.load = load

    def _count_tokens(self) -> None:
        queued = self.tokens
        if self.report is not None:
            # The engine may have computed some of what it reported, and all of what ended since.
            queued = max(self.report.queued_tokens + queued - self.tokens_at_report, self.tokens_since_report)
        self.queued_tokens = queued

    def change_tokens(self, change: int, *, since_report: bool) -> None:
        """Count prompt tokens more or less; ``since_report``: their work began after the last report."""
        self.tokens += change
        if since_report:
            self.tokens_since_report += change
        self._count_tokens()

    def observe_speed(self, tokens: int, seconds: float) -> None:
        """Learn the speed of an engine that does not report it."""
        if tokens >= _LEAST_MEASURED:
            speed = tokens / seconds
            self.speed = speed if not self.speed else self.speed + _SHARE * (speed - self.speed)

    def change_load(self, change: int) -> None:
        """Count one piece of work more or less."""
        self.load += change
        if self.candidate:
            self.totals.load += change

    def describe(self, now: float) -> EngineView:
        """The engine at this moment."""
        endpoint = self.endpoint
        return EngineView(
            role=self.role,
            address=endpoint.address,
            name=endpoint.name,
            zone=endpoint.zone,
            state="ready" if is_ready(endpoint) else "terminating" if endpoint.terminating else "unready",
            breaker=self.breaker.state,
            load=self.load,
            queued_tokens=self.queued_tokens,
            prefill_tokens_per_second=self.speed,
            report_age=math.inf if self.report is None else now - self.reported_at,
            compatibility=self.compatibility,
            sessions=len(self.held),
        )


class Work:
    """A piece of this replica's work on an engine, from its choice to its end."""

    __slots__ = ("_ended", "_engine", "_reports", "_sent", "_tokens")

    def __init__(self, engine: Engine, tokens: int, *, sent: bool) -> None:
        """
        Args:
            engine: that does it.
            tokens: of the prompt, that it will compute.
            sent: false while another engine's leg comes first; :meth:`send` then.
        """
        self._engine = engine
        self._tokens = tokens
        self._reports = engine.reports
        self._sent = sent
        self._ended = False
        if sent:
            engine.works += 1
        else:
            engine.unsent += 1
        if tokens:
            engine.change_tokens(tokens, since_report=True)
        engine.change_load(1)
        engine.totals.works += 1

    def send(self) -> None:
        """Its request goes out: from now on the engine's own reports include it."""
        if not self._sent and not self._ended:
            self._sent = True
            self._engine.unsent -= 1
            self._engine.works += 1

    def finish_prompt(self) -> None:
        """The first token came: nothing of the prompt is left to compute."""
        tokens, self._tokens = self._tokens, 0
        if tokens:
            self._engine.change_tokens(-tokens, since_report=self._reports == self._engine.reports)

    def end(self) -> None:
        """It is over, however. May be called again."""
        if self._ended:
            return
        self.finish_prompt()
        self._ended = True
        engine = self._engine
        if self._sent:
            engine.works -= 1
        else:
            engine.unsent -= 1
        engine.change_load(-1)
        engine.totals.works -= 1
