"""The planner: single decisions in tables, and whole rollouts against simulated controllers that act in any order."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bidikv_operator.cache import ChildRef
from bidikv_operator.kinds import DEPLOYMENT
from bidikv_operator.names import DECODE, ENGINE_ROLES, PREFILL, Role
from bidikv_operator.rollout.plan import EngineSet, Target, compute_target, plan_replicas, resolve_count


def make_set(role: Role, group: str, replicas: int, ready: int | None = None, *, leaving: int = 0) -> EngineSet:
    """Group ``new`` is the current one."""
    return EngineSet(
        ref=ChildRef(DEPLOYMENT, f"{role}-{group}"),
        role=role,
        group=group,
        is_current=group == "new",
        replicas=replicas,
        live=replicas,
        leaving=leaving,
        ready=replicas if ready is None else ready,
    )


def plan(prefill: str, decode: str, *, surge: int = 0, unavailable: int = 1) -> str:
    """One step. A role is written as ``wanted: old ready/replicas, new ready/replicas``; ``+n`` are leaving."""
    sets: list[EngineSet] = []
    targets: dict[Role, Target] = {}
    for role, text in zip(ENGINE_ROLES, (prefill, decode), strict=True):
        wanted, _, counts = text.partition(":")
        targets[role] = Target(int(wanted), surge, unavailable)
        for group, count in zip(("old", "new"), counts.split(), strict=True):
            shown, _, leaving = count.partition("+")
            ready, replicas = shown.split("/")
            sets.append(make_set(role, group, int(replicas), int(ready), leaving=int(leaving or 0)))
    planned = {ref.name: count for ref, count in plan_replicas(sets, targets).items()}
    return " | ".join(f"{planned[f'{role}-old']} {planned[f'{role}-new']}" for role in ENGINE_ROLES)


@pytest.mark.parametrize(
    ("prefill", "decode", "options", "planned"),
    [
        # two of each, no spare accelerators: one of each goes, and its place is free only when its pods are gone
        ("2: 2/2 0/0", "2: 2/2 0/0", {}, "1 0 | 1 0"),
        ("2: 1/1+1 0/0", "2: 1/1+1 0/0", {}, "1 0 | 1 0"),
        ("2: 1/1 0/0", "2: 1/1+1 0/0", {}, "1 1 | 1 0"),
        ("2: 1/1 0/1", "2: 1/1 0/1", {}, "1 1 | 1 1"),
        # new prefill alone is of no use: the old one stays until new decode is there
        ("2: 1/1 1/1", "2: 1/1 0/1", {}, "1 1 | 1 1"),
        ("2: 1/1 1/1", "2: 1/1 1/1", {}, "0 1 | 0 1"),
        ("2: 0/0 2/2", "2: 0/0 2/2", {}, "0 2 | 0 2"),
        # the last old prefill stays while several old decode engines live from it
        ("2: 1/1 1/1", "4: 3/3 1/1", {}, "1 1 | 2 1"),
        ("2: 1/1 1/1", "4: 1/1 3/3", {}, "0 1 | 0 3"),
        # one prefill only: decode shows first that the new group starts
        ("1: 1/1 0/0", "4: 4/4 0/0", {}, "1 0 | 3 0"),
        ("1: 1/1 0/0", "4: 3/3 0/1", {}, "1 0 | 3 1"),
        ("1: 1/1 0/0", "4: 3/3 1/1", {}, "0 0 | 3 1"),
        ("1: 0/0 0/1", "4: 3/3 1/1", {}, "0 1 | 3 1"),
        ("1: 0/0 1/1", "4: 3/3 1/1", {}, "0 1 | 2 1"),
        # one of each: prefill first, decode serves alone meanwhile; a broken image never takes decode
        ("1: 1/1 0/0", "1: 1/1 0/0", {}, "0 0 | 1 0"),
        ("1: 0/0 0/1", "1: 1/1 0/0", {}, "0 1 | 1 0"),
        ("1: 0/0 1/1", "1: 1/1 0/0", {}, "0 1 | 0 0"),
        # one of each with a surge: no gap
        ("1: 1/1 0/0", "1: 1/1 0/0", {"surge": 1, "unavailable": 0}, "1 1 | 1 1"),
        ("1: 1/1 1/1", "1: 1/1 0/1", {"surge": 1, "unavailable": 0}, "1 1 | 1 1"),
        ("1: 1/1 1/1", "1: 1/1 1/1", {"surge": 1, "unavailable": 0}, "0 1 | 0 1"),
        # engines of the old group that are not ready go first, but not all at once
        ("4: 3/4 0/0", "4: 4/4 0/0", {}, "3 0 | 3 0"),
        ("4: 0/4 0/0", "4: 4/4 0/0", {}, "3 0 | 4 0"),
        # set back: what is current again grows, the failed group goes
        ("4: 0/1 3/3", "4: 0/1 3/3", {}, "0 3 | 0 3"),
        ("4: 0/0 3/3", "4: 0/0 3/3", {}, "0 4 | 0 4"),
        # replicas change without a rollout
        ("4: 0/0 2/2", "0: 0/0 2/2", {}, "0 4 | 0 0"),
        ("4: 0/0 2/2+3", "1: 0/0 2/2", {}, "0 4 | 0 1"),
        # a role of none holds nothing up
        ("0: 1/1 0/0", "1: 1/1 0/0", {}, "0 0 | 1 0"),
        ("0: 0/0 0/0", "1: 1/1 0/0", {}, "0 0 | 0 0"),
        ("0: 1/1 0/0", "4: 4/4 0/0", {}, "0 0 | 3 0"),
    ],
)
def test_one_step(prefill: str, decode: str, options: dict[str, int], planned: str) -> None:
    assert plan(prefill, decode, **options) == planned


@pytest.mark.parametrize("group", ["old", "new"])
@pytest.mark.parametrize("changes", [{"is_seen": False}, {"has_outdated": True}, {"is_newest": False}])
def test_ready_engines_stay_while_a_set_of_their_role_rolls_in_place(group: str, changes: dict[str, bool]) -> None:
    """Its controller takes one down by itself: with the plan's own it would be one too many."""
    sets = [make_set(role, each, 1) for role in ENGINE_ROLES for each in ("old", "new")]
    targets = dict.fromkeys(ENGINE_ROLES, Target(2, 0, 1))
    assert sorted(plan_replicas(sets, targets).values()) == [0, 0, 1, 1]
    rolling = [
        replace(found, **changes) if (found.role, found.group) == (DECODE, group) else found  # type: ignore[arg-type]
        for found in sets
    ]
    planned = {ref.name: count for ref, count in plan_replicas(rolling, targets).items()}
    is_held = group == "new" or "is_newest" not in changes  # nobody builds the others' templates any more
    assert planned["decode-old"] == (1 if is_held else 0)


