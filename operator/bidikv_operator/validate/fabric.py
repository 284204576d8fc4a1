"""``spec.fabric``, and what it gives each pod."""

from __future__ import annotations

from typing import Final

from bidikv_operator import resolved
from bidikv_operator.api.v1alpha1 import FabricSpec
from bidikv_operator.fabric import INSTANCE_TYPES, compute_interfaces
from bidikv_operator.validate.problem import Problem, Problems

FIELD: Final = "spec.fabric"
DEFAULT_HUGE_PAGES_MEBIBYTES: Final = 5120


def resolve_fabric(given: FabricSpec) -> tuple[resolved.ResolvedFabric, Problems]:
    problems = _check_efa_only(given) + _check_device_classes(given)
    huge_pages = DEFAULT_HUGE_PAGES_MEBIBYTES if given.huge_pages_mebibytes is None else given.huge_pages_mebibytes
    if huge_pages % 2:
        problems.append(Problem(f"{FIELD}.hugePagesMebibytes", f"{huge_pages} is odd; a huge page has 2 MiB"))
    classes, verification = given.device_classes, given.verification
    fabric = resolved.ResolvedFabric(
        type=given.type,
        instance_type=given.instance_type,
        devices=given.devices or "DevicePlugin",
        privileged=given.privileged == "Enabled",
        huge_pages_mebibytes=huge_pages,
        minimum_gigabits_per_second=None if verification is None else verification.minimum_gigabits_per_second,
        gates_ready=verification is not None and verification.gate == "Ready",
        **({} if classes is None or classes.gpu is None else {"gpu_device_class": classes.gpu}),
        **({} if classes is None or classes.efa is None else {"efa_device_class": classes.efa}),
    )
    return fabric, problems


def _check_efa_only(given: FabricSpec) -> Problems:
    if given.type == "EFA":
        if given.instance_type is None and given.interfaces_per_pod is None:
            return [Problem(FIELD, "type EFA needs instanceType or interfacesPerPod; set one of them")]
        return []
    only = {
        "instanceType": given.instance_type,
        "interfacesPerPod": given.interfaces_per_pod,
        "privileged": given.privileged,
        "hugePagesMebibytes": given.huge_pages_mebibytes,
        "deviceClasses.efa": given.device_classes.efa if given.device_classes else None,
    }
    return [
        Problem(f"{FIELD}.{field}", "belongs to type EFA; remove it, or set type to EFA")
        for field, value in only.items()
        if value is not None
    ]


def _check_device_classes(given: FabricSpec) -> Problems:
    if given.device_classes is None or given.devices == "ResourceClaim":
        return []
    return [Problem(f"{FIELD}.deviceClasses", "belongs to devices ResourceClaim; remove it, or set devices to that")]


def resolve_interfaces(field: str, fabric: FabricSpec, gpus: int) -> tuple[int, Problems]:
    """EFA interfaces of a pod with ``gpus`` GPUs; ``field`` is the role's."""
    if fabric.type != "EFA":
        return 0, []
    instance = INSTANCE_TYPES.get(fabric.instance_type) if fabric.instance_type else None
    problems = []
    if instance is not None and gpus > instance.gpus:
        problems.append(
            Problem(
                f"{field}.gpusPerPod",
                f"{gpus} GPUs do not fit on a {fabric.instance_type}, which has {instance.gpus}; lower gpusPerPod or "
                "tensorParallelSize, raise nodesPerReplica, or choose another instanceType",
            )
        )
    if fabric.interfaces_per_pod is not None:
        if instance is not None and fabric.interfaces_per_pod > instance.interfaces:
            problems.append(
                Problem(
                    f"{FIELD}.interfacesPerPod",
                    f"{fabric.interfaces_per_pod} interfaces do not fit on a {fabric.instance_type}, which has "
                    f"{instance.interfaces}; lower interfacesPerPod",
                )
            )
        return fabric.interfaces_per_pod, problems
    if instance is None or fabric.instance_type is None:
        return 0, problems  # told by resolve_fabric
    return compute_interfaces(fabric.instance_type, gpus), problems
