"""Rollouts on a real cluster under load: one that fails, its revert, one role alone, an upgrade, a pause, a deletion.

One that succeeds is in ``test_drain.py``.

Engines are simulated; everything else is real: scheduler, kubelets, Deployments, the operator as a process, routers in
pods.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bidikv_operator import names
from e2e.install import image_references
from e2e.kubectl import Kubectl, eventually
from e2e.load import Load, find_url
from e2e.operator_process import OperatorProcess
from e2e.simengine.local import SERVED_MODEL
from e2e.simengine.resource import build_resource

pytestmark = pytest.mark.cluster

NAME = "rolled"
CLIENTS = 3
WAIT = 240.0
QUICK = {"drainSeconds": 20}


@dataclass
class Rolled:
    """A resource of two engines in each role, and who reconciles it."""

    kubectl: Kubectl
    operator: OperatorProcess
    spec: dict[str, Any]

    def apply(self, **changes: Any) -> None:
        """Apply the resource; ``changes`` are those of ``build_resource``."""
        options: dict[str, Any] = {"prefill": 2, "decode": 2, "spec": self.spec} | changes
        self.kubectl.apply(build_resource(NAME, **options))

    def await_condition(self, name: str, status: str, reason: str | None = None) -> str:
        """Returns its message."""
        return self.operator.await_condition(NAME, name, status, reason)["message"]

    def await_generation(self) -> None:
        """Until the operator has seen the newest spec."""

        def look() -> bool:
            found = self.kubectl.get(names.SHORT_NAME, NAME)
            assert found is not None
            return bool((found.get("status") or {}).get("observedGeneration") == found["metadata"]["generation"])

        eventually(look, "the operator to see the newest spec", WAIT)

    def settle(self) -> None:
        """Until the newest spec is what runs."""
        self.await_generation()
        self.await_condition(names.PROGRESSING, "False", names.REASON_ROLLED_OUT)
        self.await_condition(names.READY, "True")

    def engine_sets(self) -> dict[str, int]:
        """Deployments of engines and their replicas."""
        found = self.kubectl.find("deployments", f"{names.LABEL_OWNER}={NAME},{names.LABEL_ROLE}!=router")
        return {item["metadata"]["name"]: item["spec"]["replicas"] for item in found}

    def generations(self) -> dict[str, int]:
        """Of the engines' Deployments: how often somebody changed what they ask for."""
        found = self.kubectl.find("deployments", f"{names.LABEL_OWNER}={NAME},{names.LABEL_ROLE}!=router")
        return {item["metadata"]["name"]: item["metadata"]["generation"] for item in found}

    def pods(self) -> set[str]:
        """Uids of the engines' pods that are not being deleted."""
        found = self.kubectl.find("pods", f"{names.LABEL_OWNER}={NAME},{names.LABEL_ROLE}!=router")
        return {pod["metadata"]["uid"] for pod in found if "deletionTimestamp" not in pod["metadata"]}

    def load(self) -> Load:
        return Load(find_url(self.kubectl, NAME), SERVED_MODEL, pause=0.05)


@pytest.fixture
def rolled(namespace: Kubectl, crd: None, tmp_path: Path, no_other_operator: None) -> Iterator[Rolled]:
    image = image_references()["runtime"]
    operator = OperatorProcess(namespace, "one", image, tmp_path, {"BIDIKV_POLL_SECONDS": "2"}).start()
    found = Rolled(namespace, operator, {"updateStrategy": QUICK})
    try:
        found.apply()
        found.settle()
        yield found
    finally:
        operator.kill()


def test_a_rollout_that_fails_keeps_serving_says_why_and_goes_back(rolled: Rolled) -> None:
    before, sets = rolled.pods(), rolled.engine_sets()
    with rolled.load().running(CLIENTS) as load:
        load.await_answers(10)
        rolled.apply(spec={**rolled.spec, "image": "docker.io/bidikv/no-such-image:v1"})
        message = rolled.await_condition(names.PROGRESSING, "False", names.REASON_ROLLOUT_FAILED)
        rolled.await_condition(names.DEGRADED, "True")
        assert "docker.io/bidikv/no-such-image:v1" in message, message
        load.await_answers(20)
        assert before & rolled.pods(), "engines of the earlier group still run"
        rolled.apply()
        rolled.settle()
        load.await_answers(10)
    assert rolled.engine_sets() == sets
    rolled.await_condition(names.DEGRADED, "False")


