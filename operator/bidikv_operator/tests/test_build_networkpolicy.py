"""Who reaches whom, by an evaluation of the policies as Kubernetes defines them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from bidikv_operator import names
from bidikv_operator.build.engine_pod import build_engine_template, build_worker_template
from bidikv_operator.build.meta import Manifest
from bidikv_operator.build.networkpolicy import build_network_policies
from bidikv_operator.build.router_pod import build_router_template
from bidikv_operator.resolved import Resolved
from bidikv_operator.tests.samples import EFA, make_resource, resolve
from bidikv_runtime import contract


@dataclass(frozen=True)
class Pod:
    namespace: str
    labels: dict[str, str]


NAMESPACES = {
    "team": {"kubernetes.io/metadata.name": "team"},
    "other": {"kubernetes.io/metadata.name": "other"},
    "bidikv-system": {"kubernetes.io/metadata.name": "bidikv-system"},
    "monitoring": {"kubernetes.io/metadata.name": "monitoring", "team": "observability"},
}


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        expression["operator"] == "In" and labels.get(expression["key"]) in expression["values"]
        for expression in selector.get("matchExpressions", [])
    )


def admits_peer(peer: dict[str, Any], policy: Manifest, source: Pod) -> bool:
    """A pod selector alone means the policy's own namespace; a namespace selector alone means all pods there."""
    if "namespaceSelector" in peer:
        if not selects(peer["namespaceSelector"], NAMESPACES[source.namespace]):
            return False
    elif source.namespace != policy["metadata"]["namespace"]:
        return False
    return selects(peer.get("podSelector", {}), source.labels)


def reaches(policies: tuple[Manifest, ...], source: Pod, target: Pod, port: int) -> bool:
    """Policies that select the target add up; without any, everybody reaches it."""
    of_target = [
        policy
        for policy in policies
        if policy["metadata"]["namespace"] == target.namespace and selects(policy["spec"]["podSelector"], target.labels)
    ]
    return not of_target or any(
        ("from" not in rule or any(admits_peer(peer, policy, source) for peer in rule["from"]))
        and ("ports" not in rule or any(item["port"] == port and item["protocol"] == "TCP" for item in rule["ports"]))
        for policy in of_target
        for rule in policy["spec"]["ingress"]
    )


def make(resource: dict[str, Any] = EFA, **security: Any) -> Resolved:
    resolved = resolve(resource)
    settings = {"metrics_namespace_labels": {"team": "observability"}, **security}
    return replace(resolved, security=replace(resolved.security, **settings), operator_namespace="bidikv-system")


RESOLVED = make()
POLICIES = build_network_policies(RESOLVED)
STRANGE = resolve(make_resource(name="stranger"))


def pod_of(resolved: Resolved, build: Any, *arguments: Any) -> Pod:
    return Pod(resolved.namespace, build(resolved, *arguments)["metadata"]["labels"])


PREFILL, DECODE = (pod_of(RESOLVED, build_engine_template, role) for role in names.ENGINE_ROLES)
WORKER = pod_of(RESOLVED, build_worker_template, "decode")
ROUTER = pod_of(RESOLVED, build_router_template)
OTHER_ENGINE = pod_of(STRANGE, build_engine_template, "decode")
OTHER_ROUTER = pod_of(STRANGE, build_router_template)
OPERATOR = Pod("bidikv-system", {"app.kubernetes.io/component": "operator", "app.kubernetes.io/name": "bidikv"})
PROMETHEUS = Pod("monitoring", {"app": "prometheus"})
CLIENT = Pod("other", {"app": "client"})
NEIGHBOUR = Pod("team", {"app": "client"})
HTTP, SIDE, LOOKUP, STATE, RANDOM = (
    contract.ENGINE_PORT,
    contract.SIDE_CHANNEL_PORT,
    contract.LOOKUP_PORT,
    contract.STATE_PORT,
    41234,
)


