"""Counts of the protocol on their way into vLLM's own /metrics, beside NIXL's stock ones.

vLLM carries one stats object from workers and scheduler to the front end, so both sides use this class. Every value is
a list of observations, as in the class it extends: its ``aggregate`` then covers ours. They travel with engine steps
only; what happens at an idle engine shows up with its next step.

A metric is a row of ``METRICS``; it is recorded by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics

from bidikv_runtime import contract

_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0)
_SAMPLES: Final = "bidikv"
"""Key in the stats' data: a list of ``(metric, values of its labels, number)``."""
MAXIMUM_PEERS: Final = 64
"""Label values of a peer's address per metric; further peers are counted as ``other``. Addresses come from requests."""
OTHER: Final = "other"


@dataclass(frozen=True)
class Metric:
    """One series of /metrics. ``labels``: its own labels and their known values, which exist from the start; None for
    values that only turn up (addresses)."""

    kind: str
    """counter, gauge or histogram (of seconds)."""
    name: str
    documentation: str
    labels: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)


_HOLDS: Final = ("session", "handover")

METRICS: Final = (
    Metric(
        "counter",
        contract.METRIC_LOOKUPS,
        "Requests that asked sources for their KV, by result.",
        {"result": ("hit", "miss", "silent", "refused")},
    ),
    Metric(
        "histogram",
        contract.METRIC_LOOKUP_SECONDS,
        "Time from a request's first question to the choice of its sources.",
    ),
    Metric(
        "histogram",
        contract.METRIC_LOOKUP_WAIT_SECONDS,
        "Time that the scheduler waited in place for the answers of one request.",
    ),
    Metric(
        "counter",
        contract.METRIC_REUSED_TOKENS,
        "Tokens whose KV was read from a source and validated.",
        {"source": None, "direction": None},
    ),
    Metric(
        "counter",
        contract.METRIC_DISCARDED_TOKENS,
        "Tokens found at a source that had to be recomputed after all.",
    ),
    Metric("counter", contract.METRIC_READ_BYTES, "Bytes of KV read from sources."),
    Metric(
        "histogram",
        contract.METRIC_READ_SECONDS,
        "Time from the start of a read to its validation; per rank.",
    ),
    Metric(
        "histogram",
        contract.METRIC_VALIDATE_SECONDS,
        "Time from the question whether a read is valid to its answer; per rank.",
    ),
    Metric(
        "counter",
        contract.METRIC_VALIDATE_FAILURES,
        "Reads that did not validate in full and were recomputed in part, by reason; per rank.",
        {"reason": ("reallocated", "restarted", "silent", "read_failed", "overdue")},
    ),
    Metric("gauge", contract.METRIC_PUBLISHED_BLOCKS, "KV blocks of this engine that other engines may read."),
    Metric(
        "gauge",
        contract.METRIC_HELD_BLOCKS,
        "Cached blocks that are evicted after all others.",
        {"reason": _HOLDS},
    ),
    Metric(
        "counter",
        contract.METRIC_HOLDS_ENDED,
        "Blocks whose hold has ended, by the hold's reason and how it ended.",
        {"reason": _HOLDS, "ended": ("used", "expired", "pressure", "budget", "over")},
    ),
    Metric(
        "counter",
        contract.METRIC_HANDOVERS_LOST,
        "Requests refused because too little of what prefill announced was found.",
    ),
    Metric(
        "counter",
        contract.METRIC_COMPUTE_LIMIT_EXCEEDED,
        "Requests refused because more of the prompt would have been computed than their sender allowed.",
    ),
    Metric(
        "counter",
        contract.METRIC_COST_DECISIONS,
        "Choices between reading a match and recomputing it.",
        {"decision": ("pull", "recompute", "explore")},
    ),
    Metric(
        "counter",
        contract.METRIC_COST_REGRETS,
        "Choices that took longer than the other one was estimated to take.",
        {"decision": ("pull", "recompute")},
    ),
    Metric(
        "gauge",
        contract.METRIC_QUARANTINED_BLOCKS,
        "Blocks kept out of use because an abandoned transfer may still write to them.",
    ),
    Metric(
        "gauge",
        contract.METRIC_TRANSPORT_INFO,
        "Backend and provider that move this engine's KV; always 1.",
        {"backend": None, "provider": None},
    ),
    Metric(
        "gauge",
        contract.METRIC_PEER_BANDWIDTH,
        "Bandwidth to a peer, measured at the first contact.",
        {"peer": None},
    ),
)
_BY_NAME: Final = {metric.name: metric for metric in METRICS}


