"""The rights that the chart gives the operator, on the API server: they suffice for its work and go no further.

Tried by impersonating the ServiceAccount that the chart creates, with the very children that the operator builds.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from bidikv_operator import names
from bidikv_operator.build import build_all
from bidikv_operator.kinds import CHILD_KINDS, INFERENCE
from bidikv_operator.resolved import Resolved
from bidikv_operator.validate import validate
from e2e.install import CHART, RELEASE
from e2e.kubectl import Kubectl, KubectlError
from e2e.tests.test_chart import helm

pytestmark = pytest.mark.cluster


@pytest.fixture
def installed(namespace: Kubectl) -> Iterator[Kubectl]:
    """The chart installed without pods for a namespace of its own: its account and rights, nothing that runs."""
    arguments = ("--kubeconfig", namespace.kubeconfig, "--namespace", namespace.namespace or "")
    values = (f"watchNamespaces={{{namespace.namespace}}}", "replicas=0", "crds.enabled=false", "rbac.aggregate=false")
    settings = [part for value in values for part in ("--set", value)]
    done = helm("install", RELEASE, str(CHART), *arguments, *settings)
    assert done.returncode == 0, done.stderr
    yield namespace
    helm("uninstall", RELEASE, *arguments, "--ignore-not-found")


def act_as(namespace: Kubectl) -> tuple[str, str]:
    """Arguments by which kubectl impersonates the operator; sent by an administrator."""
    return ("--as", f"system:serviceaccount:{namespace.namespace}:{RELEASE}")


def resolved(namespace: str | None) -> Resolved:
    resource = {
        "metadata": {"name": "rights", "namespace": namespace, "uid": "00000000-0000-0000-0000-000000000000"},
        "spec": {"model": {"source": {"path": "/m"}}, "image": "example.com/x:1", "fabric": {"type": "TCP"}},
    }
    found = validate(resource, runtime_image="example.com/y:1")
    assert isinstance(found, Resolved)
    return found


def test_the_rights_suffice_for_every_child(installed: Kubectl) -> None:
    """Among them the router's Role: the API server lets nobody grant what he does not hold himself."""
    children = [manifest for _, manifest in build_all(resolved(installed.namespace))]
    assert {child["kind"] for child in children} == {kind.kind for kind in CHILD_KINDS}
    apply = ("apply", "--server-side", "--field-manager", names.FIELD_MANAGER, "-f", "-", *act_as(installed))
    for child in children:
        dry_run = ["--dry-run=server"]
        if child["kind"] == "Role":  # a binding's dry run looks its Role up, so this one is written
            dry_run = []
            del child["metadata"]["ownerReferences"]  # there is no owner: the garbage collector would remove it
        assert "serverside-applied" in installed.run(*apply, *dry_run, stdin=json.dumps(child))


def test_a_role_that_grants_more_than_the_operator_has_is_refused(installed: Kubectl) -> None:
    role = next(manifest for kind, manifest in build_all(resolved(installed.namespace)) if kind.kind == "Role")
    role["rules"].append({"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]})
    with pytest.raises(KubectlError, match="attempting to grant RBAC permissions not currently held"):
        installed.run("apply", "--server-side", "-f", "-", *act_as(installed), stdin=json.dumps(role))


INFERENCES = f"{INFERENCE.plural}.{INFERENCE.group}"
ALLOWED = {
    f"list {INFERENCES}": True,
    f"patch {INFERENCES} --subresource=status": True,
    f"update {INFERENCES} --subresource=finalizers": True,
    "create leases.coordination.k8s.io": True,
    f"update leases.coordination.k8s.io/{RELEASE}": True,
    "create events.events.k8s.io": True,
    "list pods": True,
    f"patch {INFERENCES}": False,
    f"delete {INFERENCES}": False,
    "update leases.coordination.k8s.io/other": False,
    "delete pods": False,
    "create pods --subresource=exec": False,
    "get secrets": False,
    "list nodes": False,
    "list namespaces": False,
    "patch customresourcedefinitions.apiextensions.k8s.io": False,
    f"list {INFERENCES} --namespace=default": False,
    "list pods --all-namespaces": False,
}


def test_what_the_operator_may_do(installed: Kubectl, crd: None) -> None:
    def may(question: str) -> bool:
        argv = installed.argv("auth", "can-i", "--quiet", *question.split(), *act_as(installed))
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert "error" not in done.stderr.lower(), done.stderr
        return done.returncode == 0

    assert {question: may(question) for question in ALLOWED} == ALLOWED
