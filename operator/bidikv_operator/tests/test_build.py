"""What must hold for the children of any valid resource."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings

from bidikv_operator import names
from bidikv_operator.build import build_all
from bidikv_operator.build.meta import Manifest
from bidikv_operator.kinds import DEPLOYMENT, SERVICE
from bidikv_operator.tests.samples import EFA, TCP, make_resource, resolve, valid_resources
from bidikv_runtime import contract

Object = dict[str, Any]


def deployment(resource: Object, role: str) -> Manifest:
    found = {
        manifest["metadata"]["labels"][names.LABEL_ROLE]: manifest
        for manifest in build_all(resolve(resource)).deployments
    }
    return found[role]


def pod_spec(resource: Object, role: str) -> Object:
    spec: Object = deployment(resource, role)["spec"]["template"]["spec"]
    return spec


def engine(resource: Object, role: str = "prefill") -> Object:
    container: Object = pod_spec(resource, role)["containers"][0]
    return container


def env_of(container: Object) -> Object:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def find_none(value: Any) -> bool:
    if isinstance(value, dict):
        return any(find_none(item) for item in value.values())
    if isinstance(value, list):
        return any(find_none(item) for item in value)
    return value is None


@given(valid_resources())
@settings(max_examples=60, deadline=None)
def test_children_of_any_valid_resource(resource: Object) -> None:
    resolved = resolve(resource)
    children = list(build_all(resolved))
    # Pure: the same bytes each time, in the same order.
    assert json.dumps([m for _, m in children]) == json.dumps([m for _, m in build_all(resolve(resource))])
    seen = set()
    for kind, manifest in children:
        metadata = manifest["metadata"]
        assert (kind, metadata["name"]) not in seen
        seen.add((kind, metadata["name"]))
        assert len(metadata["name"]) <= 63
        assert not metadata["name"].endswith("-")
        assert all(len(value) <= 63 for value in metadata["labels"].values())
        (owner,) = metadata["ownerReferences"]
        assert owner["uid"] == resolved.uid
        assert owner["controller"] is True
        assert owner["blockOwnerDeletion"] is True
        assert not find_none(manifest), "a None would be sent as null and fight the server's default"
    for kind, manifest in children:
        if kind == DEPLOYMENT:
            selector = manifest["spec"]["selector"]["matchLabels"]
            assert selector.items() <= manifest["spec"]["template"]["metadata"]["labels"].items()
        if kind == SERVICE and manifest["metadata"]["name"] != resolved.name:
            assert manifest["spec"]["clusterIP"] == "None"


def test_both_roles_agree_on_what_the_hashes_depend_on() -> None:
    for resource in (TCP, EFA):
        prefill, decode = engine(resource, "prefill"), engine(resource, "decode")
        for name in ("PYTHONHASHSEED", "VLLM_NIXL_SIDE_CHANNEL_PORT"):
            assert env_of(prefill)[name] == env_of(decode)[name]
        for flag in ("--kv-transfer-config", "--prefix-caching-hash-algo", "--model"):
            values = [args[args.index(flag) + 1] for args in (prefill["args"], decode["args"])]
            assert values[0] == values[1]
            assert prefill["args"].count(flag) == 1


def test_kv_transfer_config_is_the_contract_s() -> None:
    for resource, fabric in ((TCP, "TCP"), (EFA, "EFA")):
        args = engine(resource)["args"]
        config = json.loads(args[args.index("--kv-transfer-config") + 1])
        assert config == contract.kv_transfer_config(fabric=fabric)  # type: ignore[arg-type]


def test_connector_folder_comes_first_on_the_path() -> None:
    assert env_of(engine(TCP))["PYTHONPATH"] == contract.CONNECTOR_INSTALL_DIR
    assert env_of(engine(EFA, "decode"))["PYTHONPATH"] == f"{contract.CONNECTOR_INSTALL_DIR}:/plugins"


def test_user_environment_wins_over_the_fabric_s() -> None:
    assert env_of(engine(TCP))["UCX_TLS"] == "tcp"
    assert env_of(engine(TCP, "decode"))["UCX_TLS"] == "tcp,self"


@pytest.mark.parametrize(
    ("role", "gpus"),
    [
        ({}, "1"),
        ({"tensorParallelSize": 4}, "4"),
        ({"tensorParallelSize": 2, "gpusPerPod": 8}, "8"),
        ({"tensorParallelSize": 4, "gpusPerPod": 0}, None),
    ],
)
def test_gpus(role: Object, gpus: str | None) -> None:
    container = engine(make_resource(prefill=role))
    resources = container.get("resources", {})
    assert resources.get("limits", {}).get("nvidia.com/gpu") == gpus
    assert resources.get("requests", {}).get("nvidia.com/gpu") == gpus
    tolerations = pod_spec(make_resource(prefill=role), "prefill").get("tolerations", [])
    assert [toleration["key"] for toleration in tolerations] == (["nvidia.com/gpu"] if gpus else [])


def test_tcp_pod_without_gpus_asks_for_no_resources() -> None:
    assert "resources" not in engine(TCP, "decode")


def test_router_rolls_with_its_configuration() -> None:
    def template(resource: Object) -> Object:
        found: Object = deployment(resource, "router")["spec"]["template"]
        return found

    assert template(TCP) != template({**TCP, "spec": {**TCP["spec"], "kvReuse": {"mode": "Bidirectional"}}})
    more = {**TCP["spec"], "decode": {"gpusPerPod": 0, "replicas": 4}}
    assert template(TCP) == template({**TCP, "spec": more})


@pytest.mark.parametrize(("replicas", "has_budget"), [(0, False), (1, False), (2, True)])
def test_budgets_only_where_they_can_mean_something(replicas: int, has_budget: bool) -> None:
    children = build_all(resolve(make_resource(router={"replicas": replicas})))
    roles = {budget["metadata"]["labels"][names.LABEL_ROLE] for budget in children.disruption_budgets}
    assert ("router" in roles) is has_budget


def test_child_names_are_shortened_without_collision() -> None:
    first, second = "a" * 62 + "b", "a" * 62 + "c"
    names_of = [names.child_name(owner, "prefill") for owner in (first, second)]
    assert names_of[0] != names_of[1]
    assert all(len(name) <= 63 for name in names_of)
