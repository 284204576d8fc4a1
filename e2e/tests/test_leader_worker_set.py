"""Roles whose replicas span nodes, on a real API server with a definition and a controller of LeaderWorkerSet.

An API server of the tests' own: on the cluster in use, operators of other tests would see the new kind come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bidikv_operator import names
from bidikv_operator.kinds import LEADER_WORKER_SET
from bidikv_operator.rollout.revision import compute_group
from e2e.kubectl import Kubectl, Manifest, eventually
from e2e.leader_worker_set import LeaderWorkerSetController, build_definition
from e2e.operator_process import RECONCILES, WRITES, OperatorProcess
from e2e.own_api_server import OwnApiServer, wait_until_established
from e2e.small_resource import build_small_resource

pytestmark = pytest.mark.cluster

WAIT = 300.0


def make_resource(**changes: Any) -> Manifest:
    role = {"replicas": 2, "tensorParallelSize": 16, "nodesPerReplica": 2}
    return build_small_resource(**{"prefill": role, "decode": role, "router": {"replicas": 1}, **changes})


@dataclass
class World:
    kubectl: Kubectl
    controller: LeaderWorkerSetController
    operator: OperatorProcess

    def sets(self) -> dict[str, int]:
        """Replicas by name."""
        found = self.kubectl.find(LEADER_WORKER_SET.plural)
        return {item["metadata"]["name"]: item["spec"]["replicas"] for item in found}

    def condition(self, name: str) -> dict[str, str]:
        return self.kubectl.condition(names.SINGULAR, "chat", name)

    def control_until(self, is_reached: Callable[[], bool], what: str) -> None:
        def look() -> bool:
            self.controller.step()
            return is_reached()

        eventually(look, what, WAIT)

    def are_engines_ready(self) -> bool:
        """Of the newest group, and of no other."""
        resource = self.kubectl.get(names.SINGULAR, "chat") or {}
        group = compute_group(resource["spec"])
        conditions = [self.condition(name) for name in (names.PREFILL_READY, names.DECODE_READY)]
        return (
            set(self.sets()) == {f"chat-{role}-{group}" for role in names.ENGINE_ROLES}
            and all(condition.get("reason") == names.REASON_ALL_READY for condition in conditions)
            and resource["status"]["decode"].get("updatedReplicas") == resource["spec"]["decode"]["replicas"]
        )


@pytest.fixture(scope="module")
def served(own_api_server: OwnApiServer) -> OwnApiServer:
    own_api_server.kubectl.apply(build_definition())
    wait_until_established(own_api_server.kubectl, f"{LEADER_WORKER_SET.plural}.{LEADER_WORKER_SET.group}")
    return own_api_server


@pytest.fixture
def world(served: OwnApiServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    kubectl = served.create_namespace(request.node.name.removeprefix("test_").replace("_", "-")[:63])
    operator = OperatorProcess(kubectl, "one", "runtime.example/none:v1", tmp_path)
    yield World(kubectl, LeaderWorkerSetController(kubectl), operator.start())
    operator.kill()


def test_a_replica_of_several_nodes_is_one_engine(world: World) -> None:
    world.kubectl.apply(make_resource())
    world.control_until(world.are_engines_ready, "both roles to be ready")
    assert set(world.sets().values()) == {2}
    status = (world.kubectl.get(names.SINGULAR, "chat") or {})["status"]
    assert {key: status["prefill"][key] for key in ("replicas", "readyReplicas", "updatedReplicas")} == {
        "replicas": 2,
        "readyReplicas": 2,
        "updatedReplicas": 2,
    }
    engines = world.kubectl.find("pods", status["prefill"]["selector"])
    assert len(engines) == 2, "the selector finds the first pod of each replica"
    pods = world.kubectl.find("pods", f"{names.LABEL_ROLE} in (prefill,prefill-worker)")
    assert len(pods) == 4
    worker = next(pod for pod in pods if pod["metadata"]["labels"][names.LABEL_ROLE] == "prefill-worker")
    assert "readinessProbe" not in worker["spec"]["containers"][0], "it serves nothing"

    # At rest nothing is written, by this process and by the next one.
    world.operator.await_rest("chat")
    before = world.operator.metric(WRITES)
    world.operator.await_reconcile("chat")
    assert world.operator.metric(WRITES) == before
    assert world.operator.terminate() == 0
    world.operator.start()
    eventually(lambda: world.operator.metric(RECONCILES) > 0, "a first reconcile", WAIT)
    assert world.operator.metric(WRITES) == 0

    world.kubectl.run("scale", names.SINGULAR, "chat", "--replicas=3")
    world.control_until(lambda: sorted(world.sets().values()) == [2, 3] and world.are_engines_ready(), "the scale")


def test_groups_of_replicas_are_rolled_over_in_lockstep(world: World) -> None:
    world.kubectl.apply(make_resource())
    world.control_until(world.are_engines_ready, "both roles to be ready")
    (old_decode, old_prefill) = sorted(world.sets())
    world.kubectl.apply(make_resource(image="engine.example/none:v2"))
    seen: list[tuple[int, int]] = []

    def is_done() -> bool:
        sets = world.sets()
        seen.append((sets.get(old_prefill, 0), sets.get(old_decode, 0)))
        return world.are_engines_ready()

    world.control_until(is_done, "the rollout")
    assert all(abs(prefill - decode) <= 1 for prefill, decode in seen)
    assert set(world.sets().values()) == {2}


def test_a_group_that_never_starts_leaves_the_earlier_one(world: World) -> None:
    world.kubectl.apply(make_resource())
    world.control_until(world.are_engines_ready, "both roles to be ready")
    before = world.sets()
    world.controller.broken.add("engine.example/none:broken")
    world.kubectl.apply(make_resource(image="engine.example/none:broken"))
    world.control_until(lambda: sorted(world.sets().values()) == [1, 1, 1, 1], "the rollout to stand still")
    for _ in range(3):
        world.controller.step()  # it does not go on either
    assert {name: count for name, count in world.sets().items() if name in before} == dict.fromkeys(before, 1)
    world.kubectl.apply(make_resource())
    world.control_until(lambda: world.sets() == before and world.are_engines_ready(), "the way back")


def test_another_number_of_nodes_makes_another_set(world: World) -> None:
    """The size of a LeaderWorkerSet changes for all its replicas at once; so the planner moves to another one."""
    world.kubectl.apply(make_resource())
    world.control_until(world.are_engines_ready, "both roles to be ready")
    before = set(world.sets())
    wider = {"replicas": 2, "tensorParallelSize": 32, "nodesPerReplica": 4}
    world.kubectl.apply(make_resource(prefill=wider))
    world.control_until(lambda: not before & set(world.sets()) and world.are_engines_ready(), "the rollout")
    sizes = {
        item["metadata"]["labels"][names.LABEL_ROLE]: item["spec"]["leaderWorkerTemplate"]["size"]
        for item in world.kubectl.find(LEADER_WORKER_SET.plural)
    }
    assert sizes == {"prefill": 4, "decode": 2}
