"""Engines and routers that are taken away under load, with the real kubelet and simulated engines: nothing is lost.

The load are conversations, half of them streamed, whose clients never send a request again: each request that fails
fails the test.
"""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bidikv_operator import names
from bidikv_runtime import contract
from e2e.demo.engines import parse_totals
from e2e.install import image_references
from e2e.kubectl import Kubectl, KubectlError, Manifest, eventually
from e2e.load import Load, Talk, find_url
from e2e.operator_process import OperatorProcess
from e2e.simengine.local import SERVED_MODEL
from e2e.simengine.resource import build_resource, read_metrics

pytestmark = pytest.mark.cluster

READY_SECONDS = 180.0
GONE_SECONDS = 180.0
ROLLOUT_SECONDS = 400.0
DRAIN_SECONDS = 30
CONVERSATIONS = 6
TALK = Talk(turns=12, opening=2600, more=1600, answer_tokens=24)
"""Long enough for KV that is worth being read."""


@dataclass
class Service:
    kubectl: Kubectl
    name: str
    operator: OperatorProcess

    def pods(self, role: str) -> list[Manifest]:
        """Those that are not being deleted."""
        found = self.kubectl.find("pods", f"{names.LABEL_OWNER}={self.name},{names.LABEL_ROLE}={role}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def wait_until_whole(self) -> None:
        """All wanted pods are ready, and none is being deleted."""

        def is_whole() -> bool:
            pods = self.kubectl.find("pods", f"{names.LABEL_OWNER}={self.name}")
            return len(pods) == 6 and all(is_ready(pod) for pod in pods)

        self.wait(is_whole, "all pods to be ready", READY_SECONDS)

    def wait(self, look: Callable[[], bool], what: str, seconds: float) -> None:
        """Wait; a failure shows the pods and what the operator says."""
        try:
            eventually(look, what, seconds)
        except TimeoutError as error:
            told = self.kubectl.run("get", "pods,deployments,bidikv", "-o", "wide")
            raise AssertionError(f"{error}\n{told}\n{self.operator.log()[-4000:]}") from None

    @contextmanager
    def loaded(self) -> Iterator[Load]:
        """Conversations before, during and after what happens within; every request of theirs must succeed."""
        load = Load(find_url(self.kubectl, self.name), SERVED_MODEL, talk=TALK, patient=False)
        with load.running(CONVERSATIONS):
            load.await_answers(2 * CONVERSATIONS)
            yield load
            load.await_answers(2 * CONVERSATIONS)
        print(f"{len(load.answered)} answers, none failed")

    def total(self, role: str, metric: str) -> float:
        """Of the role's pods that are not being deleted."""
        return sum(
            parse_totals(read_metrics(self.kubectl, pod["metadata"]["name"])).get(metric, 0.0)
            for pod in self.pods(role)
        )


def is_ready(pod: Manifest) -> bool:
    conditions = pod["status"].get("conditions", ())
    return "deletionTimestamp" not in pod["metadata"] and any(
        c["type"] == "Ready" and c["status"] == "True" for c in conditions
    )


def build(name: str, **simulation: Any) -> Manifest:
    """Two engines of each role; prefill's own cache holds two conversations: it reads the others' from decode."""
    spec = {
        "model": {"source": {"path": f"/{SERVED_MODEL}"}, "servedName": SERVED_MODEL, "maxLength": 16_384},
        "prefill": {"extraArgs": ["--num-gpu-blocks-override", "1100"]},
        "updateStrategy": {"drainSeconds": DRAIN_SECONDS},
    }
    # With a step of 10 ms, streams last long enough to be met by what happens.
    simulation = {"step_seconds": 0.01, **simulation}
    return build_resource(name, prefill=2, decode=2, routers=2, simulation=simulation, spec=spec)


@pytest.fixture(scope="module")
def service(
    cluster: Kubectl,
    crd: None,
    tmp_path_factory: pytest.TempPathFactory,
    no_other_operator: None,
) -> Iterator[Service]:
    namespace = f"e2e-drain-{uuid.uuid4().hex[:8]}"
    cluster.run("create", "namespace", namespace)
    kubectl = cluster.within(namespace)
    name = f"sim-{uuid.uuid4().hex[:6]}"
    operator = OperatorProcess(kubectl, "one", image_references()["runtime"], tmp_path_factory.mktemp("operator"))
    try:
        operator.start()
        kubectl.apply(build(name))
        eventually(lambda: kubectl.get("service", name) is not None, "the Service", READY_SECONDS)
        service = Service(kubectl, name, operator)
        service.wait_until_whole()
        yield service
    finally:
        cluster.run("delete", "namespace", namespace, "--wait=false")
        operator.kill()


@contextmanager
def last_words(kubectl: Kubectl, pod: str, file: Path) -> Iterator[None]:
    """Keeps a pod's log in ``file``, to its end."""
    with file.open("wb") as output:
        process = subprocess.Popen(kubectl.argv("logs", "-f", pod, "-c", names.ENGINE_CONTAINER), stdout=output)
        try:
            yield
            process.wait(GONE_SECONDS)
        finally:
            process.kill()
            process.wait()


def wait_until_gone(kubectl: Kubectl, pod: str) -> float:
    """Seconds until a pod that is being deleted has gone."""
    began = time.monotonic()
    eventually(lambda: kubectl.get("pod", pod) is None, f"the end of {pod}", GONE_SECONDS)
    return time.monotonic() - began


@pytest.mark.parametrize("role", [names.DECODE, names.PREFILL])
def test_an_engine_that_is_deleted_under_load_loses_nothing_and_leaves_when_all_is_read(
    service: Service, role: str, tmp_path: Path
) -> None:
    kubectl = service.kubectl
    service.wait_until_whole()
    victim = service.pods(role)[0]["metadata"]["name"]
    log = tmp_path / "log"
    with service.loaded():
        before = service.total(names.PREFILL, contract.METRIC_REUSED_TOKENS)
        with last_words(kubectl, victim, log):
            kubectl.run("delete", "pod", victim, "--wait=false")
            seconds = wait_until_gone(kubectl, victim)
        if role == names.DECODE:
            reused = service.total(names.PREFILL, contract.METRIC_REUSED_TOKENS) - before
            assert reused > 0, "prefill went on reading sessions' KV"
    text = log.read_text()
    assert "bidikv.drain nothing is left" in text, text
    print(f"{victim} had gone after {seconds:.0f} s")


def test_only_one_engine_of_a_role_is_evicted_at_a_time(service: Service) -> None:
    kubectl = service.kubectl
    service.wait_until_whole()
    first, second = (pod["metadata"]["name"] for pod in service.pods(names.DECODE))
    with service.loaded():
        budget = f"{service.name}-{names.DECODE}"

        def allows_one() -> bool:
            found = kubectl.get("poddisruptionbudget", budget)
            return found is not None and found["status"].get("disruptionsAllowed") == 1

        service.wait(allows_one, "the budget to know that both are ready", READY_SECONDS)
        evict(kubectl, first)
        with pytest.raises(KubectlError, match="disruption budget"):
            evict(kubectl, second)
        wait_until_gone(kubectl, first)
    service.wait_until_whole()


def evict(kubectl: Kubectl, pod: str) -> None:
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    path = f"/api/v1/namespaces/{kubectl.namespace}/pods/{pod}/eviction"
    kubectl.run("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))


def test_draining_a_node_under_load_fails_no_request(service: Service, cluster: Kubectl) -> None:
    kubectl = service.kubectl
    service.wait_until_whole()
    node = service.pods(names.DECODE)[0]["spec"]["nodeName"]
    of_ours = f"{names.LABEL_OWNER}={service.name}"
    taken = [pod["metadata"]["name"] for pod in kubectl.find("pods", of_ours) if pod["spec"]["nodeName"] == node]
    with service.loaded() as load:
        before = len(load.answered)
        try:
            # Only this resource's pods: other tests may have some on the node.
            cluster.run(
                *("drain", node, f"--pod-selector={of_ours}", "--ignore-daemonsets", "--delete-emptydir-data"),
                f"--timeout={GONE_SECONDS:.0f}s",
                timeout=GONE_SECONDS + 30,
            )
            left = [pod for pod in kubectl.find("pods", of_ours) if pod["spec"].get("nodeName") == node]
            assert left == []
            service.wait_until_whole()
        finally:
            cluster.run("uncordon", node)
        print(f"{len(taken)} pods left {node}; {len(load.answered) - before} answers meanwhile")


def test_a_new_release_takes_over_under_load(service: Service) -> None:
    """Its engines share no KV with those of before, and take their places one by one."""
    service.wait_until_whole()
    before = {pod["metadata"]["name"] for role in names.ENGINE_ROLES for pod in service.pods(role)}

    def taken_over() -> bool:
        pods = [pod for role in names.ENGINE_ROLES for pod in service.pods(role)]
        return len(pods) == 4 and not any(pod["metadata"]["name"] in before for pod in pods)

    with service.loaded() as load:
        answered = len(load.answered)
        service.kubectl.apply(build(service.name, vllm_version="0.33.0"))
        service.wait(taken_over, "the new release's engines", ROLLOUT_SECONDS)
        service.wait_until_whole()
        print(f"{len(load.answered) - answered} answers during the rollout")
