"""Leader election with two candidates, one Lease and one clock in the test's hand."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from bidikv_operator.kinds import Kind
from bidikv_operator.kube import ConflictError, NotFoundError, TransientError
from bidikv_operator.lease import Lease, LeaseTerms

Object = dict[str, Any]


class LeaseStore:
    """The Lease object with optimistic locking."""

    def __init__(self) -> None:
        self.lease: Object | None = None
        self.version = 0
        self.is_away = False

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        self._check()
        if self.lease is None:
            raise NotFoundError("none")
        return copy.deepcopy(self.lease)

    async def create_lease(self, manifest: Object) -> Object:
        self._check()
        if self.lease is not None:
            raise ConflictError("exists")
        return self._store(manifest)

    async def replace_lease(self, manifest: Object) -> Object:
        self._check()
        assert self.lease is not None
        if manifest["metadata"].get("resourceVersion") != self.lease["metadata"]["resourceVersion"]:
            raise ConflictError("changed")
        return self._store(manifest)

    def _store(self, manifest: Object) -> Object:
        self.version += 1
        metadata = {**manifest["metadata"], "resourceVersion": str(self.version)}
        self.lease = {**copy.deepcopy(manifest), "metadata": metadata}
        return self.lease

    def _check(self) -> None:
        if self.is_away:
            raise TransientError("away")

    @property
    def holder(self) -> str:
        assert self.lease is not None
        return str(self.lease["spec"]["holderIdentity"])


class World:
    def __init__(self) -> None:
        self.now = 1000.0
        self.store = LeaseStore()
        self.sleeps = 0
        self.on_sleep: list[Any] = []

    def candidate(self, identity: str) -> Lease:
        terms = LeaseTerms(
            namespace="n", name="l", identity=identity, lease_seconds=15, renew_deadline_seconds=10, retry_seconds=2
        )
        return Lease(self.store, terms, clock=lambda: self.now, sleep=self.sleep)

    async def sleep(self, seconds: float) -> None:
        """Time passes only here."""
        self.now += seconds
        self.sleeps += 1
        if self.sleeps > 1000:
            raise AssertionError("waits for ever")
        for action in self.on_sleep:
            action()
        await asyncio.sleep(0)


@pytest.fixture
def world() -> World:
    return World()


async def test_first_candidate_takes_it_at_once(world: World) -> None:
    first = world.candidate("a")
    assert not first.is_held()
    await first.acquire()
    assert first.is_held()
    assert world.sleeps == 0
    assert world.store.lease is not None
    assert world.store.lease["spec"]["leaseTransitions"] == 0


async def test_second_waits_until_the_first_has_been_silent_for_the_lease_s_length(world: World) -> None:
    first, second = world.candidate("a"), world.candidate("b")
    await first.acquire()
    started = world.now
    await second.acquire()
    assert world.store.holder == "b"
    assert 15 <= world.now - started <= 17
    assert not first.is_held(), "the deadline of the first has passed before"
    assert world.store.lease is not None
    assert world.store.lease["spec"]["leaseTransitions"] == 1


async def test_second_waits_as_long_as_the_first_renews(world: World) -> None:
    first, second = world.candidate("a"), world.candidate("b")
    await first.acquire()
    for _ in range(50):
        world.now += 2
        assert await first._try()
        assert not await second._try()
    assert first.is_held()


async def test_released_lease_is_taken_at_once(world: World) -> None:
    first, second = world.candidate("a"), world.candidate("b")
    await first.acquire()
    await first.release()
    assert not first.is_held()
    await second.acquire()
    assert world.sleeps == 0
    assert world.store.holder == "b"


async def test_holder_stops_at_its_deadline_when_the_api_server_is_away(world: World) -> None:
    first = world.candidate("a")
    await first.acquire()
    started = world.now
    world.store.is_away = True
    await first.hold()
    assert not first.is_held()
    assert 10 <= world.now - started <= 12


async def test_short_absence_of_the_api_server_is_survived(world: World) -> None:
    first = world.candidate("a")
    await first.acquire()

    def flicker() -> None:
        world.store.is_away = world.sleeps % 4 != 0
        if world.sleeps > 100:
            world.store.lease = {"metadata": {"resourceVersion": "x"}, "spec": {"holderIdentity": "b"}}

    world.on_sleep.append(flicker)
    await first.hold()
    assert world.sleeps > 100, "lost it before somebody else took it"


async def test_holder_that_sees_another_s_name_stops_at_once(world: World) -> None:
    first = world.candidate("a")
    await first.acquire()
    assert world.store.lease is not None
    world.store.lease["spec"]["holderIdentity"] = "b"
    started = world.now
    await first.hold()
    assert world.now - started <= 2


async def test_a_restarted_process_of_the_same_name_continues(world: World) -> None:
    await world.candidate("a").acquire()
    again = world.candidate("a")
    await again.acquire()
    assert world.sleeps == 0
    assert world.store.lease is not None
    assert world.store.lease["spec"]["leaseTransitions"] == 0


async def test_losing_the_race_for_an_expired_lease(world: World) -> None:
    await world.candidate("a").acquire()
    second, third = world.candidate("b"), world.candidate("c")
    for candidate in (second, third):
        assert not await candidate._try()
    world.now += 16
    outcomes = [await second._try(), await third._try()]
    assert outcomes == [True, False]
    assert world.store.holder == "b"


async def test_release_leaves_another_s_lease_alone(world: World) -> None:
    first = world.candidate("a")
    await first.acquire()
    assert world.store.lease is not None
    world.store.lease["spec"]["holderIdentity"] = "b"
    await first.release()
    assert world.store.holder == "b"
