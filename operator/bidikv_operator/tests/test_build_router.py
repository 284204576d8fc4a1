"""The router's configuration, pods and Service."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from bidikv_operator.build.meta import Manifest
from bidikv_operator.build.podmonitor import build_pod_monitors
from bidikv_operator.build.router_config import TLS_DIR, build_router_config
from bidikv_operator.build.router_pod import build_router_template
from bidikv_operator.build.service import build_endpoint_service
from bidikv_operator.resolved import Resolved, ResolvedMonitoring, ResolvedObjectives, Resources
from bidikv_operator.tests.samples import EFA, TCP, resolve
from bidikv_runtime import contract

Object = dict[str, Any]
BASE = resolve(TCP)


def with_router(**changes: Any) -> Resolved:
    return replace(BASE, router=replace(BASE.router, **changes))


def container_of(resolved: Resolved) -> Manifest:
    container: Manifest = build_router_template(resolved)["spec"]["containers"][0]
    return container


CHANGES: dict[str, tuple[Resolved, Any]] = {
    "local_limit_tokens": (with_router(local_limit_tokens=7), 7),
    "missing_prefill": (with_router(missing_prefill="Fail"), "Fail"),
    "continue_streams": (with_router(continue_streams=True), True),
    "cache_salt_by_tenant": (with_router(isolate_tenants=True), True),
    "tls_dir": (with_router(tls_secret_name="certificate"), TLS_DIR),
    "access_log": (with_router(access_log=True), True),
    "trace_endpoint": (with_router(trace_endpoint="http://c:4318/v1/traces"), "http://c:4318/v1/traces"),
    "trace_ratio": (with_router(trace_percent=25), 0.25),
    "debug": (with_router(debug=True), True),
    "prefill_ranks": (replace(BASE, prefill=replace(BASE.prefill, data_parallel_size=2)), 2),
    "decode_ranks": (replace(BASE, decode=replace(BASE.decode, data_parallel_size=3)), 3),
    "ttft_objective_seconds": (
        replace(
            BASE,
            scaling=replace(BASE.scaling, objectives=ResolvedObjectives(time_to_first_token_milliseconds=500)),
        ),
        0.5,
    ),
    "itl_objective_seconds": (
        replace(
            BASE,
            scaling=replace(BASE.scaling, objectives=ResolvedObjectives(inter_token_latency_milliseconds=30)),
        ),
        0.03,
    ),
    "reuse": (resolve(EFA), "Bidirectional"),
    "served_model_name": (resolve(EFA), "chat"),
    "namespace": (replace(BASE, namespace="elsewhere"), "elsewhere"),
    "prefill_service": (replace(BASE, name="other"), "other-prefill"),
    "decode_service": (replace(BASE, name="other"), "other-decode"),
}
LEFT_AT_ITS_DEFAULT = {"source_count", "engine_port", "lookup_port", "state_port", "version"}


def test_every_setting_of_the_router_is_written_or_deliberately_not() -> None:
    """A field that is added to the contract must get a row here."""
    assert {field.name for field in fields(contract.RouterConfig)} == set(CHANGES) | LEFT_AT_ITS_DEFAULT


@pytest.mark.parametrize("field", CHANGES)
def test_configuration(field: str) -> None:
    resolved, expected = CHANGES[field]
    written = json.loads(build_router_config(resolved).to_json())
    assert written[field] == expected
    assert json.loads(build_router_config(BASE).to_json())[field] != expected
    variables = {item["name"]: item["value"] for item in container_of(resolved)["env"]}
    assert json.loads(variables[contract.ENV_ROUTER_CONFIG]) == written


def test_limits_are_flags_of_the_command() -> None:
    command = container_of(with_router(limits={"max-queued": 3, "max-body-bytes": 5}))["command"]
    assert command[-2:] == ["--max-body-bytes=5", "--max-queued=3"]


def test_with_a_certificate_everything_speaks_https() -> None:
    resolved = with_router(tls_secret_name="certificate")
    template = build_router_template(resolved)
    container = template["spec"]["containers"][0]
    assert {"name": "tls", "secret": {"secretName": "certificate"}} in template["spec"]["volumes"]
    assert TLS_DIR in [mount["mountPath"] for mount in container["volumeMounts"]]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
        assert "scheme" not in container_of(BASE)[probe]["httpGet"]
    assert [port["name"] for port in build_endpoint_service(resolved)["spec"]["ports"]] == ["https"]
    assert [port["name"] for port in build_endpoint_service(BASE)["spec"]["ports"]] == ["http"]


def test_resources() -> None:
    assert container_of(BASE)["resources"] == {
        "requests": {"cpu": "250m", "memory": "256Mi"},
        "limits": {"memory": "1Gi"},
    }
    assert container_of(with_router(resources=Resources(cpu="2", memory="4Gi")))["resources"] == {
        "requests": {"cpu": "2", "memory": "4Gi"},
        "limits": {"memory": "4Gi"},
    }


def test_the_service_is_what_the_resource_says() -> None:
    resolved = with_router(service_type="LoadBalancer", service_annotations={"cloud.example/internal": "true"})
    service = build_endpoint_service(resolved)
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["metadata"]["annotations"] == {"cloud.example/internal": "true"}
    assert build_endpoint_service(BASE)["spec"]["type"] == "ClusterIP"
    assert "annotations" not in build_endpoint_service(BASE)["metadata"]


def test_pod_monitors() -> None:
    assert build_pod_monitors(BASE) == ()
    monitoring = ResolvedMonitoring(pod_monitor=True, interval_seconds=15, labels={"release": "prometheus"})
    engines, routers = build_pod_monitors(replace(with_router(tls_secret_name="c"), monitoring=monitoring))
    for monitor in (engines, routers):
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert (endpoint["port"], endpoint["path"], endpoint["interval"]) == ("http", "/metrics", "15s")
    assert routers["spec"]["podMetricsEndpoints"][0]["scheme"] == "https"
    assert "scheme" not in engines["spec"]["podMetricsEndpoints"][0]


def test_pull_policy_is_that_of_the_resource() -> None:
    assert "imagePullPolicy" not in container_of(BASE)
    assert container_of(replace(BASE, image_pull_policy="Never"))["imagePullPolicy"] == "Never"
