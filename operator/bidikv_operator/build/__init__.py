"""``Resolved`` to everything the cluster should hold. Pure: equal input gives equal bytes, no clock, no cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bidikv_operator import names
from bidikv_operator.build.configmap import build_router_configmap, compute_config_hash
from bidikv_operator.build.deployment import build_engine_deployment, build_router_deployment
from bidikv_operator.build.devices import build_claim_templates
from bidikv_operator.build.meta import Manifest
from bidikv_operator.build.networkpolicy import build_network_policies
from bidikv_operator.build.pdb import build_disruption_budget
from bidikv_operator.build.podmonitor import build_pod_monitors
from bidikv_operator.build.rbac import build_router_role, build_router_role_binding
from bidikv_operator.build.service import build_endpoint_service, build_engine_service
from bidikv_operator.build.serviceaccount import build_engine_account, build_router_account
from bidikv_operator.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
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
from bidikv_operator.resolved import Resolved

ENGINE_ROLES: tuple[names.Role, ...] = (names.PREFILL, names.DECODE)
ROLES: tuple[names.Role, ...] = (*ENGINE_ROLES, names.ROUTER)


@dataclass(frozen=True, kw_only=True)
class Desired:
    """The children of one resource, one field per kind."""

    service_accounts: tuple[Manifest, ...]
    roles: tuple[Manifest, ...]
    role_bindings: tuple[Manifest, ...]
    config_maps: tuple[Manifest, ...]
    services: tuple[Manifest, ...]
    network_policies: tuple[Manifest, ...]
    claim_templates: tuple[Manifest, ...]
    deployments: tuple[Manifest, ...]
    disruption_budgets: tuple[Manifest, ...]
    pod_monitors: tuple[Manifest, ...]

    def __iter__(self) -> Iterator[tuple[Kind, Manifest]]:
        """In the order of writing: a pod's account, configuration and Service exist before the pod."""
        for kind, manifests in (
            (SERVICE_ACCOUNT, self.service_accounts),
            (ROLE, self.roles),
            (ROLE_BINDING, self.role_bindings),
            (CONFIG_MAP, self.config_maps),
            (SERVICE, self.services),
            (NETWORK_POLICY, self.network_policies),
            (RESOURCE_CLAIM_TEMPLATE, self.claim_templates),
            (DEPLOYMENT, self.deployments),
            (POD_DISRUPTION_BUDGET, self.disruption_budgets),
            (POD_MONITOR, self.pod_monitors),
        ):
            for manifest in manifests:
                yield kind, manifest


def build_all(resolved: Resolved) -> Desired:
    budgets = (build_disruption_budget(resolved, role) for role in ROLES)
    engines = tuple(build_engine_deployment(resolved, role) for role in ENGINE_ROLES)
    return Desired(
        service_accounts=(build_engine_account(resolved), build_router_account(resolved)),
        roles=(build_router_role(resolved),),
        role_bindings=(build_router_role_binding(resolved),),
        config_maps=(build_router_configmap(resolved),),
        services=(
            *(build_engine_service(resolved, role) for role in ENGINE_ROLES),
            build_endpoint_service(resolved),
        ),
        network_policies=build_network_policies(resolved),
        claim_templates=build_claim_templates(resolved, (engine["spec"]["template"] for engine in engines)),
        deployments=(*engines, build_router_deployment(resolved, compute_config_hash(resolved))),
        disruption_budgets=tuple(budget for budget in budgets if budget is not None),
        pod_monitors=build_pod_monitors(resolved),
    )
