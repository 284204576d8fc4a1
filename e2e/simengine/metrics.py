"""/metrics of a simulated engine: vLLM's series and the connector's, by their real names, types, labels and buckets.

Not all of vLLM's: those by which dashboards, autoscalers and this project's tests judge an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bidikv_runtime import contract

TIME_TO_FIRST_TOKEN: Final = "vllm:time_to_first_token_seconds"
INTER_TOKEN_LATENCY: Final = "vllm:inter_token_latency_seconds"
REQUEST_LATENCY: Final = "vllm:e2e_request_latency_seconds"
QUEUE_TIME: Final = "vllm:request_queue_time_seconds"
PROMPT_SIZE: Final = "vllm:request_prompt_tokens"
ANSWER_SIZE: Final = "vllm:request_generation_tokens"
RUNNING: Final = "vllm:num_requests_running"
WAITING: Final = "vllm:num_requests_waiting"
WAITING_BY_REASON: Final = "vllm:num_requests_waiting_by_reason"
CACHE_USAGE: Final = "vllm:kv_cache_usage_perc"
PREEMPTIONS: Final = "vllm:num_preemptions_total"
PROMPT_TOKENS: Final = "vllm:prompt_tokens_total"
GENERATION_TOKENS: Final = "vllm:generation_tokens_total"
SUCCESS: Final = "vllm:request_success_total"
CACHE_QUERIES: Final = "vllm:prefix_cache_queries_total"
CACHE_HITS: Final = "vllm:prefix_cache_hits_total"
EXTERNAL_QUERIES: Final = "vllm:external_prefix_cache_queries_total"
EXTERNAL_HITS: Final = "vllm:external_prefix_cache_hits_total"

_FIRST_TOKEN: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_BETWEEN_TOKENS: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_TOKENS: Final = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_TRANSFER: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0)


@dataclass(frozen=True)
class _Series:
    kind: type[Counter] | type[Gauge] | type[Histogram]
    name: str
    buckets: Sequence[float] = ()
    labels: Mapping[str, tuple[str, ...]] | None = None
    """Its own labels and the values that exist from the start."""


_HOLDS: Final = ("session", "handover")
_SERIES: Final = (
    _Series(Gauge, RUNNING),
    _Series(Gauge, WAITING),
    _Series(Gauge, WAITING_BY_REASON, labels={"reason": ("capacity", "deferred")}),
    _Series(Gauge, CACHE_USAGE),
    _Series(Counter, PREEMPTIONS),
    _Series(Counter, PROMPT_TOKENS),
    _Series(Counter, GENERATION_TOKENS),
    _Series(Counter, SUCCESS, labels={"finished_reason": ("stop", "length", "abort", "error", "repetition")}),
    _Series(Counter, CACHE_QUERIES),
    _Series(Counter, CACHE_HITS),
    _Series(Counter, EXTERNAL_QUERIES),
    _Series(Counter, EXTERNAL_HITS),
    _Series(Histogram, TIME_TO_FIRST_TOKEN, _FIRST_TOKEN),
    _Series(Histogram, INTER_TOKEN_LATENCY, _BETWEEN_TOKENS),
    _Series(Histogram, REQUEST_LATENCY, _LATENCY),
    _Series(Histogram, QUEUE_TIME, _LATENCY),
    _Series(Histogram, PROMPT_SIZE, _TOKENS),
    _Series(Histogram, ANSWER_SIZE, _TOKENS),
)
_CONNECTOR_SERIES: Final = (
    _Series(Counter, contract.METRIC_LOOKUPS, labels={"result": ("hit", "miss", "silent", "refused")}),
    _Series(Histogram, contract.METRIC_LOOKUP_SECONDS, _TRANSFER),
    _Series(Histogram, contract.METRIC_LOOKUP_WAIT_SECONDS, _TRANSFER),
    _Series(Counter, contract.METRIC_REUSED_TOKENS, labels={"source": (), "direction": ()}),
    _Series(Counter, contract.METRIC_DISCARDED_TOKENS),
    _Series(Counter, contract.METRIC_READ_BYTES),
    _Series(Histogram, contract.METRIC_READ_SECONDS, _TRANSFER),
    _Series(Histogram, contract.METRIC_VALIDATE_SECONDS, _TRANSFER),
    _Series(
        Counter,
        contract.METRIC_VALIDATE_FAILURES,
        labels={"reason": ("reallocated", "restarted", "silent", "read_failed", "overdue")},
    ),
    _Series(Gauge, contract.METRIC_PUBLISHED_BLOCKS),
    _Series(Gauge, contract.METRIC_HELD_BLOCKS, labels={"reason": _HOLDS}),
    _Series(
        Counter,
        contract.METRIC_HOLDS_ENDED,
        labels={"reason": _HOLDS, "ended": ("used", "expired", "pressure", "budget", "over")},
    ),
    _Series(Counter, contract.METRIC_HANDOVERS_LOST),
    _Series(Counter, contract.METRIC_COMPUTE_LIMIT_EXCEEDED),
    _Series(Counter, contract.METRIC_COST_DECISIONS, labels={"decision": ("pull", "recompute", "explore")}),
    _Series(Counter, contract.METRIC_COST_REGRETS, labels={"decision": ("pull", "recompute")}),
    _Series(Gauge, contract.METRIC_QUARANTINED_BLOCKS),
)


class Metrics:
    """``record`` is also what the connector's parts call (``connector/stats.py``)."""

    def __init__(self, model_name: str, *, connector: bool) -> None:
        """``connector``: the series of the connector are there, too."""
        self._own = ("0", model_name)
        self._registry = CollectorRegistry()
        self._families: dict[str, Any] = {}
        self._totals: dict[tuple[str, ...], int] = {}
        for series in _SERIES + (_CONNECTOR_SERIES if connector else ()):
            labels = series.labels or {}
            options: dict[str, Any] = {"labelnames": ("engine", "model_name", *labels), "registry": self._registry}
            if series.kind is Histogram:
                options["buckets"] = series.buckets
            family = self._families[series.name] = series.kind(series.name, series.name, **options)
            for values in product(*labels.values()):
                family.labels(*self._own, *values)

    def record(self, metric: str, number: float = 1, *labels: str) -> None:
        """Count, observe or set."""
        family = self._families[metric]
        child = family.labels(*self._own, *labels)
        if isinstance(family, Counter):
            child.inc(number)
        elif isinstance(family, Gauge):
            child.set(number)
        else:
            child.observe(number)

    def raise_to(self, metric: str, total: int, *labels: str) -> None:
        """Bring a counter up to the total of something that counts by itself."""
        key = (metric, *labels)
        self.record(metric, total - self._totals.get(key, 0), *labels)
        self._totals[key] = total

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)
