"""What engines and routers may do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bidikv_operator import names
from bidikv_operator.build.engine_pod import build_engine_template, build_worker_template
from bidikv_operator.build.router_pod import build_router_template
from bidikv_operator.build.security import HOME_DIR
from bidikv_operator.resolved import Resolved
from bidikv_operator.tests.samples import EFA, TCP, resolve

Object = dict[str, Any]


def secured(resource: Object, *, restricted: bool = True, privileged: bool = False) -> Resolved:
    resolved = resolve(resource)
    return replace(
        resolved,
        security=replace(resolved.security, restricted=restricted),
        fabric=replace(resolved.fabric, privileged=privileged),
        prefill=replace(resolved.prefill, pod_template={}),
    )


def find_violations(spec: Object) -> list[str]:
    """The ``restricted`` pod security standard, as far as what is built could break it
    (https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted)."""
    pod = spec.get("securityContext", {})
    found = [volume["name"] for volume in spec["volumes"] if "hostPath" in volume]
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        own = container.get("securityContext", {})
        merged = {**pod, **own}
        capabilities = own.get("capabilities", {})
        rules = {
            "privileged": own.get("privileged", False) is False,
            "escalation": own.get("allowPrivilegeEscalation") is False,
            "drop": capabilities.get("drop") == ["ALL"],
            "add": not set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"},
            "non-root": merged.get("runAsNonRoot") is True and merged.get("runAsUser", 1) != 0,
            "seccomp": merged.get("seccompProfile", {}).get("type") == "RuntimeDefault",
        }
        found += [f"{container['name']}: {rule}" for rule, is_met in rules.items() if not is_met]
    return found


@pytest.mark.parametrize("build", [build_engine_template, build_worker_template])
@pytest.mark.parametrize("role", names.ENGINE_ROLES)
def test_engines_on_tcp_meet_the_restricted_standard(build: Any, role: names.Role) -> None:
    assert find_violations(build(secured(TCP), role)["spec"]) == []


def test_routers_meet_it_on_any_fabric() -> None:
    for resource in (TCP, EFA):
        assert find_violations(build_router_template(secured(resource, restricted=False))["spec"]) == []


def test_efa_lacks_of_it_what_pinning_memory_needs() -> None:
    """Kubernetes has no ambient capabilities: IPC_LOCK means nothing to a user that is not root."""
    spec = build_engine_template(secured(EFA), "prefill")["spec"]
    assert find_violations(spec) == ["engine: add", "engine: non-root"]
    assert spec["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


def test_the_privileged_switch_leaves_nothing_that_would_be_without_effect() -> None:
    spec = build_engine_template(secured(EFA, privileged=True), "prefill")["spec"]
    assert spec["containers"][0]["securityContext"] == {"privileged": True}
    assert "securityContext" not in spec


@pytest.mark.parametrize(
    ("resource", "expected"), [(TCP, None), (EFA, {"capabilities": {"add": ["IPC_LOCK"]}})], ids=["tcp", "efa"]
)
def test_unrestricted_engines_run_as_their_image_says(resource: Object, expected: Object | None) -> None:
    spec = build_engine_template(secured(resource, restricted=False), "prefill")["spec"]
    assert "securityContext" not in spec
    assert spec["containers"][0].get("securityContext") == expected
    assert HOME_DIR not in str(spec)


def test_a_user_without_an_entry_in_the_image_has_a_home_and_a_name() -> None:
    container = build_engine_template(secured(TCP), "decode")["spec"]["containers"][0]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert (env["HOME"], env["USER"], env["LOGNAME"]) == (HOME_DIR, "bidikv", "bidikv")
    assert HOME_DIR in [mount["mountPath"] for mount in container["volumeMounts"]]


@pytest.mark.parametrize("restricted", [True, False])
def test_engines_hold_no_token_of_the_api_server(restricted: bool) -> None:
    spec = build_engine_template(secured(TCP, restricted=restricted), "decode")["spec"]
    assert spec["automountServiceAccountToken"] is False
