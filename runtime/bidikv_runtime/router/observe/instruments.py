"""Counters, histograms and gauges for the way of a request, and their exposition.

Why not prometheus_client's: it locks each value, walks a histogram's buckets one by one and looks children up by their
labels, 0.3 us for a known counter and 0.8 us for a known histogram; here 0.1 and 0.3 us, look-up included. And it
formats every label anew at each scrape: 1,000 lines hold up all streams for 6 to 10 ms, here for less than 1 ms.

All are used from the event loop's thread only. The format is Prometheus' text exposition 0.0.4
(https://prometheus.io/docs/instrumenting/exposition_formats/).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

Key = tuple[str | int, ...]
"""Values of the labels, in their order."""
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Instrument:
    """What all kinds share."""

    kind: ClassVar[str]

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self.name, self.text, self.labels = name, text, tuple(labels)

    def render(self) -> Iterator[str]:
        """The lines of the exposition."""
        yield f"# HELP {self.name} {self.text}"
        yield f"# TYPE {self.name} {self.kind}"
        yield from self._render_samples()

    def _render_samples(self) -> Iterable[str]:
        raise NotImplementedError

    def _format_labels(self, key: Key, *more: str) -> str:
        pairs = [
            *(f'{label}="{str(value).translate(_ESCAPES)}"' for label, value in zip(self.labels, key, strict=True)),
            *more,
        ]
        return f"{{{','.join(pairs)}}}" if pairs else ""


class Counter(Instrument):
    """A number per combination of label values."""

    kind = "counter"

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), known: Iterable[Key] = ()) -> None:
        """``known`` combinations are exported as 0 before they happen, so that a first increase shows as a rate."""
        super().__init__(name, text, labels)
        self._values: dict[Key, int] = dict.fromkeys(known if labels else [()], 0)

    def add(self, key: Key = (), by: int = 1) -> None:
        """Count ``by`` more."""
        self._values[key] = self._values.get(key, 0) + by

    def _render_samples(self) -> Iterable[str]:
        return [f"{self.name}{self._format_labels(key)} {value}.0" for key, value in self._values.items()]


class Histogram(Instrument):
    """A distribution per combination of label values."""

    kind = "histogram"

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> None:
        super().__init__(name, text, labels)
        self._bounds = tuple(bounds)
        self._children: dict[Key, tuple[list[float], list[str]]] = {}
        if not labels:
            self._add_child(())

    def observe(self, key: Key, value: float) -> None:
        """Add one value; nan, a time that is not known, is left out."""
        if value != value:
            return
        child = self._children.get(key)
        counts = child[0] if child is not None else self._add_child(key)
        counts[bisect_left(self._bounds, value)] += 1
        counts[-1] += value

    def _add_child(self, key: Key) -> list[float]:
        """One count per bucket, then the sum of all values."""
        counts = [0.0] * (len(self._bounds) + 2)
        limits = [f'le="{bound}"' for bound in (*self._bounds, "+Inf")]
        labels = self._format_labels(key)
        names = [f"{self.name}_bucket{self._format_labels(key, limit)} " for limit in limits]
        self._children[key] = counts, [*names, f"{self.name}_count{labels} ", f"{self.name}_sum{labels} "]
        return counts

    def _render_samples(self) -> Iterable[str]:
        for counts, names in self._children.values():
            total = 0.0
            for index in range(len(self._bounds) + 1):
                total += counts[index]
                yield f"{names[index]}{total}"
            yield f"{names[-2]}{total}"
            yield f"{names[-1]}{counts[-1]}"


class Gauge(Instrument):
    """Values that are computed when they are read."""

    kind = "gauge"

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        read: Callable[[], Iterable[tuple[Key, float]]] = lambda: [((), 0.0)],
    ) -> None:
        super().__init__(name, text, labels)
        self._read = read

    def set_function(self, read: Callable[[], float]) -> None:
        """From now on the only value, that of no labels, is what ``read`` returns."""
        self._read = lambda: [((), read())]

    def _render_samples(self) -> Iterable[str]:
        return [f"{self.name}{self._format_labels(key)} {_format(value)}" for key, value in self._read()]


def _format(value: float) -> str:
    return str(float(value)).replace("inf", "+Inf")
