"""What the engine pods say of themselves: counters of vLLM's /metrics, read through the API server's pod proxy."""

from __future__ import annotations

import re

from bidikv_operator.names import LABEL_OWNER, LABEL_ROLE
from bidikv_runtime.contract import ENGINE_PORT
from e2e.kubectl import Kubectl

SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{[^}]*\})? (?P<value>\S+)$")


def parse_totals(text: str) -> dict[str, float]:
    """Prometheus text -> value per metric name, summed over its label sets."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if found := SAMPLE.match(line):
            totals[found["name"]] = totals.get(found["name"], 0.0) + float(found["value"])
    return totals


class EnginePods:
    """The pods of one role of one resource, without those that a rollout is ending."""

    def __init__(self, kubectl: Kubectl, owner: str, role: str) -> None:
        self.kubectl = kubectl
        pods = kubectl.find("pods", f"{LABEL_OWNER}={owner},{LABEL_ROLE}={role}")
        self.names = [pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def totals(self) -> dict[str, float]:
        """Counters summed over the pods."""
        sums: dict[str, float] = {}
        for name in self.names:
            path = f"/api/v1/namespaces/{self.kubectl.namespace}/pods/{name}:{ENGINE_PORT}/proxy/metrics"
            for metric, value in parse_totals(self.kubectl.run("get", "--raw", path)).items():
                sums[metric] = sums.get(metric, 0.0) + value
        return sums

    def version(self, package: str) -> str:
        """Version of a Python package inside the first pod's engine container."""
        code = f"import importlib.metadata as m; print(m.version('{package}'))"
        return self.kubectl.run("exec", self.names[0], "-c", "engine", "--", "python3", "-c", code).strip()
