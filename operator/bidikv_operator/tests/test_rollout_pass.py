"""Rollouts through the whole pass: an API server in memory, and controllers that make pods ready when told to."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from bidikv_operator import names
from bidikv_operator.build import build_all
from bidikv_operator.cache import ChildRef, Key, ObjectCache
from bidikv_operator.engines.facts import FactStore
from bidikv_operator.kinds import (
    CONTROLLER_REVISION,
    DEPLOYMENT,
    INFERENCE,
    LEADER_WORKER_SET,
    POD,
    RESOURCE_CLAIM_TEMPLATE,
    Kind,
)
from bidikv_operator.kube import ForbiddenError
from bidikv_operator.names import ENGINE_ROLES, PREFILL, Role
from bidikv_operator.reconcile import Reconciler
from bidikv_operator.state import EngineFacts
from bidikv_operator.tests.engine_samples import make_report
from bidikv_operator.tests.samples import (
    EFA,
    RUNTIME_IMAGE,
    TCP,
    FakeKube,
    find_set,
    make_resource,
    resolve,
    store_resource,
)
from bidikv_operator.token_store import TokenStore
from bidikv_operator.workqueue import RetryLaterError

Object = dict[str, Any]
KEY = Key("team", "chat")


class Facts(FactStore):
    """Reports by pod name, as if the engines had been asked."""

    def __init__(self) -> None:
        super().__init__()
        self.unread: dict[str, int] = {}

    def observe(self, key: Key, pods: Any) -> tuple[EngineFacts, ...]:
        return tuple(
            EngineFacts(
                pod=pod["metadata"]["name"],
                uid=pod["metadata"]["uid"],
                role="decode",
                address="",
                report=make_report(unread_sessions=self.unread[pod["metadata"]["name"]]),
            )
            for pod in pods
            if pod["metadata"]["name"] in self.unread
        )


class World:
    """One resource, its operator, and the controllers of Deployments."""

    def __init__(self, resource: Object) -> None:
        self.cache = ObjectCache()
        self.kube = FakeKube(self.cache)
        self.facts = Facts()
        self.broken: set[str] = set()
        """Images and arguments whose engines crash."""
        self.start_operator(RUNTIME_IMAGE)
        self.resource = store_resource(self.kube, resource)
        self._pods = 0

    def start_operator(self, runtime_image: str) -> None:
        """Another process, perhaps of another version."""
        self.reconciler = Reconciler(
            kube=self.kube,  # type: ignore[arg-type]
            cache=self.cache,
            tokens=TokenStore(self.kube, propagation_seconds=180),
            engines=self.facts,
            runtime_image=runtime_image,
            identity="test",
        )

    def change(self, **spec: Any) -> None:
        live = self.kube.objects["team", ChildRef(INFERENCE, "chat")]
        metadata = {**live["metadata"], "generation": live["metadata"]["generation"] + 1}
        self.resource = store_resource(self.kube, {**live, "metadata": metadata, "spec": {**live["spec"], **spec}})

    async def reconcile(self) -> None:
        await self.reconciler.reconcile(KEY)

    async def settle(self, *, passes: int = 40) -> None:
        """Reconcile and let the controllers act, until nothing is written any more.

        Raises:
            AssertionError: it goes on.
        """
        for _ in range(passes):
            self.kube.take_writes()
            await self.reconcile()
            if not self.kube.take_writes() and not self.control():
                return
        raise AssertionError("no end")

    def control(self) -> bool:
        """One round of the Deployments' controllers and the kubelets; whether anything changed."""
        return any([self._control(obj) for obj in self.objects(DEPLOYMENT)] + [self._end_pods()])

    def objects(self, kind: Kind) -> list[Object]:
        return [copy.deepcopy(obj) for (_, ref), obj in sorted(self.kube.objects.items(), key=str) if ref.kind == kind]

    def sets(self) -> dict[str, int]:
        """Replicas of the sets of engines by name."""
        return {
            obj["metadata"]["name"]: obj["spec"]["replicas"]
            for obj in self.objects(DEPLOYMENT)
            if obj["metadata"]["labels"][names.LABEL_ROLE] in ENGINE_ROLES
        }

    def strip(self, name: str, **changes: Any) -> None:
        """Take the labels of a set, so that the watch tells of a deletion."""
        live = self.kube.objects["team", ChildRef(DEPLOYMENT, name)]
        self.kube.store(DEPLOYMENT, {**live, "metadata": {**live["metadata"], "labels": {}, **changes}})
        self.cache.drop(DEPLOYMENT, live)

    def set_of(self, role: Role) -> Object:
        return self.kube.objects["team", ChildRef(DEPLOYMENT, find_set(self.resource, role))]

    def condition(self, name: str) -> Object:
        status = self.kube.objects["team", ChildRef(INFERENCE, "chat")]["status"]
        found: Object = next(condition for condition in status["conditions"] if condition["type"] == name)
        return found

    def pods_of(self, deployment: Mapping[str, Any]) -> list[Object]:
        selector = deployment["spec"]["selector"]["matchLabels"].items()
        return [pod for pod in self.objects(POD) if selector <= pod["metadata"]["labels"].items()]

    def _control(self, deployment: Object) -> bool:
        pods, wanted = self.pods_of(deployment), deployment["spec"]["replicas"]
        live = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        live.sort(key=lambda pod: int(pod["metadata"].get("annotations", {}).get(names.ANNOTATION_DELETION_COST, "0")))
        for pod in live[: max(0, len(live) - wanted)]:
            pod["metadata"]["deletionTimestamp"] = datetime.now(UTC).isoformat()
            self.kube.store(POD, pod)
        for _ in range(wanted - len(live)):
            self._pods += 1
            labels = deployment["spec"]["template"]["metadata"]["labels"]
            metadata = {"name": f"pod-{self._pods}", "namespace": "team", "labels": labels}
            self.kube.store(POD, {"metadata": metadata, "status": {"phase": "Running"}})
        status = self._count(deployment)
        is_changed: bool = status != deployment.get("status") or len(live) != wanted
        if is_changed:
            self.kube.store(DEPLOYMENT, {**deployment, "status": status})
        return is_changed

    def _count(self, deployment: Object) -> Object:
        live = sum("deletionTimestamp" not in pod["metadata"] for pod in self.pods_of(deployment))
        seen = deployment["metadata"].get("generation", 1)
        engine = deployment["spec"]["template"]["spec"]["containers"][0]
        image = engine["image"]
        is_broken = not self.broken.isdisjoint({image, *engine.get("args", ())})
        ready = 0 if is_broken else live
        if is_broken:
            for pod in self.pods_of(deployment):
                crashed = {"name": "engine", "image": image, "ready": False, "state": {"terminated": {"exitCode": 1}}}
                if pod["status"].get("containerStatuses") != [crashed]:
                    self.kube.store(POD, {**pod, "status": {"phase": "Running", "containerStatuses": [crashed]}})
        return {"observedGeneration": seen, "replicas": live, "readyReplicas": ready, "updatedReplicas": live}

    def _end_pods(self) -> bool:
        leaving = [pod for pod in self.objects(POD) if "deletionTimestamp" in pod["metadata"]]
        for pod in leaving:
            self.kube.remove(POD, "team", pod["metadata"]["name"])
        return bool(leaving)


