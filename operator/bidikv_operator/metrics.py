"""Prometheus metrics of the operator; all names begin with ``bidikv_operator_``.

A registry of its own, so that tests and embedders may have several. No resource's name is a label: the number of series
does not grow with the number of resources.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector

RUN_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.runs = Counter(
            "bidikv_operator_reconciles_total", "Reconciles by outcome.", ["outcome"], registry=self.registry
        )
        self.run_seconds = Histogram(
            "bidikv_operator_reconcile_seconds",
            "Duration of one reconcile.",
            buckets=RUN_BUCKETS,
            registry=self.registry,
        )
        self.writes = Counter(
            "bidikv_operator_writes_total",
            "Writes sent to the API server; none at rest.",
            ["verb", "kind"],
            registry=self.registry,
        )
        self.corrections = Counter(
            "bidikv_operator_cache_corrections_total",
            "Objects that a resync found to differ from what the watches had told.",
            registry=self.registry,
        )
        self.polls = Counter(
            "bidikv_operator_engine_polls_total",
            "Engines asked for their report, by result: answered, silent, refused, malformed.",
            ["result"],
            registry=self.registry,
        )
        self.queue_depth = Gauge("bidikv_operator_queue_depth", "Resources that wait.", registry=self.registry)
        self.queue_failing = Gauge(
            "bidikv_operator_queue_failing", "Resources whose last reconcile failed.", registry=self.registry
        )
        self.queue_oldest_seconds = Gauge(
            "bidikv_operator_queue_oldest_seconds", "How long the next resource has waited.", registry=self.registry
        )
        self.is_leader = Gauge(
            "bidikv_operator_leader", "1 in the process that holds the lease.", registry=self.registry
        )
        self.watch_age_seconds = Gauge(
            "bidikv_operator_watch_age_seconds",
            "Age of the watch request that was opened longest ago.",
            registry=self.registry,
        )
        self.resources = Gauge(
            "bidikv_operator_resources", "Resources by the status of Ready.", ["ready"], registry=self.registry
        )

    def record_run(self, outcome: str, seconds: float) -> None:
        self.runs.labels(outcome).inc()
        self.run_seconds.observe(seconds)

    def record_poll(self, result: str) -> None:
        self.polls.labels(result).inc()

    def record_write(self, verb: str, kind: str) -> None:
        self.writes.labels(verb, kind).inc()
