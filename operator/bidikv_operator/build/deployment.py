"""Deployments: of the engines of one role and compatibility group, and of the routers."""

from __future__ import annotations

from typing import Any, Final

from bidikv_operator import names
from bidikv_operator.build.meta import Manifest, build_object, build_selector, compute_replicas, role_name
from bidikv_operator.build.revision import EngineTemplates
from bidikv_operator.build.router_pod import build_router_template
from bidikv_operator.cache import ChildRef
from bidikv_operator.kinds import DEPLOYMENT
from bidikv_operator.resolved import Resolved

ROUTER_PROGRESS_DEADLINE_SECONDS: Final = 600
"""Beyond the engines' deadline: a router is ready once engines of both roles are, which may load for an hour."""


def build_engine_deployment(
    resolved: Resolved, role: names.Role, ref: ChildRef, templates: EngineTemplates, replicas: int
) -> Manifest:
    """The Deployment ``ref``: a template that changes within the group rolls in place, as the resource's strategy says.

    Its history is of no use to anybody: ``kubectl rollout undo`` would be drift, and the group's templates are kept in
    ControllerRevisions.
    """
    deployment = build_object(DEPLOYMENT, resolved, ref.name, role)
    label_set(deployment, resolved, templates)
    updates = resolved.updates
    deployment["spec"] = {
        "replicas": replicas,
        "revisionHistoryLimit": 0,
        "progressDeadlineSeconds": updates.progress_deadline_seconds,
        "selector": {"matchLabels": {**build_selector(resolved, role), names.LABEL_GROUP: resolved.identity.group}},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": updates.max_surge, "maxUnavailable": updates.max_unavailable},
        },
        "template": with_group(templates.engine, resolved),
    }
    return deployment


def label_set(manifest: Manifest, resolved: Resolved, templates: EngineTemplates) -> None:
    """Say on an engines' set which group it is of and which input its templates were built from."""
    metadata = manifest["metadata"]
    metadata["labels"][names.LABEL_GROUP] = resolved.identity.group
    metadata["annotations"] = {names.ANNOTATION_INPUT: templates.present}


def with_group(template: Manifest, resolved: Resolved) -> Manifest:
    metadata: dict[str, Any] = template["metadata"]
    labels = {**metadata["labels"], names.LABEL_GROUP: resolved.identity.group}
    return {**template, "metadata": {**metadata, "labels": labels}}


def build_router_deployment(resolved: Resolved) -> Manifest:
    """Rolls without ever having fewer routers than asked for."""
    deployment = build_object(DEPLOYMENT, resolved, role_name(resolved, names.ROUTER), names.ROUTER)
    deployment["spec"] = {
        "replicas": compute_replicas(resolved, names.ROUTER),
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": resolved.updates.progress_deadline_seconds + ROUTER_PROGRESS_DEADLINE_SECONDS,
        "selector": {"matchLabels": build_selector(resolved, names.ROUTER)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": build_router_template(resolved),
    }
    return deployment
