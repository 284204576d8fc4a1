"""The rights that the chart gives the operator: it uses all of them, they suffice, and everything else is denied.

On an API server of the tests' own, with operators that run under the chart's ServiceAccount: in the whole cluster, and
in the namespaces of ``watchNamespaces``.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from bidikv_operator import names
from bidikv_operator.kinds import CHILD_KINDS, LEADER_WORKER_SET, OPTIONAL_KINDS, POD_MONITOR, Kind
from e2e.bench.operator.control_plane import HOST, PORT
from e2e.install import CHART, RELEASE
from e2e.kubectl import Kubectl, KubectlError, Manifest, eventually
from e2e.operator_process import OperatorProcess
from e2e.own_api_server import OwnApiServer, Request, wait_until_established
from e2e.tests.test_chart import RIGHTS, helm

pytestmark = pytest.mark.cluster

WAIT: Final = 90.0
Right = tuple[str, str, str]
"""API group, resource with its subresource, verb."""
VERBS: Final = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
SPECIAL_VERBS: Final = {
    "roles": ("bind", "escalate"),
    "clusterroles": ("bind", "escalate"),
    "users": ("impersonate",),
    "groups": ("impersonate",),
    "serviceaccounts": ("impersonate",),
    "certificatesigningrequests": ("approve", "sign"),
}
GRANTED: Final[set[Right]] = {(group, plural, verb) for (group, plural), verbs in RIGHTS.items() for verb in verbs}
NOT_REQUESTED: Final[set[Right]] = {
    # The API server lets nobody grant what he does not hold: the router's Role.
    ("discovery.k8s.io", "endpointslices", "list"),
    ("discovery.k8s.io", "endpointslices", "watch"),
    # Looked up by the admission plugin OwnerReferencesPermissionEnforcement.
    (names.GROUP, f"{names.PLURAL}/finalizers", "update"),
    # Of an engine that none of its peers reaches: test_healing.py.
    ("", "pods", "delete"),
}
"""Rights that are needed without a request of their own, or for what this API server cannot have."""


@dataclass(frozen=True)
class Installed:
    """The chart without pods: its account and rights, and an operator of this checkout that runs with them."""

    server: OwnApiServer
    kubectl: Kubectl
    """The administrator's, in the namespace that is served."""
    system: str
    """Namespace of the release."""
    elsewhere: Kubectl
    """The same in a namespace that the release does not name."""
    watched: str
    """Value of BIDIKV_NAMESPACES."""
    folder: Path = field(compare=False)

    @property
    def user(self) -> str:
        return f"system:serviceaccount:{self.system}:{RELEASE}"

    @contextmanager
    def run(self) -> Iterator[OperatorProcess]:
        settings = {
            "BIDIKV_NAMESPACES": self.watched,
            "BIDIKV_LEASE_NAMESPACE": self.system,
            "BIDIKV_LEASE_NAME": RELEASE,
        }
        account = self.server.log_in(RELEASE, self.system)
        operator = OperatorProcess(account, "one", "runtime.example/none:v1", self.folder, settings)
        try:
            yield operator.start()
            assert operator.terminate() == 0, operator.log()
        finally:
            operator.kill()

    def requests(self) -> list[Request]:
        return [request for request in self.server.requests() if request.user == self.user]

    def used(self) -> set[Right]:
        """What the operator has asked for and got, leases aside."""
        used = set()
        for request in self.requests():
            if request.status < 400 and request.resource != "leases":
                used.add((request.group, request.resource, request.verb))
                if request.verb == "patch" and request.status == 201:  # an apply of what did not exist wants both
                    used.add((request.group, request.resource, "create"))
        return used


@pytest.fixture(scope="module")
def served_kinds(own_api_server: OwnApiServer) -> None:
    """The optional kinds are served here, by definitions that take anything."""
    own_api_server.kubectl.apply(*(build_definition(kind) for kind in (LEADER_WORKER_SET, POD_MONITOR)))
    for kind in (LEADER_WORKER_SET, POD_MONITOR):
        wait_until_established(own_api_server.kubectl, f"{kind.plural}.{kind.group}")


