"""The operator's Helm chart: documented values, what it renders, and that the API server takes it.

Rendering needs helm, which ``make cluster-up`` builds. Whether the rights suffice is tried in ``test_chart_rights.py``.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import tomllib
from typing import Any

import pytest
import yaml

from bidikv_operator import names
from bidikv_operator.api.crd import FILE_NAME, build_crd
from bidikv_operator.build.networkpolicy import OPERATOR_LABELS
from bidikv_operator.kinds import CHILD_KINDS, CONTROLLER_REVISION, NETWORK_POLICY, OPTIONAL_KINDS
from bidikv_operator.settings import LOG_LEVELS, PREFIX, Settings
from e2e.cluster.paths import find_paths, find_tool
from e2e.install import CHART, NAMESPACE, RELEASE, ROOT
from e2e.kubectl import Kubectl, Manifest

VALUES: Manifest = yaml.safe_load((CHART / "values.yaml").read_text())
VALUES_SCHEMA: Manifest = json.loads((CHART / "values.schema.json").read_text())
KUBERNETES = "1.35.0"


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [find_tool("helm", find_paths()), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=180)


def render(*values: str, release: str = RELEASE) -> list[Manifest]:
    """All documents of ``helm template`` with ``--set`` values."""
    settings = [part for value in values for part in ("--set", value)]
    arguments = ("--namespace", NAMESPACE, "--kube-version", KUBERNETES, *settings)
    done = helm("template", release, str(CHART), *arguments)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def of_kind(documents: list[Manifest], kind: str) -> list[Manifest]:
    return [document for document in documents if document["kind"] == kind]


def only(documents: list[Manifest], kind: str) -> Manifest:
    (found,) = of_kind(documents, kind)
    return found


def container(documents: list[Manifest]) -> Manifest:
    (found,) = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def environment(documents: list[Manifest]) -> dict[str, Any]:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container(documents)["env"]}


# --- files ------------------------------------------------------------------------------------------------------------


def test_versions_are_the_distributions() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)


def test_every_value_is_documented_where_it_stands() -> None:
    """The comment above a value starts with its name; blocks that are Kubernetes' own are documented as a whole."""
    parents: list[str] = []
    comment = ""
    for line in (CHART / "values.yaml").read_text().splitlines():
        if match := re.match(r"^( *)# (.*)", line):
            comment = comment or match[2]
        elif match := re.match(r"^( *)(\w+):", line):
            parents = [*parents[: len(match[1]) // 2], match[2]]
            name = ".".join(parents)
            if parents[0] not in {"resources", "podSecurityContext", "securityContext"} or len(parents) == 1:
                assert re.match(rf"{re.escape(name)}\b", comment), f"{name}: comment {comment!r} does not name it"
            comment = ""
        else:
            comment = ""


def test_the_schema_knows_every_value_and_refuses_others() -> None:
    def check(values: Manifest, schema: Manifest, path: str) -> None:
        assert schema["additionalProperties"] is False, f"{path} lets unknown keys pass"
        assert set(schema["properties"]) - {"global", "claims"} == set(values), path
        for key, value in values.items():
            child = schema["properties"][key]
            if isinstance(value, dict) and "properties" in child and key != "resources":
                check(value, child, f"{path}.{key}")

    check(VALUES, VALUES_SCHEMA, "values")


def test_environment_and_log_levels_are_those_of_the_settings() -> None:
    text = (CHART / "templates" / "deployment.yaml").read_text()
    used = set(re.findall(rf"name: {PREFIX}(\w+)", text))
    assert used <= {field.name.upper() for field in dataclasses.fields(Settings)}
    required = {f.name.upper() for f in dataclasses.fields(Settings) if f.default is dataclasses.MISSING}
    assert required <= used
    assert VALUES_SCHEMA["properties"]["logLevel"]["enum"] == [level.lower() for level in LOG_LEVELS]


# --- rendering --------------------------------------------------------------------------------------------------------


@pytest.mark.cluster
def test_lint() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


@pytest.mark.cluster
def test_crd_is_the_generated_one() -> None:
    crd = only(render(), "CustomResourceDefinition")
    assert crd["spec"] == build_crd()["spec"]
    assert crd["spec"] == yaml.safe_load((ROOT / "crds" / FILE_NAME).read_text())["spec"]
    assert crd["metadata"]["name"] == names.CRD_NAME
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


@pytest.mark.cluster
def test_crd_switches() -> None:
    assert "annotations" not in only(render("crds.keep=false"), "CustomResourceDefinition")["metadata"]
    assert not of_kind(render("crds.enabled=false"), "CustomResourceDefinition")


@pytest.mark.cluster
def test_one_replica_has_no_budget_and_two_have_one() -> None:
    assert not of_kind(render("replicas=1"), "PodDisruptionBudget")
    two = render("replicas=2")
    deployment = only(two, "Deployment")["spec"]
    assert deployment["replicas"] == 2
    assert only(two, "PodDisruptionBudget")["spec"]["selector"] == deployment["selector"]
    assert "podAntiAffinity" in deployment["template"]["spec"]["affinity"]
    assert not of_kind(render("replicas=2", "podDisruptionBudget.enabled=false"), "PodDisruptionBudget")


@pytest.mark.cluster
def test_only_the_metrics_port_can_be_reached() -> None:
    documents = render()
    policy, deployment = only(documents, "NetworkPolicy")["spec"], only(documents, "Deployment")["spec"]
    assert policy["podSelector"] == deployment["selector"]
    # The policies of engines let the operator in by these.
    assert deployment["template"]["metadata"]["labels"].items() >= OPERATOR_LABELS.items()
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"ports": [{"protocol": "TCP", "port": "metrics"}]}]
    prometheus = "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.team=observability"
    documents = render(prometheus)
    (rule,) = only(documents, "NetworkPolicy")["spec"]["ingress"]
    labels = only(documents, "Pod")["metadata"]["labels"]
    assert rule["from"] == [
        {"namespaceSelector": {"matchLabels": {"team": "observability"}}},
        {"podSelector": {"matchLabels": labels}},
    ]
    assert not of_kind(render("networkPolicy.enabled=false"), "NetworkPolicy")


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("values", "image"),
    [
        ([], "docker.io/bidikv/{name}:0.1.0"),
        (["{key}.tag=main"], "docker.io/bidikv/{name}:main"),
        (["{key}.repository=r/x", f"{{key}}.digest=sha256:{'0' * 64}", "{key}.tag=t"], f"r/x@sha256:{'0' * 64}"),
        (["{key}.reference=r/y:1", "{key}.tag=t"], "r/y:1"),
    ],
    ids=["default", "tag", "digest", "reference"],
)
def test_image_references(values: list[str], image: str) -> None:
    operator = render(*(value.format(key="image") for value in values))
    assert container(operator)["image"] == image.format(name="operator")
    runtime = render(*(value.format(key="runtimeImage") for value in values))
    assert environment(runtime)["BIDIKV_RUNTIME_IMAGE"] == image.format(name="runtime")


