"""The ``BidiKVInference`` resource, version v1alpha1.

These models are the single source of the CRD schema (``schema.py`` converts, ``crd.py`` assembles). They are frozen and
know nothing of Kubernetes clients, so that users may import them to write resources in Python. Each part of the spec
has a file beside this one; everything that users or the operator name is imported from here.

Rules that keep the schema structural and GitOps quiet: no defaults inside list items, no floats, no maps of objects,
enums as CamelCase strings that can grow, units in names, every string and list bounded (the API server refuses CEL
rules over unbounded ones), a description on every field. Unknown fields are ignored on reading, so that an older
operator survives a newer CRD; strictness belongs to the schema.

Optional fields have no default in the schema: what an unset field means is decided in the operator and said in the
field's description, so that the stored object stays what the user wrote. Later additions are optional fields of
the objects below (``kvReuse``, ``router``...) or new optional objects beside them; a published name never changes its
meaning.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import ConfigDict, Field

from bidikv_operator.api.base import (
    SET_LIST,
    ApiModel,
    ImageReference,
    Name,
    cel,
    map_list,
    validations,
)
from bidikv_operator.api.engine import FOREIGN_FLAGS, OWNED_FLAGS, SHORT_FLAGS, EngineRole
from bidikv_operator.api.fabric import FabricSpec
from bidikv_operator.api.model import LORA_RANKS, AdapterSource, LoraAdapter, Model, ModelSource
from bidikv_operator.api.operations import Healing, Monitoring, Security, UpdateStrategy
from bidikv_operator.api.pods import PodResources, Scheduling
from bidikv_operator.api.reuse import KVReuse
from bidikv_operator.api.router import RouterSpec
from bidikv_operator.api.scaling import Autoscaling, ReplicaBounds
from bidikv_operator.api.status import BidiKVInferenceStatus

__all__ = [
    "FOREIGN_FLAGS",
    "LORA_RANKS",
    "MAX_NAME_LENGTH",
    "NAME_RULES",
    "OWNED_FLAGS",
    "SHORT_FLAGS",
    "AdapterSource",
    "Autoscaling",
    "BidiKVInference",
    "BidiKVInferenceSpec",
    "BidiKVInferenceStatus",
    "EngineRole",
    "FabricSpec",
    "Healing",
    "KVReuse",
    "LoraAdapter",
    "Model",
    "ModelSource",
    "Monitoring",
    "PodResources",
    "ReplicaBounds",
    "RouterSpec",
    "Scheduling",
    "Security",
    "UpdateStrategy",
    "cel",
    "map_list",
    "validations",
]

MAX_NAME_LENGTH: Final = 40
"""Of ``metadata.name``: ``<name>-prefill-<group>`` then still fits a label and, with a pod's numbers, a host name of 63
characters."""
NAME_RULES: Final = (
    cel(
        f"self.metadata.name.size() <= {MAX_NAME_LENGTH}",
        f"metadata.name is too long: use at most {MAX_NAME_LENGTH} characters, because the names of its pods and "
        "Services start with it",
        ".metadata.name",
    ),
    cel(
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name must start with a letter and hold only lower-case letters, digits and '-', because its Service "
        "has the same name: choose another name (dots are not allowed)",
        ".metadata.name",
    ),
)
"""CEL rules of the root; of the metadata, the API server shows a rule there only ``name`` and ``generateName``."""


class Runtime(ApiModel):
    """The project's own part of engine and router pods."""

    image: ImageReference | None = Field(
        default=None,
        description="Image of router and connector; the operator's own when the pods were last rendered, when unset.",
    )
    restart: str | None = Field(
        default=None,
        max_length=256,
        description=(
            "Any text, as a date; another one renders the engines anew, with the operator's present runtime image if "
            "none is given here."
        ),
    )


_BOTH_TENSOR_SIZES = (
    "has(self.prefill) && has(self.prefill.tensorParallelSize) && has(self.decode) && "
    "has(self.decode.tensorParallelSize)"
)


class BidiKVInferenceSpec(ApiModel):
    """Desired state."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            cel(
                f"!({_BOTH_TENSOR_SIZES}) || "
                "self.prefill.tensorParallelSize % self.decode.tensorParallelSize == 0 || "
                "self.decode.tensorParallelSize % self.prefill.tensorParallelSize == 0",
                "prefill and decode have values of tensorParallelSize of which neither divides the other, so that no "
                "KV can be read across: choose sizes of which one divides the other",
            )
        )
    )
    model: Model = Field(description="What is served.")
    image: ImageReference = Field(
        description="vLLM image of the engines, stock or your own; e.g. vllm/vllm-openai:v0.32.0."
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="When images are pulled; Kubernetes' own default when unset."
    )
    image_pull_secrets: list[Name] | None = Field(
        default=None,
        max_length=16,
        description="Names of Secrets for pulling images, in the same namespace.",
        json_schema_extra=SET_LIST,
    )
    runtime: Runtime | None = Field(default=None, description="The image of router and connector.")
    fabric: FabricSpec = Field(description="The network between the engines.")
    kv_reuse: KVReuse | None = Field(
        default=None, description="Reuse of KV between turns; mode Bidirectional when unset."
    )
    prefill: EngineRole | None = Field(default=None, description="Pods that compute prompts.")
    decode: EngineRole | None = Field(
        default=None, description="Pods that generate tokens and hold the conversations' KV."
    )
    router: RouterSpec | None = Field(default=None, description="The OpenAI endpoint that knows sessions.")
    autoscaling: Autoscaling | None = Field(
        default=None, description="Who sets the replicas of the engine roles; mode Disabled when unset."
    )
    monitoring: Monitoring | None = Field(default=None, description="How Prometheus finds the pods' metrics.")
    update_strategy: UpdateStrategy | None = Field(default=None, description="How engine pods are replaced.")
    security: Security | None = Field(default=None, description="What protects the engines.")
    healing: Healing | None = Field(default=None, description="What happens to engines that their peers cannot reach.")
    paused: bool | None = Field(
        default=None,
        strict=True,
        description="True: the operator changes nothing but the status; pods go on as they are. False when unset.",
    )


class BidiKVInference(ApiModel):
    """One prefill/decode-disaggregated vLLM service whose decode KV cache flows back to prefill at the next turn."""

    spec: BidiKVInferenceSpec = Field(description="Desired state.")
    status: BidiKVInferenceStatus | None = Field(default=None, description="Observed state, written by the operator.")