@pytest.fixture(scope="module", params=["the whole cluster", "one namespace"])
def installed(
    request: pytest.FixtureRequest,
    own_api_server: OwnApiServer,
    served_kinds: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Installed]:
    is_namespaced = request.param == "one namespace"
    system, served = ("system-one", "served-one") if is_namespaced else ("system-all", "served-all")
    own_api_server.create_namespace(system)
    kubectl = own_api_server.create_namespace(served)
    watched = served if is_namespaced else ""
    values = ["replicas=0", "crds.enabled=false", "rbac.aggregate=false"]
    values += [f"watchNamespaces={{{served}}}"] if is_namespaced else []
    arguments = ("--kubeconfig", kubectl.kubeconfig, "--namespace", system)
    done = helm("install", RELEASE, str(CHART), *arguments, *(part for value in values for part in ("--set", value)))
    assert done.returncode == 0, done.stderr
    elsewhere = own_api_server.create_namespace(f"not-{served}")
    yield Installed(own_api_server, kubectl, system, elsewhere, watched, tmp_path_factory.mktemp("operator"))
    helm("uninstall", RELEASE, *arguments)


def build_definition(kind: Kind) -> Manifest:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{kind.group}",
            # The API server protects its own domains from being taken by accident.
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": kind.group,
            "scope": "Namespaced",
            "names": {"kind": kind.kind, "plural": kind.plural, "singular": kind.kind.lower()},
            "versions": [
                {"name": kind.version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
            ],
        },
    }


# --- what is granted --------------------------------------------------------------------------------------------------


class Reviewer:
    """Asks the API server who may do what, over one connection."""

    def __init__(self, server: OwnApiServer) -> None:
        plane = server.control_plane
        trust = ssl.create_default_context(cafile=str(plane.authority))
        self._connection = http.client.HTTPSConnection(HOST, PORT, context=trust, timeout=30)
        self._headers = {"Authorization": f"Bearer {plane.token}", "Content-Type": "application/json"}

    def close(self) -> None:
        self._connection.close()

    def ask(self, method: str, path: str, body: Manifest | None = None) -> Manifest:
        self._connection.request(method, path, json.dumps(body) if body else None, self._headers)
        response = self._connection.getresponse()
        answer = response.read()
        assert response.status < 300, answer
        found: Manifest = json.loads(answer)
        return found

    def resources(self) -> set[tuple[str, str]]:
        """Group and name of everything that is served, subresources too."""
        paths = ["/api/v1"]
        for group in self.ask("GET", "/apis")["groups"]:
            paths += [f"/apis/{version['groupVersion']}" for version in group["versions"]]
        # These are not served, only asked about.
        found = {("", "users"), ("", "groups"), (names.GROUP, f"{names.PLURAL}/finalizers")}
        for path in paths:
            group = path.split("/")[2] if path.startswith("/apis/") else ""
            found |= {(group, resource["name"]) for resource in self.ask("GET", path)["resources"]}
        return found

    def rights(self, user: str, namespace: str) -> set[Right]:
        """All that a service account may do in a namespace, on objects of any name; ``""``: in all namespaces."""
        account_namespace = user.split(":")[2]
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{account_namespace}", "system:authenticated"]
        allowed = set()
        for group, resource in self.resources():
            name, _, subresource = resource.partition("/")
            for verb in (*VERBS, *SPECIAL_VERBS.get(resource, ())):
                about = {"namespace": namespace, "group": group, "resource": name, "verb": verb}
                review = {
                    "apiVersion": "authorization.k8s.io/v1",
                    "kind": "SubjectAccessReview",
                    "spec": {
                        "user": user,
                        "groups": groups,
                        "resourceAttributes": {**about, "subresource": subresource},
                    },
                }
                answer = self.ask("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
                if answer["status"]["allowed"]:
                    allowed.add((group, resource, verb))
        return allowed


@pytest.fixture(scope="module")
def reviewer(own_api_server: OwnApiServer) -> Iterator[Reviewer]:
    found = Reviewer(own_api_server)
    yield found
    found.close()


@pytest.fixture(scope="module")
def everybodys(reviewer: Reviewer, installed: Installed) -> set[Right]:
    """What any service account may do: ask about itself."""
    elsewhere = installed.elsewhere.namespace or ""
    found = reviewer.rights(f"system:serviceaccount:{elsewhere}:nobody", elsewhere)
    assert {verb for _, _, verb in found} == {"create"}
    assert all(resource.startswith("self") for _, resource, _ in found), found
    return found


def test_the_operator_may_do_exactly_this(installed: Installed, reviewer: Reviewer, everybodys: set[Right]) -> None:
    served = installed.kubectl.namespace or ""
    assert reviewer.rights(installed.user, served) - everybodys == GRANTED
    outside = set() if installed.watched else GRANTED
    for namespace in (installed.elsewhere.namespace or "", ""):
        assert reviewer.rights(installed.user, namespace) - everybodys == outside, namespace
    lease = {("coordination.k8s.io", "leases", "create")}
    assert reviewer.rights(installed.user, installed.system) - everybodys == outside | lease


def test_of_leases_it_may_change_only_its_own(installed: Installed) -> None:
    def may(verb: str, name: str, namespace: str) -> bool:
        arguments = ("--namespace", namespace, "auth", "can-i", verb, f"leases.coordination.k8s.io/{name}")
        try:
            return installed.server.kubectl.run(*arguments, "--as", installed.user).startswith("yes")
        except KubectlError:
            return False

    for verb in ("get", "update"):
        assert may(verb, RELEASE, installed.system)
        assert not may(verb, "other", installed.system)
        assert not may(verb, RELEASE, installed.elsewhere.namespace or "")
    for verb in ("patch", "delete"):
        assert not may(verb, RELEASE, installed.system)


def test_a_role_that_grants_more_than_the_operator_has_is_refused(installed: Installed) -> None:
    role: Manifest = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "more"},
        "rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["list"]}],
    }
    with pytest.raises(KubectlError, match="attempting to grant RBAC permissions not currently held"):
        installed.kubectl.run("apply", "--server-side", "-f", "-", "--as", installed.user, stdin=json.dumps(role))


