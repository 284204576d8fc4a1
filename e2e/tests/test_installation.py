"""The chart installed for one namespace, which enforces the restricted Pod Security Standard: everything runs in it.

Operator, routers and (simulated) engines on TCP are pods here, made from the images.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bidikv_operator import names
from e2e.install import CHART, image_references
from e2e.kubectl import Kubectl, eventually
from e2e.simengine.resource import build_resource
from e2e.tests.test_chart import helm

pytestmark = pytest.mark.cluster

WAIT = 180.0
RELEASE = "one"
NAME = "chat"


@pytest.fixture
def restricted(namespace: Kubectl) -> Kubectl:
    enforce = "pod-security.kubernetes.io/enforce=restricted"
    namespace.run("label", "namespace", namespace.namespace or "", enforce)
    return namespace


@pytest.fixture
def elsewhere(cluster: Kubectl, namespace: Kubectl) -> Iterator[Kubectl]:
    """A namespace that the release does not name."""
    name = f"{namespace.namespace}-not"
    cluster.run("create", "namespace", name)
    yield cluster.within(name)
    cluster.run("delete", "namespace", name, "--wait=false")


def test_it_serves_its_namespace_and_no_other(
    restricted: Kubectl,
    elsewhere: Kubectl,
    crd: None,
    no_other_operator: None,
) -> None:
    images = image_references()
    values = [
        f"image.reference={images['operator']}",
        f"runtimeImage.reference={images['runtime']}",
        f"watchNamespaces={{{restricted.namespace}}}",
        "crds.enabled=false",
        "rbac.aggregate=false",
    ]
    arguments = ("--kubeconfig", restricted.kubeconfig, "--namespace", restricted.namespace or "")
    settings = [part for value in values for part in ("--set", value)]
    done = helm("install", RELEASE, str(CHART), *arguments, *settings, "--wait", "--timeout", "120s")
    assert done.returncode == 0, done.stderr
    try:
        operators = restricted.find("pods", "app.kubernetes.io/component=operator")
        assert len(operators) == 2
        for bound in (elsewhere, restricted):
            bound.apply(build_resource(NAME, prefill=1, decode=1))

        def is_ready() -> bool:
            return restricted.condition(names.SHORT_NAME, NAME, names.READY).get("status") == "True"

        eventually(is_ready, "the service to be ready", WAIT)
        roles = {pod["metadata"]["labels"][names.LABEL_ROLE] for pod in restricted.find("pods", names.LABEL_OWNER)}
        assert roles == set(names.ROLES)
        resource = elsewhere.get(names.SHORT_NAME, NAME)
        assert resource is not None
        assert "status" not in resource
        assert not elsewhere.find("deployments,secrets,serviceaccounts", names.LABEL_OWNER)
        done = helm("test", RELEASE, *arguments, "--timeout", "90s")
        assert done.returncode == 0, done.stdout + done.stderr
        restricted.run("delete", names.SHORT_NAME, NAME)
    finally:
        assert helm("uninstall", RELEASE, *arguments).returncode == 0
