"""Services: the endpoint that clients call, and the headless ones whose EndpointSlices tell the router its engines."""

from __future__ import annotations

from typing import Any

from bidikv_operator import names
from bidikv_operator.build.meta import Manifest, build_object, build_selector, role_name
from bidikv_operator.kinds import SERVICE
from bidikv_operator.resolved import Resolved
from bidikv_runtime import contract


def build_endpoint_service(resolved: Resolved) -> Manifest:
    """The OpenAI API in the cluster, in front of the routers; it has the resource's own name."""
    service = build_object(SERVICE, resolved, resolved.name, names.ROUTER)
    if resolved.router.service_annotations:
        service["metadata"]["annotations"] = dict(resolved.router.service_annotations)
    scheme = "https" if resolved.router.tls_secret_name is not None else "http"
    service["spec"] = {
        "type": resolved.router.service_type,
        "selector": build_selector(resolved, names.ROUTER),
        "ports": [_build_port(scheme, contract.ROUTER_PORT, "http")],
    }
    return service


def build_engine_service(resolved: Resolved, role: names.Role) -> Manifest:
    """Headless: the router addresses single pods. Pods that are not ready stay unlisted as ready on purpose."""
    service = build_object(SERVICE, resolved, role_name(resolved, role), role)
    service["spec"] = {
        "type": "ClusterIP",
        "clusterIP": "None",
        "selector": build_selector(resolved, role),
        "ports": [
            _build_port("http", contract.ENGINE_PORT, "http"),
            _build_port("lookup", contract.LOOKUP_PORT, "lookup"),
        ],
    }
    return service


def _build_port(name: str, port: int, target: str) -> dict[str, Any]:
    return {"name": name, "port": port, "targetPort": target, "protocol": "TCP"}
