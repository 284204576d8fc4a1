"""Has a child changed in the fields that the operator owns? Decided without a write. Pure.

Two comparisons, as neither suffices alone:

- the live object, cut down to the shape of the desired one, against the same cut of the API server's answer to the last
  apply. This is exact, whatever the server or a webhook made of the values (``0.5`` CPUs are stored as ``500m``);
- before there is such an answer (the operator has just started), against the desired object itself. A value that is
  not in canonical form then costs one apply that changes nothing. That a field has to go is seen by the annotation in
  which the child carries the hash of all that was applied.

Fields that others added are cut off and so never count.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from bidikv_operator import names
from bidikv_operator.build.merge import MERGE_INTO, MERGE_WHOLE

ABSENT: Final = "\0absent"
"""Stands for what the live object lacks; no API value holds a NUL."""


@dataclass(frozen=True, slots=True)
class LastApplied:
    """What was last sent, and what it became."""

    desired_hash: str
    outcome_hash: str
    version: str | None
    """Resource version of the outcome: while it is the live one, nothing has to be compared."""


def compute_hash(value: Any) -> str:
    """64 bits of a hash over the value's JSON, in the order of its fields.

    Builders always write fields in the same order, and sorting takes four times as long as all the rest.
    """
    return hashlib.blake2b(msgspec.json.encode(value), digest_size=8).hexdigest()


def cut(live: Any, desired: Any, field: str = "") -> Any:
    """``live`` reduced to the fields and named items that ``desired`` has."""
    if isinstance(desired, dict):
        if not isinstance(live, dict):
            return ABSENT if desired or live is not None else {}
        return {key: cut(live.get(key, ABSENT), value, key) for key, value in desired.items()}
    if isinstance(desired, list):
        return _cut_list(live, desired, field)
    return live


def _cut_list(live: Any, desired: list[Any], field: str) -> Any:
    if not isinstance(live, list):
        return ABSENT
    key = MERGE_INTO.get(field) or MERGE_WHOLE.get(field) or "name"
    if desired and all(isinstance(item, dict) and key in item for item in desired):
        by_name = {item.get(key): item for item in live if isinstance(item, dict)}
        return [cut(by_name.get(item[key], ABSENT), item) for item in desired]
    if len(live) == len(desired):
        return [cut(one, other) for one, other in zip(live, desired, strict=True)]
    return live


def mark_applied(desired: dict[str, Any]) -> dict[str, Any]:
    """``desired`` with the annotation that carries its own hash: any difference in it differs there too."""
    metadata = desired["metadata"]
    annotations = {**metadata.get("annotations", {}), names.ANNOTATION_APPLIED_HASH: compute_hash(desired)}
    return {**desired, "metadata": {**metadata, "annotations": annotations}}


def record_applied(desired: Any, answer: Any) -> LastApplied:
    return LastApplied(compute_hash(desired), compute_hash(cut(answer, desired)), _version(answer))


def is_unchanged(desired: Any, live: Any, last: LastApplied | None) -> bool:
    """Whether applying ``desired`` would change nothing."""
    if last is None:
        return bool(cut(live, desired) == desired)
    if last.desired_hash != compute_hash(desired):
        return False
    is_outcome = last.version is not None and last.version == _version(live)
    return is_outcome or compute_hash(cut(live, desired)) == last.outcome_hash


def _version(obj: dict[str, Any]) -> str | None:
    version: str | None = obj.get("metadata", {}).get("resourceVersion")
    return version
