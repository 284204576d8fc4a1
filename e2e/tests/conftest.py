"""Fixtures of the end-to-end tests: kubectl of the cluster in use, a namespace per test, the operator from its chart.

Tests marked ``cluster`` run on the cluster that KUBECONFIG names explicitly, else on the local one
(``make cluster-up``).
Nothing sleeps for a fixed time: waiting is ``e2e.kubectl.eventually``, with a deadline.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

import pytest

from bidikv_operator import names
from e2e.engine.fixtures import deployment, engines  # noqa: F401  (fixtures of the tests marked engine)
from e2e.install import ROOT, install_operator
from e2e.kubectl import Kubectl
from e2e.own_api_server import OwnApiServer, run_own_api_server, wait_until_established

CRD = ROOT / "crds" / "serving.bidikv.io_bidikvinferences.yaml"


@pytest.fixture(scope="session")
def cluster() -> Kubectl:
    """kubectl of the cluster in use, not bound to a namespace."""
    return Kubectl.connect()


@pytest.fixture(scope="session")
def crd(cluster: Kubectl) -> None:
    """The CRD of this checkout, served; for tests that need no operator."""
    cluster.run("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    wait_until_established(cluster, names.CRD_NAME)


@pytest.fixture(scope="session")
def operator(cluster: Kubectl) -> None:
    """The operator of this checkout, installed with its chart, two replicas."""
    install_operator(cluster, "replicas=2")


@pytest.fixture(scope="module")
def own_api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnApiServer]:
    """An API server for one file's tests; while they run, the cluster in use cannot be reached."""
    with run_own_api_server(tmp_path_factory.mktemp("own-api-server")) as server:
        yield server


@pytest.fixture
def namespace(cluster: Kubectl) -> Iterator[Kubectl]:
    """A fresh namespace with kubectl bound to it; removed afterwards."""
    name = f"e2e-{uuid.uuid4().hex[:8]}"
    cluster.run("create", "namespace", name)
    bound = cluster.within(name)
    yield bound
    cluster.run("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="module")
def no_other_operator(cluster: Kubectl) -> Iterator[None]:
    """An installed operator that serves all namespaces would do this test's work: it pauses meanwhile."""
    paused = []
    labels = "app.kubernetes.io/name=bidikv,app.kubernetes.io/component=operator"
    listed = json.loads(cluster.run("get", "deployments", "--all-namespaces", "-o", "json", "--selector", labels))
    for item in listed["items"]:
        bound = cluster.within(item["metadata"]["namespace"])
        name, replicas = item["metadata"]["name"], item["spec"]["replicas"]
        bound.run("scale", "deployment", name, "--replicas=0")
        bound.run("wait", "pod", "--selector", labels, "--for=delete", "--timeout=60s", timeout=90)
        paused.append((bound, name, replicas))
    yield
    for bound, name, replicas in paused:
        bound.run("scale", "deployment", name, f"--replicas={replicas}")
