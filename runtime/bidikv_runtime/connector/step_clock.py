"""How long the engine's steps take and what they computed: what the cost model learns prefill speed from.

A step starts when it has been scheduled and ends when its output arrives. Under async scheduling the next step is
scheduled before that; the engine's time for it begins only when the one before has ended.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Final

MAXIMUM_OPEN: Final = 4
"""Steps scheduled ahead; vLLM's pipelines are at most this deep without pipeline parallelism."""


@dataclass(frozen=True)
class Step:
    """One engine step. ``prefills``: (context, new) tokens of each request with more than one new token."""

    prefills: tuple[tuple[int, int], ...]
    decodes: int
    started: float


class StepClock:
    """Times are of ``time.monotonic``."""

    def __init__(self) -> None:
        self._open: deque[Step] = deque(maxlen=MAXIMUM_OPEN)
        self._last_end = float("-inf")

    def scheduled(self, scheduler_output: Any, now: float) -> None:
        """A step begins. Steps without tokens are not followed: they compute nothing."""
        counts = scheduler_output.num_scheduled_tokens
        if not counts:
            return
        cached = scheduler_output.scheduled_cached_reqs
        contexts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        contexts |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        prefills = tuple((contexts.get(request, 0), count) for request, count in counts.items() if count > 1)
        self._open.append(Step(prefills, len(counts) - len(prefills), now))

    def ended(self, now: float) -> tuple[Step, float] | None:
        """The oldest open step has ended; the step and its seconds, None when none is open."""
        if not self._open:
            return None
        step = self._open.popleft()
        seconds = now - max(step.started, self._last_end)
        self._last_end = now
        return step, seconds
