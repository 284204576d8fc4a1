"""How many engines of which group there should be now. Pure: counts in, counts out, no clock, no memory.

Engines of a role live in one set (Deployment or LeaderWorkerSet) per compatibility group. The set of the group that the
spec asks for is *current*; a change of group makes new sets and empties the others. Per role there are W replicas
wanted, at most S more at a time (surge) and at most U fewer ready ones (unavailable). A ready engine is *useful* when
its group has a ready engine of the other role too: engines of two groups cannot exchange KV.

One step, the same whatever led here:

1. The current set has at most W.
2. Engines of other groups that are not ready go, but as many as W - U stay counted, as a short outage of all must not
   empty a group that is about to come back.
3. Ready engines of other groups go one by one, while each role keeps W - U ready and W - U useful, and at least one
   useful pair. So the roles advance in lockstep: the last old engine of one role waits until the other role can do
   without it, and neither goes before the new group has a pair of its own. None goes while a set of the role rolls in
   place: that set's controller spends the same budget and does not know of other sets.
4. If that leaves all as it is, and all is ready and at rest, no step without a gap exists (one replica and no surge):
   one engine goes from one role, first where the other role has shown that the new group starts, else from prefill, as
   decode can serve alone.
5. The current set grows into the room up to W + S. An engine of another group occupies its place until its pods are
   gone: they hold their accelerators while they drain. How many there are is known once its controller has seen what
   was asked of it last.

Templates that change within a group roll in place, by the sets' own controllers; decode's waits until prefill's has
been seen to start (``may_take_newest``), so that one that does not leaves decode as it is.

A group that does not come up is never ready, so nothing goes on its behalf: the rollout stands still and what is left
of the earlier group serves. Set back, the earlier group is current again and step 2 takes the failed one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from bidikv_operator.cache import ChildRef
from bidikv_operator.names import DECODE, ENGINE_ROLES, PREFILL, Role


@dataclass(frozen=True, kw_only=True)
class EngineSet:
    """The engines of one role and group. Counts are of replicas: of several pods each, where a replica has several."""

    ref: ChildRef
    role: Role
    group: str
    """Empty for sets of before there were groups."""
    is_current: bool
    is_newest: bool = True
    """Whether its template was built from what the spec says now."""
    replicas: int
    """What its spec asks for."""
    live: int = 0
    """That exist and are not being deleted."""
    leaving: int = 0
    """That are being deleted and still hold their accelerators."""
    ready: int = 0
    updated: int = 0
    """Of the set's newest template."""
    has_outdated: bool = False
    """As its own status tells: what is counted elsewhere is known at another moment."""
    is_seen: bool = True
    """Whether its controller has seen the present spec: its counts are of an earlier one else."""
    is_rolled_out: bool = False
    """Its controller has seen the present spec, and all replicas are of the newest template and ready."""
    is_late: bool = False
    """Made no progress within its deadline."""
    late_at: datetime | None = None
    """When it is late unless something progresses; None where its controller tells, or nothing has to progress."""
    is_paused: bool = False
    """Somebody paused its Deployment: it scales, but a changed template reaches no pod."""

    @property
    def is_replaced(self) -> bool:
        """Whether some of its engines are to make room for newer ones."""
        return not self.is_current or not self.is_newest or self.has_outdated

    @property
    def is_held(self) -> bool:
        """Whether its being paused keeps its template from pods that should have it."""
        return self.is_paused and self.is_seen and self.replicas > 0 and (self.has_outdated or not self.updated)

    @property
    def rolls_in_place(self) -> bool:
        """Whether its controller takes engines away, or may be about to: what is ready now need not be in a moment."""
        return not self.is_seen or self.has_outdated or (self.is_current and not self.is_newest)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Where the engines' rollout stands, after this pass."""

    sets: tuple[EngineSet, ...] = ()
    """Of both roles; current ones first. While the resource is invalid all of them count as current."""
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

    @property
    def is_rolling(self) -> bool:
        """Whether engines are being replaced, by another group or in place."""
        return any(found.is_replaced for found in self.sets)

    def of_role(self, role: Role) -> tuple[EngineSet, ...]:
        return tuple(found for found in self.sets if found.role == role)


@dataclass(frozen=True)
class Target:
    """What one role should come to, and what it may cost on the way."""

    wanted: int
    surge: int
    unavailable: int

    @property
    def floor(self) -> int:
        return max(0, self.wanted - self.unavailable)

    @property
    def lowest(self) -> int:
        """Ready engines that a role never falls below without need: the floor, and one to serve."""
        return max(self.floor, min(1, self.wanted))


def compute_target(wanted: int, max_surge: int | str, max_unavailable: int | str) -> Target:
    """Percentages become counts as in a Deployment: a surge rounds up, unavailability down, and not both are 0."""
    surge = resolve_count(max_surge, wanted, is_rounded_up=True)
    unavailable = min(wanted, resolve_count(max_unavailable, wanted, is_rounded_up=False))
    if surge == 0 and unavailable == 0:
        unavailable = min(1, wanted)
    return Target(wanted, surge, unavailable)


def resolve_count(value: int | str, wanted: int, *, is_rounded_up: bool) -> int:
    """A count, or a share of ``wanted`` as ``"25%"``."""
    if isinstance(value, int):
        return value
    share = int(value.removesuffix("%")) * wanted
    return (share + 99) // 100 if is_rounded_up else share // 100


def may_take_newest(sets: Iterable[EngineSet], role: Role, targets: Mapping[Role, Target]) -> bool:
    """Whether a current set may roll to the newest template now.

    Always but for decode that serves, while prefill's newest template has not shown that it starts. It has when a pod
    more than surge and unavailability allow is of it: the set's controller makes that one only after another is ready.
    """
    current = {found.role: found for found in sets if found.is_current}
    own, first = current.get(role), current.get(PREFILL)
    if role == PREFILL or first is None or own is None or own.is_newest or not own.ready:
        return True
    target = targets[PREFILL]
    is_proven = first.is_rolled_out or first.updated > target.surge + target.unavailable
    return target.wanted == 0 or (first.is_newest and is_proven)


