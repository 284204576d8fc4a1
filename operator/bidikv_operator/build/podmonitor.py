"""PodMonitors of the Prometheus operator: what scrapes engines and routers.

API: ``monitoring.coreos.com/v1``. Routers and engines have one each, as routers with a certificate serve HTTPS.
"""

from __future__ import annotations

from bidikv_operator import names
from bidikv_operator.build.meta import Manifest, build_object, build_selector, engine_account_name, role_name
from bidikv_operator.kinds import POD_MONITOR
from bidikv_operator.resolved import Resolved


def build_pod_monitors(resolved: Resolved) -> tuple[Manifest, ...]:
    """None unless the resource asks for them."""
    if not resolved.monitoring.pod_monitor:
        return ()
    engines: Manifest = {
        "matchLabels": {names.LABEL_OWNER: resolved.name},
        "matchExpressions": [{"key": names.LABEL_ROLE, "operator": "In", "values": list(names.ENGINE_ROLES)}],
    }
    engine = build_object(POD_MONITOR, resolved, engine_account_name(resolved))
    router = build_object(POD_MONITOR, resolved, role_name(resolved, names.ROUTER), names.ROUTER)
    for monitor, selector, tls in (
        (engine, engines, False),
        (router, {"matchLabels": build_selector(resolved, names.ROUTER)}, resolved.router.tls_secret_name is not None),
    ):
        monitor["metadata"]["labels"] = {**resolved.monitoring.labels, **monitor["metadata"]["labels"]}
        monitor["spec"] = {
            "selector": selector,
            "podTargetLabels": [names.LABEL_OWNER, names.LABEL_ROLE, names.LABEL_GROUP],
            "podMetricsEndpoints": [_build_endpoint(resolved.monitoring.interval_seconds, tls=tls)],
        }
    return engine, router


def _build_endpoint(interval_seconds: int, *, tls: bool) -> Manifest:
    endpoint: Manifest = {"port": "http", "path": "/metrics", "interval": f"{interval_seconds}s"}
    if tls:
        # The certificate names the Service, not the pod's address that is scraped.
        endpoint |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    return endpoint
