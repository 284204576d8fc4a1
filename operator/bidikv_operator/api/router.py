"""``spec.router``: the OpenAI endpoint that knows sessions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from bidikv_operator.api.base import ApiModel, Name, Replicas, Switch, cel, validations
from bidikv_operator.api.pods import PodResources, PodTemplate, Scheduling


class Tracing(ApiModel):
    """OpenTelemetry traces."""

    endpoint: str = Field(
        max_length=1024,
        pattern=r"^https?://[^\s]+$",
        description="OTLP/HTTP endpoint, e.g. http://collector.observability:4318/v1/traces.",
    )
    sample_percent: int | None = Field(
        default=None,
        ge=0,
        le=100,
        description="Share of new traces that are sampled; 100 when unset. A client's trace keeps its own decision.",
    )


Bytes = Annotated[int, Field(ge=1024, le=2**40, json_schema_extra={"format": "int64"})]
Seconds = Annotated[int, Field(ge=1, le=86400)]


class RouterLimits(ApiModel):
    """Bounds of one router pod; unset ones have the router's own defaults."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            cel(
                "!has(self.maximumBodyBytes) || "
                "self.maximumBodyBytes <= (has(self.maximumBufferedBytes) ? self.maximumBufferedBytes : 536870912)",
                "maximumBodyBytes is larger than maximumBufferedBytes (536870912 when unset), so that no such body "
                "could ever be read: raise maximumBufferedBytes",
                ".maximumBodyBytes",
            )
        )
    )
    maximum_concurrent_requests: int | None = Field(
        default=None, ge=1, le=1000000, description="Requests in flight; above it clients get 503. 4096 when unset."
    )
    maximum_queued_turns: int | None = Field(
        default=None,
        ge=0,
        le=1000000,
        description="Turns that wait for a prefill engine; above it clients get 429. 1024 when unset.",
    )
    queue_seconds: Seconds | None = Field(
        default=None, description="Longest wait for a prefill engine; after it clients get 503. 60 when unset."
    )
    maximum_prefills_per_engine: int | None = Field(
        default=None,
        ge=0,
        le=100000,
        description="Prefills under way per ready prefill engine; 64 when unset, 0 for no bound.",
    )
    maximum_body_bytes: Bytes | None = Field(
        default=None, description="Largest request body; above it the client gets 413. 64 MiB when unset."
    )
    maximum_buffered_bytes: Bytes | None = Field(
        default=None, description="Request bodies held at once, all clients together; 512 MiB when unset."
    )
    prefill_silence_seconds: Seconds | None = Field(
        default=None, description="Longest silence of prefill, its queue included; 600 when unset."
    )
    decode_first_byte_seconds: Seconds | None = Field(
        default=None,
        description="Longest wait for decode's first byte (without streaming: its whole answer); 3600 when unset.",
    )
    decode_silence_seconds: Seconds | None = Field(
        default=None, description="Longest silence within decode's answer; 600 when unset."
    )


class RouterService(ApiModel):
    """The Service in front of the routers."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] | None = Field(
        default=None, description="Type of the Service; ClusterIP when unset."
    )
    annotations: dict[str, Annotated[str, Field(max_length=4096)]] | None = Field(
        default=None, max_length=32, description="Annotations of the Service, as for a cloud's load balancer."
    )


class RouterSpec(ApiModel):
    """The router pods."""

    replicas: Replicas | None = Field(default=None, description="Router pods; 2 when unset.")
    resources: PodResources | None = Field(default=None, description="CPU and memory of the router container.")
    scheduling: Scheduling | None = Field(default=None, description="On which nodes the pods may run.")
    local_limit_tokens: int | None = Field(
        default=None,
        ge=0,
        le=1000000,
        description=(
            "A turn of which decode has to compute at most this many tokens may go to decode alone; 512 when unset, 0 "
            "for never."
        ),
    )
    missing_prefill: Literal["Decode", "Fail"] | None = Field(
        default=None,
        description=(
            "What happens to a turn whose prefill does not say what it computed: Decode computes what is missing, or "
            "the turn Fails with 502. Decode when unset."
        ),
    )
    continue_streams: Switch | None = Field(
        default=None,
        description=(
            "Enabled: when decode dies within a stream, another engine goes on from the text already sent. Disabled "
            "when unset."
        ),
    )
    tenant_isolation: Switch | None = Field(
        default=None,
        description=(
            "Enabled: KV is shared only between requests with the same Authorization header. Disabled when unset."
        ),
    )
    tls_secret_name: Name | None = Field(
        default=None,
        description="Secret of type kubernetes.io/tls in the same namespace with which routers serve HTTPS.",
    )
    access_log: Switch | None = Field(
        default=None, description="Enabled: one JSON line per request on standard output. Disabled when unset."
    )
    tracing: Tracing | None = Field(default=None, description="OpenTelemetry traces; none when unset.")
    debug: Switch | None = Field(
        default=None,
        description=(
            "Enabled: routers serve /debug/sessions and obey the header x-bidikv-path of every client. Disabled when "
            "unset."
        ),
    )
    limits: RouterLimits | None = Field(default=None, description="Bounds of one router pod.")
    service: RouterService | None = Field(default=None, description="The Service in front of the routers.")
    pod_template: PodTemplate | None = Field(
        default=None, description="Override of the router's pod template; its container is called `router`."
    )
