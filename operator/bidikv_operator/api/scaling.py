"""``spec.autoscaling``: who sets the replicas, within which bounds, and what users should feel."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from bidikv_operator.api.base import ApiModel, Replicas, cel, validations


class Objectives(ApiModel):
    """What users should feel; routers export them with how many turns met them."""

    time_to_first_token_p90_milliseconds: int | None = Field(
        default=None,
        ge=1,
        le=3600000,
        alias="timeToFirstTokenP90Milliseconds",
        description="90th percentile of the time from a request to its first token.",
    )
    inter_token_latency_p90_milliseconds: int | None = Field(
        default=None,
        ge=1,
        le=60000,
        alias="interTokenLatencyP90Milliseconds",
        description="90th percentile of the time between two tokens of an answer.",
    )


class ReplicaBounds(ApiModel):
    """Bounds of one role's replicas; both hold whoever writes them."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            cel(
                "!has(self.minReplicas) || self.minReplicas <= self.maxReplicas",
                "minReplicas is greater than maxReplicas: raise maxReplicas or choose a smaller minReplicas",
                ".minReplicas",
            )
        )
    )
    min_replicas: Replicas | None = Field(default=None, description="Fewest replicas; 1 (or maxReplicas) when unset.")
    max_replicas: Replicas = Field(description="Most replicas.")


class Autoscaling(ApiModel):
    """Who sets the replicas of the engine roles."""

    mode: Literal["Disabled", "External"] = Field(
        description=(
            "External: something else, as a HorizontalPodAutoscaler or KEDA, writes prefill.replicas and "
            "decode.replicas, and the operator keeps them within the bounds. Disabled: replicas are as written."
        )
    )
    objectives: Objectives | None = Field(default=None, description="What users should feel.")
    prefill: ReplicaBounds | None = Field(
        default=None, description="Bounds of prefill.replicas with mode External; none when unset."
    )
    decode: ReplicaBounds | None = Field(
        default=None, description="Bounds of decode.replicas with mode External; none when unset."
    )