# --- what is used -----------------------------------------------------------------------------------------------------

SPEC: Final[Manifest] = {
    "model": {"source": {"huggingFace": {"repository": "example/model"}}},
    "image": "engine.example/none:v1",
    "fabric": {"type": "EFA", "instanceType": "p5en.48xlarge", "devices": "ResourceClaim"},
    "prefill": {"replicas": 2, "tensorParallelSize": 16, "nodesPerReplica": 2},
    "decode": {"replicas": 2, "tensorParallelSize": 8},
    "router": {"replicas": 2},
    "monitoring": {"podMonitor": "Enabled"},
}
SPECS: Final[dict[str, Manifest]] = {
    "NetworkPolicy": {"podSelector": {}},
    "Service": {"clusterIP": "None", "selector": {"a": "b"}},
    "PodDisruptionBudget": {"maxUnavailable": 1, "selector": {"matchLabels": {"a": "b"}}},
    "Deployment": {
        "replicas": 0,
        "selector": {"matchLabels": {"a": "b"}},
        "template": {
            "metadata": {"labels": {"a": "b"}},
            "spec": {"containers": [{"name": "none", "image": "none.example/none:v1"}]},
        },
    },
    "ResourceClaimTemplate": {
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.example.com"}}]}}
    },
}
KINDS: Final = tuple(dict.fromkeys((*CHILD_KINDS, *OPTIONAL_KINDS)))
CHILDREN: Final = ",".join(f"{kind.plural}.{kind.group}" if kind.group else kind.plural for kind in KINDS)
OWNED: Final = f"{names.LABEL_OWNER}=chat"


def make_resource(**changes: Any) -> Manifest:
    spec = {**SPEC, **changes}
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": "chat"}, "spec": spec}


def make_decode_pods(kubectl: Kubectl) -> list[Manifest]:
    """Pods that the Deployment's controller would have made, with a cost from before."""
    [deployment] = kubectl.find("deployments", f"{OWNED},{names.LABEL_ROLE}={names.DECODE}")
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"decode-{number}",
                "labels": deployment["spec"]["template"]["metadata"]["labels"],
                "annotations": {names.ANNOTATION_DELETION_COST: "7"},
            },
            "spec": {
                "serviceAccountName": "chat-engine",
                "containers": [{"name": names.ENGINE_CONTAINER, "image": "none.example/none:v1"}],
            },
        }
        for number in range(2)
    ]


def read_costs(kubectl: Kubectl) -> set[str]:
    return {pod["metadata"]["annotations"][names.ANNOTATION_DELETION_COST] for pod in kubectl.find("pods", OWNED)}


def make_leftover(kind: Kind) -> Manifest:
    """What an earlier release of the operator might have made, and this one does not want."""
    labels = {names.LABEL_OWNER: "chat", names.LABEL_MANAGED_BY: names.MANAGED_BY}
    found: Manifest = {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {"name": "chat-leftover", "labels": labels},
    }
    if kind.kind == "RoleBinding":
        found["roleRef"] = {"apiGroup": kind.group, "kind": "Role", "name": "none"}
    if kind.kind == "ControllerRevision":
        found |= {"revision": 1, "data": {"a": "b"}}
    if kind.kind in SPECS:
        found["spec"] = SPECS[kind.kind]
    return found


