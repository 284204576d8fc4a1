"""``spec.model``."""

from __future__ import annotations

from typing import Final

from bidikv_operator import resolved
from bidikv_operator.api import model as api
from bidikv_operator.build.engine import ADAPTERS_DIR, MODEL_DIR
from bidikv_operator.validate.problem import Problem, Problems

FIELD: Final = "spec.model"


def resolve_model(given: api.Model, name: str) -> tuple[resolved.ResolvedModel, Problems]:
    """The model of the resource ``name``, which is its served name when it has none."""
    served = given.served_name or name
    source = given.source
    problems = _check_source(source)
    adapters, found = _resolve_adapters(given, served)
    problems += found
    hub, claim = source.hugging_face, source.persistent_volume_claim
    if claim is not None:
        problems += _check_volume_path(f"{FIELD}.source", claim.path)
    if given.cache is not None and hub is None:
        problems.append(Problem(f"{FIELD}.cache", "keeps downloads from the hub; remove it, or use source.huggingFace"))
    if given.max_lora_rank is not None:
        if not adapters:
            problems.append(Problem(f"{FIELD}.maxLoraRank", "belongs to loraAdapters; remove it, or set loraAdapters"))
        if given.max_lora_rank not in api.LORA_RANKS:
            allowed = ", ".join(map(str, api.LORA_RANKS))
            problems.append(
                Problem(
                    f"{FIELD}.maxLoraRank", f"{given.max_lora_rank} is none of {allowed}; choose the next larger one"
                )
            )
    argument = source.path or ""
    if hub is not None:
        argument = hub.repository
    elif claim is not None:
        argument = f"{MODEL_DIR}/{claim.path.strip('/')}"
    model = resolved.ResolvedModel(
        argument=argument,
        served_name=served,
        max_length=given.max_length,
        revision=None if hub is None else hub.revision,
        token_secret_name=None if hub is None else hub.token_secret_name,
        claim_name=None if claim is None else claim.claim_name,
        cache_claim_name=None if given.cache is None else given.cache.persistent_volume_claim_name,
        adapters=adapters,
        max_lora_rank=given.max_lora_rank,
    )
    return model, problems


def _check_source(source: api.ModelSource) -> Problems:
    given = [part for part in (source.hugging_face, source.persistent_volume_claim, source.path) if part is not None]
    problems = []
    if len(given) != 1:
        problems.append(Problem(f"{FIELD}.source", "set exactly one of huggingFace, persistentVolumeClaim and path"))
    if source.path is not None:
        problems += _check_absolute(f"{FIELD}.source.path", source.path)
    return problems


def _resolve_adapters(given: api.Model, served: str) -> tuple[tuple[resolved.ResolvedAdapter, ...], Problems]:
    adapters, problems = [], []
    seen = {served}
    for adapter in given.lora_adapters or []:
        field = f"{FIELD}.loraAdapters[{adapter.name}]"
        if adapter.name in seen:
            what = "the model's own name" if adapter.name == served else "given twice"
            problems.append(Problem(field, f"its name is {what}; choose another one"))
        seen.add(adapter.name)
        claim, path = adapter.source.persistent_volume_claim, adapter.source.path
        if (claim is None) == (path is None):
            problems.append(Problem(f"{field}.source", "set exactly one of persistentVolumeClaim and path"))
        if claim is not None:
            problems += _check_volume_path(f"{field}.source", claim.path)
            path = f"{ADAPTERS_DIR}/{claim.claim_name}/{claim.path.strip('/')}"
        elif path is not None:
            problems += _check_absolute(f"{field}.source.path", path)
        adapters.append(
            resolved.ResolvedAdapter(
                name=adapter.name, path=path or "", claim_name=None if claim is None else claim.claim_name
            )
        )
    return tuple(adapters), problems


def _check_volume_path(field: str, path: str) -> Problems:
    field = f"{field}.persistentVolumeClaim.path"
    if path.startswith("/"):
        return [Problem(field, f"{path!r} is absolute; remove the leading '/', it is relative to the volume")]
    if ".." in path.split("/"):
        return [Problem(field, f"{path!r} leaves the volume; remove the '..'")]
    return []


def _check_absolute(field: str, path: str) -> Problems:
    return [] if path.startswith("/") else [Problem(field, f"{path!r} is relative; start it with '/'")]
