"""Run the operator as a subprocess on this machine, for one namespace: tests need what the installed one cannot give.

Several may run side by side (leader election), be killed, and be started again. Each listens on loopback only.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from bidikv_operator import names
from e2e.install import ROOT
from e2e.kubectl import Kubectl, eventually

PORT = re.compile(r"Serving /healthz, /readyz and /metrics on port (\d+)")
RECONCILES = "bidikv_operator_reconciles_total"
WRITES = "bidikv_operator_writes_total"
START_SECONDS = 30
STOP_SECONDS = 30
CONDITION_SECONDS = 300
"""Enough for a rollout of simulated engines, or for the verdict on one that is silent, on few cores."""
SHOWN_CHARACTERS = 4000
"""Of the log, by a failure."""


@dataclass
class OperatorProcess:
    """One operator; ``identity`` is its name in the Lease."""

    kubectl: Kubectl
    identity: str
    runtime_image: str
    folder: Path
    settings: dict[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None
    _said_before: int = 0
    """Characters in the log that are of earlier processes."""

    def start(self) -> OperatorProcess:
        """Start, and wait until it serves its pages."""
        assert self.kubectl.namespace is not None, "bind the operator to a namespace"
        paths = [str(ROOT / "operator"), str(ROOT / "runtime")]
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": str(self.folder),
            "NO_PROXY": "*",  # neither the cluster nor loopback is behind a proxy
            "PYTHONPATH": os.pathsep.join(paths),
            "KUBECONFIG": self.kubectl.kubeconfig,
            "BIDIKV_RUNTIME_IMAGE": self.runtime_image,
            "BIDIKV_NAMESPACES": self.kubectl.namespace,
            "BIDIKV_LEASE_NAMESPACE": self.kubectl.namespace,
            "BIDIKV_LEASE_NAME": "operator",
            "BIDIKV_IDENTITY": self.identity,
            "BIDIKV_HTTP_HOST": "127.0.0.1",
            "BIDIKV_HTTP_PORT": "0",
            **self.settings,
        }
        self._said_before = len(self.log())
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bidikv_operator"], env=environment, stdout=log, stderr=log, cwd=self.folder
            )
        eventually(self._find_started, f"operator {self.identity} to serve", START_SECONDS, every=0.1)
        return self

    @property
    def log_file(self) -> Path:
        return self.folder / f"{self.identity}.log"

    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    @property
    def pid(self) -> int | None:
        """Of the process that runs; None before a start and after an end."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def leads(self) -> bool:
        return self.page("readyz") == (200, "ok, leading\n")

    def await_condition(self, resource: str, name: str, status: str, reason: str | None = None) -> dict[str, str]:
        """Wait until a condition of a resource has this status, and this reason if one is given; returns it.

        Raises:
            AssertionError: it did not come; tells what was seen last and what the operator said.
        """
        seen: dict[str, dict[str, str]] = {}

        def look() -> dict[str, str] | None:
            found = (self.kubectl.get(names.SHORT_NAME, resource) or {}).get("status") or {}
            seen.clear()
            seen.update({condition["type"]: condition for condition in found.get("conditions") or []})
            condition = seen.get(name, {})
            fits = condition.get("status") == status and reason in (None, condition["reason"])
            return condition if fits else None

        try:
            return eventually(look, f"{name}={status} {reason or ''} of {resource}", CONDITION_SECONDS)
        except TimeoutError as error:
            last = "\n".join(f"{c['type']}={c['status']} {c['reason']}: {c['message']}" for c in seen.values())
            raise AssertionError(f"{error}; seen last:\n{last}\n{self.log()[-SHOWN_CHARACTERS:]}") from None

    def await_reconcile(self, resource: str) -> None:
        """Touch a resource as a user may, and wait until the operator has looked at it again."""
        before = self.metric(RECONCILES)
        mark = f"example.com/touched={uuid.uuid4().hex}"
        self.kubectl.run("annotate", names.SHORT_NAME, resource, mark, "--overwrite")
        eventually(lambda: self.metric(RECONCILES) > before, f"a look at {resource}", CONDITION_SECONDS, every=0.1)

    def await_rest(self, resource: str) -> None:
        """Wait until a look at a resource writes nothing: what others do to its children may be told late."""

        def rests() -> bool:
            written = self.metric(WRITES)
            self.await_reconcile(resource)
            return self.metric(WRITES) == written

        eventually(rests, f"a look at {resource} that writes nothing", CONDITION_SECONDS)

    def page(self, name: str) -> tuple[int, str]:
        """Status and text of one of its pages."""
        url = f"http://127.0.0.1:{self._port()}/{name}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric over its series with these labels."""
        series = re.findall(rf"^{name}({{[^}}]*}})? (\S+)$", self.page("metrics")[1], re.MULTILINE)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for found, value in series if all(label in found for label in wanted))

    def terminate(self) -> int:
        """SIGTERM, as the kubelet sends it; returns the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_SECONDS)

    def kill(self) -> None:
        """SIGKILL: no chance to release anything."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_SECONDS)

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def logged_at(self, words: str) -> datetime:
        """When a line with these words was logged."""
        line = next(line for line in self.log().splitlines() if words in line)
        return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").astimezone(UTC)

    def wait(self, seconds: float) -> int:
        """The exit code of an operator that ends by itself."""
        assert self._process is not None
        return self._process.wait(seconds)

    def _port(self) -> int | None:
        found = PORT.search(self.log(), self._said_before)
        return int(found.group(1)) if found else None

    def _find_started(self) -> int | None:
        """The port of a process that serves; None while it starts."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"operator {self.identity} ended at its start:\n{self.log()}")
        return self._port()