@pytest.mark.parametrize("is_seen", [True, False])
def test_nothing_grows_before_the_controller_has_seen_what_was_asked_last(is_seen: bool) -> None:
    """Asked for three and then for two, it may have made the third: one pod of two replicas is no room for another."""
    old = replace(make_set(DECODE, "old", 2, 1), live=1, is_seen=is_seen)
    sets = [make_set(PREFILL, "old", 0), make_set(PREFILL, "new", 1), old, make_set(DECODE, "new", 0)]
    planned = plan_replicas(sets, {PREFILL: Target(1, 0, 1), DECODE: Target(3, 0, 1)})
    assert planned[ChildRef(DEPLOYMENT, "decode-new")] == (1 if is_seen else 0)


@pytest.mark.parametrize("is_seen", [True, False])
def test_no_gap_is_made_before_the_controllers_have_seen_what_was_asked_last(is_seen: bool) -> None:
    sets = [make_set(role, group, count) for role in ENGINE_ROLES for group, count in (("old", 1), ("new", 0))]
    sets = [replace(found, is_seen=is_seen or found.role == DECODE) for found in sets]
    planned = plan_replicas(sets, dict.fromkeys(ENGINE_ROLES, Target(1, 0, 1)))
    assert planned[ChildRef(DEPLOYMENT, "prefill-old")] == (0 if is_seen else 1)


