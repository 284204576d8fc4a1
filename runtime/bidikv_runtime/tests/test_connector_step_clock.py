"""The time of a step, alone and when the next one is scheduled before it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bidikv_runtime.connector.step_clock import Step, StepClock


def output(new: dict[str, tuple[int, int]] | None = None, cached: dict[str, tuple[int, int]] | None = None) -> Any:
    """Requests with (computed tokens, scheduled tokens)."""
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        num_scheduled_tokens={name: count for name, (_, count) in (new | cached).items()},
        scheduled_new_reqs=[SimpleNamespace(req_id=n, num_computed_tokens=c) for n, (c, _) in new.items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[computed for computed, _ in cached.values()]
        ),
    )


def test_a_step_of_prefills_and_decodes() -> None:
    clock = StepClock()
    clock.scheduled(output({"new": (512, 2000)}, {"chunk": (2048, 48), "decode": (300, 1)}), 10.0)
    assert clock.ended(10.5) == (Step(((512, 2000), (2048, 48)), 1, 10.0), 0.5)


def test_a_step_scheduled_ahead_counts_from_the_end_of_the_one_before() -> None:
    clock = StepClock()
    clock.scheduled(output({"a": (0, 100)}), 1.0)
    clock.scheduled(output({"b": (0, 200)}), 1.1)
    first, second = clock.ended(2.0), clock.ended(2.5)
    assert first is not None
    assert second is not None
    assert (first[1], second[1]) == (1.0, 0.5)


def test_steps_without_tokens_are_not_followed() -> None:
    clock = StepClock()
    clock.scheduled(output(), 1.0)
    assert clock.ended(2.0) is None
