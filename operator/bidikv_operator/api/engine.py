"""``spec.prefill`` and ``spec.decode``: the engine pods of one role."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import ConfigDict, Field

from bidikv_operator.api.base import (
    ATOMIC_LIST,
    ApiModel,
    Replicas,
    Switch,
    cel,
    map_list,
    validations,
)
from bidikv_operator.api.pods import EngineScheduling, EnvVar, PodResources, PodTemplate

OWNED_FLAGS: Final = (
    *("--kv-transfer-config", "--kv-offloading-size", "--kv-offloading-backend"),
    *("--enable-prefix-caching", "--no-enable-prefix-caching", "--prefix-caching-hash-algo"),
    *("--host", "--port", "--uds", "--ssl-certfile", "--ssl-keyfile", "--grpc", "--headless", "--shutdown-timeout"),
    *("--config", "--model", "--revision", "--served-model-name", "--max-model-len"),
    *("--enable-lora", "--no-enable-lora", "--lora-modules", "--max-lora-rank"),
    *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
    *("--decode-context-parallel-size", "-dcp", "--prefill-context-parallel-size", "-pcp"),
    *("--enable-expert-parallel", "--no-enable-expert-parallel", "-ep"),
    *("--data-parallel-size", "-dp", "--data-parallel-rank", "-dpn", "--data-parallel-start-rank", "-dpr"),
    *("--data-parallel-size-local", "-dpl", "--data-parallel-address", "-dpa", "--data-parallel-rpc-port", "-dpp"),
    *("--data-parallel-backend", "-dpb", "--data-parallel-multi-port-external-lb", "-dpm"),
    *("--data-parallel-hybrid-lb", "--no-data-parallel-hybrid-lb", "-dph"),
    *("--data-parallel-external-lb", "--no-data-parallel-external-lb", "-dpe"),
    *("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port"),
)
"""vLLM flags that ``extraArgs`` may not name, in any spelling that vLLM understands: those that the operator writes or
leaves out on purpose, those that would replace the connector (``--kv-offloading-size``), those that the connector
refuses (context parallelism), and ``--config``, whose file could hold any of them."""

# vLLM's parser takes --max_model_len for --max-model-len, --kv-transfer-config.kv_role for a key of the JSON value, -n2
# for -n 2, and (argparse's abbreviations) any unambiguous prefix such as --max-model. No other flag of vLLM 0.32 than
# FOREIGN_FLAGS is a prefix of one of ours, so refusing every prefix refuses nothing else. A lone "-" or "--" is none.
FOREIGN_FLAGS: Final = ("-dc",)
"""Flags of vLLM 0.32 that begin an owned one and are none: ``--diffusion-config``."""
SHORT_FLAGS: Final = tuple(flag for flag in OWNED_FLAGS if len(flag) == 2)
_FLAG_OF_ARGUMENT = "a.split('=', 2)[0].split('.', 2)[0].replace('_', '-')"
_OWNED_FLAG_RULE = (
    f"!has(self.extraArgs) || self.extraArgs.filter(a, a.startsWith('-') && a != '-' && a != '--')"
    f".map(a, {_FLAG_OF_ARGUMENT}).filter(flag, !(flag in {list(FOREIGN_FLAGS)!r}))"
    f".all(flag, !{list(OWNED_FLAGS)!r}.exists(owned, owned.startsWith(flag)) && "
    + " && ".join(f"!flag.startsWith('{flag}')" for flag in SHORT_FLAGS)
    + ")"
)
Argument = Annotated[str, Field(min_length=1, max_length=4096)]

_RANKS = (
    "(has(self.tensorParallelSize) ? self.tensorParallelSize : 1)"
    " * (has(self.dataParallelSize) ? self.dataParallelSize : 1)"
)
_NODES = "(has(self.nodesPerReplica) ? self.nodesPerReplica : 1)"


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
                f"!has(self.gpusPerPod) || self.gpusPerPod == 0 || self.gpusPerPod * {_NODES} >= {_RANKS}",
                "gpusPerPod is smaller than the ranks of a pod (tensorParallelSize times dataParallelSize, over "
                "nodesPerReplica): raise it, or leave it out to get one GPU per rank",
                ".gpusPerPod",
            ),
            cel(
                f"!has(self.nodesPerReplica) || ({_RANKS}) % self.nodesPerReplica == 0",
                "nodesPerReplica does not divide tensorParallelSize: choose a number of nodes that does",
                ".nodesPerReplica",
            ),
            cel(
                "!has(self.nodesPerReplica) || self.nodesPerReplica == 1 || "
                "!has(self.dataParallelSize) || self.dataParallelSize == 1",
                "dataParallelSize over several nodes is not supported, ranks of one replica share a pod: use more "
                "replicas, or set nodesPerReplica to 1",
                ".dataParallelSize",
            ),
        )
    )
    replicas: Replicas | None = Field(
        default=None, description="Replicas of this role, each a pod or nodesPerReplica pods; 1 when unset."
    )
    tensor_parallel_size: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="GPUs over which the model is split; 1 when unset. One role's must divide the other's.",
    )
    pipeline_parallel_size: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Pipeline stages; only 1, because engines exchange the KV of one stage.",
        json_schema_extra=validations(
            cel(
                "self == 1",
                "pipelineParallelSize must be 1, engines exchange the KV of one stage: use tensorParallelSize, with "
                "nodesPerReplica for a model that no node holds",
            )
        ),
    )
    data_parallel_size: int | None = Field(
        default=None,
        ge=1,
        le=16,
        description="Ranks in one pod, each with a KV cache and tensorParallelSize GPUs of its own; 1 when unset.",
    )
    expert_parallel: Switch | None = Field(
        default=None,
        description="Enabled: a mixture-of-experts model spreads its experts over all ranks. Disabled when unset.",
    )
    nodes_per_replica: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description=(
            "Pods, each on a node of its own, over which one replica's tensorParallelSize is spread; more than 1 "
            "needs LeaderWorkerSet in the cluster. 1 when unset."
        ),
    )
    gpus_per_pod: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="GPUs per pod; one for each rank in it when unset, 0 for an engine that runs on CPUs.",
    )
    resources: PodResources | None = Field(default=None, description="CPU and memory of the engine container.")
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
    scheduling: EngineScheduling | None = Field(default=None, description="On which nodes the pods may run.")
    pod_template: PodTemplate | None = Field(
        default=None,
        description=(
            "Override of the generated pod template: objects merge, lists of named items merge by name, anything else "
            "replaces. The engine's container is called `engine`."
        ),
    )
