"""Names, labels and buckets of everything the router exports.

Labels have few values by construction: never a session, a pod or a path that a client chose. Children are cached here,
since looking one up costs more than observing it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bidikv_runtime.contract import METRIC_TIME_TO_FIRST_TOKEN
from bidikv_runtime.router.choice.endpoints import Pools

TIME_TO_FIRST_TOKEN: Final = METRIC_TIME_TO_FIRST_TOKEN
PREFILL_LEG_SECONDS: Final = "bidikv_router_prefill_leg_seconds"
REQUESTS: Final = "bidikv_router_requests_total"
RETRIES: Final = "bidikv_router_retries_total"
HANDOVERS_LOST: Final = "bidikv_router_handovers_lost_total"
DISCONNECTS: Final = "bidikv_router_client_disconnects_total"
BROKEN_STREAMS: Final = "bidikv_router_broken_streams_total"
IN_FLIGHT: Final = "bidikv_router_requests_in_flight"
BUFFERED_BYTES: Final = "bidikv_router_buffered_bytes"
SESSIONS: Final = "bidikv_router_sessions_total"
ENDPOINTS: Final = "bidikv_router_endpoints"

Path = Literal["bidirectional", "oneway", "direct"]
"""bidirectional: prefill was offered decode's history. oneway: prefill without sources. direct: decode alone."""
Route = Literal["chat", "completions", "models", "passed", "local"]
Phase = Literal["receive", "prefill", "decode", "stream"]

_LATENCY_BUCKETS: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0),
)


class RouterMetrics:
    """One registry and its instruments."""

    def __init__(self, max_sessions_remembered: int) -> None:
        self.registry = registry = CollectorRegistry()
        self._time_to_first_token = Histogram(
            TIME_TO_FIRST_TOKEN,
            "From the request fully received to the first byte of decode's streamed body.",
            ["path"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self._prefill_leg = Histogram(
            PREFILL_LEG_SECONDS,
            "Duration of successful prefill legs, queueing included.",
            ["path"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self._requests = Counter(REQUESTS.removesuffix("_total"), "Answers.", ["route", "code"], registry=registry)
        self._retries = Counter(
            RETRIES.removesuffix("_total"), "Legs sent again.", ["leg", "reason"], registry=registry
        )
        self.handovers_lost = Counter(
            HANDOVERS_LOST.removesuffix("_total"),
            "Turns that decode refused because it did not find what prefill had computed.",
            registry=registry,
        )
        self._disconnects = Counter(
            DISCONNECTS.removesuffix("_total"), "Clients that left early.", ["phase"], registry=registry
        )
        self.broken_streams = Counter(
            BROKEN_STREAMS.removesuffix("_total"), "Answers that decode broke off.", registry=registry
        )
        self.in_flight = Gauge(IN_FLIGHT, "Requests in flight.", registry=registry)
        self.buffered_bytes = Gauge(BUFFERED_BYTES, "Bytes of request bodies held.", registry=registry)
        self._sessions = Counter(
            SESSIONS.removesuffix("_total"), "Sessions not seen among the most recent ones.", registry=registry
        )
        self._endpoints = Gauge(ENDPOINTS, "Known engines.", ["role", "state"], registry=registry)
        self._max_sessions = max_sessions_remembered
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        self._request_children: dict[tuple[Route, int], Counter] = {}
        paths: tuple[Path, ...] = ("bidirectional", "oneway", "direct")
        self._first_token_children = {path: self._time_to_first_token.labels(path) for path in paths}
        self._prefill_children = {path: self._prefill_leg.labels(path) for path in paths}
        self.observe_pools(Pools())

    def observe_first_token(self, path: Path, seconds: float) -> None:
        """A stream's first byte came after ``seconds``."""
        self._first_token_children[path].observe(seconds)

    def observe_prefill(self, path: Path, seconds: float) -> None:
        """A prefill leg succeeded within ``seconds``."""
        self._prefill_children[path].observe(seconds)

    def count_answer(self, route: Route, status: int) -> None:
        """A response with ``status`` began."""
        child = self._request_children.get((route, status))
        if child is None:
            child = self._request_children[route, status] = self._requests.labels(route, str(status))
        child.inc()

    def count_retry(
        self, leg: Literal["prefill", "decode"], reason: Literal["connection", "status", "stale", "handover"]
    ) -> None:
        """A leg is sent again."""
        self._retries.labels(leg, reason).inc()

    def count_disconnect(self, phase: Phase) -> None:
        """A client left."""
        self._disconnects.labels(phase).inc()

    def note_session(self, session: bytes) -> None:
        """Count the session if it is not among the most recent ones."""
        recent = self._recent
        if session in recent:
            recent.move_to_end(session)
            return
        self._sessions.inc()
        recent[session] = None
        if len(recent) > self._max_sessions:
            recent.popitem(last=False)

    def observe_pools(self, pools: Pools) -> None:
        """Set the gauges of known engines."""
        for role, known, ready in (
            ("prefill", pools.prefill, pools.ready_prefill),
            ("decode", pools.decode, pools.ready_decode),
        ):
            terminating = sum(endpoint.terminating for endpoint in known)
            self._endpoints.labels(role, "ready").set(len(ready))
            self._endpoints.labels(role, "terminating").set(terminating)
            self._endpoints.labels(role, "unready").set(len(known) - len(ready) - terminating)

    def render(self) -> bytes:
        """The text exposition of all metrics."""
        return generate_latest(self.registry)
