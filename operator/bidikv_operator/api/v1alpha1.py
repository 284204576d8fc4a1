"""The ``BidiKVInference`` resource, version v1alpha1.

These models are the single source of the CRD schema (``schema.py`` converts, ``crd.py`` assembles). They are frozen and
know nothing of Kubernetes clients, so that users may import them to write resources in Python.

Rules that keep the schema structural and GitOps quiet: no defaults inside list items, no floats, no maps of objects,
enums as CamelCase strings that can grow, units in names, every string and list bounded (the API server refuses CEL
rules over unbounded ones), a description on every field. Unknown fields are ignored on reading, so that an older
operator survives a newer CRD; strictness belongs to the schema.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """Base of every part of the resource: frozen, camelCase on the wire."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True, extra="ignore")


def cel(rule: str, message: str) -> dict[str, str]:
    """One ``x-kubernetes-validations`` entry; ``message`` is the sentence that the user reads."""
    return {"rule": rule, "message": message}


Name = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
Argument = Annotated[str, Field(min_length=1, max_length=4096)]
Replicas = Annotated[int, Field(ge=0, le=1024)]

OWNED_FLAGS = (
    "--kv-transfer-config",
    "--enable-prefix-caching",
    "--no-enable-prefix-caching",
    "--prefix-caching-hash-algo",
    "--host",
    "--port",
    "--model",
    "--served-model-name",
    "--max-model-len",
    "--tensor-parallel-size",
)
"""vLLM flags that the operator sets itself: ``extraArgs`` may not name them."""


class HuggingFaceSource(ApiModel):
    repository: str = Field(
        min_length=1, max_length=256, description="Repository on the Hugging Face hub, e.g. Qwen/Qwen3-32B."
    )
    revision: str | None = Field(
        default=None, min_length=1, max_length=128, description="Branch, tag or commit; a commit makes pods reproducible."
    )
    token_secret_name: Name | None = Field(
        default=None, description="Secret in the same namespace whose key `token` holds the hub's access token."
    )


class PersistentVolumeClaimSource(ApiModel):
    claim_name: Name = Field(description="PersistentVolumeClaim in the same namespace; mounted read-only.")
    path: str = Field(
        min_length=1, max_length=1024, pattern=r"^[^/].*$", description="Path of the model inside the volume, relative."
    )


class ModelSource(ApiModel):
    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "[has(self.huggingFace), has(self.persistentVolumeClaim), has(self.path)].filter(x, x).size() == 1",
                    "set exactly one of huggingFace, persistentVolumeClaim and path",
                )
            ]
        }
    )
    hugging_face: HuggingFaceSource | None = Field(default=None, description="A model on the Hugging Face hub.")
    persistent_volume_claim: PersistentVolumeClaimSource | None = Field(
        default=None, description="A model on a PersistentVolumeClaim."
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        pattern=r"^/.*$",
        description="Absolute path inside the engine image, or in a volume that podTemplate mounts.",
    )


class Model(ApiModel):
    source: ModelSource = Field(description="Where the model comes from.")
    served_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="Model name in the OpenAI API; the resource's name when unset.",
    )
    max_length: int | None = Field(
        default=None, ge=1, le=16777216, description="Longest context in tokens; the model's own limit when unset."
    )


class FabricSpec(ApiModel):
    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "self.type != 'EFA' || has(self.instanceType) || has(self.interfacesPerPod)",
                    "type EFA needs instanceType or interfacesPerPod, to know how many EFA interfaces a pod gets",
                ),
                cel(
                    "self.type == 'EFA' || (!has(self.instanceType) && !has(self.interfacesPerPod))",
                    "instanceType and interfacesPerPod belong to type EFA",
                ),
            ]
        }
    )
    type: Literal["EFA", "TCP"] = Field(description="What carries the KV blocks: EFA (NIXL LIBFABRIC) or TCP (NIXL UCX).")
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


class KVReuse(ApiModel):
    mode: Literal["Bidirectional", "OneWay"] = Field(
        description=(
            "Bidirectional: prefill reads a conversation's history back from decode. "
            "OneWay: KV moves from prefill to decode only."
        )
    )


class EnvVar(ApiModel):
    name: str = Field(
        min_length=1, max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="Environment variable's name."
    )
    value: str = Field(max_length=4096, description="Its value.")


