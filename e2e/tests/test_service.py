"""The whole product: one resource, real Kubernetes, real vLLM and NIXL, through the router's Service.

Uses the demo's resource in the demo's namespace, so that engines which ``make demo`` has left running are used again.
"""

from __future__ import annotations

import http.client
import io
import json
import math
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest

from bidikv_operator import names
from bidikv_runtime import contract
from e2e.argocd import read_health
from e2e.cluster.paths import find_external_kubeconfig, find_paths
from e2e.demo.__main__ import NAME, NAMESPACE, RESOURCE, prefill_cache_tokens, service_url, wait_until_ready
from e2e.demo.client import Message, stream_chat
from e2e.demo.engines import EnginePods
from e2e.demo.workload import NEW_TOKENS_PER_TURN, user_text
from e2e.install import NAMESPACE as OPERATOR_NAMESPACE
from e2e.install import RELEASE
from e2e.kubectl import Kubectl, eventually

pytestmark = pytest.mark.cluster

CHILDREN = "serviceaccounts,roles,rolebindings,services,deployments,poddisruptionbudgets"


@dataclass(frozen=True)
class Service:
    kubectl: Kubectl
    url: str


@pytest.fixture(scope="module")
def service(cluster: Kubectl, operator: None) -> Iterator[Service]:
    cluster.run("apply", "--server-side", "--force-conflicts", "-f", str(RESOURCE))
    kubectl = cluster.within(NAMESPACE)
    wait_until_ready(kubectl, "Ready")
    with service_url(kubectl) as url:
        yield Service(kubectl, url)


def ask(service: Service, messages: list[Message], *, salt: str, session: str, max_tokens: int = 16) -> str:
    extra = {"cache_salt": salt}
    answer = stream_chat(
        service.url, model=NAME, messages=messages, max_tokens=max_tokens, session=session, extra=extra
    )
    return answer.text


