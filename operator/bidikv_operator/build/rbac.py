"""What the router may read. The operator must hold every right granted here, or the API server refuses the Role."""

from __future__ import annotations

from bidikv_operator import names
from bidikv_operator.build.meta import Manifest, build_object, role_name
from bidikv_operator.kinds import ROLE, ROLE_BINDING
from bidikv_operator.resolved import Resolved


def build_router_role(resolved: Resolved) -> Manifest:
    role = build_object(ROLE, resolved, role_name(resolved, names.ROUTER), names.ROUTER)
    role["rules"] = [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}]
    return role


def build_router_role_binding(resolved: Resolved) -> Manifest:
    name = role_name(resolved, names.ROUTER)
    binding = build_object(ROLE_BINDING, resolved, name, names.ROUTER)
    binding["roleRef"] = {"apiGroup": ROLE.group, "kind": ROLE.kind, "name": name}
    binding["subjects"] = [{"kind": "ServiceAccount", "name": name, "namespace": resolved.namespace}]
    return binding
