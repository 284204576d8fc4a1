"""The whole pass over an API server in memory."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bidikv_operator import names
from bidikv_operator.cache import ChildRef, Key, ObjectCache
from bidikv_operator.engines.facts import FactStore
from bidikv_operator.kinds import DEPLOYMENT, INFERENCE, LEADER_WORKER_SET
from bidikv_operator.kube import InvalidError, TransientError
from bidikv_operator.reconcile import Reconciler
from bidikv_operator.tests.samples import RUNTIME_IMAGE, FakeKube, find_set, make_resource, store_resource
from bidikv_operator.token_store import TokenStore
from bidikv_operator.workqueue import Done, RequeueAfter, RetryLaterError

Object = dict[str, Any]
KEY = Key("team", "chat")
PREFILL = find_set(make_resource(), names.PREFILL)


class World:
    def __init__(self) -> None:
        self.cache = ObjectCache()
        self.kube = FakeKube(self.cache)
        self.reconciler = Reconciler(
            kube=self.kube,  # type: ignore[arg-type]
            cache=self.cache,
            tokens=TokenStore(self.kube, propagation_seconds=180),
            engines=FactStore(),
            runtime_image=RUNTIME_IMAGE,
            identity="test",
        )

    @property
    def status(self) -> Object:
        found: Object = self.kube.objects["team", ChildRef(INFERENCE, "chat")]["status"]
        return found

    def condition(self, name: str) -> tuple[str, str]:
        found = next(condition for condition in self.status["conditions"] if condition["type"] == name)
        return found["status"], found["reason"]

    def make_ready(self) -> None:
        for (_, ref), obj in list(self.kube.objects.items()):
            if ref.kind == DEPLOYMENT:
                wanted = obj["spec"]["replicas"]
                counts = {"replicas": wanted, "readyReplicas": wanted, "updatedReplicas": wanted}
                self.kube.store(
                    DEPLOYMENT,
                    {**obj, "status": {"observedGeneration": obj["metadata"].get("generation", 1), **counts}},
                )


@pytest.fixture
def world() -> World:
    return World()


async def test_from_nothing_to_rest(world: World) -> None:
    store_resource(world.kube, make_resource())
    assert await world.reconciler.reconcile(KEY) == Done()
    assert world.condition("Ready") == ("False", "Starting")
    world.make_ready()
    await world.reconciler.reconcile(KEY)
    assert world.condition("Ready") == ("True", "Ready")
    world.kube.take_writes()
    for _ in range(3):
        await world.reconciler.reconcile(KEY)
    assert world.kube.take_writes() == [], "at rest nothing is written"
    assert not any(verb == "list" for verb, _ in world.kube.reads), "and nothing is read either"


async def test_absent_and_leaving_resources_are_left_alone(world: World) -> None:
    assert await world.reconciler.reconcile(KEY) == Done()
    resource = make_resource()
    resource["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    store_resource(world.kube, resource)
    assert await world.reconciler.reconcile(KEY) == Done()
    assert world.kube.take_writes() == []


async def test_an_invalid_change_leaves_what_runs(world: World) -> None:
    resource = store_resource(world.kube, make_resource())
    await world.reconciler.reconcile(KEY)
    world.make_ready()
    await world.reconciler.reconcile(KEY)
    world.kube.take_writes()
    live = world.kube.objects["team", ChildRef(INFERENCE, "chat")]
    store_resource(world.kube, {**live, "spec": {**resource["spec"], "fabric": {"type": "EFA"}}})
    await world.reconciler.reconcile(KEY)
    assert world.condition("Accepted") == ("False", "Invalid")
    assert world.condition("PrefillReady") == ("True", "AllReplicasReady")
    kinds = {what.split()[0] for _, what in world.kube.take_writes()}
    assert kinds == {"BidiKVInference", "Event"}


async def test_a_refused_child_is_told_and_retried(world: World) -> None:
    store_resource(world.kube, make_resource())
    world.kube.refuse = lambda verb, kind, name: InvalidError("spec.x: bad") if kind == DEPLOYMENT else None
    with pytest.raises(RetryLaterError, match=rf"Deployment {PREFILL}: spec\.x: bad"):
        await world.reconciler.reconcile(KEY)
    assert world.condition("Progressing") == ("False", "ApplyFailed")
    world.kube.refuse = lambda verb, kind, name: None
    await world.reconciler.reconcile(KEY)
    assert world.condition("Progressing") == ("True", "Starting")


async def test_an_absent_api_server_is_retried_after_its_own_wish(world: World) -> None:
    store_resource(world.kube, make_resource())
    world.kube.refuse = lambda verb, kind, name: TransientError("slow down", status=429, retry_after=7)
    with pytest.raises(RetryLaterError) as caught:
        await world.reconciler.reconcile(KEY)
    assert caught.value.after == 7


async def test_children_of_a_predecessor_are_looked_at_again_soon(world: World) -> None:
    store_resource(world.kube, make_resource())
    await world.reconciler.reconcile(KEY)
    successor = make_resource()
    successor["metadata"]["uid"] = "another"
    store_resource(world.kube, successor)
    assert isinstance(await world.reconciler.reconcile(KEY), RequeueAfter)
    assert world.condition("Progressing") == ("True", "WaitingForDeletion")


async def test_engines_of_a_predecessor_make_nothing_ready(world: World) -> None:
    """Whoever deletes, creates and waits for Ready must not be told of pods that are about to go."""
    store_resource(world.kube, make_resource())
    await world.reconciler.reconcile(KEY)
    world.make_ready()
    successor = make_resource()
    successor["metadata"]["uid"] = "another"
    store_resource(world.kube, successor)
    await world.reconciler.reconcile(KEY)
    assert world.condition("Ready") == ("False", "WaitingForDeletion")


async def test_a_leader_worker_set_that_makes_no_progress_is_told_once_at_its_deadline(world: World) -> None:
    """Nothing in the cluster changes then, so the pass before has to ask for this one."""
    began = datetime(2026, 1, 1, 12, tzinfo=UTC)
    now = began
    world.reconciler.clock = lambda: now
    prefill = {"replicas": 2, "tensorParallelSize": 2, "nodesPerReplica": 2}
    resource = make_resource(prefill=prefill, updateStrategy={"progressDeadlineSeconds": 600})
    store_resource(world.kube, resource)
    await world.reconciler.reconcile(KEY)
    world.make_ready()
    ref = ChildRef(LEADER_WORKER_SET, find_set(resource, names.PREFILL))
    progressing = {"type": "Progressing", "status": "True", "lastTransitionTime": "2026-01-01T12:00:00Z"}
    counts = {"replicas": 2, "updatedReplicas": 2, "readyReplicas": 1}
    world.kube.store(ref.kind, {**world.kube.objects["team", ref], "status": {**counts, "conditions": [progressing]}})
    now = began + timedelta(seconds=30)
    assert await world.reconciler.reconcile(KEY) == RequeueAfter(570.0)
    world.kube.take_writes()
    now = began + timedelta(seconds=599.5)
    assert await world.reconciler.reconcile(KEY) == RequeueAfter(0.5)
    assert world.kube.take_writes() == [], "a status does not tell how much time is left"
    assert world.condition("Progressing") == ("True", "Starting")
    now = began + timedelta(seconds=600)
    assert await world.reconciler.reconcile(KEY) == Done()
    assert world.condition("Progressing") == ("False", "Stalled")
    assert world.condition("Degraded") == ("True", "Stalled")
    world.kube.take_writes()
    now = began + timedelta(days=1)
    assert await world.reconciler.reconcile(KEY) == Done()
    assert world.kube.take_writes() == []
    conditions = [{**progressing, "status": "False"}]
    complete = {**counts, "readyReplicas": 2, "conditions": conditions}
    world.kube.store(ref.kind, {**world.kube.objects["team", ref], "status": complete})
    assert await world.reconciler.reconcile(KEY) == Done()
    assert world.condition("Progressing") == ("False", "RolledOut")


async def test_events_tell_transitions_once(world: World) -> None:
    store_resource(world.kube, make_resource())
    await world.reconciler.reconcile(KEY)
    world.make_ready()
    await world.reconciler.reconcile(KEY)
    await world.reconciler.reconcile(KEY)
    notes = [obj["note"] for (_, ref), obj in world.kube.objects.items() if ref.kind.kind == "Event"]
    assert sum(note.startswith("Ready is True") for note in notes) == 1
    assert not any(note.startswith("Accepted is True") for note in notes)


async def test_recreated_resource_does_not_get_its_predecessor_s_status(world: World) -> None:
    store_resource(world.kube, make_resource())
    successor = make_resource()
    successor["metadata"]["uid"] = "another"
    # The cache is behind: it still shows the predecessor.
    world.kube.cache = None
    store_resource(world.kube, successor)
    await world.reconciler.reconcile(KEY)
    assert "status" not in world.kube.objects["team", ChildRef(INFERENCE, "chat")]


async def test_children_stay_quiet_about_conditions_of_others(world: World) -> None:
    store_resource(world.kube, make_resource())
    await world.reconciler.reconcile(KEY)
    live = world.kube.objects["team", ChildRef(INFERENCE, "chat")]
    foreign = {**live["status"]["conditions"][0], "type": "TheirCondition"}
    status = {**live["status"], "conditions": [*live["status"]["conditions"], foreign]}
    store_resource(world.kube, {**live, "status": status})
    world.kube.take_writes()
    await world.reconciler.reconcile(KEY)
    assert world.kube.take_writes() == []
    assert names.READY in {condition["type"] for condition in world.status["conditions"]}