@pytest.mark.cluster
def test_environment_and_probes() -> None:
    documents = render("metrics.port=9090", "logLevel=debug", "workers=7", "watchNamespaces={b,a}")
    assert environment(documents) == {
        "BIDIKV_RUNTIME_IMAGE": "docker.io/bidikv/runtime:0.1.0",
        "BIDIKV_NAMESPACES": "b,a",
        "BIDIKV_LEASE_NAMESPACE": {"fieldRef": {"fieldPath": "metadata.namespace"}},
        "BIDIKV_LEASE_NAME": "bidikv",
        "BIDIKV_IDENTITY": {"fieldRef": {"fieldPath": "metadata.name"}},
        "BIDIKV_HTTP_PORT": "9090",
        "BIDIKV_LOG_LEVEL": "debug",
        "BIDIKV_WORKERS": "7",
        "BIDIKV_TOKEN_PROPAGATION_SECONDS": "180",
    }
    operator = container(documents)
    assert operator["ports"] == [{"name": "metrics", "containerPort": 9090}]
    assert operator["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert operator["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
    assert only(documents, "Service")["spec"]["ports"] == [{"name": "metrics", "port": 9090, "targetPort": "metrics"}]


CHILD_VERBS = {"get", "list", "watch", "create", "patch", "delete"}
RIGHTS: dict[tuple[str, str], set[str]] = {
    (names.GROUP, names.PLURAL): {"list", "watch"},
    (names.GROUP, f"{names.PLURAL}/status"): {"patch"},
    (names.GROUP, f"{names.PLURAL}/finalizers"): {"update"},
    ("", "pods"): {"list", "watch", "patch", "delete"},
    ("", "secrets"): {"get", "create", "patch"},
    ("discovery.k8s.io", "endpointslices"): {"list", "watch"},
    ("events.k8s.io", "events"): {"create"},
    **{
        (kind.group, kind.plural): CHILD_VERBS
        for kind in {*CHILD_KINDS, *OPTIONAL_KINDS, CONTROLLER_REVISION, NETWORK_POLICY}
    },
}
"""Exactly what the operator may do, beside its Lease."""


def rights(role: Manifest) -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                found.setdefault((group, resource), set()).update(rule["verbs"])
    return found


def operator_roles(documents: list[Manifest], kind: str) -> list[Manifest]:
    """Roles of the operator itself, without its Lease's and those aggregated for users."""
    return [role for role in of_kind(documents, kind) if role["metadata"]["name"] == RELEASE]


@pytest.mark.cluster
def test_rights_in_the_cluster_are_exactly_these() -> None:
    documents = render()
    (role,) = operator_roles(documents, "ClusterRole")
    assert rights(role) == RIGHTS
    assert not operator_roles(documents, "Role")
    binding = only(documents, "ClusterRoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    account = only(documents, "ServiceAccount")["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}]


