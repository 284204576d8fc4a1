"""``spec.model``: where the model and its adapters lie, and what they are called in the API."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from bidikv_operator.api.base import ApiModel, Name, cel, map_list, validations

_INSIDE_VOLUME = cel(
    "!self.startsWith('/') && !self.split('/').exists(part, part == '..')",
    "path must be relative and stay inside the volume: remove the leading '/' and every '..'",
)
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""``MaxLoRARanks`` of vLLM 0.32 (``config/lora.py``)."""
ModelName = Annotated[str, Field(min_length=1, max_length=253)]
AbsolutePath = Annotated[
    str,
    Field(
        min_length=1,
        max_length=1024,
        json_schema_extra=validations(cel("self.startsWith('/')", "path must be absolute: start it with '/'")),
    ),
]


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
    """A folder on a volume of the same namespace."""

    claim_name: Name = Field(description="PersistentVolumeClaim in the same namespace; mounted read-only.")
    path: str = Field(
        min_length=1,
        max_length=1024,
        description="Path inside the volume, relative to its root.",
        json_schema_extra=validations(_INSIDE_VOLUME),
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
    path: AbsolutePath | None = Field(
        default=None, description="Absolute path inside the engine image, or in a volume that podTemplate mounts."
    )


class AdapterSource(ApiModel):
    """Where the engines find an adapter: exactly one of the two.

    The hub is none of them. vLLM 0.32 names no revision of an adapter there (``lora/utils.py``), and adapters are told
    apart by their files, which lie nowhere before vLLM's first use: KV made with them would never move.
    """

    model_config = ConfigDict(
        json_schema_extra=validations(
            cel(
                "has(self.persistentVolumeClaim) != has(self.path)",
                "source needs exactly one of persistentVolumeClaim and path: set one, remove the other",
            )
        )
    )
    persistent_volume_claim: PersistentVolumeClaimSource | None = Field(
        default=None, description="An adapter on a PersistentVolumeClaim."
    )
    path: AbsolutePath | None = Field(
        default=None, description="Absolute path inside the engine image, or in a volume that podTemplate mounts."
    )


class LoraAdapter(ApiModel):
    """A LoRA adapter that clients choose by its name as model."""

    name: str = Field(
        min_length=1,
        max_length=253,
        pattern=r"^[A-Za-z0-9][-A-Za-z0-9_./:]*$",
        description="Model name in the OpenAI API.",
    )
    source: AdapterSource = Field(
        description="Where the adapter comes from: a volume or a path. Copy an adapter from the hub to a volume first."
    )


class ModelCache(ApiModel):
    """Where downloads from the hub are kept."""

    persistent_volume_claim_name: Name = Field(
        description=(
            "PersistentVolumeClaim in the same namespace that every engine pod mounts to read and write downloads; "
            "it needs access mode ReadWriteMany unless all pods share a node."
        )
    )


class Model(ApiModel):
    """The model and its name in the API."""

    model_config = ConfigDict(
        json_schema_extra=validations(
            cel(
                "!has(self.cache) || has(self.source.huggingFace)",
                "cache keeps downloads from the hub: remove it, or use source.huggingFace",
                ".cache",
            ),
            cel(
                "!has(self.maxLoraRank) || has(self.loraAdapters)",
                "maxLoraRank belongs to loraAdapters: remove it, or set loraAdapters",
                ".maxLoraRank",
            ),
            cel(
                "!has(self.servedName) || !has(self.loraAdapters) || "
                "!self.loraAdapters.exists(adapter, adapter.name == self.servedName)",
                "loraAdapters has an adapter with the name of the model itself: choose another name for it",
                ".loraAdapters",
            ),
        )
    )
    source: ModelSource = Field(description="Where the model comes from.")
    served_name: ModelName | None = Field(
        default=None, description="Model name in the OpenAI API; the resource's name when unset."
    )
    max_length: int | None = Field(
        default=None, ge=1, le=16777216, description="Longest context in tokens; the model's own limit when unset."
    )
    lora_adapters: list[LoraAdapter] | None = Field(
        default=None,
        max_length=64,
        description="LoRA adapters that are served beside the model, each under its own name.",
        json_schema_extra=map_list("name"),
    )
    max_lora_rank: int | None = Field(
        default=None,
        ge=1,
        le=512,
        description="Largest rank of the adapters; vLLM's own default of 16 when unset.",
        json_schema_extra=validations(
            cel(
                f"self in {list(LORA_RANKS)}",
                f"maxLoraRank must be one of {', '.join(map(str, LORA_RANKS))}: choose the next larger one",
            )
        ),
    )
    cache: ModelCache | None = Field(
        default=None, description="Where downloads from the hub outlive their pod; each pod's own disk when unset."
    )