@pytest.mark.parametrize(
    ("wanted", "surge", "unavailable", "target"),
    [
        (4, 0, 1, Target(4, 0, 1)),
        (4, "25%", "25%", Target(4, 1, 1)),
        (5, "25%", "25%", Target(5, 2, 1)),
        (1, "0%", "25%", Target(1, 0, 1)),
        (0, 0, 1, Target(0, 0, 0)),
        (3, 0, 8, Target(3, 0, 3)),
        (2, 1, 0, Target(2, 1, 0)),
    ],
)
def test_targets(wanted: int, surge: int | str, unavailable: int | str, target: Target) -> None:
    assert compute_target(wanted, surge, unavailable) == target


@given(st.integers(0, 200), st.integers(0, 1024))
def test_percentages_round_as_in_a_deployment(percent: int, wanted: int) -> None:
    up, down = (resolve_count(f"{percent}%", wanted, is_rounded_up=rounded) for rounded in (True, False))
    assert down <= percent * wanted / 100 <= up
    assert up - down <= 1


# --- whole rollouts ---------------------------------------------------------------------------------------------------


@dataclass
class Pod:
    is_ready: bool = False
    is_leaving: bool = False


@dataclass
class Cluster:
    """Sets with their pods. Controllers act only when ``step`` tells one to, so anything may be late."""

    targets: Mapping[Role, Target]
    group: str = "a"
    broken: frozenset[str] = frozenset()
    """Groups whose engines never get ready."""
    replicas: dict[tuple[Role, str], int] = field(default_factory=dict)
    pods: dict[tuple[Role, str], list[Pod]] = field(default_factory=dict)

    def observe(self) -> list[EngineSet]:
        keys = {*self.replicas, *((role, self.group) for role in ENGINE_ROLES)}
        found = []
        for role, group in sorted(keys):
            pods = self.pods.get((role, group), [])
            found.append(
                EngineSet(
                    ref=ChildRef(DEPLOYMENT, f"{role}-{group}"),
                    role=role,
                    group=group,
                    is_current=group == self.group,
                    replicas=self.replicas.get((role, group), 0),
                    live=sum(not pod.is_leaving for pod in pods),
                    leaving=sum(pod.is_leaving for pod in pods),
                    ready=sum(pod.is_ready and not pod.is_leaving for pod in pods),
                )
            )
        return found

    def plan(self) -> dict[ChildRef, int]:
        return plan_replicas(self.observe(), self.targets)

    def apply(self, planned: Mapping[ChildRef, int]) -> None:
        for ref, count in planned.items():
            name, _, group = ref.name.partition("-")
            role: Role = "prefill" if name == PREFILL else "decode"
            key = (role, group)
            self.replicas[key] = count
            if count == 0 and not self.pods.get(key) and group != self.group:
                del self.replicas[key]  # as the orphan deletion does

    def control(self, key: tuple[Role, str]) -> None:
        """The Deployment's controller: excess pods that are not ready go first."""
        pods = self.pods.setdefault(key, [])
        live = [pod for pod in pods if not pod.is_leaving]
        for pod in sorted(live, key=lambda pod: pod.is_ready)[: max(0, len(live) - self.replicas.get(key, 0))]:
            pod.is_leaving = True
        pods += [Pod() for _ in range(self.replicas.get(key, 0) - len(live))]

    def progress(self, key: tuple[Role, str], rng: random.Random) -> None:
        """A pod becomes ready, or is gone after it was deleted."""
        waiting = [pod for pod in self.pods.get(key, []) if pod.is_leaving or not pod.is_ready]
        if not waiting:
            return
        pod = rng.choice(waiting)
        if pod.is_leaving:
            self.pods[key].remove(pod)
        elif key[1] not in self.broken:
            pod.is_ready = True

    def blip(self, key: tuple[Role, str]) -> None:
        for pod in self.pods.get(key, []):
            pod.is_ready = False

    def step(self, rng: random.Random) -> None:
        keys = sorted({*self.replicas, *self.pods})
        if keys:
            key = rng.choice(keys)
            self.progress(key, rng) if rng.random() < 0.5 else self.control(key)

    def settle(self) -> None:
        """Until nothing moves any more.

        Raises:
            AssertionError: it never ends.
        """
        rng = random.Random(0)
        for _ in range(1000):
            before = (dict(self.replicas), {key: [vars(pod).copy() for pod in pods] for key, pods in self.pods.items()})
            self.apply(self.plan())
            for key in sorted({*self.replicas, *self.pods}):
                self.control(key)
                self.progress(key, rng)
            if before == (
                dict(self.replicas),
                {key: [vars(pod).copy() for pod in pods] for key, pods in self.pods.items()},
            ):
                return
        raise AssertionError(f"no end: {self}")

    def is_done(self) -> bool:
        return all(
            sum(pod.is_ready for pod in self.pods.get((role, self.group), [])) == self.targets[role].wanted
            and not any(self.pods.get((role, group)) for group in "abc" if group != self.group)
            for role in ENGINE_ROLES
        )

    def count_useful_pairs(self) -> int:
        def ready(role: Role, group: str) -> int:
            return sum(pod.is_ready and not pod.is_leaving for pod in self.pods.get((role, group), []))

        return sum(min(ready(PREFILL, group), ready(DECODE, group)) for group in "abc")


