"""Deployments of prefill, decode and router."""

from __future__ import annotations

from bidikv_operator import names
from bidikv_operator.build.engine_pod import build_engine_template
from bidikv_operator.build.meta import Manifest, build_object, build_selector, compute_replicas, role_name
from bidikv_operator.build.probes import STARTUP_SECONDS
from bidikv_operator.build.router_pod import build_router_template
from bidikv_operator.kinds import DEPLOYMENT
from bidikv_operator.resolved import Resolved

ENGINE_PROGRESS_DEADLINE_SECONDS = STARTUP_SECONDS + 600
"""Longer than the start-up probe allows, or Kubernetes would report a loading model as a failed rollout."""
ROUTER_PROGRESS_DEADLINE_SECONDS = 600


def build_engine_deployment(resolved: Resolved, role: names.Role) -> Manifest:
    """Rolls one pod at a time in place (no surge): there is rarely a spare set of GPUs."""
    deployment = build_object(DEPLOYMENT, resolved, role_name(resolved, role), role)
    deployment["spec"] = {
        "replicas": compute_replicas(resolved, role),
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": ENGINE_PROGRESS_DEADLINE_SECONDS,
        "selector": {"matchLabels": build_selector(resolved, role)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "template": build_engine_template(resolved, role),
    }
    return deployment


def build_router_deployment(resolved: Resolved, config_hash: str) -> Manifest:
    """Rolls without ever having fewer routers than asked for."""
    deployment = build_object(DEPLOYMENT, resolved, role_name(resolved, names.ROUTER), names.ROUTER)
    deployment["spec"] = {
        "replicas": compute_replicas(resolved, names.ROUTER),
        "revisionHistoryLimit": 3,
        "progressDeadlineSeconds": ROUTER_PROGRESS_DEADLINE_SECONDS,
        "selector": {"matchLabels": build_selector(resolved, names.ROUTER)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": build_router_template(resolved, config_hash),
    }
    return deployment
