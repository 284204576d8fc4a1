"""What pods get of their nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bidikv_operator import names
from bidikv_operator.build.devices import (
    build_claim_templates,
    build_engine_resources,
    compute_ranks,
    compute_shared_memory,
)
from bidikv_operator.build.engine_pod import build_engine_template, build_worker_template
from bidikv_operator.build.meta import Manifest
from bidikv_operator.fabric import INSTANCE_TYPES, build_efa_env, compute_interfaces
from bidikv_operator.resolved import Resolved, Resources
from bidikv_operator.tests.samples import EFA, TCP, resolve

MOST_DEVICES_OF_A_CLAIM = 32
"""``AllocationResultsMaxSize`` of ``resource.k8s.io/v1``."""


def sized(instance: str | None, gpus: int, interfaces: int | None = None, **fabric: Any) -> Resolved:
    """A resource on EFA whose prefill pods have these devices."""
    resolved = resolve(EFA)
    if interfaces is None:
        assert instance is not None
        interfaces = compute_interfaces(instance, gpus)
    return replace(
        resolved,
        fabric=replace(resolved.fabric, instance_type=instance, **fabric),
        prefill=replace(resolved.prefill, tensor_parallel_size=max(gpus, 1), gpus=gpus, interfaces=interfaces),
    )


def claims(resolved: Resolved) -> tuple[Manifest, tuple[Manifest, ...]]:
    template = build_engine_template(resolved, "prefill")
    return template, build_claim_templates(resolved, (template,))


@pytest.mark.parametrize(
    ("instance", "gpus", "interfaces"),
    [
        ("p4d.24xlarge", 8, 4),
        ("p4d.24xlarge", 4, 2),
        ("p4d.24xlarge", 1, 1),
        ("p4de.24xlarge", 2, 1),
        ("p5.48xlarge", 8, 32),
        ("p5.48xlarge", 1, 4),
        ("p5e.48xlarge", 4, 16),
        ("p5en.48xlarge", 8, 16),
        ("p5en.48xlarge", 1, 2),
        ("p6-b200.48xlarge", 8, 8),
        ("p6-b200.48xlarge", 2, 2),
        ("p6e-gb200.36xlarge", 4, 4),
        ("p6e-gb200.36xlarge", 1, 1),
        ("p5en.48xlarge", 0, 1),
    ],
)
def test_a_pod_gets_its_share_of_the_interfaces(instance: str, gpus: int, interfaces: int) -> None:
    resolved = sized(instance, gpus)
    resources = build_engine_resources(resolved, resolved.prefill)
    assert resources["limits"].get("vpc.amazonaws.com/efa") == str(interfaces)
    assert resources["limits"].get("nvidia.com/gpu") == (str(gpus) if gpus else None)
    spec = build_engine_template(resolved, "prefill")["spec"]
    assert spec["nodeSelector"]["node.kubernetes.io/instance-type"] == instance
    assert spec["nodeSelector"].get("kubernetes.io/arch") == ("arm64" if "gb200" in instance else None)


@pytest.mark.parametrize("instance", INSTANCE_TYPES)
def test_pods_that_fit_by_gpus_fit_by_interfaces(instance: str) -> None:
    whole = INSTANCE_TYPES[instance]
    for gpus in range(1, whole.gpus + 1):
        if gpus * whole.interfaces % whole.gpus == 0:
            assert whole.gpus // gpus * compute_interfaces(instance, gpus) <= whole.interfaces


def test_unknown_hardware_is_not_told_to_insist_on_rdma() -> None:
    assert build_efa_env("p5.48xlarge", 5120)["FI_EFA_USE_DEVICE_RDMA"] == "1"
    assert "FI_EFA_USE_DEVICE_RDMA" not in build_efa_env(None, 5120)


@pytest.mark.parametrize(("mebibytes", "written"), [(5120, "5Gi"), (1024, "1Gi"), (1026, "1026Mi"), (0, None)])
def test_huge_pages(mebibytes: int, written: str | None) -> None:
    resolved = sized("p5en.48xlarge", 4, huge_pages_mebibytes=mebibytes)
    template = build_engine_template(resolved, "prefill")
    container = template["spec"]["containers"][0]
    assert container["resources"]["limits"].get("hugepages-2Mi") == written
    assert ("/dev/hugepages" in [mount["mountPath"] for mount in container["volumeMounts"]]) is (written is not None)
    assert ("huge-pages" in [volume["name"] for volume in template["spec"]["volumes"]]) is (written is not None)
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert env.get("FI_EFA_USE_HUGE_PAGE") == (None if written else "0")


@pytest.mark.parametrize(
    ("tensor", "data", "nodes", "ranks", "memory", "cpu"),
    [(1, 1, 1, 1, "9Gi", "3"), (8, 1, 1, 8, "16Gi", "10"), (2, 4, 1, 8, "16Gi", "13"), (16, 1, 2, 8, "16Gi", "10")],
)
def test_shared_memory_and_processors_follow_the_ranks_of_a_pod(
    tensor: int, data: int, nodes: int, ranks: int, memory: str, cpu: str
) -> None:
    resolved = sized("p5en.48xlarge", ranks)
    settings = replace(resolved.prefill, tensor_parallel_size=tensor, data_parallel_size=data, nodes=nodes)
    assert compute_ranks(settings) == ranks
    assert compute_shared_memory(settings) == memory
    assert build_engine_resources(resolved, settings)["requests"]["cpu"] == cpu


def test_what_the_resource_asks_for_replaces_what_is_derived() -> None:
    resolved = sized("p5en.48xlarge", 4)
    settings = replace(resolved.prefill, resources=Resources(cpu="24", memory="300Gi"))
    resources = build_engine_resources(resolved, settings)
    assert resources["requests"]["cpu"] == "24"
    assert "cpu" not in resources["limits"], "a throttled engine stalls every request of its batch"
    assert resources["requests"]["memory"] == resources["limits"]["memory"] == "300Gi"


def test_without_accelerators_nothing_is_derived() -> None:
    resolved = resolve(TCP)
    assert build_engine_resources(resolved, resolved.decode) == {}
    settings = replace(resolved.decode, resources=Resources(cpu="500m"))
    assert build_engine_resources(resolved, settings) == {"requests": {"cpu": "500m"}}


@pytest.mark.parametrize(
    ("instance", "gpus", "interfaces", "count", "group", "aligned"),
    [
        ("p4d.24xlarge", 8, None, 4, (2, 1), True),
        ("p5.48xlarge", 8, None, 8, (1, 4), True),
        ("p5.48xlarge", 1, None, 1, (1, 4), True),
        ("p5en.48xlarge", 4, None, 4, (1, 2), True),
        ("p6-b200.48xlarge", 2, None, 2, (1, 1), True),
        ("p6e-gb200.36xlarge", 4, None, 4, (1, 1), False),  # its GPUs hang on NVLink
        ("p5.48xlarge", 8, 6, 2, (4, 3), False),  # no root has four GPUs
        ("p5en.48xlarge", 0, 16, 16, (0, 1), False),
        (None, 4, 4, 4, (1, 1), False),  # nothing is known of the hardware
    ],
)
def test_claims(
    instance: str | None, gpus: int, interfaces: int | None, count: int, group: tuple[int, int], aligned: bool
) -> None:
    template, (claim_template,) = claims(sized(instance, gpus, interfaces, devices="ResourceClaim"))
    spec = template["spec"]
    claim_names = [claim["name"] for claim in spec["resourceClaims"]]
    assert len(set(claim_names)) == count
    container = spec["containers"][0]
    assert [claim["name"] for claim in container["resources"]["claims"]] == claim_names
    assert not {"nvidia.com/gpu", "vpc.amazonaws.com/efa"} & set(container["resources"]["limits"])
    assert {claim["resourceClaimTemplateName"] for claim in spec["resourceClaims"]} == {
        claim_template["metadata"]["name"]
    }
    devices = claim_template["spec"]["spec"]["devices"]
    counts = {request["name"]: request["exactly"]["count"] for request in devices["requests"]}
    assert (counts.get("gpus", 0), counts.get("interfaces", 0)) == group
    assert sum(counts.values()) <= MOST_DEVICES_OF_A_CLAIM
    assert ("constraints" in devices) is aligned


def test_claims_name_the_device_classes_of_the_resource() -> None:
    resolved = sized(
        "p5en.48xlarge", 4, devices="ResourceClaim", gpu_device_class="our-gpus", efa_device_class="our-nics"
    )
    requests = claims(resolved)[1][0]["spec"]["spec"]["devices"]["requests"]
    assert [request["exactly"]["deviceClassName"] for request in requests] == ["our-gpus", "our-nics"]


def test_an_earlier_pod_template_still_finds_its_claims() -> None:
    """A ResourceClaimTemplate cannot be changed: another size has another name, and both are built."""
    earlier, later = (sized("p5en.48xlarge", gpus, devices="ResourceClaim") for gpus in (4, 8))
    later = replace(later, prefill=replace(later.prefill, interfaces=8))
    templates = [build_engine_template(resolved, "prefill") for resolved in (earlier, later)]
    built = build_claim_templates(later, templates)
    named = {
        claim["resourceClaimTemplateName"] for template in templates for claim in template["spec"]["resourceClaims"]
    }
    assert {manifest["metadata"]["name"] for manifest in built} == named
    assert len(built) == 2
    assert built == build_claim_templates(later, list(reversed(templates)))


def test_pods_of_equal_devices_share_a_claim_template() -> None:
    resolved = sized("p5en.48xlarge", 4, devices="ResourceClaim")
    templates = [build_engine_template(resolved, role) for role in names.ENGINE_ROLES]
    templates.append(build_worker_template(resolved, "prefill"))
    assert len(build_claim_templates(resolved, templates)) == 1


def test_on_tcp_gpus_alone_are_claimed() -> None:
    resolved = resolve(TCP)
    resolved = replace(
        resolved,
        fabric=replace(resolved.fabric, devices="ResourceClaim"),
        prefill=replace(resolved.prefill, tensor_parallel_size=2, gpus=2),
    )
    template, (claim_template,) = claims(resolved)
    assert len(template["spec"]["resourceClaims"]) == 2
    (request,) = claim_template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["deviceClassName"] == "gpu.nvidia.com"
    without = build_engine_template(resolved, "decode")
    assert "resourceClaims" not in without["spec"], "decode runs on CPUs"


def test_device_plugins_need_no_claims() -> None:
    template, built = claims(sized("p5en.48xlarge", 4))
    assert built == ()
    assert "resourceClaims" not in template["spec"]
    assert names.ANNOTATION_DEVICES not in template["metadata"].get("annotations", {})
