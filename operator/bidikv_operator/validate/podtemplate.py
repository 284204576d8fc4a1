"""Shape and ownership of a ``podTemplate`` override; what Kubernetes itself refuses is left to the API server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bidikv_operator import names
from bidikv_operator.validate.labels import check_owned_keys
from bidikv_operator.validate.problem import Problem, Problems


def check_pod_template(
    field: str, template: Mapping[str, Any], container: str, *, owned_env: tuple[str, ...]
) -> Problems:
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


def _check_template_metadata(field: str, metadata: Mapping[str, Any]) -> Problems:
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
            Problem(f"{field}.{key}", f"the value of {name} is no text; quote it")
            for name, value in entries.items()
            if not isinstance(value, str)
        ]
        problems += check_owned_keys(f"{field}.{key}", entries)
    return problems


def _check_main_container(field: str, container: Mapping[str, Any], owned_env: tuple[str, ...]) -> Problems:
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