@pytest.fixture
async def world() -> World:
    found = World(make_resource(prefill={"replicas": 2}, decode={"replicas": 2}))
    await found.settle()
    assert found.condition("Progressing")["reason"] == "RolledOut"
    return found


async def test_a_new_group_takes_the_place_of_the_old_one(world: World) -> None:
    old = sorted(world.sets())
    world.change(image="vllm:v2")
    seen = []
    for _ in range(60):
        world.kube.take_writes()
        await world.reconcile()
        if world.sets() not in seen:
            seen.append(world.sets())
        if not world.kube.take_writes() and not world.control():
            break
    new = sorted(find_set(world.resource, role) for role in ENGINE_ROLES)
    assert [tuple(step.get(name, 0) for name in (*old, *new)) for step in seen] == [
        # decode and prefill of the old group, decode and prefill of the new one
        (1, 1, 0, 0),
        (1, 1, 1, 1),
        (0, 0, 1, 1),
        (0, 0, 2, 2),
    ]
    assert set(world.sets()) == set(new), "the emptied sets are gone"
    assert world.condition("Progressing")["reason"] == "RolledOut"


async def test_ready_stays_true_during_a_rollout(world: World) -> None:
    world.change(image="vllm:v2")
    for _ in range(60):
        await world.reconcile()
        assert world.condition("Ready")["status"] == "True"
        if not world.control():
            break


