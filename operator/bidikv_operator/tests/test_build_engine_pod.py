"""Pods of engines: ports, volumes, how they stop, and the workers of replicas that span nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bidikv_operator import names
from bidikv_operator.build import engine
from bidikv_operator.build.engine_pod import build_engine_template, build_worker_template
from bidikv_operator.build.meta import build_selector
from bidikv_operator.build.pdb import build_disruption_budget
from bidikv_operator.resolved import Resolved, ResolvedAdapter
from bidikv_operator.tests.samples import EFA, TCP, resolve
from bidikv_runtime import contract

Object = dict[str, Any]


def engine_of(template: Object) -> Object:
    container: Object = template["spec"]["containers"][0]
    return container


def with_decode(resolved: Resolved, **changes: Any) -> Resolved:
    return replace(resolved, decode=replace(resolved.decode, **changes))


def test_each_rank_has_ports_of_its_own() -> None:
    ports = engine_of(build_engine_template(with_decode(resolve(TCP), data_parallel_size=16), "decode"))["ports"]
    numbers = [port["containerPort"] for port in ports]
    assert len(set(numbers)) == len(numbers) == 1 + 3 * 16
    assert {contract.LOOKUP_PORT + 15, contract.STATE_PORT + 15, contract.SIDE_CHANNEL_PORT + 15} <= set(numbers)
    assert len({port["name"] for port in ports}) == len(ports)
    assert all(len(port["name"]) <= 15 for port in ports), "the API server's limit"


def test_claims_of_adapters_are_mounted_once_each() -> None:
    resolved = resolve(TCP)
    adapters = (
        ResolvedAdapter(name="a", path=f"{engine.ADAPTERS_DIR}/shared/a", claim_name="shared"),
        ResolvedAdapter(name="b", path=f"{engine.ADAPTERS_DIR}/own/b", claim_name="own"),
        ResolvedAdapter(name="c", path=f"{engine.ADAPTERS_DIR}/shared/c", claim_name="shared"),
        ResolvedAdapter(name="d", path="org/d"),
    )
    resolved = replace(resolved, model=replace(resolved.model, adapters=adapters, cache_claim_name="cache"))
    template = build_engine_template(resolved, "decode")
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]
        for volume in template["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    mounts = {mount["mountPath"]: mount for mount in engine_of(template)["volumeMounts"]}
    for adapter in adapters:
        if adapter.claim_name:
            mount = mounts[f"{engine.ADAPTERS_DIR}/{adapter.claim_name}"]
            assert adapter.path.startswith(f"{mount['mountPath']}/")
            assert mount["readOnly"]
            assert claims[mount["name"]] == {"claimName": adapter.claim_name, "readOnly": True}
    assert sorted(claim["claimName"] for claim in claims.values()) == ["cache", "models", "own", "shared"]
    assert claims[mounts[engine.HUB_CACHE_DIR]["name"]] == {"claimName": "cache"}, "downloads are written"


@pytest.mark.parametrize("resource", [TCP, EFA])
@pytest.mark.parametrize("build", [build_engine_template, build_worker_template])
@pytest.mark.parametrize("role", names.ENGINE_ROLES)
def test_what_is_mounted_exists(resource: Object, build: Any, role: names.Role) -> None:
    spec = build(resolve(resource), role)["spec"]
    volumes = [volume["name"] for volume in spec["volumes"]]
    assert len(set(volumes)) == len(volumes)
    for container in (*spec["initContainers"], *spec["containers"]):
        assert {mount["name"] for mount in container.get("volumeMounts", [])} <= set(volumes)
    own = [container for container in spec["containers"] if container["name"] == "engine"] + spec["initContainers"]
    assert {container["terminationMessagePolicy"] for container in own} == {"FallbackToLogsOnError"}


@pytest.mark.parametrize(("reuse", "ranks", "expected"), [("Bidirectional", 1, []), ("OneWay", 4, ["--ranks", "4"])])
def test_a_stopping_engine_waits_for_what_others_will_read(reuse: Any, ranks: int, expected: list[str]) -> None:
    """The hook does not depend on the mode of reuse: a change of it would restart the engines."""
    resolved = with_decode(replace(resolve(EFA), reuse=reuse), data_parallel_size=ranks)
    resolved = replace(resolved, updates=replace(resolved.updates, drain_seconds=300))
    template = build_engine_template(resolved, names.DECODE)
    command = engine_of(template)["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:3] == ["python3", "-m", contract.DRAIN_MODULE]
    assert command[3:7] == ["--leave-seconds", "10", "--seconds", "300"]
    assert command[7:] == expected


def test_the_grace_covers_leaving_draining_and_running_requests() -> None:
    for seconds in (0, 120, 900):
        resolved = resolve(TCP)
        resolved = replace(resolved, updates=replace(resolved.updates, drain_seconds=seconds))
        template = build_engine_template(resolved, "decode")
        command = engine_of(template)["lifecycle"]["preStop"]["exec"]["command"]
        hook = sum(int(command[command.index(flag) + 1]) for flag in ("--leave-seconds", "--seconds"))
        args = engine_of(template)["args"]
        requests = int(args[args.index("--shutdown-timeout") + 1])
        assert template["spec"]["terminationGracePeriodSeconds"] > hook + requests


def test_a_worker_serves_nothing_and_no_service_finds_it() -> None:
    resolved = with_decode(resolve(EFA), tensor_parallel_size=16, gpus=8, nodes=2)
    worker, first = build_worker_template(resolved, "decode"), build_engine_template(resolved, "decode")
    selector = build_selector(resolved, "decode").items()
    assert selector <= first["metadata"]["labels"].items()
    assert not selector <= worker["metadata"]["labels"].items()
    container = engine_of(worker)
    assert "--headless" in container["command"]
    assert not {"ports", "lifecycle", "startupProbe", "readinessProbe", "livenessProbe"} & set(container)
    for field in ("image", "env", "resources", "volumeMounts", "securityContext"):
        assert container[field] == engine_of(first)[field]


def test_an_override_of_the_engine_s_probes_is_not_one_of_the_worker_s() -> None:
    override = {
        "metadata": {"annotations": {"a": "b"}},
        "spec": {
            "hostIPC": True,
            "containers": [
                {"name": "engine", "livenessProbe": {"timeoutSeconds": 30}, "env": [{"name": "A", "value": "1"}]},
                {"name": "sidecar", "image": "s", "ports": [{"name": "x", "containerPort": 1}]},
            ],
        },
    }
    resolved = with_decode(resolve(EFA), pod_template=override)
    worker = build_worker_template(resolved, "decode")
    assert "livenessProbe" not in engine_of(worker)
    assert {"name": "A", "value": "1"} in engine_of(worker)["env"]
    assert worker["spec"]["containers"][1] == override["spec"]["containers"][1]  # type: ignore[index]
    assert worker["spec"]["hostIPC"] is True
    first = engine_of(build_engine_template(resolved, "decode"))
    assert first["livenessProbe"]["timeoutSeconds"] == 30
    assert first["livenessProbe"]["httpGet"]["path"] == "/health"


@pytest.mark.parametrize("build", [build_engine_template, build_worker_template])
def test_labels_are_added_and_nothing_is_shared_between_calls(build: Any) -> None:
    resolved = resolve(TCP)
    plain, labelled = build(resolved, "prefill"), build(resolved, "prefill", labels={names.LABEL_GROUP: "abc"})
    assert labelled["metadata"]["labels"] == plain["metadata"]["labels"] | {names.LABEL_GROUP: "abc"}
    assert names.LABEL_GROUP not in build(resolved, "prefill")["metadata"]["labels"]


def test_a_budget_counts_the_workers_of_its_role() -> None:
    resolved = with_decode(resolve(EFA), tensor_parallel_size=16, gpus=8, nodes=2)
    budget = build_disruption_budget(resolved, "decode")
    assert budget is not None
    (expression,) = budget["spec"]["selector"]["matchExpressions"]
    for build in (build_engine_template, build_worker_template):
        assert build(resolved, "decode")["metadata"]["labels"][names.LABEL_ROLE] in expression["values"]
        assert build(resolved, "prefill")["metadata"]["labels"][names.LABEL_ROLE] not in expression["values"]