class VerifiedReadStats(NixlKVConnectorStats):  # type: ignore[misc]
    """Observations since the last step. Bytes read are upstream's ``bytes_transferred``: it transfers by reads only."""

    def reset(self) -> None:
        super().reset()
        self.data[_SAMPLES] = []

    def is_empty(self) -> bool:
        return super().is_empty() and not self.data[_SAMPLES]

    def record(self, metric: str, number: float = 1, *labels: str) -> None:
        """Count, observe or set ``metric`` (a name of ``METRICS``); ``labels`` are its labels' values in order."""
        assert len(labels) == len(_BY_NAME[metric].labels), (metric, labels)
        self.data[_SAMPLES].append((metric, labels, number))

    def record_read(self, seconds: float) -> None:
        """One rank has read and got its answer."""
        self.record(contract.METRIC_READ_SECONDS, seconds)

    def record_validate_seconds(self, seconds: float) -> None:
        """One rank has got the answer whether its read is valid."""
        self.record(contract.METRIC_VALIDATE_SECONDS, seconds)

    def record_validate_failure(self, reason: str) -> None:
        """A rank's read is not valid in full; the reasons are listed in ``METRICS``."""
        self.record(contract.METRIC_VALIDATE_FAILURES, 1, reason)

    def reduce(self) -> dict[str, int | float]:
        """Adds the interval's sums to upstream's line in the engine's log."""

        def total(metric: str) -> float:
            return float(sum(number for name, _, number in self.data[_SAMPLES] if name == metric))

        hits = [labels for name, labels, _ in self.data[_SAMPLES] if name == contract.METRIC_LOOKUPS]
        reduced: dict[str, int | float] = super().reduce()
        return reduced | {
            "Lookups": len(hits),
            "Lookup hits": sum(labels[0] == "hit" for labels in hits),
            "Reused tokens": total(contract.METRIC_REUSED_TOKENS),
            "Discarded tokens": total(contract.METRIC_DISCARDED_TOKENS),
        }


class VerifiedReadMetrics(NixlPromMetrics):  # type: ignore[misc]
    """Upstream's series and ours, per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._engines = per_engine_labelvalues
        self._families = {metric.name: self._create(metric, labelnames) for metric in METRICS}
        self._open_labels: dict[tuple[str, int], set[tuple[str, ...]]] = {}

    def _create(self, metric: Metric, labelnames: list[str]) -> Any:
        options: dict[str, Any] = {"labelnames": [*labelnames, *metric.labels]}
        if metric.kind == "counter":
            family = self._counter_cls(name=metric.name, documentation=metric.documentation, **options)
        elif metric.kind == "gauge":
            family = self._gauge_cls(
                name=metric.name, documentation=metric.documentation, multiprocess_mode="mostrecent", **options
            )
        else:
            family = self._histogram_cls(
                name=metric.name, documentation=metric.documentation, buckets=list(_SECONDS), **options
            )
        known = [values for values in metric.labels.values() if values is not None]
        if len(known) == len(metric.labels):
            for values in self._engines.values():
                for labels in product(*known):
                    family.labels(*values, *labels)
        return family

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        if read := sum(transfer_stats_data["bytes_transferred"]):
            self._child(contract.METRIC_READ_BYTES, (), engine_idx).inc(read)
        for name, labels, number in transfer_stats_data[_SAMPLES]:
            child, kind = self._child(name, tuple(labels), engine_idx), _BY_NAME[name].kind
            if kind == "counter":
                child.inc(number)
            elif kind == "gauge":
                child.set(number)
            else:
                child.observe(number)

    def _child(self, name: str, labels: tuple[str, ...], engine: int) -> Any:
        if None in _BY_NAME[name].labels.values():
            seen = self._open_labels.setdefault((name, engine), set())
            if labels not in seen and len(seen) >= MAXIMUM_PEERS:
                labels = (OTHER,) * len(labels)
            seen.add(labels)
        return self._families[name].labels(*self._engines[engine], *labels)
