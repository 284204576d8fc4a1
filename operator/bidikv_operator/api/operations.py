"""How a service is run: monitoring, replacement of pods, security and healing."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from bidikv_operator.api.base import ApiModel, IntOrString, LabelValue, Switch, cel, validations


class Monitoring(ApiModel):
    """How Prometheus finds the pods' metrics."""

    pod_monitor: Switch | None = Field(
        default=None,
        description=(
            "Enabled: a PodMonitor of the Prometheus operator for engines and routers; its CRD must be installed. "
            "Disabled when unset."
        ),
    )
    interval_seconds: int | None = Field(default=None, ge=1, le=3600, description="Between two scrapes; 30 when unset.")
    labels: dict[str, LabelValue] | None = Field(
        default=None, max_length=32, description="Labels of the PodMonitor, by which a Prometheus selects it."
    )


PERCENT_PATTERN = r"^(0|[1-9][0-9]?|100)%$"
PodCount = Annotated[int | str, IntOrString(minimum=0, maximum=1024, pattern=PERCENT_PATTERN, max_length=4)]
"""Pods of a role, or percent of its replicas."""


class UpdateStrategy(ApiModel):
    """How the pods of an engine role are replaced."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            cel(
                "!has(self.maxUnavailable) || !(self.maxUnavailable == 0 || self.maxUnavailable == '0%') || "
                "(has(self.maxSurge) && !(self.maxSurge == 0 || self.maxSurge == '0%'))",
                "maxUnavailable and maxSurge (0 when unset) are both 0, so that no pod could ever be replaced: raise "
                "one of them",
            )
        )
    )
    max_surge: PodCount | None = Field(
        default=None,
        description="Replicas above the wanted number during a change, or percent of it (rounded up); 0 when unset.",
    )
    max_unavailable: PodCount | None = Field(
        default=None,
        description="Wanted replicas that may be missing during a change, or percent (rounded down); 1 when unset.",
    )
    progress_deadline_seconds: int | None = Field(
        default=None,
        ge=60,
        le=86400,
        description="A change without any progress for this long is reported as failed; 4200 when unset.",
    )
    drain_seconds: int | None = Field(
        default=None,
        ge=0,
        le=3600,
        description=(
            "How long a stopping engine waits for the next turns of its sessions, so that their KV moves on; 120 when "
            "unset."
        ),
    )


class MetricsFrom(ApiModel):
    """Who may read the engines' metrics through the NetworkPolicy."""

    namespace_labels: dict[str, LabelValue] = Field(
        min_length=1,
        max_length=32,
        description="Pods of namespaces with all of these labels, as kubernetes.io/metadata.name: monitoring.",
    )


class PeerToken(ApiModel):
    """The secret by which engines and routers of one resource know each other."""

    rotation_days: int | None = Field(
        default=None,
        ge=0,
        le=3650,
        description="Age at which it is replaced, without a restart; 0 or unset: only when rotation changes.",
    )
    rotation: str | None = Field(
        default=None, max_length=256, description="Any text, as a date; another one replaces the token at once."
    )


class Security(ApiModel):
    """What protects the engines."""

    network_policy: Switch | None = Field(
        default=None,
        description=(
            "Enabled: a NetworkPolicy admits to engines only the resource's routers and engines, the operator and "
            "metricsFrom. Enabled when unset."
        ),
    )
    metrics_from: MetricsFrom | None = Field(
        default=None, description="Who else may read engines' metrics; nobody when unset."
    )
    pod_security: Literal["Restricted", "Unrestricted"] | None = Field(
        default=None,
        description=(
            "Restricted: engines run as a user of their own and without privileges that their fabric does not need. "
            "Unrestricted: as the image's user. Restricted when unset."
        ),
    )
    peer_token: PeerToken | None = Field(
        default=None, description="The secret by which engines and routers know each other."
    )


class Healing(ApiModel):
    """What happens to an engine that Kubernetes calls ready and its peers cannot reach."""

    mode: Switch | None = Field(
        default=None, description="Enabled: such a pod is deleted, so that another one replaces it. Enabled when unset."
    )
    maximum_per_hour: int | None = Field(
        default=None, ge=1, le=64, description="Most pods deleted within an hour; 4 when unset."
    )
    unreachable_seconds: int | None = Field(
        default=None,
        ge=30,
        le=86400,
        description="How long most of its peers must have called it unreachable; 60 when unset.",
    )