async def test_a_failed_rollout_stands_still_and_is_set_back(world: World) -> None:
    before = world.sets()
    image = world.resource["spec"]["image"]
    world.broken.add("vllm:broken")
    world.change(image="vllm:broken")
    await world.settle()
    old = {name: count for name, count in world.sets().items() if name in before}
    assert set(old.values()) == {1}, "one of each serves on"
    progressing = world.condition("Progressing")
    assert (progressing["status"], progressing["reason"]) == ("False", "RolloutFailed")
    assert "keeps serving" in progressing["message"]
    assert world.condition("Ready")["status"] == "True"
    world.change(image=image)
    await world.settle()
    assert world.sets() == before
    assert world.condition("Progressing")["reason"] == "RolledOut"


async def test_another_version_of_the_operator_restarts_no_engine(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*args: Any, **kwargs: Any) -> Object:
        raise AssertionError("what this version would build is not looked at")

    before = {role: world.set_of(role) for role in ENGINE_ROLES}
    world.kube.take_writes()
    monkeypatch.setattr("bidikv_operator.build.revision.build_engine_template", build)
    world.start_operator("registry.example/bidikv/runtime:v2")
    await world.settle()
    assert {role: world.set_of(role) for role in ENGINE_ROLES} == before
    router = world.kube.objects["team", ChildRef(DEPLOYMENT, "chat-router")]
    assert router["spec"]["template"]["spec"]["containers"][0]["image"] == "registry.example/bidikv/runtime:v2"
    monkeypatch.undo()
    world.change(runtime={"restart": "now"})
    await world.settle()
    installer = world.set_of(PREFILL)["spec"]["template"]["spec"]["initContainers"][0]
    assert installer["image"] == "registry.example/bidikv/runtime:v2", "asked for, the new runtime comes"


async def test_a_change_within_the_group_rolls_in_place(world: World) -> None:
    before = world.sets()
    world.change(prefill={"replicas": 2, "extraArgs": ["--max-num-seqs", "8"]})
    await world.settle()
    assert world.sets() == before
    assert "--max-num-seqs" in world.set_of(PREFILL)["spec"]["template"]["spec"]["containers"][0]["args"]


async def test_earlier_templates_are_kept_and_found_again(world: World) -> None:
    def revisions() -> dict[str, int]:
        return {
            obj["metadata"]["name"]: obj["revision"]
            for obj in world.objects(CONTROLLER_REVISION)
            if obj["metadata"]["labels"][names.LABEL_ROLE] == PREFILL
        }

    (first,) = revisions()
    for number in range(4):
        world.change(prefill={"replicas": 2, "extraArgs": ["--max-num-seqs", str(number + 1)]})
        await world.settle()
    assert sorted(revisions().values()) == [3, 4, 5], "the one in use and two before it"
    assert first not in revisions()
    world.change(prefill={"replicas": 2, "extraArgs": ["--max-num-seqs", "3"]})
    await world.settle()
    assert sorted(revisions().values()) == [3, 4, 5], "set back, it is the same revision again"


async def test_sets_of_before_there_were_groups_are_rolled_over() -> None:
    world = World(make_resource(prefill={"replicas": 2}, decode={"replicas": 2}))
    await world.settle()
    legacy = {}
    for role in ENGINE_ROLES:
        old = world.set_of(role)
        world.kube.remove(DEPLOYMENT, "team", old["metadata"]["name"])
        legacy[role] = f"chat-{role}"
        labels = {key: value for key, value in old["metadata"]["labels"].items() if key != names.LABEL_GROUP}
        template = copy.deepcopy(old["spec"]["template"])
        template["metadata"]["labels"] = labels
        selector = {"matchLabels": {names.LABEL_OWNER: "chat", names.LABEL_ROLE: role}}
        metadata = {"name": legacy[role], "namespace": "team", "labels": labels}
        metadata["ownerReferences"] = old["metadata"]["ownerReferences"]
        spec = {"replicas": 2, "selector": selector, "template": template}
        world.kube.store(DEPLOYMENT, {"metadata": metadata, "spec": spec})
    for pod in world.objects(POD):
        pod["metadata"]["labels"].pop(names.LABEL_GROUP, None)
        world.kube.store(POD, pod)
    world.control()
    await world.reconcile()
    assert world.sets() == {
        **{find_set(world.resource, role): 0 for role in ENGINE_ROLES},
        **dict.fromkeys(legacy.values(), 1),
    }
    templates = [
        obj["spec"]["template"] for obj in world.objects(DEPLOYMENT) if obj["metadata"]["name"] == "chat-prefill"
    ]
    assert "v0.32.0" in str(templates), "a set of before is resized and nothing else"
    await world.settle()
    assert world.sets() == {find_set(world.resource, role): 2 for role in ENGINE_ROLES}