@pytest.mark.parametrize(
    ("who", "source", "target", "ports"),
    [
        ("prefill reads decode", PREFILL, DECODE, (SIDE, LOOKUP, STATE, RANDOM)),
        ("decode reads prefill", DECODE, PREFILL, (SIDE, LOOKUP, STATE, RANDOM)),
        ("decode reads decode", DECODE, DECODE, (SIDE, LOOKUP, RANDOM)),
        ("a worker joins its replica", WORKER, DECODE, (29501, RANDOM)),
        ("a replica reaches its worker", DECODE, WORKER, (RANDOM,)),
        ("prefill reads the worker's KV", PREFILL, WORKER, (RANDOM,)),
        ("a router sends turns and reads reports", ROUTER, DECODE, (HTTP, STATE)),
        ("the operator reads reports", OPERATOR, PREFILL, (STATE,)),
        ("metrics are scraped", PROMETHEUS, PREFILL, (HTTP,)),
        ("anybody calls the API", CLIENT, ROUTER, (contract.ROUTER_PORT,)),
        ("a neighbour calls the API", NEIGHBOUR, ROUTER, (contract.ROUTER_PORT,)),
    ],
)
def test_who_is_let_in(who: str, source: Pod, target: Pod, ports: tuple[int, ...]) -> None:
    for port in ports:
        assert reaches(POLICIES, source, target, port), f"{who}: port {port}"


@pytest.mark.parametrize(
    ("who", "source", "target", "ports"),
    [
        ("a client may not go past the router", CLIENT, DECODE, (HTTP, SIDE, LOOKUP, STATE, RANDOM)),
        ("nor a neighbour in the namespace", NEIGHBOUR, PREFILL, (HTTP, SIDE, LOOKUP, STATE, RANDOM)),
        ("nor engines of another resource", OTHER_ENGINE, DECODE, (HTTP, SIDE, LOOKUP, STATE, RANDOM)),
        ("nor another resource's routers", OTHER_ROUTER, DECODE, (HTTP, STATE)),
        ("a router reads no KV", ROUTER, DECODE, (SIDE, LOOKUP, RANDOM)),
        ("the operator sends no requests", OPERATOR, DECODE, (HTTP, SIDE, LOOKUP)),
        ("an operator elsewhere is nobody", replace(OPERATOR, namespace="other"), DECODE, (STATE,)),
        ("another pod beside the operator is nobody", Pod("bidikv-system", {}), DECODE, (STATE,)),
        ("who scrapes does nothing else", PROMETHEUS, DECODE, (SIDE, LOOKUP, STATE, RANDOM)),
        ("a worker is not reached from outside", CLIENT, WORKER, (HTTP, RANDOM)),
        ("a router serves one port", CLIENT, ROUTER, (9999,)),
    ],
)
def test_who_is_kept_out(who: str, source: Pod, target: Pod, ports: tuple[int, ...]) -> None:
    for port in ports:
        assert not reaches(POLICIES, source, target, port), f"{who}: port {port}"


def test_without_namespaces_for_metrics_nobody_else_reads_them() -> None:
    policies = build_network_policies(make(metrics_namespace_labels={}))
    assert not reaches(policies, PROMETHEUS, DECODE, HTTP)


def test_outside_of_a_cluster_the_operator_has_no_rule() -> None:
    policies = build_network_policies(replace(RESOLVED, operator_namespace=""))
    assert not reaches(policies, OPERATOR, DECODE, STATE)
    assert reaches(policies, ROUTER, DECODE, STATE)


def test_the_reports_of_every_rank_are_reached() -> None:
    resolved = replace(RESOLVED, decode=replace(RESOLVED.decode, data_parallel_size=3))
    policies = build_network_policies(resolved)
    for source in (ROUTER, OPERATOR):
        assert [reaches(policies, source, DECODE, STATE + rank) for rank in range(4)] == [True, True, True, False]


def test_turned_off_there_are_none() -> None:
    assert build_network_policies(make(network_policy=False)) == ()


def test_other_pods_of_the_namespace_are_left_alone() -> None:
    assert not [policy for policy in POLICIES if selects(policy["spec"]["podSelector"], NEIGHBOUR.labels)]
    assert not [policy for policy in POLICIES if selects(policy["spec"]["podSelector"], OTHER_ENGINE.labels)]