def test_the_history_is_read_back_from_decode(service: Service) -> None:
    """At least 90 % of a history that prefill forgot is read from decode, and the answer is the same as without."""
    salt, tokens = uuid.uuid4().hex, 3 * 1000
    messages: list[Message] = [{"role": "user", "content": user_text(salt, "first", length=tokens)}]
    first = ask(service, messages, salt=salt, session="reader")
    messages += [
        {"role": "assistant", "content": first},
        # More than decode may compute alone.
        {"role": "user", "content": user_text(salt, "second", length=1000)},
    ]
    for n in range(-(-prefill_cache_tokens(service.kubectl) // NEW_TOKENS_PER_TURN)):
        ask(service, [{"role": "user", "content": user_text(salt, n)}], salt=salt, session=f"other-{n}", max_tokens=1)
    prefill = EnginePods(service.kubectl, NAME, names.PREFILL)
    before = prefill.totals()
    second = ask(service, messages, salt=salt, session="reader")
    reused = prefill.totals().get(contract.METRIC_REUSED_TOKENS, 0) - before.get(contract.METRIC_REUSED_TOKENS, 0)
    assert reused >= 0.9 * tokens
    assert second == ask(service, messages, salt=uuid.uuid4().hex, session="another")


def test_every_router_hears_from_every_engine(service: Service) -> None:
    """Replicas share nothing but the engines' reports."""
    routers = EnginePods(service.kubectl, NAME, names.ROUTER).names
    assert len(routers) == 2
    for router in routers:
        path = f"/api/v1/namespaces/{service.kubectl.namespace}/pods/{router}:{contract.ROUTER_PORT}/proxy/metrics"

        def ages(path: str = path) -> list[float]:
            text = service.kubectl.run("get", "--raw", path)
            lines = [line for line in text.splitlines() if line.startswith("bidikv_router_engine_report_age_seconds{")]
            return [float(line.rpartition(" ")[2]) for line in lines]

        def all_report(ages: Callable[[], list[float]] = ages) -> bool:
            found = ages()
            return len(found) == 2 and max(found) < math.inf

        eventually(all_report, f"reports of both engines at {router}", timeout=60)


def test_parameters_of_the_kv_protocol_are_refused_from_clients(service: Service) -> None:
    """A client's ``kv_transfer_params`` would make an engine connect anywhere: the router removes them."""
    prefill = EnginePods(service.kubectl, NAME, names.PREFILL)
    before = prefill.totals().get(contract.METRIC_REUSED_TOKENS, 0)
    answer = stream_chat(
        service.url,
        model=NAME,
        messages=[{"role": "user", "content": user_text(uuid.uuid4(), length=300)}],
        max_tokens=4,
        session=uuid.uuid4().hex,
        extra={"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "192.0.2.1", "remote_port": 1}},
    )
    assert answer.text
    assert prefill.totals().get(contract.METRIC_REUSED_TOKENS, 0) == before


def test_models_and_errors_have_the_shape_of_openai(service: Service) -> None:
    where = urlsplit(service.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=30)
    connection.request("GET", "/v1/models")
    models = json.loads(connection.getresponse().read())
    assert [m["id"] for m in models["data"]] == [NAME]
    body = json.dumps({"model": "no-such-model", "messages": [{"role": "user", "content": "x"}]})
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 404
    assert "no-such-model" in json.loads(response.read())["error"]["message"]
    connection.close()


def test_a_client_that_leaves_stops_the_engine(service: Service) -> None:
    """Decode stops generating for a client that has closed its connection."""
    decode = EnginePods(service.kubectl, NAME, names.DECODE)
    asked = 6000
    before = decode.totals()["vllm:generation_tokens_total"]
    where = urlsplit(service.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    body = {"model": NAME, "stream": True, "max_tokens": asked, "ignore_eos": True, "temperature": 0}
    body["messages"] = [{"role": "user", "content": user_text(uuid.uuid4(), length=200)}]
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    response.close()
    connection.close()
    eventually(lambda: decode.totals()["vllm:num_requests_running"] == 0, "decode to stop", timeout=60)
    assert decode.totals()["vllm:generation_tokens_total"] - before < asked


def test_kubectl_get_shows_ready_and_why(service: Service) -> None:
    header, row = service.kubectl.run("get", names.SHORT_NAME, NAME).splitlines()
    columns = dict(zip(header.split(), row.split(), strict=False))
    assert columns["READY"] == "True"
    assert columns["REASON"] == service.kubectl.condition(names.SHORT_NAME, NAME, names.READY)["reason"]


def test_argo_cd_calls_it_healthy(service: Service) -> None:
    """Once nothing progresses: the tests before may have made a router restart."""

    def is_healthy() -> bool:
        resource = service.kubectl.get(names.SHORT_NAME, NAME)
        return resource is not None and read_health(resource)[0] == "Healthy"

    eventually(is_healthy, "Argo CD's health of the resource", timeout=60)


def test_the_resource_owns_all_it_needs(service: Service) -> None:
    children = service.kubectl.find(CHILDREN, f"{names.LABEL_OWNER}={NAME}")
    kinds = {child["kind"] for child in children}
    assert kinds == {"ServiceAccount", "Role", "RoleBinding", "Service", "Deployment", "PodDisruptionBudget"}
    for child in children:
        owner = child["metadata"]["ownerReferences"][0]
        assert (owner["kind"], owner["name"], owner["controller"]) == (names.KIND, NAME, True)


def test_an_idle_operator_only_renews_its_lease(service: Service) -> None:
    """Over a minute at rest, as the API server's audit log tells. Reconciles at rest: ``test_operator.py``."""
    if find_external_kubeconfig(find_paths()) is not None:
        pytest.skip("the audit log of another cluster cannot be read")
    account = f"system:serviceaccount:{OPERATOR_NAMESPACE}:{RELEASE}"
    watched = (OPERATOR_NAMESPACE, service.kubectl.namespace)

    def watch() -> set[str]:
        """The resources that it writes within a minute."""
        with find_paths().audit_log.open() as log:
            log.seek(0, io.SEEK_END)
            time.sleep(60)
            entries = [json.loads(line) for line in log if line.endswith("\n")]
        objects = [entry.get("objectRef", {}) for entry in entries if entry["user"]["username"] == account]
        return {found["resource"] for found in objects if found.get("namespace") in watched}

    written = watch()
    if names.PLURAL in written:
        # The status may have told of what engines report of the tests before: they are asked every 15 s.
        written = watch()
    assert written == {"leases"}


@pytest.mark.parametrize("kind", ["serviceaccount", "service", "poddisruptionbudget", "rolebinding"])
def test_a_child_deleted_by_hand_comes_back(service: Service, kind: str) -> None:
    for child in service.kubectl.find(kind, f"{names.LABEL_OWNER}={NAME}"):
        name, uid = child["metadata"]["name"], child["metadata"]["uid"]
        service.kubectl.run("delete", kind, name)

        def repaired(name: str = name, uid: str = uid) -> bool:
            found = service.kubectl.get(kind, name)
            return found is not None and found["metadata"]["uid"] != uid

        eventually(repaired, f"{kind} {name} to come back", timeout=60)


def test_the_router_deployment_deleted_by_hand_comes_back_and_serves(service: Service) -> None:
    name = f"{NAME}-router"
    service.kubectl.run("delete", "deployment", name)
    eventually(lambda: service.kubectl.get("deployment", name), f"deployment {name} to come back", timeout=60)
    wait_until_ready(service.kubectl, "Ready again")
    with service_url(service.kubectl) as url:
        again = Service(service.kubectl, url)
        assert ask(again, [{"role": "user", "content": "hello"}], salt=uuid.uuid4().hex, session="after")
