"""Spec to ``Resolved``, or the list of what is wrong with it. Pure.

The CRD's schema and CEL rules refuse most mistakes at admission. This module must not rely on them: a resource may
have been stored under an older CRD. It also holds the rules that a schema cannot state: environment variables and pod
template parts that the operator owns, vLLM's argument spellings, what an instance type offers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from bidikv_operator import names
from bidikv_operator.api.v1alpha1 import OWNED_FLAGS, BidiKVInferenceSpec, EngineRole, FabricSpec, ModelSource
from bidikv_operator.build.engine import MODEL_DIR
from bidikv_operator.fabric import INSTANCE_TYPES, compute_interfaces
from bidikv_operator.resolved import Resolved, ResolvedEngine, ResolvedFabric, ResolvedModel, ResolvedRouter
from bidikv_operator.rollout.revision import compute_identity
from bidikv_runtime import contract

OWNED_ENV: Final = (
    "PYTHONHASHSEED",
    "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
    contract.ENV_LOOKUP_HOST,
)
"""Engine variables on which both roles must agree or that name the pod's own address."""

DNS_LABEL: Final = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
"""RFC 1035 label: what a Service may be called."""
NAME_LIMIT: Final = 63
DEFAULT_ENGINE_REPLICAS: Final = 1
DEFAULT_ROUTER_REPLICAS: Final = 2