async def test_a_scale_down_takes_the_engine_of_least_value(world: World) -> None:
    world.change(decode={"replicas": 4})
    await world.settle()
    pods = [pod["metadata"]["name"] for pod in world.pods_of(world.set_of("decode"))]
    world.facts.unread = dict(zip(pods, (3, 0, 5, 1), strict=True))
    world.kube.take_writes()
    await world.reconcile()
    assert not [what for _, what in world.kube.take_writes() if what.startswith("Pod")], "only when they are needed"
    world.change(decode={"replicas": 2})
    await world.reconcile()
    writes = [what for verb, what in world.kube.take_writes() if what.split()[0] in ("Pod", "Deployment")]
    assert writes == [
        f"Pod {pods[0]}",
        f"Pod {pods[2]}",
        f"Pod {pods[3]}",
        f"Deployment {find_set(world.resource, 'decode')}",
    ]
    await world.settle()
    left = {pod["metadata"]["name"] for pod in world.pods_of(world.set_of("decode"))}
    assert left == {pods[0], pods[2]}


async def test_a_scale_down_goes_on_without_the_right_to_write_values(world: World) -> None:
    world.facts.unread = {pod["metadata"]["name"]: 1 for pod in world.objects(POD)}
    world.kube.refuse = lambda verb, kind, name: ForbiddenError("no", status=403) if kind == POD else None
    world.change(decode={"replicas": 1})
    await world.settle()
    assert world.set_of("decode")["spec"]["replicas"] == 1


async def test_paused_nothing_is_written_but_the_status(world: World) -> None:
    world.kube.take_writes()
    world.change(paused=True, image="vllm:v2", decode={"replicas": 5})
    await world.reconcile()
    assert {what.split()[0] for _, what in world.kube.take_writes()} <= {names.KIND, "Event"}
    assert world.condition("Progressing")["reason"] == "Paused"
    world.change(paused=False)
    await world.settle()
    assert world.set_of("decode")["spec"]["replicas"] == 5


async def test_a_paused_child_is_told_and_not_written_to(world: World) -> None:
    def pause(is_paused: bool) -> None:
        live = world.set_of(PREFILL)
        generation = live["metadata"]["generation"] + 1
        world.kube.store(
            DEPLOYMENT,
            {
                **live,
                "metadata": {**live["metadata"], "generation": generation},
                "spec": {**live["spec"], "paused": is_paused},
                "status": {**live["status"], "observedGeneration": generation},
            },
        )

    def tell(condition: str) -> tuple[str, str]:
        return world.condition(condition)["status"], world.condition(condition)["reason"]

    remedy = f"kubectl rollout resume deployment/{find_set(world.resource, PREFILL)} "
    world.kube.take_writes()
    pause(True)
    await world.reconcile()
    assert {what.split()[0] for _, what in world.kube.take_writes()} == {names.KIND}, "its message, and no Event"
    assert tell("Progressing") == ("False", "RolledOut")
    assert remedy in world.condition("Progressing")["message"]
    await world.reconcile()
    assert world.kube.take_writes() == []

    world.change(prefill={"replicas": 2, "extraArgs": ["--max-num-seqs", "9"]})
    await world.reconcile()
    pause(True)  # this API server forgets what others set; ``storm.py`` has one that does not
    live = world.set_of(PREFILL)
    world.kube.store(DEPLOYMENT, {**live, "status": {**live["status"], "updatedReplicas": 0}})
    await world.reconcile()
    assert tell("Progressing") == ("False", "DeploymentPaused")
    assert tell("Degraded") == ("True", "DeploymentPaused")
    assert tell("Ready") == ("True", "Ready")
    assert remedy in world.condition("Progressing")["message"]
    notes = [obj["note"] for (_, ref), obj in world.kube.objects.items() if ref.kind.kind == "Event"]
    assert sum("DeploymentPaused" in note or remedy in note for note in notes) == 1

    pause(False)
    await world.settle()
    assert tell("Progressing") == ("False", "RolledOut")
    assert tell("Degraded") == ("False", "AsExpected")
    assert remedy not in world.condition("Progressing")["message"]


