"""The ``BidiKVInference`` resource, version v1alpha1.

These models are the single source of the CRD schema (``schema.py`` converts, ``crd.py`` assembles). They are frozen and
know nothing of Kubernetes clients, so that users may import them to write resources in Python.

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

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """Base of every part of the resource: frozen, camelCase on the wire."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True, extra="ignore")


def cel(rule: str, message: str, field_path: str | None = None) -> dict[str, str]:
    """One ``x-kubernetes-validations`` entry.

    ``message`` is the sentence that the user reads: it names the field and the remedy. ``field_path`` (``.extraArgs``)
    makes the API server's error point at that field instead of the object that holds the rule.
    """
    entry = {"rule": rule, "message": message}
    if field_path is not None:
        entry["fieldPath"] = field_path
    return entry


def validations(*rules: dict[str, str]) -> dict[str, Any]:
    """``json_schema_extra`` of a model or field that carries CEL rules."""
    return {"x-kubernetes-validations": list(rules)}


def map_list(key: str) -> dict[str, Any]:
    """``json_schema_extra`` of a list whose items are told apart (and merged by server-side apply) by ``key``."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


SET_LIST: Final[dict[str, Any]] = {"x-kubernetes-list-type": "set"}
ATOMIC_LIST: Final[dict[str, Any]] = {"x-kubernetes-list-type": "atomic"}
"""Order matters or items repeat: whoever applies the list owns all of it."""

MAX_NAME_LENGTH: Final = 40
"""Of ``metadata.name``: ``<name>-prefill-<template hash>-<random>`` still fits a host name of 63 characters."""
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

# DNS subdomain, as Kubernetes checks the names of Secrets and PersistentVolumeClaims.
_DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
Name = Annotated[str, Field(min_length=1, max_length=253, pattern=_DNS_SUBDOMAIN)]
Argument = Annotated[str, Field(min_length=1, max_length=4096)]
Replicas = Annotated[int, Field(ge=0, le=1024)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Generation = Annotated[int, Field(ge=0, le=2**53, json_schema_extra={"format": "int64"})]

OWNED_FLAGS: Final = (
    "--kv-transfer-config",
    "--enable-prefix-caching",
    "--no-enable-prefix-caching",
    "--prefix-caching-hash-algo",
    "--host",
    "--port",
    "--uds",
    "--ssl-certfile",
    "--ssl-keyfile",
    "--model",
    "--revision",
    "--served-model-name",
    "--max-model-len",
    "--tensor-parallel-size",
    "-tp",
)
"""vLLM flags that belong to the operator: ``extraArgs`` may not name them, in any spelling that vLLM understands."""

# vLLM's parser takes --max_model_len for --max-model-len, --kv-transfer-config.kv_role for a key of the JSON value, and
# (argparse's abbreviations) any unambiguous prefix such as --max-model. No other flag of vLLM 0.32 is a prefix of
# one of ours, so refusing every prefix refuses nothing else. A lone "-" or "--" is no flag.
_FLAG_OF_ARGUMENT = "a.split('=', 2)[0].split('.', 2)[0].replace('_', '-')"
_OWNED_FLAG_RULE = (
    f"!has(self.extraArgs) || self.extraArgs.filter(a, a.startsWith('-') && a != '-' && a != '--')"
    f".map(a, {_FLAG_OF_ARGUMENT}).all(flag, !{list(OWNED_FLAGS)!r}.exists(owned, owned.startsWith(flag)))"
)


class HuggingFaceSource(ApiModel):
    """A model on the Hugging Face hub; each engine pod downloads it."""

    repository: str = Field(
        min_length=1, max_length=256, description="Repository on the Hugging Face hub, e.g. Qwen/Qwen3-32B."
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="Branch, tag or commit; a commit makes pods reproducible.",
    )
    token_secret_name: Name | None = Field(
        default=None, description="Secret in the same namespace whose key `token` holds the hub's access token."
    )


class PersistentVolumeClaimSource(ApiModel):
    """A model on a volume of the same namespace."""

    claim_name: Name = Field(description="PersistentVolumeClaim in the same namespace; mounted read-only.")
    path: str = Field(
        min_length=1,
        max_length=1024,
        description="Path of the model inside the volume, relative to its root.",
        json_schema_extra=validations(
            cel(
                "!self.startsWith('/') && !self.split('/').exists(part, part == '..')",
                "path must be relative and stay inside the volume: remove the leading '/' and every '..'",
            )
        ),
    )


class ModelSource(ApiModel):
    """Where the engines find the model: exactly one of the three."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            cel(
                "[has(self.huggingFace), has(self.persistentVolumeClaim), has(self.path)].filter(x, x).size() == 1",
                "source needs exactly one of huggingFace, persistentVolumeClaim and path: set one, remove the others",
            )
        )
    )
    hugging_face: HuggingFaceSource | None = Field(default=None, description="A model on the Hugging Face hub.")
    persistent_volume_claim: PersistentVolumeClaimSource | None = Field(
        default=None, description="A model on a PersistentVolumeClaim."
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="Absolute path inside the engine image, or in a volume that podTemplate mounts.",
        json_schema_extra=validations(cel("self.startsWith('/')", "path must be absolute: start it with '/'")),
    )


