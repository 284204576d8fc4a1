"""An API server of the tests' own, without controllers or nodes.

Every request is audited, reads too, and an operator that serves the whole cluster disturbs nobody. What ReplicaSets,
kubelets or the garbage collector would do does not happen here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from bidikv_operator import names
from e2e.bench.operator.control_plane import ADVERTISED, ControlPlane, run_control_plane
from e2e.bench.processes import guardian
from e2e.cluster.paths import find_paths, find_tool
from e2e.install import ROOT
from e2e.kubectl import Kubectl, eventually
from e2e.network_namespace import own_network

STRICT: Final = "--enable-admission-plugins=OwnerReferencesPermissionEnforcement"
"""Some clusters have it: who makes children block their owner's deletion needs a right for that."""
ESTABLISHED_SECONDS: Final = 120.0
CRD = ROOT / "crds" / "serving.bidikv.io_bidikvinferences.yaml"


@dataclass(frozen=True)
class Request:
    """One request as the audit log has it."""

    received: datetime
    verb: str
    group: str
    resource: str
    """With its subresource, as RBAC names it."""
    namespace: str
    name: str
    user: str
    agent: str
    status: int

    @property
    def is_write(self) -> bool:
        return self.verb not in {"get", "list", "watch"}


@dataclass(frozen=True)
class OwnApiServer:
    control_plane: ControlPlane
    kubectl: Kubectl
    folder: Path

    def create_namespace(self, name: str) -> Kubectl:
        """A namespace, and kubectl bound to it."""
        self.kubectl.run("create", "namespace", name)
        return self.kubectl.within(name)

    def log_in(self, account: str, namespace: str) -> Kubectl:
        """kubectl with a token of a ServiceAccount, bound to its namespace."""
        token = self.kubectl.run("--namespace", namespace, "create", "token", account, "--duration=2h").strip()
        kubeconfig = json.loads(self.control_plane.kubeconfig.read_text())
        kubeconfig["users"][0]["user"] = {"token": token}
        return Kubectl(self.kubectl.binary, self._write(f"{namespace}-{account}", kubeconfig), namespace)

    def reach_through(self, url: str) -> Kubectl:
        """The administrator's kubectl by another way to the API server, as a relay."""
        kubeconfig = json.loads(self.control_plane.kubeconfig.read_text())
        kubeconfig["clusters"][0]["cluster"]["server"] = url
        return Kubectl(self.kubectl.binary, self._write("relayed", kubeconfig))

    def requests(self) -> list[Request]:
        """All so far that were about a resource, in the order of their arrival."""
        lines = self.control_plane.audit_log.read_bytes().splitlines()
        entries = (json.loads(line) for line in lines if line.endswith(b"}"))
        # A watch has an entry at its start and one at its end; a failed request may have one for its panic.
        found = [_parse(entry) for entry in entries if "objectRef" in entry and "responseStatus" in entry]
        return sorted(found, key=lambda request: request.received)

    def _write(self, name: str, kubeconfig: dict[str, Any]) -> str:
        path = self.folder / f"{name}.kubeconfig"
        path.touch(0o600)
        path.write_text(json.dumps(kubeconfig))
        return str(path)


def _parse(entry: dict[str, Any]) -> Request:
    about = entry["objectRef"]
    return Request(
        received=datetime.fromisoformat(entry["requestReceivedTimestamp"]),
        verb=entry["verb"],
        group=about.get("apiGroup", ""),
        resource="/".join(part for part in (about["resource"], about.get("subresource")) if part),
        namespace=about.get("namespace", ""),
        name=about.get("name", ""),
        user=entry["user"]["username"],
        agent=entry.get("userAgent", ""),
        status=entry["responseStatus"]["code"],
    )


@contextmanager
def run_own_api_server(folder: Path) -> Iterator[OwnApiServer]:
    """With the CRD of this checkout, in a network of the calling thread's own, which needs root."""
    with (
        guardian() as guard,
        own_network([ADVERTISED]),
        run_control_plane(folder / "control-plane", guard, STRICT) as control_plane,
    ):
        kubectl = Kubectl(find_tool("kubectl", find_paths()), str(control_plane.kubeconfig))
        kubectl.run("apply", "--server-side", "-f", str(CRD))
        wait_until_established(kubectl, names.CRD_NAME)
        yield OwnApiServer(control_plane, kubectl, folder)


def wait_until_established(kubectl: Kubectl, definition: str) -> None:
    """``kubectl wait`` fails on a definition that has no conditions yet."""

    def look() -> bool:
        return kubectl.condition("customresourcedefinition", definition, "Established").get("status") == "True"

    eventually(look, f"{definition} to be served", ESTABLISHED_SECONDS, every=0.1)
