"""What a pod gets of its node: GPUs, EFA interfaces, huge pages, processors, memory, /dev/shm.

GPUs and interfaces come from device plugins, as counts in ``resources``, or are claimed (dynamic resource allocation,
``resource.k8s.io/v1``, Kubernetes 1.34): one claim per smallest group of GPUs and interfaces that has the whole pod's
proportion, made from one ResourceClaimTemplate. So each group can be held to one PCIe root, from which an interface
reads GPU memory without a detour, and no claim comes near the 32 devices that the API allows.

A ResourceClaimTemplate cannot be changed. Its name therefore says what is in it, and it is built from the pod templates
in use (``build_claim_templates``): pods of an earlier revision still find theirs.

What is written is in canonical form (``5Gi``, not ``5120Mi``), so that the live object compares equal.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from bidikv_operator import names
from bidikv_operator.build.meta import Manifest, build_object
from bidikv_operator.fabric import EFA_RESOURCE, GPU_RESOURCE, HUGE_PAGES_RESOURCE, INSTANCE_TYPES
from bidikv_operator.kinds import RESOURCE_CLAIM_TEMPLATE
from bidikv_operator.resolved import Resolved, ResolvedEngine, Resources

PCIE_ROOT: Final = "resource.kubernetes.io/pcieRoot"
"""Attribute that NVIDIA's and EFA's drivers both publish: https://karpenter.sh/docs/tasks/dra/"""
SHARED_MEMORY_BASE_GIBIBYTES: Final = 8
"""vLLM's cache of multimodal input, at most 4 GiB, and what libraries take."""
SHARED_MEMORY_RANK_GIBIBYTES: Final = 1
"""Per rank: a message queue (an engine of one rank was seen to use 400 MiB for its two) and NCCL's buffers."""


