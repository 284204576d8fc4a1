"""Conditions with the bookkeeping that Kubernetes' API conventions ask for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from bidikv_operator import names

MESSAGE_LIMIT: Final = 2048
"""Characters of a message; the API takes 32768, people read fewer."""

ConditionStatus = Literal["True", "False", "Unknown"]


@dataclass(frozen=True)
class Condition:
    """What one condition says now.

    ``message`` is a sentence without times, counters that tick or random names: it is written whenever it changes.
    """

    type: str
    status: ConditionStatus
    reason: str
    message: str


def build_conditions(
    current: Iterable[Condition], previous: Iterable[Mapping[str, Any]], *, generation: int, now: str
) -> list[dict[str, Any]]:
    """The API form of all conditions, in the order of ``names.CONDITION_TYPES``.

    ``lastTransitionTime`` moves only when ``status`` does.

    Args:
        previous: the conditions of the live object.
        now: RFC 3339 time with a precision of seconds.

    Raises:
        ValueError: a condition is missing or there is one too many.
    """
    by_type = {condition.type: condition for condition in current}
    if set(by_type) != set(names.CONDITION_TYPES):
        raise ValueError(f"conditions {sorted(by_type)} are not {sorted(names.CONDITION_TYPES)}")
    known = {condition["type"]: condition for condition in previous}
    built = []
    for name in names.CONDITION_TYPES:
        condition, before = by_type[name], known.get(name, {})
        is_same = before.get("status") == condition.status
        built.append(
            {
                "type": name,
                "status": condition.status,
                "observedGeneration": generation,
                "lastTransitionTime": before["lastTransitionTime"] if is_same else now,
                "reason": condition.reason,
                "message": condition.message[:MESSAGE_LIMIT],
            }
        )
    return built
