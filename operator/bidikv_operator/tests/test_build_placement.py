"""Where pods may run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bidikv_operator import names
from bidikv_operator.build.engine_pod import build_engine_template, build_worker_template
from bidikv_operator.build.router_pod import build_router_template
from bidikv_operator.resolved import Resolved, Scheduling
from bidikv_operator.tests.samples import EFA, TCP, resolve

ROLES: tuple[names.Role, ...] = ("prefill", "decode")


def with_scheduling(resolved: Resolved, **fields: Any) -> Resolved:
    scheduling = Scheduling(**fields)
    return replace(
        resolved,
        prefill=replace(resolved.prefill, scheduling=scheduling),
        decode=replace(resolved.decode, scheduling=scheduling),
        router=replace(resolved.router, scheduling=scheduling),
    )


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Kubernetes' LabelSelector, as far as it is used."""
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        expression["operator"] == "In" and labels.get(expression["key"]) in expression["values"]
        for expression in selector.get("matchExpressions", [])
    )


def labels_of_all_engines(resolved: Resolved) -> list[dict[str, str]]:
    built = [build(resolved, role) for role in ROLES for build in (build_engine_template, build_worker_template)]
    return [template["metadata"]["labels"] for template in built]


@pytest.mark.parametrize("build", [build_engine_template, build_worker_template])
@pytest.mark.parametrize("role", ROLES)
def test_efa_engines_share_a_zone(build: Any, role: names.Role) -> None:
    resolved = resolve(EFA)
    affinity = build(resolved, role)["spec"]["affinity"]
    (term,) = affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "topology.kubernetes.io/zone"
    # The term must match the pod itself, or the very first pod could never be scheduled.
    assert all(selects(term["labelSelector"], labels) for labels in labels_of_all_engines(resolved))
    assert not selects(term["labelSelector"], build_router_template(resolved)["metadata"]["labels"])


@pytest.mark.parametrize("resource", [EFA, TCP])
@pytest.mark.parametrize("role", ROLES)
def test_a_role_keeps_away_from_the_other_if_it_can(resource: dict[str, Any], role: names.Role) -> None:
    resolved = resolve(resource)
    (preferred,) = build_engine_template(resolved, role)["spec"]["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    term = preferred["podAffinityTerm"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    other = names.DECODE if role == names.PREFILL else names.PREFILL
    for labels in labels_of_all_engines(resolved):
        assert selects(term["labelSelector"], labels) is labels[names.LABEL_ROLE].startswith(other)


def test_tcp_engines_may_be_anywhere_unless_told() -> None:
    resolved = resolve(TCP)
    assert "podAffinity" not in build_engine_template(resolved, "decode")["spec"]["affinity"]
    told = build_engine_template(with_scheduling(resolved, topology_key="rack"), "decode")["spec"]["affinity"]
    (term,) = told["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "rack"


def test_a_narrower_domain_is_required_beside_the_zone() -> None:
    told = build_engine_template(with_scheduling(resolve(EFA), topology_key="rack"), "decode")["spec"]["affinity"]
    terms = told["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [term["topologyKey"] for term in terms] == ["topology.kubernetes.io/zone", "rack"]
    zone = with_scheduling(resolve(EFA), topology_key="topology.kubernetes.io/zone")
    terms = build_engine_template(zone, "decode")["spec"]["affinity"]["podAffinity"]
    assert len(terms["requiredDuringSchedulingIgnoredDuringExecution"]) == 1


def test_scheduling_adds_to_what_the_operator_writes() -> None:
    toleration = {"key": "spot", "operator": "Exists"}
    resolved = with_scheduling(
        resolve(EFA),
        node_selector={"pool": "a", "node.kubernetes.io/instance-type": "mine"},
        tolerations=(toleration,),
        priority_class_name="high",
        scheduler_name="other",
    )
    for role in ROLES:
        spec = build_engine_template(resolved, role)["spec"]
        assert spec["nodeSelector"] == {"node.kubernetes.io/instance-type": "mine", "pool": "a"}
        assert [item["key"] for item in spec["tolerations"]] == ["nvidia.com/gpu", "spot"]
    for spec in (build_engine_template(resolved, "decode")["spec"], build_router_template(resolved)["spec"]):
        assert (spec["priorityClassName"], spec["schedulerName"]) == ("high", "other")
    router = build_router_template(resolved)["spec"]
    assert router["tolerations"] == [toleration]
    assert router["nodeSelector"]["pool"] == "a"


def test_a_role_s_template_does_not_depend_on_the_other_role() -> None:
    """Templates are stored per role and used until the role's own part of the spec changes."""
    resolved = resolve(EFA)
    changed = replace(
        resolved, decode=replace(resolved.decode, nodes=4, data_parallel_size=1, tensor_parallel_size=16, gpus=4)
    )
    assert build_engine_template(resolved, "prefill") == build_engine_template(changed, "prefill")
