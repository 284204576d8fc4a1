"""What the engines have reported, by resource: the poller writes it, reconciles read it. No I/O.

Invariants: a pod that is gone is forgotten at the next poll of its resource; a report stays, with its age, when an
engine cannot be asked, as that may be the network's fault; a resource is named for a reconcile only when something
changed that its status tells, and that is coarse, so that numbers which tick cause no writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bidikv_operator import names
from bidikv_operator.cache import Key
from bidikv_operator.engines.reach import find_unreachable
from bidikv_operator.engines.targets import Target, choose_targets
from bidikv_operator.names import Role
from bidikv_operator.resolved import Resolved, ResolvedFabric
from bidikv_operator.state import EngineFacts, Fault
from bidikv_operator.status.reuse import compute_reuse
from bidikv_operator.status.transport import compute_transport, compute_transport_facts, find_condition
from bidikv_runtime.contract import REACH_SECONDS, EngineReport


@dataclass(frozen=True)
class Expectation:
    """What a resource's engines are, as far as asking and judging them needs it."""

    ranks: Mapping[Role, int]
    fabric: ResolvedFabric
    unreachable_seconds: float


def build_expectation(resolved: Resolved) -> Expectation:
    return Expectation(
        ranks={
            names.PREFILL: resolved.prefill.data_parallel_size,
            names.DECODE: resolved.decode.data_parallel_size,
        },
        fabric=resolved.fabric,
        unreachable_seconds=resolved.healing.unreachable_seconds,
    )


@dataclass
class _Engine:
    first_asked: float
    began: float
    """When the present process was first seen."""
    report: EngineReport | None = None
    reported: float = 0.0
    fault: Fault | None = None
    unreachable_since: float | None = None


@dataclass
class _Resource:
    expectation: Expectation
    engines: dict[tuple[str, int], _Engine] = field(default_factory=dict)
    """By uid of the pod and rank."""
    view: object = None


class FactStore:
    """Used from the event loop's thread."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        choose: Callable[[Iterable[Mapping[str, Any]], Mapping[Role, int]], tuple[Target, ...]] = choose_targets,
    ) -> None:
        self._clock, self._choose = clock, choose
        self._resources: dict[Key, _Resource] = {}

    def expect(self, key: Key, expectation: Expectation) -> None:
        """The engines of this resource are to be asked."""
        known = self._resources.get(key)
        if known is None:
            self._resources[key] = _Resource(expectation)
        else:
            known.expectation = expectation

    def forget(self, key: Key) -> None:
        """The resource is gone."""
        self._resources.pop(key, None)

    def keys(self) -> tuple[Key, ...]:
        """The resources whose engines are to be asked."""
        return tuple(self._resources)

    def count(self) -> int:
        """Engines that have been asked and still run."""
        return sum(len(known.engines) for known in self._resources.values())

    def targets(self, key: Key, pods: Iterable[Mapping[str, Any]]) -> tuple[Target, ...]:
        """The engines of a resource that can be asked now; those of pods that are gone are forgotten."""
        known = self._resources.get(key)
        if known is None:
            return ()
        targets = self._choose(pods, known.expectation.ranks)
        current = {(target.uid, target.rank) for target in targets}
        known.engines = {place: engine for place, engine in known.engines.items() if place in current}
        return targets

    def take(self, key: Key, target: Target, answer: EngineReport | Fault) -> None:
        """An engine has been asked."""
        known = self._resources.get(key)
        if known is None:
            return  # deleted meanwhile
        now = self._clock()
        engine = known.engines.setdefault((target.uid, target.rank), _Engine(now, now))
        if isinstance(answer, EngineReport):
            if engine.report is not None and engine.report.epoch != answer.epoch:
                engine.began = now
            engine.report, engine.reported, engine.fault = answer, now, None
        else:
            engine.fault = answer

    def observe(self, key: Key, pods: Iterable[Mapping[str, Any]]) -> tuple[EngineFacts, ...]:
        """What is known of a resource's engines; one that has not been asked yet has neither report nor fault."""
        known = self._resources.get(key)
        if known is None:
            return ()
        now = self._clock()
        targets = self._choose(pods, known.expectation.ranks)
        return tuple(_build_facts(target, known.engines.get((target.uid, target.rank)), now) for target in targets)

    def judge(self, key: Key, pods: Iterable[Mapping[str, Any]], status: Mapping[str, Any]) -> bool:
        """All engines of a resource have been asked. Returns whether a reconcile would find something new.

        Args:
            key: the resource.
            pods: its pods.
            status: its live status, with which what ticks is compared.
        """
        known = self._resources.get(key)
        if known is None:
            return False
        now, pods = self._clock(), tuple(pods)
        unreachable = find_unreachable(self.observe(key, pods))
        for target in self._choose(pods, known.expectation.ranks):
            engine = known.engines.get((target.uid, target.rank))
            if engine is None:
                continue
            # Peers may still tell of an earlier process at this address for as long.
            if target.address not in unreachable or now - engine.began < REACH_SECONDS:
                engine.unreachable_since = None
            elif engine.unreachable_since is None:
                engine.unreachable_since = now
        view = _build_view(self.observe(key, pods), known.expectation, status)
        if view == known.view:
            return False
        known.view = view
        return True


def _build_facts(target: Target, engine: _Engine | None, now: float) -> EngineFacts:
    if engine is None:
        return EngineFacts(pod=target.pod, uid=target.uid, role=target.role, address=target.address, report=None)
    since = engine.unreachable_since
    return EngineFacts(
        pod=target.pod,
        uid=target.uid,
        role=target.role,
        address=target.address,
        report=engine.report,
        age_seconds=now - (engine.first_asked if engine.report is None else engine.reported),
        unreachable_seconds=0.0 if since is None else now - since,
        known_seconds=now - engine.began,
        fault=engine.fault,
    )


def _build_view(facts: tuple[EngineFacts, ...], expectation: Expectation, status: Mapping[str, Any]) -> object:
    """What a reconcile would make of the facts."""
    late = frozenset(
        one.address
        for one in facts
        if one.unreachable_seconds and one.unreachable_seconds >= expectation.unreachable_seconds
    )
    return (
        compute_transport(facts, expectation.fabric, find_condition(status)),
        compute_transport_facts(facts, status.get("transport")),
        compute_reuse(facts, status.get("kvReuse")),
        late,
        # From then on an earlier leader's word on who cannot be reached is dropped.
        any(one.known_seconds >= REACH_SECONDS + expectation.unreachable_seconds for one in facts),
    )
