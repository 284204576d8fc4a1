"""The whole resource: name, schema, and every part of the spec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pydantic import ValidationError

from bidikv_operator import names
from bidikv_operator.api.operations import Healing, Monitoring, Security, UpdateStrategy
from bidikv_operator.api.reuse import KVReuse, Retention
from bidikv_operator.api.router import RouterSpec
from bidikv_operator.api.v1alpha1 import BidiKVInferenceSpec, EngineRole
from bidikv_operator.resolved import Resolved, ResolvedRetention
from bidikv_operator.rollout.revision import compute_identity
from bidikv_operator.validate.engine import check_sizes, resolve_engine
from bidikv_operator.validate.fabric import resolve_fabric
from bidikv_operator.validate.model import resolve_model
from bidikv_operator.validate.operations import (
    resolve_healing,
    resolve_monitoring,
    resolve_security,
    resolve_updates,
)
from bidikv_operator.validate.problem import Problem, Problems, Rejected
from bidikv_operator.validate.router import resolve_router
from bidikv_operator.validate.scaling import clamp_replicas, resolve_scaling

DNS_LABEL: Final = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
"""RFC 1035 label: what a Service may be called."""
NAME_LIMIT: Final = 63


def validate(resource: Mapping[str, Any], *, runtime_image: str, operator_namespace: str = "") -> Resolved | Rejected:
    """Check one resource as the API server returned it.

    Args:
        resource: the whole object.
        runtime_image: image of router and connector where the resource names none, from the operator's settings.
        operator_namespace: where the operator runs; empty outside of a cluster.
    """
    metadata = resource["metadata"]
    name: str = metadata["name"]
    problems = _check_name(name)
    try:
        spec = BidiKVInferenceSpec.model_validate(resource.get("spec") or {})
    except ValidationError as error:
        return Rejected((*problems, *_schema_problems(error)))

    def add(found: Problems) -> None:
        problems.extend(found)

    add(_check_images(spec))
    model, found = resolve_model(spec.model, name)
    add(found)
    fabric, found = resolve_fabric(spec.fabric)
    add(found)
    prefill, found = resolve_engine("spec.prefill", spec.prefill or EngineRole(), spec.fabric)
    add(found)
    decode, found = resolve_engine("spec.decode", spec.decode or EngineRole(), spec.fabric)
    add(found)
    add(check_sizes(prefill, decode))
    router, found = resolve_router(spec.router or RouterSpec())
    add(found)
    retention, found = _resolve_retention(spec.kv_reuse)
    add(found)
    asked = {names.PREFILL: prefill.replicas, names.DECODE: decode.replicas}
    scaling, found = resolve_scaling(spec.autoscaling, asked)
    add(found)
    monitoring, found = resolve_monitoring(spec.monitoring or Monitoring())
    add(found)
    updates, found = resolve_updates(spec.update_strategy or UpdateStrategy())
    add(found)
    security, found = resolve_security(spec.security or Security())
    add(found)
    if problems:
        return Rejected(tuple(problems))
    return Resolved(
        namespace=metadata["namespace"],
        name=name,
        uid=metadata["uid"],
        identity=compute_identity(resource["spec"]),
        model=model,
        image=spec.image,
        image_pull_policy=spec.image_pull_policy,
        image_pull_secrets=tuple(spec.image_pull_secrets or ()),
        runtime_image=(spec.runtime.image if spec.runtime else None) or runtime_image,
        fabric=fabric,
        reuse=spec.kv_reuse.mode if spec.kv_reuse else "Bidirectional",
        retention=retention,
        prefill=replace(prefill, replicas=clamp_replicas(scaling, names.PREFILL, prefill.replicas)),
        decode=replace(decode, replicas=clamp_replicas(scaling, names.DECODE, decode.replicas)),
        router=router,
        scaling=scaling,
        monitoring=monitoring,
        updates=updates,
        security=security,
        healing=resolve_healing(spec.healing or Healing()),
        paused=bool(spec.paused),
        operator_namespace=operator_namespace,
    )


def _check_name(name: str) -> Problems:
    if len(name) <= NAME_LIMIT and DNS_LABEL.match(name):
        return []
    return [
        Problem(
            "metadata.name",
            f"{name!r} cannot be the name of a Service; recreate the resource with at most {NAME_LIMIT} lower-case "
            "letters, digits and dashes, starting with a letter",
        )
    ]


def _schema_problems(error: ValidationError) -> Problems:
    return [
        Problem(".".join(("spec", *(str(part) for part in entry["loc"]))), f"{entry['msg']}; correct this field")
        for entry in error.errors(include_url=False, include_input=False)
    ]


def _check_images(spec: BidiKVInferenceSpec) -> Problems:
    images = {"spec.image": spec.image, "spec.runtime.image": (spec.runtime.image if spec.runtime else None) or ""}
    secrets = spec.image_pull_secrets or []
    return [
        Problem(field, f"{image!r} is no image reference; remove white space and 'https://'")
        for field, image in images.items()
        if re.search(r"\s", image) or "://" in image
    ] + [
        Problem("spec.imagePullSecrets", f"{name!r} is given twice; keep one")
        for name in dict.fromkeys(secrets)
        if secrets.count(name) > 1
    ]


def _resolve_retention(given: KVReuse | None) -> tuple[ResolvedRetention, Problems]:
    retention = (given.retention if given else None) or Retention()
    settings = {"budgetPercent": retention.budget_percent, "idleSeconds": retention.idle_seconds}
    problems = [
        Problem(f"spec.kvReuse.retention.{field}", "belongs to policy SessionAware; remove it, or set policy to that")
        for field, value in settings.items()
        if value is not None and retention.policy == "LRU"
    ]
    resolved = ResolvedRetention(
        policy=retention.policy, budget_percent=retention.budget_percent, idle_seconds=retention.idle_seconds
    )
    return resolved, problems