async def test_a_deleted_set_comes_back_whole(world: World) -> None:
    """Its pods are the garbage collector's; there is nothing to be careful about."""
    before = world.sets()
    world.kube.remove(DEPLOYMENT, "team", find_set(world.resource, PREFILL))
    await world.settle()
    assert world.sets() == before


async def test_sets_that_lost_their_labels_are_found_by_their_pods(world: World) -> None:
    earlier = set(world.sets())
    world.change(image="vllm:v2")
    await world.reconcile()
    assert set(world.sets()) > earlier, "both groups are there"
    for name in earlier:
        world.strip(name)
    world.kube.take_writes()
    await world.reconcile()
    patched = {what for verb, what in world.kube.take_writes() if verb == "patch"}
    assert patched == {f"Deployment {name}" for name in earlier}
    await world.settle()
    current = {find_set(world.resource, role) for role in ENGINE_ROLES}
    assert {obj["metadata"]["name"] for obj in world.objects(DEPLOYMENT)} == {*current, "chat-router"}
    assert world.condition("Progressing")["reason"] == "RolledOut"
    world.kube.reads.clear()
    await world.reconcile()
    assert world.kube.reads == [], "it costs nothing while all sets are known"


@pytest.mark.parametrize(
    "changes",
    [
        {"ownerReferences": []},  # nothing says any more that it was ours
        {"ownerReferences": [{"kind": "Other", "name": "x", "uid": "x", "controller": True}]},
        {"deletionTimestamp": "2026-01-01T00:00:00Z"},
    ],
)
async def test_a_lost_set_of_others_or_that_goes_gets_no_labels(world: World, changes: Object) -> None:
    (earlier,) = (name for name in world.sets() if name.startswith("chat-decode"))
    world.change(image="vllm:v2")
    world.strip(earlier, **changes)
    world.kube.take_writes()
    await world.reconcile()
    assert f"Deployment {earlier}" not in {what for _, what in world.kube.take_writes()}


async def test_labels_that_may_not_be_given_back_hold_nothing_else_up(world: World) -> None:
    (earlier,) = (name for name in world.sets() if name.startswith("chat-decode"))
    world.change(image="vllm:v2")
    world.strip(earlier)
    world.kube.refuse = lambda verb, kind, name: ForbiddenError("a policy") if name == earlier else None
    await world.reconcile()
    assert ("team", ChildRef(DEPLOYMENT, find_set(world.resource, PREFILL))) in world.kube.objects


async def test_a_role_over_several_nodes_waits_for_its_kind() -> None:
    world = World(make_resource(prefill={"tensorParallelSize": 2, "nodesPerReplica": 2}))
    world.reconciler.missing_kinds = frozenset({LEADER_WORKER_SET})
    await world.settle()
    assert world.objects(LEADER_WORKER_SET) == []
    assert world.condition("Progressing")["reason"] == names.REASON_KIND_MISSING
    revisions = {obj["metadata"]["labels"][names.LABEL_ROLE] for obj in world.objects(CONTROLLER_REVISION)}
    assert revisions == {"decode"}, "a template that nothing was made from is not kept"
    world.start_operator(RUNTIME_IMAGE)
    await world.reconcile()
    (found,) = world.objects(LEADER_WORKER_SET)
    assert found["spec"]["leaderWorkerTemplate"]["size"] == 2


async def test_claims_that_earlier_engines_name_stay() -> None:
    fabric = {"type": "EFA", "instanceType": "p5.48xlarge", "devices": "ResourceClaim"}
    role = {"tensorParallelSize": 2, "replicas": 2}
    world = World(make_resource(fabric=fabric, prefill=role, decode=role))
    await world.settle()
    (first,) = world.objects(RESOURCE_CLAIM_TEMPLATE)
    classes = {"gpu": "gpu.example", "efa": "efa.example"}
    world.change(image="vllm:v2", fabric={**fabric, "deviceClasses": classes})
    await world.reconcile()
    during = [obj["metadata"]["name"] for obj in world.objects(RESOURCE_CLAIM_TEMPLATE)]
    assert len(during) == 2
    assert first["metadata"]["name"] in during
    await world.settle()
    (last,) = world.objects(RESOURCE_CLAIM_TEMPLATE)
    assert last["metadata"]["name"] in str(world.set_of(PREFILL))


