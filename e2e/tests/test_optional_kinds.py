"""Kinds that a cluster may lack: an operator notices when one comes, and outlives one that goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bidikv_operator import names
from bidikv_operator.kinds import POD_MONITOR
from e2e.kubectl import Kubectl, Manifest, eventually
from e2e.operator_process import OperatorProcess
from e2e.own_api_server import OwnApiServer, wait_until_established
from e2e.small_resource import build_small_resource

pytestmark = pytest.mark.cluster

WAIT = 120.0
DEFINITION = f"{POD_MONITOR.plural}.{POD_MONITOR.group}"


def build_definition() -> Manifest:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": POD_MONITOR.version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": DEFINITION},
        "spec": {
            "group": POD_MONITOR.group,
            "names": {"kind": POD_MONITOR.kind, "plural": POD_MONITOR.plural},
            "scope": "Namespaced",
            "versions": [version],
        },
    }


@pytest.fixture
def kubectl(own_api_server: OwnApiServer) -> Iterator[Kubectl]:
    """A namespace on an API server that does not serve PodMonitors."""
    cluster = own_api_server.kubectl
    cluster.run("delete", "crd", DEFINITION, "--ignore-not-found", timeout=WAIT)
    yield own_api_server.create_namespace("optional-kinds")
    cluster.apply(build_definition())


def test_a_kind_that_comes_and_goes(kubectl: Kubectl, tmp_path: Path) -> None:
    settings = {"BIDIKV_RESYNC_SECONDS": "5"}
    operator = OperatorProcess(kubectl, "one", "runtime.example/none:v1", tmp_path, settings)
    try:
        operator.start()
        kubectl.apply(build_small_resource(monitoring={"podMonitor": "Enabled"}))
        told = operator.await_condition("chat", names.PROGRESSING, "False", names.REASON_KIND_MISSING)
        assert DEFINITION in told["message"]
        assert kubectl.find("deployments"), "all else is there"

        kubectl.within("").apply(build_definition())
        wait_until_established(kubectl, DEFINITION)
        assert operator.wait(WAIT) == 0, "it ends cleanly, to be started again"
        assert "PodMonitor is served now" in operator.log()
        assert "released the lease" in operator.log()
        operator.start()
        eventually(lambda: kubectl.find("podmonitors") or None, "the PodMonitors", WAIT)
        name = kubectl.find("podmonitors")[0]["metadata"]["name"]
        kubectl.run("delete", "podmonitor", name)
        eventually(lambda: kubectl.get("podmonitor", name), "a deleted PodMonitor to come back: it is watched", WAIT)

        kubectl.run("delete", "crd", DEFINITION, timeout=WAIT)
        assert operator.wait(WAIT) in (0, 1), "cleanly, or because the watch failed first"
        operator.start()
        eventually(operator.leads, "an operator without the kind to lead", WAIT)
    finally:
        operator.kill()
