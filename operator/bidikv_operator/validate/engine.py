"""``spec.prefill`` and ``spec.decode``."""

from __future__ import annotations

from typing import Final

from bidikv_operator import names, resolved
from bidikv_operator.api.v1alpha1 import EngineRole, FabricSpec
from bidikv_operator.validate.arguments import OWNED_ENV, check_env, check_extra_args
from bidikv_operator.validate.fabric import resolve_interfaces
from bidikv_operator.validate.pods import resolve_resources, resolve_scheduling
from bidikv_operator.validate.podtemplate import check_pod_template
from bidikv_operator.validate.problem import Problem, Problems

DEFAULT_REPLICAS: Final = 1


def resolve_engine(field: str, role: EngineRole, fabric: FabricSpec) -> tuple[resolved.ResolvedEngine, Problems]:
    """One role, without the bounds of autoscaling."""
    tensor, data, nodes = role.tensor_parallel_size or 1, role.data_parallel_size or 1, role.nodes_per_replica or 1
    problems = _check_parallelism(field, role)
    ranks = tensor * data // nodes
    gpus = ranks if role.gpus_per_pod is None else role.gpus_per_pod
    if 0 < gpus < ranks:
        problems.append(
            Problem(
                f"{field}.gpusPerPod",
                f"{gpus} GPUs cannot hold the {ranks} ranks of a pod (tensorParallelSize {tensor}, dataParallelSize "
                f"{data}, nodesPerReplica {nodes}); raise gpusPerPod or lower tensorParallelSize",
            )
        )
    interfaces, found = resolve_interfaces(field, fabric, gpus)
    problems += found
    problems += check_extra_args(f"{field}.extraArgs", role.extra_args or [])
    problems += check_env(f"{field}.env", role.env or [])
    scheduling, found = resolve_scheduling(f"{field}.scheduling", role.scheduling)
    problems += found
    template = role.pod_template or {}
    problems += check_pod_template(
        f"{field}.podTemplate", template, names.ENGINE_CONTAINER, owned_env=(*OWNED_ENV, "PYTHONPATH")
    )
    engine = resolved.ResolvedEngine(
        replicas=DEFAULT_REPLICAS if role.replicas is None else role.replicas,
        tensor_parallel_size=tensor,
        gpus=gpus,
        interfaces=interfaces,
        extra_args=tuple(role.extra_args or ()),
        env=tuple((variable.name, variable.value) for variable in role.env or ()),
        pod_template=template,
        data_parallel_size=data,
        expert_parallel=role.expert_parallel == "Enabled",
        nodes=nodes,
        resources=resolve_resources(role.resources),
        scheduling=scheduling,
    )
    return engine, problems


def _check_parallelism(field: str, role: EngineRole) -> Problems:
    tensor, data, nodes = role.tensor_parallel_size or 1, role.data_parallel_size or 1, role.nodes_per_replica or 1
    problems = []
    if (role.pipeline_parallel_size or 1) != 1:
        problems.append(
            Problem(
                f"{field}.pipelineParallelSize",
                "must be 1, engines exchange the KV of one stage; use tensorParallelSize with nodesPerReplica",
            )
        )
    if tensor * data % nodes:
        problems.append(
            Problem(
                f"{field}.nodesPerReplica",
                f"{nodes} nodes do not divide tensorParallelSize {tensor}; choose a number of nodes that does",
            )
        )
    if nodes > 1 and data > 1:
        problems.append(
            Problem(
                f"{field}.dataParallelSize",
                "ranks of one replica share a pod, so it must be 1 with several nodes; use more replicas instead",
            )
        )
    return problems


def check_sizes(prefill: resolved.ResolvedEngine, decode: resolved.ResolvedEngine) -> Problems:
    """Whether the two roles can read each other's KV: one tensor parallel size divides the other."""
    sizes = sorted((prefill.tensor_parallel_size, decode.tensor_parallel_size))
    if sizes[1] % sizes[0] == 0:
        return []
    return [
        Problem(
            "spec.decode.tensorParallelSize",
            f"{decode.tensor_parallel_size} and prefill's {prefill.tensor_parallel_size}: neither divides the other; "
            "choose sizes of which one divides the other",
        )
    ]
