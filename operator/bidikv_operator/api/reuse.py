"""``spec.kvReuse``: how the KV of earlier turns is used again."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from bidikv_operator.api.base import ApiModel, cel, validations


def _only_session_aware(field: str) -> dict[str, str]:
    return cel(
        f"!has(self.{field}) || !has(self.policy) || self.policy == 'SessionAware'",
        f"{field} belongs to policy SessionAware: remove it, or set policy to SessionAware",
        f".{field}",
    )


class Retention(ApiModel):
    """Which cached blocks an engine evicts last."""

    model_config = ConfigDict(
        json_schema_extra=validations(_only_session_aware("budgetPercent"), _only_session_aware("idleSeconds"))
    )
    policy: Literal["SessionAware", "LRU"] | None = Field(
        default=None,
        description=(
            "SessionAware: blocks of sessions that will be back are evicted last. LRU: vLLM's own order. "
            "SessionAware when unset."
        ),
    )
    budget_percent: int | None = Field(
        default=None, ge=0, le=90, description="Share of the KV cache that sessions may hold; 60 when unset."
    )
    idle_seconds: int | None = Field(
        default=None,
        ge=1,
        le=86400,
        description="A session without a request for this long is held no more; 600 when unset.",
    )


class KVReuse(ApiModel):
    """How the KV of earlier turns is used again."""

    mode: Literal["Bidirectional", "OneWay"] = Field(
        description=(
            "Bidirectional: prefill reads a conversation's history back from decode. "
            "OneWay: KV moves from prefill to decode only."
        )
    )
    retention: Retention | None = Field(default=None, description="Which cached blocks an engine evicts last.")