@dataclass(frozen=True)
class Problem:
    """One mistake: the field, and a sentence that says what to do."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


@dataclass(frozen=True)
class Rejected:
    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        return "; ".join(str(problem) for problem in self.problems)


def validate(resource: Mapping[str, Any], *, runtime_image: str) -> Resolved | Rejected:
    """Check one resource as the API server returned it.

    Args:
        resource: the whole object.
        runtime_image: image of router and connector, from the operator's settings.
    """
    metadata = resource["metadata"]
    name: str = metadata["name"]
    problems = _check_name(name)
    try:
        spec = BidiKVInferenceSpec.model_validate(resource.get("spec") or {})
    except ValidationError as error:
        return Rejected((*problems, *_schema_problems(error)))

    model, found = _resolve_model(spec.model.source, name, spec.model.served_name, spec.model.max_length)
    problems += found
    prefill, found = _resolve_engine("spec.prefill", spec.prefill or EngineRole(), spec.fabric)
    problems += found
    decode, found = _resolve_engine("spec.decode", spec.decode or EngineRole(), spec.fabric)
    problems += found
    router_template = (spec.router.pod_template if spec.router else None) or {}
    problems += _check_pod_template("spec.router.podTemplate", router_template, names.ROUTER_CONTAINER, owned_env=())
    if problems:
        return Rejected(tuple(problems))
    return Resolved(
        namespace=metadata["namespace"],
        name=name,
        uid=metadata["uid"],
        identity=compute_identity(resource["spec"]),
        model=model,
        image=spec.image,
        runtime_image=runtime_image,
        image_pull_secrets=tuple(spec.image_pull_secrets or ()),
        fabric=ResolvedFabric(type=spec.fabric.type, instance_type=spec.fabric.instance_type),
        reuse=spec.kv_reuse.mode if spec.kv_reuse else "Bidirectional",
        prefill=prefill,
        decode=decode,
        router=ResolvedRouter(
            replicas=_first(spec.router.replicas if spec.router else None, DEFAULT_ROUTER_REPLICAS),
            pod_template=router_template,
        ),
    )


def _first(value: int | None, default: int) -> int:
    return default if value is None else value


def _check_name(name: str) -> list[Problem]:
    if len(name) <= NAME_LIMIT and DNS_LABEL.match(name):
        return []
    return [
        Problem(
            "metadata.name",
            f"{name!r} cannot be the name of a Service; recreate the resource with at most {NAME_LIMIT} lower-case "
            "letters, digits and dashes, starting with a letter",
        )
    ]


def _schema_problems(error: ValidationError) -> list[Problem]:
    return [
        Problem(".".join(("spec", *(str(part) for part in entry["loc"]))), f"{entry['msg']}; correct this field")
        for entry in error.errors(include_url=False, include_input=False)
    ]


def _resolve_model(
    source: ModelSource, name: str, served_name: str | None, max_length: int | None
) -> tuple[ResolvedModel, list[Problem]]:
    field = "spec.model.source"
    given = [part for part in (source.hugging_face, source.persistent_volume_claim, source.path) if part is not None]
    served = served_name or name
    if len(given) != 1:
        problem = Problem(field, "set exactly one of huggingFace, persistentVolumeClaim and path")
        return ResolvedModel(argument="", served_name=served), [problem]
    if source.hugging_face is not None:
        hub = source.hugging_face
        return (
            ResolvedModel(
                argument=hub.repository,
                served_name=served,
                max_length=max_length,
                revision=hub.revision,
                token_secret_name=hub.token_secret_name,
            ),
            [],
        )
    if source.persistent_volume_claim is not None:
        claim = source.persistent_volume_claim
        problems = []
        if ".." in claim.path.split("/"):
            problems.append(
                Problem(f"{field}.persistentVolumeClaim.path", f"{claim.path!r} leaves the volume; remove the '..'")
            )
        return (
            ResolvedModel(
                argument=f"{MODEL_DIR}/{claim.path.strip('/')}",
                served_name=served,
                max_length=max_length,
                claim_name=claim.claim_name,
            ),
            problems,
        )
    return ResolvedModel(argument=source.path or "", served_name=served, max_length=max_length), []


def _resolve_engine(field: str, role: EngineRole, fabric: FabricSpec) -> tuple[ResolvedEngine, list[Problem]]:
    parallel = _first(role.tensor_parallel_size, 1)
    gpus = _first(role.gpus_per_pod, parallel)
    interfaces, problems = _resolve_interfaces(field, fabric, gpus)
    if 0 < gpus < parallel:
        problems.append(
            Problem(
                f"{field}.gpusPerPod",
                f"{gpus} GPUs cannot hold tensorParallelSize {parallel}; raise gpusPerPod or lower tensorParallelSize",
            )
        )
    problems += _check_extra_args(f"{field}.extraArgs", role.extra_args or [])
    seen: set[str] = set()
    for variable in role.env or []:
        if variable.name in OWNED_ENV:
            problems.append(Problem(f"{field}.env", f"{variable.name} is set by the operator; remove it"))
        if variable.name in seen:
            problems.append(Problem(f"{field}.env", f"{variable.name} is given twice; keep one"))
        seen.add(variable.name)
    template = role.pod_template or {}
    problems += _check_pod_template(
        f"{field}.podTemplate", template, names.ENGINE_CONTAINER, owned_env=(*OWNED_ENV, "PYTHONPATH")
    )
    engine = ResolvedEngine(
        replicas=_first(role.replicas, DEFAULT_ENGINE_REPLICAS),
        tensor_parallel_size=parallel,
        gpus=gpus,
        interfaces=interfaces,
        extra_args=tuple(role.extra_args or ()),
        env=tuple((variable.name, variable.value) for variable in role.env or ()),
        pod_template=template,
    )
    return engine, problems


def _resolve_interfaces(field: str, fabric: FabricSpec, gpus: int) -> tuple[int, list[Problem]]:
    if fabric.type != "EFA":
        return 0, []
    instance = INSTANCE_TYPES.get(fabric.instance_type) if fabric.instance_type else None
    if instance is None and fabric.interfaces_per_pod is None:
        return 0, [Problem("spec.fabric", "type EFA needs instanceType or interfacesPerPod; set one of them")]
    problems = []
    if instance is not None and gpus > instance.gpus:
        problems.append(
            Problem(
                f"{field}.gpusPerPod",
                f"{gpus} GPUs do not fit on a {fabric.instance_type}, which has {instance.gpus}; lower gpusPerPod or "
                "tensorParallelSize, or choose another instanceType",
            )
        )
    if fabric.interfaces_per_pod is not None:
        if instance is not None and fabric.interfaces_per_pod > instance.interfaces:
            problems.append(
                Problem(
                    "spec.fabric.interfacesPerPod",
                    f"{fabric.interfaces_per_pod} interfaces do not fit on a {fabric.instance_type}, which has "
                    f"{instance.interfaces}; lower interfacesPerPod",
                )
            )
        return fabric.interfaces_per_pod, problems
    assert fabric.instance_type is not None  # one of the two is set, checked above
    return compute_interfaces(fabric.instance_type, gpus), problems


def _check_extra_args(field: str, args: list[str]) -> list[Problem]:
    problems = []
    for arg in args:
        owned = find_owned_flag(arg)
        if owned is not None:
            problems.append(
                Problem(field, f"{arg.split('=')[0]} means {owned}, which belongs to the operator; remove it")
            )
    return problems


def find_owned_flag(arg: str) -> str | None:
    """The owned flag that vLLM would read ``arg`` as, or None.

    vLLM's parser (``utils/argparse_utils.py``, 0.32) turns underscores into dashes, takes ``--flag=value`` and
    ``--flag.key value``, and, as argparse does, any unambiguous beginning of a flag. The last one given wins, so each
    of these would silently replace the operator's value. No flag of vLLM 0.32 outside of the list begins an owned
    one.
    """
    if not arg.startswith("-") or arg in ("-", "--"):
        return None
    flag = arg.split("=", 1)[0].split(".", 1)[0].replace("_", "-")
    return next((owned for owned in OWNED_FLAGS if owned.startswith(flag)), None)


def _check_pod_template(
    field: str, template: Mapping[str, Any], container: str, *, owned_env: tuple[str, ...]
) -> list[Problem]:
    """Shape and ownership of an override; what Kubernetes itself refuses is left to the API server."""
    problems = [
        Problem(f"{field}.{key}", "only metadata and spec can be overridden; remove it")
        for key in sorted(set(template) - {"metadata", "spec"})
    ]
    metadata, spec = ({} if template.get(key) is None else template[key] for key in ("metadata", "spec"))
    for key, value in (("metadata", metadata), ("spec", spec)):
        if not isinstance(value, Mapping):
            return [*problems, Problem(f"{field}.{key}", "must be an object; correct it")]
    problems += _check_template_metadata(f"{field}.metadata", metadata)
    for key in ("containers", "initContainers", "volumes"):
        items = spec.get(key)
        if items is None:
            continue
        if not isinstance(items, list) or not all(isinstance(item, Mapping) and item.get("name") for item in items):
            problems.append(Problem(f"{field}.spec.{key}", "must be a list of objects with a name; correct it"))
            continue
        item_names = [item["name"] for item in items]
        for name in sorted({name for name in item_names if item_names.count(name) > 1}):
            problems.append(Problem(f"{field}.spec.{key}", f"{name!r} is given twice; keep one"))
        if key == "containers":
            for item in items:
                if item["name"] == container:
                    problems += _check_main_container(f"{field}.spec.containers[{container}]", item, owned_env)
    return problems


def _check_template_metadata(field: str, metadata: Mapping[str, Any]) -> list[Problem]:
    problems = [
        Problem(f"{field}.{key}", "only labels and annotations can be overridden; remove it")
        for key in sorted(set(metadata) - {"labels", "annotations"})
    ]
    for key in ("labels", "annotations"):
        entries = metadata.get(key) or {}
        if not isinstance(entries, Mapping):
            problems.append(Problem(f"{field}.{key}", "must be an object; correct it"))
            continue
        problems += [
            Problem(f"{field}.{key}", f"{name} belongs to the operator; remove it")
            for name in sorted(entries)
            if name.startswith(f"{names.GROUP}/") or name == names.LABEL_MANAGED_BY
        ]
    return problems


def _check_main_container(field: str, container: Mapping[str, Any], owned_env: tuple[str, ...]) -> list[Problem]:
    problems = []
    if "args" in container and container["name"] == names.ENGINE_CONTAINER:
        problems.append(Problem(f"{field}.args", "the operator writes the arguments; use extraArgs instead"))
    env = container.get("env")
    if env is not None and (
        not isinstance(env, list) or not all(isinstance(item, Mapping) and item.get("name") for item in env)
    ):
        return [*problems, Problem(f"{field}.env", "must be a list of objects with a name; correct it")]
    owned = [item["name"] for item in env or [] if item["name"] in owned_env]
    return [*problems, *(Problem(f"{field}.env", f"{name} is set by the operator; remove it") for name in owned)]