@pytest.mark.cluster
def test_rights_in_watched_namespaces_are_the_same_and_nothing_is_cluster_wide() -> None:
    documents = render("watchNamespaces={a,b}")
    assert not operator_roles(documents, "ClusterRole")
    assert not of_kind(documents, "ClusterRoleBinding")
    roles = operator_roles(documents, "Role")
    assert [role["metadata"]["namespace"] for role in roles] == ["a", "b"]
    assert all(rights(role) == RIGHTS for role in roles)
    bindings = [b for b in of_kind(documents, "RoleBinding") if b["metadata"]["name"] == RELEASE]
    assert [b["metadata"]["namespace"] for b in bindings] == ["a", "b"]
    assert all(b["subjects"][0]["namespace"] == NAMESPACE for b in bindings)


@pytest.mark.cluster
def test_lease_is_the_only_one_that_may_be_changed() -> None:
    role = only(render("leaderElection.leaseName=mine"), "Role")
    create, change = role["rules"]
    assert create["verbs"] == ["create"]
    assert change["resourceNames"] == ["mine"]
    assert set(change["verbs"]) == {"get", "update"}
    assert {r for rule in role["rules"] for r in rule["resources"]} == {"leases"}


@pytest.mark.cluster
def test_rbac_and_account_switches() -> None:
    documents = render("rbac.create=false", "serviceAccount.create=false", "serviceAccount.name=mine")
    assert not [d for d in documents if d["kind"] in {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}]
    assert not of_kind(documents, "ServiceAccount")
    assert only(documents, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    assert [r["metadata"]["name"] for r in of_kind(render("rbac.aggregate=false"), "ClusterRole")] == [RELEASE]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("bogus=1", "additional properties 'bogus' not allowed"),
        ("image.bogus=1", "additional properties 'bogus' not allowed"),
        ("crds.enabled=perhaps", "/crds/enabled"),
        ("replicas=two", "/replicas"),
        ("replicas=-1", "/replicas"),
        ("logLevel=loud", "/logLevel"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("image.digest=abc", "/image/digest"),
        ("watchNamespaces=a", "/watchNamespaces"),
        ("watchNamespaces={A}", "/watchNamespaces/0"),
        ("watchNamespaces={a,a}", "/watchNamespaces"),
        ("metrics.port=80", "/metrics/port"),
        ("peerToken.propagationSeconds=0", "/peerToken/propagationSeconds"),
        ("networkPolicy.metricsFrom[0].pods=x", "/networkPolicy/metricsFrom/0"),
    ],
)
def test_wrong_values_are_refused_with_their_place(value: str, words: str) -> None:
    done = helm("template", RELEASE, str(CHART), "--kube-version", KUBERNETES, "--set", value)
    assert done.returncode != 0
    assert words in done.stderr


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("values", "scopes"),
    [([], ["--all-namespaces"]), (["--set", "watchNamespaces={a,b}"], ["--namespace a", "--namespace b"])],
)
def test_notes_name_only_what_the_release_serves(namespace: Kubectl, values: list[str], scopes: list[str]) -> None:
    """Whoever follows them to uninstall must not delete resources of other releases."""
    name = namespace.namespace or ""
    where = ("--kubeconfig", namespace.kubeconfig, "--namespace", name)
    done = helm("install", name, str(CHART), "--dry-run=server", *where, "--set", "crds.enabled=false", *values)
    assert done.returncode == 0, done.stderr
    for verb in ("get bidikv", "delete bidikv --all"):
        assert re.findall(rf"kubectl {verb} (--.*)", done.stdout) == scopes


@pytest.mark.cluster
def test_other_release_names_do_not_collide() -> None:
    assert only(render(release="other"), "Deployment")["metadata"]["name"] == "other-bidikv"


# --- on the API server ------------------------------------------------------------------------------------------------


@pytest.mark.cluster
@pytest.mark.parametrize(
    "values", [(), ("replicas=2",), ("watchNamespaces={NAMESPACE}", "metrics.service.enabled=false")]
)
def test_the_api_server_takes_everything_that_is_rendered(namespace: Kubectl, values: tuple[str, ...]) -> None:
    """And finds nothing that the restricted Pod Security Standard forbids (it would warn)."""
    namespace.run("label", "namespace", namespace.namespace or "", "pod-security.kubernetes.io/warn=restricted")
    items = render(*(value.replace("NAMESPACE", namespace.namespace or "") for value in values))
    for item in items:
        if item["metadata"].get("namespace") == NAMESPACE:
            item["metadata"]["namespace"] = namespace.namespace
    items = [item for item in items if item["kind"] != "Pod"]  # the helm test, which needs the release's account
    argv = namespace.argv("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict")
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    done = subprocess.run([*argv, "-f", "-"], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.cluster
def test_helm_test_passes_on_the_installed_operator(cluster: Kubectl, operator: None) -> None:
    done = helm("test", RELEASE, "--kubeconfig", cluster.kubeconfig, "--namespace", NAMESPACE, "--timeout", "90s")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Phase:          Succeeded" in done.stdout