SEEDS = st.integers(0, 2**32)


def targets(most: int = 5) -> st.SearchStrategy[dict[Role, Target]]:
    def pair(surge: int, unavailable: int, prefill: int, decode: int) -> dict[Role, Target]:
        return {
            PREFILL: compute_target(prefill, surge, unavailable),
            DECODE: compute_target(decode, surge, unavailable),
        }

    return st.builds(pair, st.integers(0, 2), st.integers(0, 2), st.integers(0, most), st.integers(0, most))


def kept_ready(sets: Iterable[EngineSet], planned: Mapping[ChildRef, int], role: Role) -> int:
    return sum(min(found.ready, planned[found.ref]) for found in sets if found.role == role)


def check_step(cluster: Cluster, planned: Mapping[ChildRef, int]) -> None:
    """What must hold for every single decision."""
    sets = cluster.observe()
    dropped = [found for found in sets if planned[found.ref] < min(found.ready, found.replicas)]
    for role, target in cluster.targets.items():
        mine = [found for found in sets if found.role == role]
        (current,) = [found for found in mine if found.is_current]
        others = [found for found in mine if not found.is_current]
        before = sum(min(found.ready, found.replicas) for found in mine)
        after = kept_ready(sets, planned, role)
        assert planned[current.ref] <= max(target.wanted, 0)
        assert after >= min(before, target.floor), "fewer ready engines than asked for"
        occupied = sum(max(found.replicas, found.live) + found.leaving for found in others)
        if planned[current.ref] > current.replicas and occupied:
            total = occupied + max(planned[current.ref], current.live)
            assert total <= target.wanted + target.surge, "more engines than there is room for"
        assert all(planned[found.ref] <= found.replicas for found in others), "a group of the past grows"
    if any(
        kept_ready(sets, planned, role) == 0
        and target.wanted
        and any(f.role == role and not f.is_current for f in dropped)
        for role, target in cluster.targets.items()
    ):
        # A role loses its last ready engine only where it has no room for two, one role at a time.
        assert len(dropped) == 1
        assert any(target.wanted + target.surge == 1 for target in cluster.targets.values())


