"""Counts of the protocol on their way into vLLM's own /metrics, beside NIXL's stock ones.

vLLM carries one stats object from workers and scheduler to the front end, so both sides use this class. Every value is
a list of observations, as in the class it extends: its ``aggregate`` then covers ours. They travel with engine steps
only; what happens at an idle engine shows up with its next step.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics

from bidikv_runtime import contract

RESULTS: Final = ("hit", "miss", "silent", "refused")
REASONS: Final = ("reallocated", "restarted", "silent", "read_failed")

_KEYS: Final = (
    "lookups",
    "lookup_seconds",
    "reused_tokens",
    "discarded_tokens",
    "read_seconds",
    "validate_failures",
    "published_blocks",
)
_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0)


class VerifiedReadStats(NixlKVConnectorStats):  # type: ignore[misc]
    """Observations since the last step. Bytes read are upstream's ``bytes_transferred``: it transfers by reads only."""

    def reset(self) -> None:
        super().reset()
        self.data.update({key: [] for key in _KEYS})

    def is_empty(self) -> bool:
        return super().is_empty() and not any(self.data[key] for key in _KEYS)

    def record_lookup(self, result: str, seconds: float) -> None:
        """One request's questions are decided; ``result`` is one of ``RESULTS``."""
        self.data["lookups"].append(result)
        self.data["lookup_seconds"].append(seconds)

    def record_load(self, reused_tokens: int, discarded_tokens: int) -> None:
        """One read has ended, in all ranks."""
        self.data["reused_tokens"].append(reused_tokens)
        self.data["discarded_tokens"].append(discarded_tokens)

    def record_read(self, seconds: float) -> None:
        """One rank has read and got its answer."""
        self.data["read_seconds"].append(seconds)

    def record_validate_failure(self, reason: str) -> None:
        """``reason`` is one of ``REASONS``."""
        self.data["validate_failures"].append(reason)

    def record_published_blocks(self, count: int) -> None:
        self.data["published_blocks"].append(count)

    def reduce(self) -> dict[str, int | float]:
        """Adds the interval's sums to upstream's line in the engine's log."""
        reduced: dict[str, int | float] = super().reduce()
        return reduced | {
            "Lookups": len(self.data["lookups"]),
            "Lookup hits": self.data["lookups"].count("hit"),
            "Reused tokens": sum(self.data["reused_tokens"]),
            "Discarded tokens": sum(self.data["discarded_tokens"]),
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
        engines = per_engine_labelvalues

        def counter(name: str, documentation: str) -> dict[int, Any]:
            metric = self._counter_cls(name=name, documentation=documentation, labelnames=labelnames)
            return {engine: metric.labels(*values) for engine, values in engines.items()}

        def histogram(name: str, documentation: str) -> dict[int, Any]:
            metric = self._histogram_cls(
                name=name, documentation=documentation, labelnames=labelnames, buckets=list(_SECONDS)
            )
            return {engine: metric.labels(*values) for engine, values in engines.items()}

        def split_counter(name: str, documentation: str, label: str, known: tuple[str, ...]) -> dict[int, Any]:
            metric = self._counter_cls(name=name, documentation=documentation, labelnames=[*labelnames, label])
            return {
                engine: {value: metric.labels(*values, value) for value in known} for engine, values in engines.items()
            }

        self._lookups = split_counter(
            contract.METRIC_LOOKUPS, "Requests that asked sources for their KV, by result.", "result", RESULTS
        )
        self._validate_failures = split_counter(
            contract.METRIC_VALIDATE_FAILURES,
            "Reads that did not validate in full and were recomputed in part, by reason; per rank.",
            "reason",
            REASONS,
        )
        self._reused = counter(contract.METRIC_REUSED_TOKENS, "Tokens whose KV was read from a source and validated.")
        self._discarded = counter(
            contract.METRIC_DISCARDED_TOKENS, "Tokens found at a source that had to be recomputed after all."
        )
        self._bytes = counter(contract.METRIC_READ_BYTES, "Bytes of KV read from sources.")
        self._lookup_seconds = histogram(
            contract.METRIC_LOOKUP_SECONDS, "Time from a request's first question to the choice of its source."
        )
        self._read_seconds = histogram(
            contract.METRIC_READ_SECONDS, "Time from the start of a read to its validation; per rank."
        )
        published = self._gauge_cls(
            name=contract.METRIC_PUBLISHED_BLOCKS,
            documentation="KV blocks of this engine that other engines may read.",
            labelnames=labelnames,
            multiprocess_mode="mostrecent",
        )
        self._published = {engine: published.labels(*values) for engine, values in engines.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        data = transfer_stats_data
        for result in data["lookups"]:
            self._lookups[engine_idx][result].inc()
        for reason in data["validate_failures"]:
            self._validate_failures[engine_idx][reason].inc()
        self._reused[engine_idx].inc(sum(data["reused_tokens"]))
        self._discarded[engine_idx].inc(sum(data["discarded_tokens"]))
        self._bytes[engine_idx].inc(sum(data["bytes_transferred"]))
        for seconds in data["lookup_seconds"]:
            self._lookup_seconds[engine_idx].observe(seconds)
        for seconds in data["read_seconds"]:
            self._read_seconds[engine_idx].observe(seconds)
        if data["published_blocks"]:
            self._published[engine_idx].set(data["published_blocks"][-1])
