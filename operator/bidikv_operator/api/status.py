"""``status``: what the operator observed. Numbers are coarse, so that they change rarely."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bidikv_operator.api.base import ATOMIC_LIST, ApiModel, Count, Generation, map_list


class Condition(ApiModel):
    """Same shape as ``metav1.Condition``."""

    type: str = Field(max_length=316, description="Kind of condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    observed_generation: Generation | None = Field(
        default=None, description="metadata.generation it was computed from."
    )
    last_transition_time: str = Field(
        description="When status last changed.", json_schema_extra={"format": "date-time"}
    )
    reason: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="CamelCase word for programs.",
    )
    message: str = Field(max_length=32768, description="Sentence for people.")


class RoleStatus(ApiModel):
    """Pods of one role, counted."""

    replicas: Count | None = Field(default=None, description="Replicas that exist.")
    ready_replicas: Count | None = Field(default=None, description="Replicas that are ready.")
    updated_replicas: Count | None = Field(default=None, description="Replicas of the newest template.")
    selector: str | None = Field(default=None, max_length=1024, description="Label selector of the pods, for /scale.")


class EngineRoleStatus(RoleStatus):
    """Pods of one engine role, counted."""

    group: str | None = Field(
        default=None,
        max_length=63,
        description="Compatibility group of the newest template: only engines of one group exchange KV.",
    )


class KVReuseStatus(ApiModel):
    """The engines' KV, as they report it."""

    sessions: Count | None = Field(
        default=None, description="Sessions of whose KV the decode engines still hold some, rounded."
    )
    reused_tokens_percent: int | None = Field(
        default=None,
        ge=0,
        le=100,
        description="Share of prompt tokens whose KV prefill read from other engines since they started, rounded.",
    )


class TransportStatus(ApiModel):
    """What moves KV between the engines, as they report it."""

    backend: str | None = Field(default=None, max_length=64, description="NIXL's backend, as LIBFABRIC or UCX.")
    provider: str | None = Field(
        default=None, max_length=64, description="What the backend moves bytes with, as efa or tcp."
    )
    gigabits_per_second: Count | None = Field(
        default=None, description="Least bandwidth measured between two engines, rounded down."
    )


class RecycledEngine(ApiModel):
    """An engine pod that was deleted because its peers could not reach it."""

    role: Literal["prefill", "decode"] = Field(description="Its role.")
    time: str = Field(description="When it was deleted.", json_schema_extra={"format": "date-time"})


class HealingStatus(ApiModel):
    """What healing has done lately. It bounds healing, also under the operator's next leader."""

    recycled: list[RecycledEngine] | None = Field(
        default=None,
        max_length=64,
        description="Engine pods that were deleted within the hour before the last of them, oldest first.",
        json_schema_extra=ATOMIC_LIST,
    )


class BidiKVInferenceStatus(ApiModel):
    """Observed state."""

    observed_generation: Generation | None = Field(default=None, description="metadata.generation last reconciled.")
    conditions: list[Condition] | None = Field(
        default=None,
        max_length=32,
        description=(
            "Accepted, PrefillReady, DecodeReady, RouterReady, TransportVerified, Scaling, Progressing, Degraded and "
            "the summary Ready."
        ),
        json_schema_extra=map_list("type"),
    )
    endpoint: str | None = Field(
        default=None, max_length=1024, description="Base URL of the OpenAI API in the cluster."
    )
    runtime_image: str | None = Field(
        default=None, max_length=512, description="Image of router and connector in the newest engine template."
    )
    prefill: EngineRoleStatus | None = Field(default=None, description="Counts of the prefill pods.")
    decode: EngineRoleStatus | None = Field(default=None, description="Counts of the decode pods.")
    router: RoleStatus | None = Field(default=None, description="Counts of the router pods.")
    kv_reuse: KVReuseStatus | None = Field(default=None, description="The engines' KV.")
    transport: TransportStatus | None = Field(default=None, description="What moves KV between the engines.")
    healing: HealingStatus | None = Field(default=None, description="What healing has done lately.")