async def test_pods_that_no_kubelet_ends_hold_nothing_up(world: World) -> None:
    world.change(image="vllm:v2")
    await world.reconcile()
    world.control()
    for pod in world.objects(POD):
        if "deletionTimestamp" in pod["metadata"]:
            pod["metadata"]["deletionTimestamp"] = "2020-01-01T00:00:00Z"
            world.kube.store(POD, pod)
    await world.reconcile()
    assert sorted(world.sets().values()) == [1, 1, 1, 1]


async def test_a_template_that_is_refused_takes_no_engine_away(world: World) -> None:
    """Whether it fits is seen before anything makes room for it, even where one engine has to go first."""
    before = world.sets()
    world.kube.refuse = lambda verb, kind, name: (
        ForbiddenError("a policy refuses it", status=403) if kind == DEPLOYMENT and name not in before else None
    )
    world.change(image="vllm:v2")
    for _ in range(3):
        with pytest.raises(RetryLaterError, match="a policy refuses it"):
            await world.reconcile()
        world.control()
    assert world.sets() == before
    assert world.condition("Ready")["status"] == "True"
    world.kube.refuse = lambda verb, kind, name: None
    await world.settle()
    assert set(world.sets()) == {find_set(world.resource, role) for role in ENGINE_ROLES}


async def test_a_kind_that_is_missing_takes_no_engine_away(world: World) -> None:
    before = world.sets()
    world.reconciler.missing_kinds = frozenset({LEADER_WORKER_SET})
    world.change(
        prefill={"replicas": 2, "tensorParallelSize": 2, "nodesPerReplica": 2}, decode={"tensorParallelSize": 2}
    )
    world.facts.unread = {pod["metadata"]["name"]: 1 for pod in world.objects(POD)}
    await world.settle()
    assert {name: count for name, count in world.sets().items() if name in before} == before
    assert world.condition("Progressing")["reason"] == names.REASON_KIND_MISSING
    world.facts.unread = dict.fromkeys(world.facts.unread, 2)
    world.kube.take_writes()
    await world.reconcile()
    assert world.kube.take_writes() == [], "nor does it keep their values at hand"


@pytest.mark.parametrize(
    "data", [None, {}, {"template": None}, {"template": {"metadata": {}, "spec": {}}}, {"template": 1}]
)
async def test_a_revision_without_a_template_is_written_anew(world: World, data: Any) -> None:
    before = {role: world.set_of(role) for role in ENGINE_ROLES}
    revisions = {obj["metadata"]["name"]: obj["data"] for obj in world.objects(CONTROLLER_REVISION)}
    for obj in world.objects(CONTROLLER_REVISION):
        world.kube.store(CONTROLLER_REVISION, {**obj, "data": data})
    await world.settle()
    assert {obj["metadata"]["name"]: obj["data"] for obj in world.objects(CONTROLLER_REVISION)} == revisions
    assert {role: world.set_of(role) for role in ENGINE_ROLES} == before


async def test_somebody_else_s_revision_is_no_template(world: World) -> None:
    """Else whoever may write ControllerRevisions would choose what runs."""
    before = {role: world.set_of(role) for role in ENGINE_ROLES}
    taken = next(
        obj for obj in world.objects(CONTROLLER_REVISION) if obj["metadata"]["labels"][names.LABEL_ROLE] == PREFILL
    )
    owner = {"apiVersion": "v1", "kind": "Other", "name": "x", "uid": "other", "controller": True}
    taken["metadata"]["ownerReferences"] = [owner]
    taken["data"]["template"]["spec"]["containers"][0]["image"] = "theirs"
    world.kube.store(CONTROLLER_REVISION, taken)
    with pytest.raises(RetryLaterError, match="belongs to something else"):
        await world.reconcile()
    assert {role: world.set_of(role) for role in ENGINE_ROLES} == before


def test_equal_specs_give_equal_templates_from_the_store() -> None:
    """What comes back from a ControllerRevision must not differ in a byte, or each operator's start would write."""
    for resource in (TCP, EFA):
        first = build_all(resolve(resource))
        stored = {ChildRef(CONTROLLER_REVISION, obj["metadata"]["name"]): _round_trip(obj) for obj in first.revisions}
        second = build_all(resolve(resource), stored)
        assert [str(manifest) for _, manifest in first] == [str(manifest) for _, manifest in second]


def _round_trip(value: Any) -> Any:
    """As the API server may answer: with other orders of keys."""
    if isinstance(value, dict):
        return {key: _round_trip(value[key]) for key in sorted(value)}
    return [_round_trip(item) for item in value] if isinstance(value, list) else value