PodTemplate = Annotated[
    dict[str, Any],
    Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}),
]
"""A pod template override; merged by name into the generated template (see ``build/pod.py``)."""


class EngineRole(ApiModel):
    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    f"!has(self.extraArgs) || self.extraArgs.all(a, !(a.split('=')[0] in {list(OWNED_FLAGS)!r}))",
                    "extraArgs names a flag that the operator sets itself; remove it: " + " ".join(OWNED_FLAGS),
                )
            ]
        }
    )
    replicas: Replicas | None = Field(default=None, description="Pods of this role; 1 when unset.")
    tensor_parallel_size: int | None = Field(
        default=None, ge=1, le=64, description="GPUs per pod over which the model is split; 1 when unset."
    )
    gpus_per_pod: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="nvidia.com/gpu per pod; tensorParallelSize when unset, 0 for an engine that runs on CPUs.",
    )
    extra_args: list[Argument] | None = Field(
        default=None, max_length=128, description="Further arguments of vLLM's server, one list item per word."
    )
    env: list[EnvVar] | None = Field(
        default=None,
        max_length=128,
        description="Further environment variables of the engine container.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    pod_template: PodTemplate | None = Field(
        default=None,
        description=(
            "Override of the generated pod template (metadata.labels, metadata.annotations, spec): objects merge, lists of "
            "named items merge by name, anything else replaces. The engine's container is called `engine`."
        ),
    )


class RouterSpec(ApiModel):
    replicas: Replicas | None = Field(default=None, description="Router pods; 2 when unset.")
    pod_template: PodTemplate | None = Field(
        default=None, description="Override of the router's pod template; its container is called `router`."
    )


class BidiKVInferenceSpec(ApiModel):
    model: Model = Field(description="What is served.")
    image: str = Field(
        min_length=1, max_length=512, description="vLLM image of the engines, stock or your own; e.g. vllm/vllm-openai:v0.32.0."
    )
    image_pull_secrets: list[Name] | None = Field(
        default=None,
        max_length=16,
        description="Names of Secrets for pulling images, in the same namespace.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    fabric: FabricSpec = Field(description="The network between the engines.")
    kv_reuse: KVReuse | None = Field(default=None, description="Reuse of KV between turns; mode Bidirectional when unset.")
    prefill: EngineRole | None = Field(default=None, description="Pods that compute prompts.")
    decode: EngineRole | None = Field(default=None, description="Pods that generate tokens and hold the conversations' KV.")
    router: RouterSpec | None = Field(default=None, description="The OpenAI endpoint that knows sessions.")


class Condition(ApiModel):
    type: str = Field(max_length=316, description="Kind of condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    observed_generation: int | None = Field(default=None, ge=0, description="metadata.generation it was computed from.")
    last_transition_time: str = Field(
        description="When status last changed.", json_schema_extra={"format": "date-time"}
    )
    reason: str = Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
                        description="CamelCase word for programs.")
    message: str = Field(max_length=32768, description="Sentence for people.")


class RoleStatus(ApiModel):
    replicas: int | None = Field(default=None, ge=0, description="Pods that exist.")
    ready_replicas: int | None = Field(default=None, ge=0, description="Pods that are ready.")
    updated_replicas: int | None = Field(default=None, ge=0, description="Pods of the newest template.")
    selector: str | None = Field(default=None, max_length=1024, description="Label selector of the pods, for /scale.")


class BidiKVInferenceStatus(ApiModel):
    observed_generation: int | None = Field(default=None, ge=0, description="metadata.generation last reconciled.")
    conditions: list[Condition] | None = Field(
        default=None,
        max_length=32,
        description="Accepted, PrefillReady, DecodeReady, RouterReady, Progressing and the summary Ready.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    endpoint: str | None = Field(default=None, max_length=1024, description="Base URL of the OpenAI API in the cluster.")
    prefill: RoleStatus | None = Field(default=None, description="Counts of the prefill pods.")
    decode: RoleStatus | None = Field(default=None, description="Counts of the decode pods.")
    router: RoleStatus | None = Field(default=None, description="Counts of the router pods.")


class BidiKVInference(ApiModel):
    """One prefill/decode-disaggregated vLLM service whose decode KV cache flows back to prefill at the next turn."""

    spec: BidiKVInferenceSpec = Field(description="Desired state.")
    status: BidiKVInferenceStatus | None = Field(default=None, description="Observed state, written by the operator.")
