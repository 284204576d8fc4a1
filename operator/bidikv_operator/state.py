"""The values that pass between the steps of a reconcile. Pure: no clients, so that pure steps may take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bidikv_operator.cache import ChildRef
from bidikv_operator.kinds import Kind
from bidikv_operator.names import Role
from bidikv_runtime.contract import EngineReport

Object = dict[str, Any]
Fault = Literal["silent", "refused", "malformed"]
"""It does not answer, it refuses the operator's token, or its report cannot be read."""


@dataclass(frozen=True)
class EngineFacts:
    """One engine pod as its own report tells."""

    pod: str
    uid: str
    role: Role
    address: str
    """``host:port`` of its lookup port, as peers name it."""
    report: EngineReport | None
    """The last one; None before any."""
    age_seconds: float = 0.0
    """Of the report; without one, since the pod was first asked."""
    unreachable_seconds: float = 0.0
    """For how long most of its peers have reported it as unreachable; 0 when they do not."""
    known_seconds: float = 0.0
    """For how long the operator's process has known this engine's process."""
    fault: Fault | None = None
    """Why the last attempt to ask it brought no report; None when it did, or before any."""


@dataclass(frozen=True)
class Observed:
    """Everything one reconcile looks at."""

    resource: Object
    children: Mapping[ChildRef, Object]
    pods: tuple[Object, ...]
    engines: tuple[EngineFacts, ...] = ()
    missing_kinds: frozenset[Kind] = field(default_factory=frozenset)
    """Optional kinds that the cluster does not serve."""


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