def compute_ranks(settings: ResolvedEngine) -> int:
    """Worker processes of one pod: the ranks of a replica, shared out to its pods."""
    return max(1, settings.tensor_parallel_size * settings.data_parallel_size // settings.nodes)


def build_engine_resources(resolved: Resolved, settings: ResolvedEngine) -> Manifest:
    """``resources`` of the engine's container; empty for none.

    Processors that the resource does not name are requested for what busily polls: vLLM's API server, a scheduler per
    data-parallel rank and a worker per GPU (https://docs.vllm.ai/en/latest/design/arch_overview/). Kubernetes also
    refuses huge pages without a request of CPU or memory. Memory is not guessed: it depends on how the weights are
    loaded. Without GPUs and EFA nothing is requested that nobody asked for.
    """
    devices: dict[str, str] = {}
    if resolved.fabric.devices == "DevicePlugin":
        if settings.gpus:
            devices[GPU_RESOURCE] = str(settings.gpus)
        if settings.interfaces:
            devices[EFA_RESOURCE] = str(settings.interfaces)
    if resolved.fabric.type == "EFA" and resolved.fabric.huge_pages_mebibytes:
        devices[HUGE_PAGES_RESOURCE] = _write_mebibytes(resolved.fabric.huge_pages_mebibytes)
    requests = dict(devices)
    if settings.gpus or resolved.fabric.type == "EFA":
        requests["cpu"] = str(1 + settings.data_parallel_size + compute_ranks(settings))
    resources = with_resources({"requests": requests, "limits": devices}, settings.resources)
    claims = [{"name": name} for name in _name_claims(resolved, settings)]
    if claims:
        resources["claims"] = claims
    return {key: value for key, value in resources.items() if value}


def with_resources(base: Mapping[str, Mapping[str, str]], asked: Resources) -> Manifest:
    """``base`` with what the resource asks for. CPU is requested and not limited: a throttled process stalls the whole
    batch. Memory is requested and limited to the same amount: its requests are held, and it is not evicted first."""
    requests, limits = dict(base["requests"]), dict(base["limits"])
    if asked.cpu is not None:
        requests["cpu"] = asked.cpu
    if asked.memory is not None:
        requests["memory"] = limits["memory"] = asked.memory
    return {"requests": requests, "limits": limits}


def compute_shared_memory(settings: ResolvedEngine) -> str:
    """Upper bound of /dev/shm; it reserves nothing, but what is used counts as the container's memory."""
    return f"{SHARED_MEMORY_BASE_GIBIBYTES + SHARED_MEMORY_RANK_GIBIBYTES * compute_ranks(settings)}Gi"


def _write_mebibytes(count: int) -> str:
    return f"{count // 1024}Gi" if count % 1024 == 0 else f"{count}Mi"


@dataclass(frozen=True)
class _Claim:
    """One group of devices, of which a pod has several."""

    gpus: int
    interfaces: int
    gpu_class: str
    efa_class: str
    is_aligned: bool
    """All of them on one PCIe root."""


def _plan_claims(resolved: Resolved, settings: ResolvedEngine) -> tuple[_Claim, int] | None:
    """The group, and how many of it a pod claims."""
    count = math.gcd(settings.gpus, settings.interfaces)
    if resolved.fabric.devices != "ResourceClaim" or not count:
        return None
    gpus, interfaces = settings.gpus // count, settings.interfaces // count
    whole = INSTANCE_TYPES.get(resolved.fabric.instance_type or "")
    fits_root = (
        whole is not None
        and whole.pcie_roots is not None
        and gpus <= whole.gpus // whole.pcie_roots
        and interfaces <= whole.interfaces // whole.pcie_roots
    )
    claim = _Claim(
        gpus=gpus,
        interfaces=interfaces,
        gpu_class=resolved.fabric.gpu_device_class,
        efa_class=resolved.fabric.efa_device_class,
        is_aligned=fits_root and gpus > 0 and interfaces > 0,
    )
    return claim, count


def _name_claims(resolved: Resolved, settings: ResolvedEngine) -> list[str]:
    planned = _plan_claims(resolved, settings)
    return [f"devices-{index}" for index in range(planned[1])] if planned else []


def _claim_template_name(owner: str, annotation: str) -> str:
    return names.child_name(owner, f"devices-{hashlib.sha256(annotation.encode()).hexdigest()[:8]}")


def add_claims(template: Manifest, resolved: Resolved, settings: ResolvedEngine) -> None:
    """Let the pod claim its devices, and annotate it with what ``build_claim_templates`` has to know."""
    planned = _plan_claims(resolved, settings)
    if planned is None:
        return
    annotation = json.dumps(asdict(planned[0]), sort_keys=True)
    template["metadata"].setdefault("annotations", {})[names.ANNOTATION_DEVICES] = annotation
    name = _claim_template_name(resolved.name, annotation)
    template["spec"]["resourceClaims"] = [
        {"name": claim, "resourceClaimTemplateName": name} for claim in _name_claims(resolved, settings)
    ]


def build_claim_templates(resolved: Resolved, templates: Iterable[Mapping[str, Any]]) -> tuple[Manifest, ...]:
    """The ResourceClaimTemplates that these pod templates name, each once, in the order of their names."""
    annotations = {
        annotation
        for template in templates
        if (annotation := template["metadata"].get("annotations", {}).get(names.ANNOTATION_DEVICES)) is not None
    }
    built = [_build_claim_template(resolved, annotation) for annotation in annotations]
    return tuple(sorted(built, key=lambda manifest: str(manifest["metadata"]["name"])))


def _build_claim_template(resolved: Resolved, annotation: str) -> Manifest:
    claim = _Claim(**json.loads(annotation))
    requests = [
        {"name": name, "exactly": {"deviceClassName": device_class, "allocationMode": "ExactCount", "count": count}}
        for name, device_class, count in (
            ("gpus", claim.gpu_class, claim.gpus),
            ("interfaces", claim.efa_class, claim.interfaces),
        )
        if count
    ]
    devices: Manifest = {"requests": requests}
    if claim.is_aligned:
        devices["constraints"] = [{"requests": ["gpus", "interfaces"], "matchAttribute": PCIE_ROOT}]
    template = build_object(RESOURCE_CLAIM_TEMPLATE, resolved, _claim_template_name(resolved.name, annotation))
    template["spec"] = {"spec": {"devices": devices}}
    return template
