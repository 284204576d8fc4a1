"""The API kinds the operator touches: how each is addressed, and nothing else.

A new child kind starts here: watches (``watch.py``) and resync (``resync.py``) walk these tuples. The chart's RBAC
must name it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bidikv_operator import names


@dataclass(frozen=True)
class Kind:
    """One namespaced API kind; ``group`` is empty for the core API."""

    group: str
    version: str
    kind: str
    plural: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def root(self) -> str:
        """Path of the group-version in the API server, the place of its discovery document."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Path of the collection (``namespace`` None: of all namespaces), of one object, or of its subresource."""
        parts = [self.root()]
        if namespace is not None:
            parts.append(f"namespaces/{namespace}")
        parts.append(self.plural)
        if name is not None:
            parts.append(name)
        if subresource is not None:
            parts.append(subresource)
        return "/".join(parts)


INFERENCE: Final = Kind(names.GROUP, names.VERSION, names.KIND, names.PLURAL)
SERVICE_ACCOUNT: Final = Kind("", "v1", "ServiceAccount", "serviceaccounts")
ROLE: Final = Kind("rbac.authorization.k8s.io", "v1", "Role", "roles")
ROLE_BINDING: Final = Kind("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings")
SERVICE: Final = Kind("", "v1", "Service", "services")
DEPLOYMENT: Final = Kind("apps", "v1", "Deployment", "deployments")
POD_DISRUPTION_BUDGET: Final = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
SECRET: Final = Kind("", "v1", "Secret", "secrets")
"""Read and written by name, never listed or watched."""
CONTROLLER_REVISION: Final = Kind("apps", "v1", "ControllerRevision", "controllerrevisions")
NETWORK_POLICY: Final = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
RESOURCE_CLAIM_TEMPLATE: Final = Kind("resource.k8s.io", "v1", "ResourceClaimTemplate", "resourceclaimtemplates")
LEADER_WORKER_SET: Final = Kind("leaderworkerset.x-k8s.io", "v1", "LeaderWorkerSet", "leaderworkersets")
POD_MONITOR: Final = Kind("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors")
POD: Final = Kind("", "v1", "Pod", "pods")
LEASE: Final = Kind("coordination.k8s.io", "v1", "Lease", "leases")
EVENT: Final = Kind("events.k8s.io", "v1", "Event", "events")

CHILD_KINDS: Final = (
    SERVICE_ACCOUNT,
    ROLE,
    ROLE_BINDING,
    SERVICE,
    NETWORK_POLICY,
    DEPLOYMENT,
    CONTROLLER_REVISION,
    POD_DISRUPTION_BUDGET,
)
"""In the order of writing: identity and configuration exist before the pods that mount them."""
WATCHED_KINDS: Final = (INFERENCE, *CHILD_KINDS, POD)
"""All but the resource itself are watched by our label only."""

OPTIONAL_KINDS: Final = (RESOURCE_CLAIM_TEMPLATE, LEADER_WORKER_SET, POD_MONITOR)
"""Used by resources that ask for them, where the cluster serves them."""
