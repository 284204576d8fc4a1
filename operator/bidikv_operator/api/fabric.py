"""``spec.fabric``: the network that carries KV blocks between the engines."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from bidikv_operator.api.base import ApiModel, Name, Switch, cel, validations


def _only_with_efa(field: str) -> dict[str, str]:
    return cel(
        f"self.type == 'EFA' || !has(self.{field})",
        f"{field} belongs to type EFA: remove it, or set type to EFA",
        f".{field}",
    )


class DeviceClasses(ApiModel):
    """DeviceClasses from which claims ask for devices."""

    gpu: Name | None = Field(default=None, description="Of the GPUs; gpu.nvidia.com when unset.")
    efa: Name | None = Field(default=None, description="Of the EFA interfaces; efa.networking.k8s.aws when unset.")


class Verification(ApiModel):
    """What the condition TransportVerified demands, and what depends on it."""

    minimum_gigabits_per_second: int | None = Field(
        default=None,
        ge=1,
        le=12800,
        description="Least bandwidth measured between two engines; any bandwidth when unset.",
    )
    gate: Literal["Ready", "Disabled"] | None = Field(
        default=None,
        description="Ready: the condition Ready is true only while TransportVerified is. Disabled when unset.",
    )


class FabricSpec(ApiModel):
    """The network that carries KV blocks between the engines."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            cel(
                "self.type != 'EFA' || has(self.instanceType) || has(self.interfacesPerPod)",
                "type EFA needs instanceType or interfacesPerPod: set one, it says how many EFA interfaces a pod gets",
            ),
            _only_with_efa("instanceType"),
            _only_with_efa("interfacesPerPod"),
            _only_with_efa("privileged"),
            _only_with_efa("hugePagesMebibytes"),
            cel(
                "!has(self.deviceClasses) || (has(self.devices) && self.devices == 'ResourceClaim')",
                "deviceClasses belongs to devices ResourceClaim: remove it, or set devices to ResourceClaim",
                ".deviceClasses",
            ),
            cel(
                "self.type == 'EFA' || !has(self.deviceClasses) || !has(self.deviceClasses.efa)",
                "deviceClasses names a class of EFA interfaces: remove its efa, or set type to EFA",
                ".deviceClasses.efa",
            ),
        )
    )
    type: Literal["EFA", "TCP"] = Field(
        description="What carries the KV blocks: EFA (NIXL LIBFABRIC) or TCP (NIXL UCX)."
    )
    instance_type: (
        Literal[
            "p4d.24xlarge",
            "p4de.24xlarge",
            "p5.48xlarge",
            "p5e.48xlarge",
            "p5en.48xlarge",
            "p6-b200.48xlarge",
            "p6e-gb200.36xlarge",
        ]
        | None
    ) = Field(default=None, description="EC2 instance type; gives the EFA interfaces per GPU and selects the nodes.")
    interfaces_per_pod: int | None = Field(
        default=None, ge=1, le=64, description="EFA interfaces per engine pod; overrides what instanceType gives."
    )
    devices: Literal["DevicePlugin", "ResourceClaim"] | None = Field(
        default=None,
        description=(
            "How pods ask for GPUs and EFA interfaces: DevicePlugin (extended resources) or ResourceClaim (dynamic "
            "resource allocation, Kubernetes 1.34 or newer); DevicePlugin when unset."
        ),
    )
    device_classes: DeviceClasses | None = Field(
        default=None, description="DeviceClasses that the claims of devices ResourceClaim name."
    )
    privileged: Switch | None = Field(
        default=None,
        description=(
            "Enabled: engine containers are privileged, which some EFA drivers want for registering GPU memory. "
            "Disabled, with IPC_LOCK alone, when unset."
        ),
    )
    huge_pages_mebibytes: int | None = Field(
        default=None,
        ge=0,
        le=1048576,
        description="Huge pages of 2 MiB per engine pod, in MiB; 5120 when unset, 0 for none.",
        json_schema_extra=validations(
            cel("self % 2 == 0", "hugePagesMebibytes must be even, a huge page has 2 MiB: choose the next even number")
        ),
    )
    verification: Verification | None = Field(
        default=None, description="What TransportVerified demands of the engines' own reports."
    )
