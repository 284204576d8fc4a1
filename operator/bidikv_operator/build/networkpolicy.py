"""Who may open connections to engines and routers. Ingress only: models are downloaded from anywhere.

- An engine is reached by the resource's routers (HTTP and reports), by its other engines on every port (UCX and
  LIBFABRIC listen on ports that they choose at random; a replica of several nodes talks among its pods), by the
  operator (reports), and by pods of the namespaces that may read metrics.
- A router is reached by everybody, on its one port.

Kubernetes lets a node's kubelet reach its own pods whatever the policy, so probes need no rule. A policy does something
only where the cluster's network enforces it, and binds no pod on its node's own network.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from bidikv_operator import names
from bidikv_operator.build.meta import Manifest, build_object, build_selector, engine_account_name, role_name
from bidikv_operator.build.placement import list_engine_labels
from bidikv_operator.kinds import NETWORK_POLICY
from bidikv_operator.resolved import Resolved
from bidikv_runtime import contract

NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"
"""Label that the API server puts on every namespace."""
OPERATOR_LABELS: Final = {names.LABEL_COMPONENT: "operator"}
"""Of the operator's pods, as the chart sets them."""


def build_network_policies(resolved: Resolved) -> tuple[Manifest, ...]:
    """One for the engines of both roles and one for the routers; none when the resource turns them off."""
    if not resolved.security.network_policy:
        return ()
    return (_build_engine_policy(resolved), _build_router_policy(resolved))


def _build_engine_policy(resolved: Resolved) -> Manifest:
    ranks = max(resolved.prefill.data_parallel_size, resolved.decode.data_parallel_size)
    states = range(contract.STATE_PORT, contract.STATE_PORT + ranks)
    engines = {
        "matchLabels": {names.LABEL_OWNER: resolved.name},
        "matchExpressions": [{"key": names.LABEL_ROLE, "operator": "In", "values": list_engine_labels()}],
    }
    routers = {"matchLabels": build_selector(resolved, names.ROUTER)}
    ingress: list[Manifest] = [
        {"from": [{"podSelector": engines}]},
        {"from": [{"podSelector": routers}], "ports": _list_ports((contract.ENGINE_PORT, *states))},
    ]
    if resolved.operator_namespace:
        operator = {
            "namespaceSelector": {"matchLabels": {NAMESPACE_NAME: resolved.operator_namespace}},
            "podSelector": {"matchLabels": OPERATOR_LABELS},
        }
        ingress.append({"from": [operator], "ports": _list_ports(states)})
    if resolved.security.metrics_namespace_labels:
        namespaces = {"matchLabels": dict(resolved.security.metrics_namespace_labels)}
        ingress.append({"from": [{"namespaceSelector": namespaces}], "ports": _list_ports((contract.ENGINE_PORT,))})
    policy = build_object(NETWORK_POLICY, resolved, engine_account_name(resolved))
    policy["spec"] = {"podSelector": engines, "policyTypes": ["Ingress"], "ingress": ingress}
    return policy


def _build_router_policy(resolved: Resolved) -> Manifest:
    policy = build_object(NETWORK_POLICY, resolved, role_name(resolved, names.ROUTER), names.ROUTER)
    policy["spec"] = {
        "podSelector": {"matchLabels": build_selector(resolved, names.ROUTER)},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": _list_ports((contract.ROUTER_PORT,))}],
    }
    return policy


def _list_ports(ports: Iterable[int]) -> list[dict[str, Any]]:
    return [{"port": port, "protocol": "TCP"} for port in ports]
