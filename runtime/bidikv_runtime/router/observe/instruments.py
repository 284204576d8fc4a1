"""Counters and histograms for the way of a request.

Why not prometheus_client's: it takes a lock per value, walks the buckets one by one and looks up children by their
labels: 0.3 us for a known counter and 0.8 us for a known histogram here, against 0.1 and 0.3 us of these, labels
included. All of them are used from the event loop's thread only. ``prometheus_client`` still writes the exposition:
each instrument is one of its collectors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Key = tuple[str | int, ...]
"""Values of the labels, in their order."""


class Counter(Collector):
    """A number per combination of label values."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), known: Iterable[Key] = ()) -> None:
        """``known`` combinations are exported as 0 before they happen, so that a first increase shows as a rate."""
        self.name, self.text, self.labels = name, text, tuple(labels)
        self._values: dict[Key, int] = dict.fromkeys(known if labels else [()], 0)

    def add(self, key: Key = (), by: int = 1) -> None:
        """Count ``by`` more."""
        self._values[key] = self._values.get(key, 0) + by

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self.name, self.text, labels=self.labels)
        for key, value in self._values.items():
            family.add_metric([str(part) for part in key], value)
        return [family]


class Histogram(Collector):
    """A distribution per combination of label values."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> None:
        self.name, self.text, self.labels = name, text, tuple(labels)
        self._bounds = tuple(bounds)
        self._names = [*(floatToGoString(bound) for bound in bounds), "+Inf"]
        self._children: dict[Key, list[float]] = {}
        if not labels:
            self._add_child(())

    def observe(self, key: Key, value: float) -> None:
        """Add one value; nan, a time that is not known, is left out."""
        if value != value:
            return
        child = self._children.get(key)
        if child is None:
            child = self._add_child(key)
        child[bisect_left(self._bounds, value)] += 1
        child[-1] += value

    def _add_child(self, key: Key) -> list[float]:
        """One count per bucket, then the sum of all values."""
        child = self._children[key] = [0.0] * (len(self._bounds) + 2)
        return child

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        for key, child in self._children.items():
            buckets, total = [], 0.0
            for name, count in zip(self._names, child, strict=False):
                total += count
                buckets.append((name, total))
            family.add_metric([str(part) for part in key], buckets, child[-1])
        return [family]


class Gauge(Collector):
    """Values that are computed when they are read."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        read: Callable[[], Iterable[tuple[Key, float]]] = lambda: [((), 0.0)],
    ) -> None:
        self.name, self.text, self.labels = name, text, tuple(labels)
        self._read = read

    def set_function(self, read: Callable[[], float]) -> None:
        """From now on the only value, that of no labels, is what ``read`` returns."""
        self._read = lambda: [((), read())]

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(self.name, self.text, labels=self.labels)
        for key, value in self._read():
            family.add_metric([str(part) for part in key], value)
        return [family]