@given(targets(), targets(), SEEDS, st.data())
@settings(max_examples=100, deadline=None)
def test_any_history_keeps_the_budget_and_ends(
    first: dict[Role, Target], second: dict[Role, Target], seed: int, data: st.DataObject
) -> None:
    rng, cluster = random.Random(seed), Cluster(first)
    for _ in range(data.draw(st.integers(1, 4), label="changes")):
        for _ in range(data.draw(st.integers(0, 60), label="steps")):
            planned = cluster.plan()
            check_step(cluster, planned)
            if rng.random() < 0.7:
                cluster.apply(planned)
            cluster.step(rng)
            if rng.random() < 0.05 and cluster.pods:
                cluster.blip(rng.choice(sorted(cluster.pods)))
        cluster.group = data.draw(st.sampled_from("abc"), label="group")
        cluster.targets = data.draw(st.sampled_from([first, second]), label="targets")
        cluster.broken = data.draw(st.frozensets(st.sampled_from("abc"), max_size=2), label="broken")
    cluster.broken = frozenset()
    cluster.settle()
    assert cluster.is_done(), cluster
    assert cluster.plan() == {found.ref: found.replicas for found in cluster.observe()}


@given(targets(), SEEDS)
@settings(max_examples=40, deadline=None)
def test_a_rollout_only_ever_goes_on(goal: dict[Role, Target], seed: int) -> None:
    """No oscillation: without faults, what is new only grows and what is old only shrinks."""
    rng, cluster = random.Random(seed), Cluster(goal)
    cluster.settle()
    cluster.group = "b"
    before: dict[ChildRef, int] = {}
    for _ in range(400):
        planned = cluster.plan()
        for ref, count in planned.items():
            if ref in before:
                assert count >= before[ref] if ref.name.endswith("-b") else count <= before[ref]
        before = planned
        cluster.apply(planned)
        cluster.step(rng)
    cluster.settle()
    assert cluster.is_done()


@given(targets(), SEEDS)
@settings(max_examples=40, deadline=None)
def test_a_group_that_never_starts_leaves_the_service_up(goal: dict[Role, Target], seed: int) -> None:
    rng, cluster = random.Random(seed), Cluster(goal, broken=frozenset("b"))
    cluster.settle()
    pairs = cluster.count_useful_pairs()
    cluster.group = "b"
    for _ in range(300):
        cluster.apply(cluster.plan())
        cluster.step(rng)
        decode = [pod for pod in cluster.pods.get((DECODE, "a"), []) if pod.is_ready and not pod.is_leaving]
        if goal[PREFILL].wanted and goal[DECODE].wanted:
            assert decode, "decode can always serve alone"
            if all(target.wanted + target.surge >= 2 for target in goal.values()):
                assert cluster.count_useful_pairs(), "a pair serves all the time"
    cluster.settle()
    resting = cluster.plan()
    assert resting == {found.ref: found.replicas for found in cluster.observe()}
    # Set back: all as before.
    cluster.group = "a"
    cluster.settle()
    assert cluster.is_done()
    assert cluster.count_useful_pairs() == pairs


@given(targets(), SEEDS)
@settings(max_examples=40, deadline=None)
def test_roles_advance_together(goal: dict[Role, Target], seed: int) -> None:
    """While new decode is held up, at most what the budget allows of prefill is given up for new ones."""
    rng, cluster = random.Random(seed), Cluster(goal)
    cluster.settle()
    cluster.group = "b"
    for _ in range(300):
        cluster.apply(cluster.plan())
        key = rng.choice(sorted({*cluster.replicas, *cluster.pods}))
        if key == (DECODE, "b") or rng.random() < 0.5:
            cluster.control(key)
        else:
            cluster.progress(key, rng)
    target = goal[PREFILL]
    if goal[DECODE].wanted and target.wanted + target.surge >= 2:
        old = [pod for pod in cluster.pods.get((PREFILL, "a"), []) if pod.is_ready and not pod.is_leaving]
        assert len(old) >= target.lowest, "old decode keeps its prefill"
