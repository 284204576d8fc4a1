"""``Resolved`` to everything the cluster should hold. Pure: equal input gives equal bytes, no clock, no cluster.

Two things are taken from what is there already: engines' templates that are stored for what the spec says
(``revision.py``), and how many engines there should be in this step of a rollout (``rollout/scale.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bidikv_operator.build.deployment import build_engine_deployment, build_router_deployment
from bidikv_operator.build.devices import build_claim_templates
from bidikv_operator.build.leaderworkerset import build_leader_worker_set
from bidikv_operator.build.meta import Manifest, compute_replicas
from bidikv_operator.build.networkpolicy import build_network_policies
from bidikv_operator.build.pdb import build_disruption_budget
from bidikv_operator.build.podmonitor import build_pod_monitors
from bidikv_operator.build.rbac import build_router_role, build_router_role_binding
from bidikv_operator.build.revision import build_controller_revision, choose_kept_revisions, choose_templates
from bidikv_operator.build.service import build_endpoint_service, build_engine_service
from bidikv_operator.build.serviceaccount import build_engine_account, build_router_account
from bidikv_operator.cache import ChildRef
from bidikv_operator.kinds import (
    CONTROLLER_REVISION,
    DEPLOYMENT,
    LEADER_WORKER_SET,
    NETWORK_POLICY,
    POD_DISRUPTION_BUDGET,
    POD_MONITOR,
    RESOURCE_CLAIM_TEMPLATE,
    ROLE,
    ROLE_BINDING,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
)
from bidikv_operator.names import ENGINE_ROLES, ROLES, Role
from bidikv_operator.resolved import Resolved
from bidikv_operator.rollout.sets import find_engine_set


@dataclass(frozen=True, kw_only=True)
class Desired:
    """The children of one resource, one field per kind."""

    service_accounts: tuple[Manifest, ...]
    roles: tuple[Manifest, ...]
    role_bindings: tuple[Manifest, ...]
    services: tuple[Manifest, ...]
    network_policies: tuple[Manifest, ...]
    claim_templates: tuple[Manifest, ...]
    revisions: tuple[Manifest, ...]
    deployments: tuple[Manifest, ...]
    leader_worker_sets: tuple[Manifest, ...]
    disruption_budgets: tuple[Manifest, ...]
    pod_monitors: tuple[Manifest, ...]
    kept: frozenset[ChildRef]
    """Children that stay as they are, if they exist: revisions to go back to, claims that earlier engines name."""

    def __iter__(self) -> Iterator[tuple[Kind, Manifest]]:
        """In the order of writing: a pod's account and Service exist before the pod, and a template has
        been accepted before it is kept."""
        for kind, manifests in (
            (SERVICE_ACCOUNT, self.service_accounts),
            (ROLE, self.roles),
            (ROLE_BINDING, self.role_bindings),
            (SERVICE, self.services),
            (NETWORK_POLICY, self.network_policies),
            (RESOURCE_CLAIM_TEMPLATE, self.claim_templates),
            (DEPLOYMENT, self.deployments),
            (LEADER_WORKER_SET, self.leader_worker_sets),
            (CONTROLLER_REVISION, self.revisions),
            (POD_DISRUPTION_BUDGET, self.disruption_budgets),
            (POD_MONITOR, self.pod_monitors),
        ):
            for manifest in manifests:
                yield kind, manifest


def build_all(
    resolved: Resolved,
    children: Mapping[ChildRef, Mapping[str, Any]] | None = None,
    replicas: Mapping[ChildRef, int] | None = None,
    inputs: Mapping[Role, str] | None = None,
) -> Desired:
    """All children.

    Args:
        children: those that exist.
        replicas: of the current set of each engine role; what the resource says when None.
        inputs: whose templates that set has in this step of a rollout; what the resource says when None.
    """
    children = children or {}
    budgets = (build_disruption_budget(resolved, role) for role in ROLES)
    chosen = {role: choose_templates(resolved, role, children, (inputs or {}).get(role)) for role in ENGINE_ROLES}
    templates = [
        template for each in chosen.values() for template in (each.engine, each.worker) if template is not None
    ]
    sets: dict[Kind, list[Manifest]] = {DEPLOYMENT: [], LEADER_WORKER_SET: []}
    for role in ENGINE_ROLES:
        ref = find_engine_set(resolved, role)
        build = build_engine_deployment if ref.kind == DEPLOYMENT else build_leader_worker_set
        count = compute_replicas(resolved, role) if replicas is None else replicas[ref]
        sets[ref.kind].append(build(resolved, role, ref, chosen[role], count))
    return Desired(
        service_accounts=(build_engine_account(resolved), build_router_account(resolved)),
        roles=(build_router_role(resolved),),
        role_bindings=(build_router_role_binding(resolved),),
        services=(
            *(build_engine_service(resolved, role) for role in ENGINE_ROLES),
            build_endpoint_service(resolved),
        ),
        network_policies=build_network_policies(resolved),
        claim_templates=build_claim_templates(resolved, templates),
        revisions=tuple(build_controller_revision(resolved, role, chosen[role], children) for role in ENGINE_ROLES),
        deployments=(*sets[DEPLOYMENT], build_router_deployment(resolved)),
        leader_worker_sets=tuple(sets[LEADER_WORKER_SET]),
        disruption_budgets=tuple(budget for budget in budgets if budget is not None),
        pod_monitors=build_pod_monitors(resolved),
        kept=choose_kept_revisions(resolved, chosen, children) | _find_claim_templates(children.values()),
    )


def _find_claim_templates(children: Iterable[Mapping[str, Any]]) -> frozenset[ChildRef]:
    """Those that a set of engines names, of whatever group: without its own a pod cannot be made again."""
    named = set()
    for child in children:
        spec = child.get("spec") or {}
        nested = spec.get("leaderWorkerTemplate") or {}
        for template in (spec.get("template"), nested.get("leaderTemplate"), nested.get("workerTemplate")):
            if not isinstance(template, Mapping):
                continue
            for claim in (template.get("spec") or {}).get("resourceClaims") or ():
                named.add(ChildRef(RESOURCE_CLAIM_TEMPLATE, claim.get("resourceClaimTemplateName", "")))
    return frozenset(named)
