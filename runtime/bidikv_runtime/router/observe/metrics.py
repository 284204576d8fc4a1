"""Names, labels and buckets of everything the router exports.

Nearly all of it is read from the record of a request when it ends (:meth:`RouterMetrics.observe`), or computed when it
is scraped. Invariants:

- Labels have few values by construction: never a session, a client's path or a pod's name. Only the gauges of engines
  carry an address, and an engine that left is gone from the next scrape.
- Stages add up: to a request's time, and up to first_token to its time to the first token.
- Hand-overs balance: prefills done = handed over + abandoned + pending, at every scrape.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from bidikv_runtime.contract import METRIC_OBJECTIVE, METRIC_OBJECTIVE_TURNS, METRIC_TIME_TO_FIRST_TOKEN
from bidikv_runtime.router.choice.endpoints import Pools
from bidikv_runtime.router.observe.engine_view import EngineView
from bidikv_runtime.router.observe.instruments import Counter, Gauge, Histogram, Instrument, Key
from bidikv_runtime.router.observe.record import Phase, TurnRecord
from bidikv_runtime.router.observe.stages import compute_first_token_seconds, compute_stages

AnyInstrument = TypeVar("AnyInstrument", bound=Instrument)
Leg = Literal["prefill", "decode"]
RetryReason = Literal["connection", "status", "stale", "handover", "local"]
QueueRefusal = Literal["full", "timeout"]

TIME_TO_FIRST_TOKEN: Final = METRIC_TIME_TO_FIRST_TOKEN
STAGE_SECONDS: Final = "bidikv_router_stage_seconds"
REQUEST_SECONDS: Final = "bidikv_router_request_seconds"
INTER_TOKEN_SECONDS: Final = "bidikv_router_inter_token_seconds"
LONGEST_GAP_SECONDS: Final = "bidikv_router_longest_gap_seconds"
BODY_BYTES: Final = "bidikv_router_request_body_bytes"
REQUESTS: Final = "bidikv_router_requests_total"
OUTCOMES: Final = "bidikv_router_outcomes_total"
PATHS: Final = "bidikv_router_paths_total"
RETRIES: Final = "bidikv_router_retries_total"
DISCONNECTS: Final = "bidikv_router_client_disconnects_total"
BROKEN_STREAMS: Final = "bidikv_router_broken_streams_total"
CONTINUED: Final = "bidikv_router_continued_streams_total"
KEEP_ALIVES: Final = "bidikv_router_keep_alives_total"
PREFILLS: Final = "bidikv_router_prefills_total"
HANDED_OVER: Final = "bidikv_router_handed_over_total"
ABANDONED: Final = "bidikv_router_handovers_abandoned_total"
HANDOVERS_LOST: Final = "bidikv_router_handovers_lost_total"
HANDOVERS_PENDING: Final = "bidikv_router_handovers_pending"
UNANNOUNCED: Final = "bidikv_router_prefills_unannounced_total"
LOCAL_REFUSALS: Final = "bidikv_router_local_refusals_total"
PREFILL_SLOTS: Final = "bidikv_router_prefill_slots_used"
QUEUED: Final = "bidikv_router_queued"
QUEUE_REFUSALS: Final = "bidikv_router_queue_refusals_total"
IN_FLIGHT: Final = "bidikv_router_requests_in_flight"
BUFFERED_BYTES: Final = "bidikv_router_buffered_bytes"
SESSIONS: Final = "bidikv_router_sessions_total"
SESSIONS_REMEMBERED: Final = "bidikv_router_sessions_remembered"
LOG_LINES_DROPPED: Final = "bidikv_router_access_log_dropped_total"
ENDPOINTS: Final = "bidikv_router_endpoints"
ENGINE_LOAD: Final = "bidikv_router_engine_load"
ENGINE_BREAKER: Final = "bidikv_router_engine_breaker"
ENGINE_REPORT_AGE: Final = "bidikv_router_engine_report_age_seconds"
LOAD_IMBALANCE: Final = "bidikv_router_decode_load_imbalance"

_LATENCY_BUCKETS: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0),
    # Fine around 5 s, for which prefill holds a hand-over, and 30 s, the lease of KV that waits to be read.
    *(4.0, 4.5, 5.0, 5.5, 7.5, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 60.0, 120.0, 300.0, 600.0),
)
_GAP_BUCKETS: Final = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0),
)
_BYTE_BUCKETS: Final = tuple(float(4**power) for power in range(5, 14))
"""1 KiB to 64 MiB."""
_BREAKER_VALUES: Final = {"closed": 0, "half_open": 1, "open": 2}
_PHASES: Final[tuple[Phase, ...]] = ("receive", "queue", "prefill", "decode", "stream")


class RouterMetrics:
    """All instruments of a router."""

    def __init__(
        self, max_sessions_remembered: int, *, ttft_objective: float = 0.0, itl_objective: float = 0.0
    ) -> None:
        """Objectives are in seconds, of the time to the first token and between two tokens; 0: none."""
        self.instruments: list[Instrument] = []
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self.read_engines: Callable[[], Sequence[EngineView]] = list
        """Gives what is known of the engines, at each scrape."""
        self._pools = Pools()
        self._max_sessions = max_sessions_remembered
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        self._live: dict[int, TurnRecord] = {}
        """Requests that have not ended, by the record's identity."""
        self._ttft_objective, self._itl_objective = ttft_objective, itl_objective
        self._build_latencies()
        self._build_counters()
        self._build_gauges()

    def _build_latencies(self) -> None:
        self._time_to_first_token = self._histogram(
            TIME_TO_FIRST_TOKEN,
            "From a streamed request fully received to the first byte of its answer's body.",
            _LATENCY_BUCKETS,
            "path",
        )
        self._stages = self._histogram(
            STAGE_SECONDS,
            "Parts of a request's time, each from the end of the one before. queue: to admission; prefill: to its "
            "answer; handover: to decode's head; first_token: to the first byte of a stream; stream: to its end; "
            "answer: of what is no stream, the rest.",
            _LATENCY_BUCKETS,
            "path",
            "stage",
        )
        self._durations = self._histogram(
            REQUEST_SECONDS, "From a request fully received to its end.", _LATENCY_BUCKETS, "path"
        )
        self._inter_token = self._histogram(
            INTER_TOKEN_SECONDS, "Mean time between two pieces of a stream, one value per stream.", _GAP_BUCKETS
        )
        self._longest_gap = self._histogram(
            LONGEST_GAP_SECONDS, "Longest time between two pieces of a stream, one value per stream.", _GAP_BUCKETS
        )
        self._body_bytes = self._histogram(BODY_BYTES, "Size of requests' bodies.", _BYTE_BUCKETS)

    def _build_counters(self) -> None:
        count = self._counter
        self._requests = count(REQUESTS, "Answers that began, by their status.", "code", "route")
        self._outcomes = count(
            OUTCOMES,
            "Ended requests. answered: a whole answer, whatever its status; refused: by the router; broken: cut off.",
            "outcome",
            known=[(outcome,) for outcome in ("answered", "refused", "broken", "disconnected")],
        )
        self._paths = count(PATHS, "Turns by the path that they took, and why.", "path", "reason")
        self._retries = count(
            RETRIES,
            "Legs sent again. connection: it broke; status: a 5xx; stale: a kept connection had just been closed; "
            "handover: decode did not find it; local: decode, asked alone, would have had to compute too much.",
            "leg",
            "reason",
        )
        self._disconnects = count(
            DISCONNECTS, "Clients that left early.", "phase", known=[(phase,) for phase in _PHASES]
        )
        self.broken_streams = count(BROKEN_STREAMS, "Answers that decode broke off.")
        self._continued = count(CONTINUED, "Broken streams that went on at another engine.")
        self._keep_alives = count(KEEP_ALIVES, "Comments sent to clients while nothing else was there.")
        self._prefills = count(PREFILLS, "Prefill legs that succeeded.")
        self._handed_over = count(HANDED_OVER, "Of these, those whose decode engine began to answer.")
        self._abandoned = count(
            ABANDONED,
            "Of these, those that nobody reads. client: it left; decode: it failed; lost: decode did not find the KV.",
            "reason",
            known=[("client",), ("decode",), ("lost",)],
        )
        self.handovers_lost = count(HANDOVERS_LOST, "Turns that decode refused: it did not find what prefill computed.")
        self._unannounced = count(UNANNOUNCED, "Prefill answers that did not say what was computed.")
        self._local_refusals = count(LOCAL_REFUSALS, "Turns that decode, asked alone, refused: too much to compute.")
        self._queue_refusals = count(
            QUEUE_REFUSALS,
            "Turns that found the queue full, or waited too long in it.",
            "reason",
            known=[("full",), ("timeout",)],
        )
        self._sessions = count(SESSIONS, "Sessions not seen among the most recent ones.")
        self._log_lines_dropped = count(LOG_LINES_DROPPED, "Lines of the access log that nobody took in time.")
        self._objectives = count(
            METRIC_OBJECTIVE_TURNS,
            "Streamed answers by whether they met an objective. ttft: time to the first token; itl: mean time between "
            "two pieces.",
            "objective",
            "met",
            known=[(name, met) for name, _ in self._read_objectives() for met in ("yes", "no")],
        )

    def _read_objectives(self) -> list[tuple[str, float]]:
        objectives = (("ttft", self._ttft_objective), ("itl", self._itl_objective))
        return [(name, seconds) for name, seconds in objectives if seconds > 0]

    def _build_gauges(self) -> None:
        gauge = self._gauge
        gauge(
            METRIC_OBJECTIVE,
            "What the 90th percentile should be: of the time to the first token (ttft), between two tokens (itl).",
            "objective",
            read=lambda: [((name,), seconds) for name, seconds in self._read_objectives()],
        )
        self.in_flight = gauge(IN_FLIGHT, "Requests in flight.")
        self.in_flight.set_function(lambda: len(self._live))
        self.buffered_bytes = gauge(BUFFERED_BYTES, "Bytes of request bodies held.")
        self.prefill_slots = gauge(PREFILL_SLOTS, "Turns that were admitted to a prefill engine and are there.")
        self.queued = gauge(QUEUED, "Turns that wait for a prefill engine.")
        gauge(
            HANDOVERS_PENDING, "Prefill legs that succeeded and whose decode engine has not begun to answer."
        ).set_function(
            lambda: sum(record.prefills - record.handed_over - record.handovers_lost for record in self._live.values())
        )
        gauge(SESSIONS_REMEMBERED, "Sessions remembered to count new ones.").set_function(lambda: len(self._recent))
        gauge(ENDPOINTS, "Known engines.", "role", "state", read=self._read_endpoints)
        gauge(
            ENGINE_LOAD,
            "Unfinished requests of an engine, of all replicas, as the choice of engines counts them.",
            "engine",
            "role",
            read=lambda: [((engine.address, engine.role), engine.load) for engine in self.read_engines()],
        )
        gauge(
            ENGINE_BREAKER,
            "Circuit breaker of an engine. 0: closed; 1: half open; 2: open.",
            "engine",
            "role",
            read=lambda: [
                ((engine.address, engine.role), _BREAKER_VALUES[engine.breaker]) for engine in self.read_engines()
            ],
        )
        gauge(
            ENGINE_REPORT_AGE,
            "Age of an engine's last report; +Inf without one.",
            "engine",
            "role",
            read=lambda: [((engine.address, engine.role), engine.report_age) for engine in self.read_engines()],
        )
        gauge(
            LOAD_IMBALANCE,
            "Highest load of a ready decode engine over their mean; 1 when all are equal, or idle.",
        ).set_function(self._compute_imbalance)

    # --- the life of a request ---

    def begin(self, record: TurnRecord) -> None:
        """A request is served from now on, until :meth:`observe`."""
        self._live[id(record)] = record

    def observe_first_token(self, record: TurnRecord) -> None:
        """A stream's first byte went out. Not counted at its end: who scales by this cannot wait for long answers."""
        seconds = compute_first_token_seconds(record)
        self._time_to_first_token.observe((record.path,), seconds)
        if self._ttft_objective and not math.isnan(seconds):
            self._objectives.add(("ttft", "yes" if seconds <= self._ttft_objective else "no"))

    def observe(self, record: TurnRecord) -> None:
        """The request ended: count and time it."""
        self._live.pop(id(record), None)
        route, path = record.route, record.path
        if record.status:
            self._requests.add((record.status, route))
        self._outcomes.add((record.outcome,))
        if record.outcome == "disconnected":
            self._disconnects.add((record.phase,))
        elif record.outcome == "broken":
            self.broken_streams.add()
        if record.body_bytes:
            self._body_bytes.observe((), record.body_bytes)
        if record.reason:
            self._paths.add((path, record.reason))
        if record.session and route != "passed":
            self.note_session(record.session)
        if record.prefills:
            self._observe_handovers(record)
        if record.local_refusals:
            self._local_refusals.add((), record.local_refusals)
        if record.keep_alives:
            self._keep_alives.add((), record.keep_alives)
        if record.continued:
            self._continued.add((), record.continued)
        self._observe_times(record)

    def _observe_handovers(self, record: TurnRecord) -> None:
        lost = record.handovers_lost
        self._prefills.add((), record.prefills)
        self._handed_over.add((), record.handed_over)
        if lost:
            self.handovers_lost.add((), lost)
            self._abandoned.add(("lost",), lost)
        if abandoned := record.prefills - record.handed_over - lost:
            self._abandoned.add(("client" if record.outcome == "disconnected" else "decode",), abandoned)
        if record.unannounced:
            self._unannounced.add((), record.unannounced)

    def _observe_times(self, record: TurnRecord) -> None:
        path = record.path
        self._durations.observe((path,), record.ended_at - record.received_at)
        for stage, begin, end in compute_stages(record):
            self._stages.observe((path, stage), end - begin)
        if record.streamed and record.chunks > 1:
            seconds = (record.last_byte_at - record.first_byte_at) / (record.chunks - 1)
            self._inter_token.observe((), seconds)
            if self._itl_objective:
                self._objectives.add(("itl", "yes" if seconds <= self._itl_objective else "no"))
            self._longest_gap.observe((), record.longest_gap)

    # --- events that no record tells ---

    def count_refusal(self, status: int) -> None:
        """The server refused something that was no whole request."""
        self._requests.add((status, "local"))

    def count_retry(self, leg: Leg, reason: RetryReason) -> None:
        """A leg is sent again."""
        self._retries.add((leg, reason))

    def count_queue_refusal(self, reason: QueueRefusal) -> None:
        """A turn was not admitted."""
        self._queue_refusals.add((reason,))

    def count_dropped_lines(self, count: int) -> None:
        """The access log lost lines."""
        self._log_lines_dropped.add((), count)

    def note_session(self, session: bytes) -> None:
        """Count the session if it is not among the most recent ones."""
        recent = self._recent
        if session in recent:
            recent.move_to_end(session)
            return
        self._sessions.add()
        recent[session] = None
        if len(recent) > self._max_sessions:
            recent.popitem(last=False)

    def observe_pools(self, pools: Pools) -> None:
        """Take a new snapshot of the engines."""
        self._pools = pools

    # --- scraping ---

    def render(self) -> bytes:
        """The text exposition of all metrics."""
        lines = [line for instrument in self.instruments for line in instrument.render()]
        return "\n".join([*lines, ""]).encode() + generate_latest(self._process)

    def _read_endpoints(self) -> Iterable[tuple[Key, float]]:
        pools = self._pools
        for role, known, ready in (
            ("prefill", pools.prefill, pools.ready_prefill),
            ("decode", pools.decode, pools.ready_decode),
        ):
            terminating = sum(endpoint.terminating for endpoint in known)
            yield (role, "ready"), len(ready)
            yield (role, "terminating"), terminating
            yield (role, "unready"), len(known) - len(ready) - terminating

    def _compute_imbalance(self) -> float:
        loads = [e.load for e in self.read_engines() if e.role == "decode" and e.state == "ready"]
        total = sum(loads)
        return max(loads) * len(loads) / total if total else 1.0

    # --- building ---

    def _counter(self, name: str, text: str, *labels: str, known: Iterable[Key] = ()) -> Counter:
        return self._add(Counter(name, text, labels, known))

    def _histogram(self, name: str, text: str, bounds: Sequence[float], *labels: str) -> Histogram:
        return self._add(Histogram(name, text, bounds, labels))

    def _gauge(
        self, name: str, text: str, *labels: str, read: Callable[[], Iterable[tuple[Key, float]]] | None = None
    ) -> Gauge:
        return self._add(Gauge(name, text, labels, read) if read else Gauge(name, text, labels))

    def _add(self, instrument: AnyInstrument) -> AnyInstrument:
        self.instruments.append(instrument)
        return instrument
