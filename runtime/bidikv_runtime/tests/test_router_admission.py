"""The queue in front of prefill: bounds, fairness, leaving, and what a refused client is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bidikv_runtime.router.admission import Admission
from bidikv_runtime.router.api.errors import ApiError
from bidikv_runtime.router.limits import Limits
from bidikv_runtime.router.observe.metrics import QueueRefusal


class FakeLoop(asyncio.SelectorEventLoop):
    """A loop whose clock the test moves."""

    now = 1000.0

    def time(self) -> float:
        return self.now


class Desk:
    """An admission, and the turns that passed it in their order."""

    def __init__(self, loop: FakeLoop, **limits: float) -> None:
        self.loop = loop
        self.refusals: list[QueueRefusal] = []
        defaults = {"max_prefills_per_engine": 1, "max_queued": 4, "queue_seconds": 60.0}
        self.admission = Admission(loop, Limits(**(defaults | limits)), self.refusals.append)  # type: ignore[arg-type]
        self.entered: list[str] = []

    def arrive(self, name: str, tenant: str = "t") -> asyncio.Task[None]:
        """A turn that stays inside until :meth:`Admission.leave` is called for it."""
        task = self.loop.create_task(self._enter(name, tenant))
        self.settle()
        return task

    async def _enter(self, name: str, tenant: str) -> None:
        if not self.admission.try_enter():
            await self.admission.wait(tenant.encode())
        self.entered.append(name)

    def settle(self) -> None:
        """Run what is due now."""
        for _ in range(4):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def leave(self) -> None:
        self.admission.leave()
        self.settle()


@pytest.fixture
def loop() -> Iterator[FakeLoop]:
    loop = FakeLoop()
    yield loop
    for task in asyncio.all_tasks(loop):
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()


def refusal_of(task: asyncio.Task[None]) -> ApiError:
    error = task.exception()
    assert isinstance(error, ApiError)
    return error


def test_free_slots_take_no_queue(loop: FakeLoop) -> None:
    desk = Desk(loop, max_prefills_per_engine=2)
    assert [desk.admission.try_enter() for _ in range(3)] == [True, True, False]
    desk.admission.leave()
    assert desk.admission.try_enter()
    assert (desk.admission.active, desk.admission.queued) == (2, 0)


def test_no_bound(loop: FakeLoop) -> None:
    desk = Desk(loop, max_prefills_per_engine=0)
    assert all(desk.admission.try_enter() for _ in range(1000))


def test_first_come_first_served(loop: FakeLoop) -> None:
    desk = Desk(loop)
    for name in "abcd":
        desk.arrive(name)
    assert desk.entered == ["a"]
    for _ in range(3):
        desk.leave()
    assert desk.entered == ["a", "b", "c", "d"]
    desk.leave()
    assert (desk.admission.active, desk.admission.queued) == (0, 0)


def test_tenants_take_turns(loop: FakeLoop) -> None:
    desk = Desk(loop, max_queued=10)
    for name in ("a1", "a2", "a3", "a4"):
        desk.arrive(name, "a")
    desk.arrive("b1", "b")
    desk.arrive("c1", "c")
    desk.arrive("b2", "b")
    for _ in range(6):
        desk.leave()
    assert desk.entered == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


def test_capacity_follows_the_engines(loop: FakeLoop) -> None:
    desk = Desk(loop, max_prefills_per_engine=2, max_queued=10)
    for name in "abcdef":
        desk.arrive(name)
    assert desk.entered == ["a", "b"]
    desk.admission.resize(2)
    desk.settle()
    assert desk.entered == ["a", "b", "c", "d"]
    desk.admission.resize(1)
    desk.leave()
    desk.leave()
    assert desk.entered == ["a", "b", "c", "d"], "more are under way than one engine may have"
    desk.leave()
    assert desk.entered == ["a", "b", "c", "d", "e"]
    desk.admission.resize(0)
    desk.leave()
    assert desk.entered[-1] == "f", "without an engine the turns pass, to be told so"


def test_a_full_queue_refuses_and_says_when_to_come_back(loop: FakeLoop) -> None:
    desk = Desk(loop, max_queued=2)
    for name in "abc":
        desk.arrive(name)
    refused = refusal_of(desk.arrive("d"))
    assert (refused.status, refused.retry_after) == (429, 1)
    # One completion in four seconds, two in the queue: eight seconds.
    loop.now += 4
    desk.leave()
    desk.arrive("e")
    refused = refusal_of(desk.arrive("f"))
    assert (refused.status, refused.retry_after) == (429, 8)
    loop.now += 50
    refused = refusal_of(desk.arrive("g"))
    assert refused.retry_after == 60, "never more than the longest wait"
    assert desk.refusals == ["full", "full", "full"]


def test_a_full_queue_makes_room_for_a_tenant_that_waits_with_less(loop: FakeLoop) -> None:
    desk = Desk(loop, max_queued=3)
    desk.arrive("running", "a")
    burst = [desk.arrive(f"a{index}", "a") for index in range(3)]
    desk.arrive("b0", "b")
    assert refusal_of(burst[2]).status == 429, "the newest of the burst"
    assert [task.done() for task in burst] == [False, False, True]
    # Two of one tenant, one of the other: swapping them would help nobody.
    assert refusal_of(desk.arrive("b1", "b")).status == 429
    for _ in range(3):
        desk.leave()
    assert desk.entered == ["running", "a0", "b0", "a1"]


def test_waiting_ends(loop: FakeLoop) -> None:
    desk = Desk(loop, queue_seconds=5.0)
    desk.arrive("a")
    waiting = desk.arrive("b")
    loop.now += 5.1
    desk.settle()
    refused = refusal_of(waiting)
    assert refused.status == 503
    assert refused.retry_after is not None
    assert "5 s" in refused.sentence
    assert desk.refusals == ["timeout"]
    assert (desk.admission.active, desk.admission.queued) == (1, 0)
    desk.leave()
    assert desk.admission.active == 0


def test_a_client_that_left_while_it_waited_holds_nothing(loop: FakeLoop) -> None:
    desk = Desk(loop)
    desk.arrive("a")
    leaving, staying = desk.arrive("b"), desk.arrive("c")
    leaving.cancel()
    desk.settle()
    assert leaving.cancelled()
    assert desk.admission.queued == 1
    desk.leave()
    assert staying.done()
    assert desk.entered == ["a", "c"]


@pytest.mark.parametrize("order", ["leave first", "grant first"])
def test_a_client_that_left_just_when_its_slot_came_passes_it_on(loop: FakeLoop, order: str) -> None:
    desk = Desk(loop)
    desk.arrive("a")
    leaving = desk.arrive("b")
    desk.arrive("c")
    steps: list[Callable[[], object]] = [leaving.cancel, desk.admission.leave]
    for step in steps if order == "leave first" else reversed(steps):
        step()
    desk.settle()
    assert leaving.cancelled()
    assert desk.entered == ["a", "c"]
    assert (desk.admission.active, desk.admission.queued) == (1, 0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["arrive", "leave", "cancel", "resize", "wait"]), st.integers(0, 5))))
def test_slots_and_places_balance(steps: list[tuple[str, int]]) -> None:
    loop = FakeLoop()
    desk = Desk(loop, max_prefills_per_engine=2, queue_seconds=10.0)
    tasks: list[asyncio.Task[None]] = []
    left, capacity, largest = 0, 2, 2
    try:
        for number, (step, value) in enumerate(steps):
            if step == "arrive":
                tasks.append(loop.create_task(desk._enter(str(number), f"tenant-{value}")))
            elif step == "leave" and desk.admission.active > desk.admission.queued and len(desk.entered) > left:
                left += 1
                desk.admission.leave()
            elif step == "cancel" and tasks:
                tasks[value % len(tasks)].cancel()
            elif step == "resize":
                capacity = 2 * max(1, value)
                largest = max(largest, capacity)
                desk.admission.resize(value)
            elif step == "wait":
                loop.now += value
            desk.settle()
            waiting = [task for task in tasks if not task.done()]
            assert desk.admission.queued == len(waiting) <= 4
            assert desk.admission.active == len(desk.entered) - left <= largest
            assert not waiting or desk.admission.active >= capacity, "somebody waits while a slot is free"
        while len(desk.entered) > left:
            left += 1
            desk.leave()
        assert (desk.admission.active, desk.admission.queued) == (0, 0)
        assert not desk.admission._waiting
    finally:
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()
        loop.close()