def plan_replicas(sets: Iterable[EngineSet], targets: Mapping[Role, Target]) -> dict[ChildRef, int]:
    """Replicas that each of the sets should have now. Each role has exactly one current set, which may be empty."""
    state = _State(list(sets), targets)
    state.limit_current()
    state.drop_unready()
    state.drop_ready()
    grown = state.compute_growth()
    if state.is_unchanged() and not any(grown.values()) and state.is_at_rest():
        state.drop_with_gap()
    return {found.ref: state.planned[found.ref] + grown.get(found.ref, 0) for found in state.sets}


class _State:
    """One step in the making: ``planned`` begins as the sets are and is changed in place."""

    def __init__(self, sets: list[EngineSet], targets: Mapping[Role, Target]) -> None:
        self.sets = sets
        self.targets = targets
        self.planned = {found.ref: found.replicas for found in sets}

    def limit_current(self) -> None:
        for found in self.sets:
            if found.is_current:
                self.planned[found.ref] = min(found.replicas, self.targets[found.role].wanted)

    def drop_unready(self) -> None:
        for role in ENGINE_ROLES:
            for found in self._others(role):
                spare = self._count_kept(role) - self.targets[role].floor
                unready = self.planned[found.ref] - self._ready(found)
                self.planned[found.ref] -= max(0, min(unready, spare))

    def drop_ready(self) -> None:
        is_changed = True
        while is_changed:
            # One of each role in turn, or one role would use up what both may do.
            dropped = [self._drop_one(role) for role in ENGINE_ROLES]
            is_changed = any(dropped)

    def drop_with_gap(self) -> None:
        candidates = [
            role
            for role in ENGINE_ROLES
            if self._others(role) and self._count_ready(role) - 1 >= self.targets[role].floor
        ]
        if candidates:
            # Stable: prefill comes first among equals.
            chosen = min(candidates, key=lambda role: not self._has_ready_current(_other(role)))
            self.planned[self._others(chosen)[0].ref] -= 1

    def compute_growth(self) -> dict[ChildRef, int]:
        """By how much each current set may grow."""
        grown = {}
        for current in (found for found in self.sets if found.is_current):
            target = self.targets[current.role]
            missing = target.wanted - self.planned[current.ref]
            others = [found for found in self.sets if found.role == current.role and not found.is_current]
            occupied = [max(found.replicas, found.live) + found.leaving for found in others]
            if not all(found.is_seen for found in others):
                missing = 0  # its controller may just be making the pods of what it was asked for before
            elif any(occupied):
                room = target.wanted + target.surge - sum(occupied) - max(self.planned[current.ref], current.live)
                missing = min(missing, room)
            grown[current.ref] = max(0, missing)
        return grown

    def is_unchanged(self) -> bool:
        return all(self.planned[found.ref] == found.replicas for found in self.sets)

    def is_at_rest(self) -> bool:
        return all(
            found.is_seen and found.replicas == found.live == found.ready and not found.leaving for found in self.sets
        )

    def _drop_one(self, role: Role) -> bool:
        """Take one ready engine of another group, if the role and its partner can do without it."""
        before = {each: self._count_useful(each) for each in ENGINE_ROLES}
        if not before[role] and not self._has_ready_current(_other(role)):
            return False  # nothing is paired yet: one more of the new group would not be, either
        if any(found.role == role and found.is_current and found.rolls_in_place for found in self.sets):
            return False
        for found in self._others(role):
            if self._ready(found) < self.planned[found.ref]:
                continue  # it is the one that is not ready that would go, which step 2 decides on
            if found.rolls_in_place:
                continue
            self.planned[found.ref] -= 1
            is_bearable = self._count_ready(role) >= self.targets[role].lowest and all(
                self._count_useful(each) >= min(before[each], self.targets[each].lowest) for each in ENGINE_ROLES
            )
            if is_bearable:
                return True
            self.planned[found.ref] += 1
        return False

    def _others(self, role: Role) -> list[EngineSet]:
        """The sets that are to become empty and are not yet, the least useful first."""
        others = [
            found for found in self.sets if found.role == role and not found.is_current and self.planned[found.ref]
        ]
        return sorted(others, key=lambda found: (self._is_paired(found), self._ready(found), found.ref.name))

    def _ready(self, found: EngineSet) -> int:
        """Ready engines that the plan keeps; one that is about to be deleted still counts as ready in the status."""
        return min(found.ready, self.planned[found.ref])

    def _is_paired(self, found: EngineSet) -> bool:
        partner = _other(found.role)
        return self.targets[partner].wanted == 0 or any(
            other.role == partner and other.group == found.group and self._ready(other) for other in self.sets
        )

    def _has_ready_current(self, role: Role) -> bool:
        return self.targets[role].wanted == 0 or any(
            found.role == role and found.is_current and self._ready(found) for found in self.sets
        )

    def _count_ready(self, role: Role) -> int:
        return sum(self._ready(found) for found in self.sets if found.role == role)

    def _count_useful(self, role: Role) -> int:
        return sum(self._ready(found) for found in self.sets if found.role == role and self._is_paired(found))

    def _count_kept(self, role: Role) -> int:
        """Engines of other groups, ready or not, and the ready ones of the current group."""
        return sum(
            self._ready(found) if found.is_current else self.planned[found.ref]
            for found in self.sets
            if found.role == role
        )


def _other(role: Role) -> Role:
    return DECODE if role == PREFILL else PREFILL
