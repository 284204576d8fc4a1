"""What pods of any role share: environment, resources, scheduling, and the override of the whole template."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from bidikv_operator.api.base import (
    ATOMIC_LIST,
    ApiModel,
    IntOrString,
    LabelKey,
    LabelValue,
    Name,
    cel,
    validations,
)


class EnvVar(ApiModel):
    """A literal environment variable; values from Secrets and the like go into podTemplate."""

    name: str = Field(
        min_length=1, max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="Environment variable's name."
    )
    value: str = Field(max_length=4096, description="Its value.")


CPU_PATTERN: Final = r"^([1-9][0-9]{0,3}|(0|[1-9][0-9]{0,3})\.[0-9]{0,2}[1-9]|[1-9][0-9]{0,6}m)$"
MEMORY_PATTERN: Final = r"^[1-9][0-9]{0,8}(Mi|Gi|Ti|M|G|T)$"
Cpu = Annotated[int | str, IntOrString(minimum=1, maximum=4096, pattern=CPU_PATTERN, max_length=8)]
Memory = Annotated[str, Field(max_length=11, pattern=MEMORY_PATTERN)]


class PodResources(ApiModel):
    """Requests of the main container, as Kubernetes quantities; the memory is its limit, too."""

    cpu: Cpu | None = Field(default=None, description="CPUs, as 4 or 500m.")
    memory: Memory | None = Field(default=None, description="Memory with its unit, as 64Gi; also the limit.")


class Toleration(ApiModel):
    """A taint that the pods tolerate, as in a PodSpec."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            cel(
                "has(self.key) || (has(self.operator) && self.operator == 'Exists')",
                "key is missing: set it, or set operator to Exists to tolerate every taint",
            ),
            cel(
                "!has(self.value) || !has(self.operator) || self.operator == 'Equal'",
                "value belongs to operator Equal: remove it",
                ".value",
            ),
            cel(
                "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
                "tolerationSeconds belongs to effect NoExecute: remove it, or set effect to NoExecute",
                ".tolerationSeconds",
            ),
        )
    )
    key: LabelKey | None = Field(default=None, description="Key of the taint; every taint when unset.")
    operator: Literal["Exists", "Equal"] | None = Field(
        default=None, description="Whether the key or key and value must match; Equal when unset."
    )
    value: LabelValue | None = Field(default=None, description="Value of the taint.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect of the taint; every effect when unset."
    )
    toleration_seconds: int | None = Field(
        default=None,
        ge=0,
        le=2**31 - 1,
        description="How long a pod stays after a NoExecute taint; for ever when unset.",
    )


class Scheduling(ApiModel):
    """On which nodes pods may run."""

    node_selector: dict[str, LabelValue] | None = Field(
        default=None, max_length=32, description="Labels that a node must have."
    )
    tolerations: list[Toleration] | None = Field(
        default=None,
        max_length=32,
        description="Taints that the pods tolerate, besides those that their GPUs need.",
        json_schema_extra=ATOMIC_LIST,
    )
    priority_class_name: Name | None = Field(default=None, description="PriorityClass of the pods.")
    scheduler_name: Name | None = Field(default=None, description="Scheduler; the cluster's own when unset.")


class EngineScheduling(Scheduling):
    """On which nodes engine pods may run."""

    topology_key: LabelKey | None = Field(
        default=None,
        description=(
            "Node label in one domain of which all pods of both engine roles must run, as of a rack or placement "
            "group; with EFA they share a zone in any case."
        ),
    )


_POD_TEMPLATE_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "metadata": {
            "type": "object",
            "description": "Labels and annotations to add to the pods.",
            "properties": {
                "labels": {
                    "type": "object",
                    "description": "Further labels; those that the operator selects on cannot be changed.",
                    "maxProperties": 64,
                    "additionalProperties": {"type": "string", "maxLength": 63},
                },
                "annotations": {
                    "type": "object",
                    "description": "Further annotations.",
                    "maxProperties": 64,
                    "additionalProperties": {"type": "string", "maxLength": 65536},
                },
            },
        },
        "spec": {
            "type": "object",
            "description": "Any part of a PodSpec (see `kubectl explain pod.spec`); checked when the pods are applied.",
            "x-kubernetes-preserve-unknown-fields": True,
        },
    },
}
PodTemplate = Annotated[dict[str, Any], WithJsonSchema(_POD_TEMPLATE_SCHEMA)]
"""A pod template override; merged by name into the generated template (``build/``).

A dict, because it is merged and not read. PodSpec is not expanded in the schema: it would make the CRD too large for
client-side apply (256 KiB) and tie it to one Kubernetes version.
"""
