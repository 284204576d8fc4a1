"""The values that pass between the steps of a reconcile. Pure: no clients, so that pure steps may take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bidikv_operator.cache import ChildRef

Object = dict[str, Any]


@dataclass(frozen=True)
class Observed:
    """Everything one reconcile looks at."""

    resource: Object
    children: Mapping[ChildRef, Object]
    pods: tuple[Object, ...]


@dataclass(frozen=True)
class Failure:
    """A child that could not be brought to its desired state."""

    ref: ChildRef
    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.ref}: {self.message}"


@dataclass(frozen=True)
class Applied:
    """Children as the API server returned them, and what went wrong."""

    children: Mapping[ChildRef, Object]
    failures: tuple[Failure, ...] = ()
    waiting: tuple[ChildRef, ...] = ()
    """Children whose earlier incarnation is still being deleted."""