def test_what_kv_does_not_depend_on_rolls_its_own_role_only(rolled: Rolled) -> None:
    sets = rolled.engine_sets()
    decode = rolled.kubectl.find("pods", f"{names.LABEL_OWNER}={NAME},{names.LABEL_ROLE}=decode")
    with rolled.load().running(CLIENTS) as load:
        load.await_answers(10)
        extra = {"prefill": {"extraArgs": ["--max-num-seqs", "64"]}}
        resource = build_resource(NAME, prefill=2, decode=2, spec=rolled.spec)
        resource["spec"]["prefill"] |= extra["prefill"]
        rolled.kubectl.apply(resource)
        rolled.settle()
        load.await_answers(10)
    assert rolled.engine_sets() == sets
    after = rolled.kubectl.find("pods", f"{names.LABEL_OWNER}={NAME},{names.LABEL_ROLE}=decode")
    assert {pod["metadata"]["uid"] for pod in decode} == {pod["metadata"]["uid"] for pod in after}


def test_a_newer_operator_with_another_runtime_restarts_no_engine(rolled: Rolled) -> None:
    before, generations = rolled.pods(), rolled.generations()
    rolled.operator.terminate()
    newer = OperatorProcess(
        rolled.kubectl, "newer", "docker.io/bidikv/newer-runtime:v9", rolled.operator.folder
    ).start()
    try:
        eventually(newer.leads, "the newer operator to lead", WAIT)
        newer.await_reconcile(NAME)
        # Its routers are rolled to the newer runtime, whose image does not exist here: the sign that it has reconciled.
        rolled.await_condition(names.ROUTER_READY, "True")

        def rolls_router() -> bool:
            found = rolled.kubectl.get("deployment", f"{NAME}-router")
            assert found is not None
            [container] = found["spec"]["template"]["spec"]["containers"]
            return bool(container["image"] == "docker.io/bidikv/newer-runtime:v9")

        eventually(rolls_router, "the router's Deployment to name the newer runtime", WAIT)
        newer.await_reconcile(NAME)
        assert rolled.generations() == generations, "what would restart engines"
        assert rolled.pods() == before
    finally:
        newer.kill()


def test_paused_changes_nothing_until_it_is_resumed(rolled: Rolled) -> None:
    sets = rolled.engine_sets()
    rolled.apply(spec={**rolled.spec, "paused": True}, decode=1)
    rolled.await_condition(names.PROGRESSING, "False", names.REASON_PAUSED)
    rolled.kubectl.run("delete", "poddisruptionbudget", f"{NAME}-decode")
    rolled.operator.await_reconcile(NAME)
    assert rolled.kubectl.get("poddisruptionbudget", f"{NAME}-decode") is None
    assert rolled.engine_sets() == sets
    rolled.apply(decode=2)
    rolled.settle()
    eventually(
        lambda: rolled.kubectl.get("poddisruptionbudget", f"{NAME}-decode") is not None, "the budget to be back", WAIT
    )


def test_deletion_leaves_nothing(rolled: Rolled) -> None:
    rolled.kubectl.run("delete", names.SHORT_NAME, NAME, "--wait=false")
    kinds = "deployments,pods,secrets,networkpolicies,controllerrevisions,services,serviceaccounts"
    kinds += ",roles,rolebindings,poddisruptionbudgets"

    def left() -> list[str]:
        found = rolled.kubectl.run(
            "get", kinds, "--selector", f"{names.LABEL_OWNER}={NAME}", "-o", "json", "--ignore-not-found"
        )
        return [item["metadata"]["name"] for item in json.loads(found)["items"]] if found else []

    eventually(lambda: not left(), "everything to be gone", WAIT)