class Model(ApiModel):
    """The model and its name in the API."""

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
    """The network that carries KV blocks between the engines."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            cel(
                "self.type != 'EFA' || has(self.instanceType) || has(self.interfacesPerPod)",
                "type EFA needs instanceType or interfacesPerPod: set one, it says how many EFA interfaces a pod gets",
            ),
            cel(
                "self.type == 'EFA' || !has(self.instanceType)",
                "instanceType belongs to type EFA: remove it, or set type to EFA",
                ".instanceType",
            ),
            cel(
                "self.type == 'EFA' || !has(self.interfacesPerPod)",
                "interfacesPerPod belongs to type EFA: remove it, or set type to EFA",
                ".interfacesPerPod",
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


class KVReuse(ApiModel):
    """How the KV of earlier turns is used again."""

    mode: Literal["Bidirectional", "OneWay"] = Field(
        description=(
            "Bidirectional: prefill reads a conversation's history back from decode. "
            "OneWay: KV moves from prefill to decode only."
        )
    )


class EnvVar(ApiModel):
    """A literal environment variable; values from Secrets and the like go into podTemplate."""

    name: str = Field(
        min_length=1, max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="Environment variable's name."
    )
    value: str = Field(max_length=4096, description="Its value.")


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
"""A pod template override; merged by name into the generated template (see ``build/pod.py``).

A dict, because it is merged and not read. PodSpec is not expanded in the schema: it would make the CRD too large for
client-side apply (256 KiB) and tie it to one Kubernetes version.
"""


class EngineRole(ApiModel):
    """The engine pods of one role."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            cel(
                _OWNED_FLAG_RULE,
                "extraArgs names a flag that belongs to the operator: remove it and use the resource's own fields "
                "(" + " ".join(OWNED_FLAGS) + ")",
                ".extraArgs",
            ),
            cel(
                "!has(self.gpusPerPod) || self.gpusPerPod == 0 || "
                "self.gpusPerPod >= (has(self.tensorParallelSize) ? self.tensorParallelSize : 1)",
                "gpusPerPod is smaller than tensorParallelSize: raise it, or leave it out to get one GPU per rank",
                ".gpusPerPod",
            ),
        )
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
        default=None,
        max_length=128,
        description="Further arguments of vLLM's server, one list item per word.",
        json_schema_extra=ATOMIC_LIST,
    )
    env: list[EnvVar] | None = Field(
        default=None,
        max_length=128,
        description="Further environment variables of the engine container.",
        json_schema_extra=map_list("name"),
    )
    pod_template: PodTemplate | None = Field(
        default=None,
        description=(
            "Override of the generated pod template: objects merge, lists of named items merge by name, anything else "
            "replaces. The engine's container is called `engine`."
        ),
    )


class RouterSpec(ApiModel):
    """The router pods."""

    replicas: Replicas | None = Field(default=None, description="Router pods; 2 when unset.")
    pod_template: PodTemplate | None = Field(
        default=None, description="Override of the router's pod template; its container is called `router`."
    )


class BidiKVInferenceSpec(ApiModel):
    """Desired state."""

    model: Model = Field(description="What is served.")
    image: str = Field(
        min_length=1,
        max_length=512,
        description="vLLM image of the engines, stock or your own; e.g. vllm/vllm-openai:v0.32.0.",
        json_schema_extra=validations(
            cel(
                "!self.matches('[[:space:]]') && !self.contains('://')",
                "image must be an image reference such as vllm/vllm-openai:v0.32.0: remove white space and 'https://'",
            )
        ),
    )
    image_pull_secrets: list[Name] | None = Field(
        default=None,
        max_length=16,
        description="Names of Secrets for pulling images, in the same namespace.",
        json_schema_extra=SET_LIST,
    )
    fabric: FabricSpec = Field(description="The network between the engines.")
    kv_reuse: KVReuse | None = Field(
        default=None, description="Reuse of KV between turns; mode Bidirectional when unset."
    )
    prefill: EngineRole | None = Field(default=None, description="Pods that compute prompts.")
    decode: EngineRole | None = Field(
        default=None, description="Pods that generate tokens and hold the conversations' KV."
    )
    router: RouterSpec | None = Field(default=None, description="The OpenAI endpoint that knows sessions.")


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

    replicas: Count | None = Field(default=None, description="Pods that exist.")
    ready_replicas: Count | None = Field(default=None, description="Pods that are ready.")
    updated_replicas: Count | None = Field(default=None, description="Pods of the newest template.")
    selector: str | None = Field(default=None, max_length=1024, description="Label selector of the pods, for /scale.")


class BidiKVInferenceStatus(ApiModel):
    """Observed state."""

    observed_generation: Generation | None = Field(default=None, description="metadata.generation last reconciled.")
    conditions: list[Condition] | None = Field(
        default=None,
        max_length=32,
        description="Accepted, PrefillReady, DecodeReady, RouterReady, Progressing and the summary Ready.",
        json_schema_extra=map_list("type"),
    )
    endpoint: str | None = Field(
        default=None, max_length=1024, description="Base URL of the OpenAI API in the cluster."
    )
    prefill: RoleStatus | None = Field(default=None, description="Counts of the prefill pods.")
    decode: RoleStatus | None = Field(default=None, description="Counts of the decode pods.")
    router: RoleStatus | None = Field(default=None, description="Counts of the router pods.")


class BidiKVInference(ApiModel):
    """One prefill/decode-disaggregated vLLM service whose decode KV cache flows back to prefill at the next turn."""

    spec: BidiKVInferenceSpec = Field(description="Desired state.")
    status: BidiKVInferenceStatus | None = Field(default=None, description="Observed state, written by the operator.")
