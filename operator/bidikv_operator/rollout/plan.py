"""How many engines of which group there should be now. Pure: counts in, counts out, no clock.

Engines of a role live in one set (Deployment or LeaderWorkerSet) per compatibility group. A set of the group that the
spec asks for is *current*; a change of group makes new sets and empties the others, both roles in lockstep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bidikv_operator.cache import ChildRef
from bidikv_operator.names import Role


@dataclass(frozen=True, kw_only=True)
class EngineSet:
    """The engines of one role and group. Counts are of replicas: of several pods each, where a replica has several."""

    ref: ChildRef
    role: Role
    group: str
    """Empty for sets of before there were groups."""
    is_current: bool
    replicas: int
    """What its spec asks for."""
    live: int = 0
    """That exist and are not being deleted."""
    leaving: int = 0
    """That are being deleted and still hold their accelerators."""
    ready: int = 0
    updated: int = 0
    """Of the set's newest template."""
    is_rolled_out: bool = False
    """Its controller has seen the present spec, and all replicas are of the newest template and ready."""
    is_late: bool = False
    """Made no progress within its deadline."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Where the engines' rollout stands, after this pass."""

    sets: tuple[EngineSet, ...] = ()
    """Of both roles; current ones first. While the resource is invalid or paused nobody is current but the sets that
    already were."""
    group: str = ""
    """The one that the spec asks for; empty while the resource is invalid."""
    wanted: Mapping[Role, int] = field(default_factory=dict)
    """Replicas of each engine role in the end."""
    is_settled: bool = False
    """Only current sets are left, and they are complete and ready."""
    is_failed: bool = False
    """The current sets do not come up; what ran before keeps serving, as far as there was room for both."""
    message: str = ""
    """One sentence for the condition Progressing."""

    def of_role(self, role: Role) -> tuple[EngineSet, ...]:
        return tuple(found for found in self.sets if found.role == role)