def list_children(kubectl: Kubectl) -> list[tuple[str, str]]:
    """Kinds and names of what carries the label."""
    return sorted((child["kind"], child["metadata"]["name"]) for child in kubectl.find(CHILDREN, OWNED))


@pytest.fixture(scope="module")
def worked(installed: Installed) -> Installed:
    """The operator has done everything that it ever does to a resource."""
    kubectl, elsewhere = installed.kubectl, installed.elsewhere
    kubectl.apply(make_resource(), *(make_leftover(kind) for kind in KINDS))
    elsewhere.apply(make_resource())

    def is_built() -> bool:
        children = list_children(kubectl)
        are_clean = all(name != "chat-leftover" for _, name in children)
        return are_clean and {kind for kind, _ in children} == {kind.kind for kind in KINDS}

    with installed.run():
        eventually(is_built, "a child of every kind, and no leftover", WAIT)
        # Who loses the label is asked for by name: it could be anybody's.
        children = list_children(kubectl)
        for kind, name in dict(children).items():
            kubectl.run("label", kind, name, f"{names.LABEL_OWNER}-")
        eventually(lambda: list_children(kubectl) == children, "the labels to come back", WAIT)
        # Before a scale-down every pod is told what it is worth.
        kubectl.apply(*make_decode_pods(kubectl))
        kubectl.apply(make_resource(decode={**SPEC["decode"], "replicas": 1}))
        eventually(lambda: read_costs(kubectl) == {"0"}, "costs of pods", WAIT)
        kubectl.apply(make_resource(paused=True))
        eventually(lambda: kubectl.find("events"), "an Event of the pause", WAIT)
        if not installed.watched:
            eventually(lambda: elsewhere.find(CHILDREN, OWNED), "children elsewhere", WAIT)
    with installed.run() as again:  # reads what the first one has written
        eventually(lambda: again.metric("bidikv_operator_reconciles_total") > 1, "passes of the next operator", WAIT)
    return installed


def test_everything_granted_is_used_and_nothing_else_is_asked_for(worked: Installed) -> None:
    assert worked.used() == GRANTED - NOT_REQUESTED
    refused = [request for request in worked.requests() if request.status == 403]
    assert refused == []


def test_only_served_namespaces_are_asked_for(worked: Installed) -> None:
    asked = {request.namespace for request in worked.requests() if request.resource != "leases"}
    if worked.watched:
        assert asked == {worked.watched}
        assert not worked.elsewhere.find(CHILDREN, OWNED)
        resource = worked.elsewhere.get(names.PLURAL, "chat")
        assert resource is not None
        assert "status" not in resource
    else:
        assert {"", worked.kubectl.namespace, worked.elsewhere.namespace} <= asked
    assert {request.namespace for request in worked.requests() if request.resource == "leases"} == {worked.system}


def test_the_peer_token_is_in_its_secret_and_nowhere_else(worked: Installed) -> None:
    secret = worked.kubectl.get("secret", "chat-peer-token")
    assert secret is not None
    content: dict[str, Any] = secret["data"]
    everything = worked.kubectl.run("get", f"{CHILDREN},{names.PLURAL},events", "--output", "json")
    for value in content.values():
        assert value not in everything
    log = "".join(path.read_text() for path in worked.folder.glob("*.log"))
    assert not any(value in log for value in content.values())


def test_routers_may_read_endpoint_slices_and_engines_nothing(
    worked: Installed, reviewer: Reviewer, everybodys: set[Right]
) -> None:
    served, elsewhere = worked.kubectl.namespace or "", worked.elsewhere.namespace or ""
    slices = {("discovery.k8s.io", "endpointslices", verb) for verb in ("list", "watch")}
    router, engine = (f"system:serviceaccount:{served}:chat-{name}" for name in ("router", "engine"))
    assert reviewer.rights(router, served) - everybodys == slices
    assert reviewer.rights(router, elsewhere) == everybodys
    for namespace in (served, elsewhere):
        assert reviewer.rights(engine, namespace) == everybodys
    account = worked.kubectl.get("serviceaccount", "chat-engine")
    assert account is not None
    assert account["automountServiceAccountToken"] is False, "engines have no token either"
