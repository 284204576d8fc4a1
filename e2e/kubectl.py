"""Run kubectl against the cluster in use, with a deadline on every call.

The demo and the end-to-end tests go through kubectl, as users do; what they see is what a user would see.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from e2e.cluster.paths import find_external_kubeconfig, find_paths, find_tool
from e2e.cluster.progress import ClusterError

Manifest = dict[str, Any]
T = TypeVar("T")


class KubectlError(Exception):
    """kubectl ended with an error; the text is what it printed."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl of one cluster, optionally bound to a namespace."""

    binary: str
    kubeconfig: str
    namespace: str | None = None

    @staticmethod
    def connect() -> Kubectl:
        """kubectl for the explicit KUBECONFIG, else for the local cluster.

        Raises:
            SystemExit: there is neither; the message says what to run.
        """
        try:
            paths = find_paths()
            kubeconfig = find_external_kubeconfig(paths) or str(paths.kubeconfig)
            if not Path(kubeconfig).exists():
                raise SystemExit(f"{kubeconfig} does not exist: run `make cluster-up`, or set KUBECONFIG")
            return Kubectl(binary=find_tool("kubectl", paths), kubeconfig=kubeconfig)
        except ClusterError as error:
            raise SystemExit(str(error)) from None

    def within(self, namespace: str) -> Kubectl:
        """The same cluster, bound to ``namespace``."""
        return Kubectl(self.binary, self.kubeconfig, namespace)

    def argv(self, *arguments: str) -> list[str]:
        scope = ["--namespace", self.namespace] if self.namespace else []
        return [self.binary, "--kubeconfig", self.kubeconfig, *scope, *arguments]

    def run(self, *arguments: str, stdin: str | None = None, timeout: float = 60) -> str:
        """kubectl's standard output.

        Raises:
            KubectlError: it failed, or did not end within ``timeout`` seconds.
        """
        argv = self.argv(*arguments)
        try:
            done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise KubectlError(f"kubectl {' '.join(arguments)} did not end within {timeout:.0f} s") from None
        if done.returncode:
            raise KubectlError(done.stderr.strip() or done.stdout.strip())
        return done.stdout

    def apply(self, *manifests: Manifest) -> str:
        """Server-side apply, as GitOps tools do."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
        return self.run("apply", "--server-side", "--field-manager", "user", "-f", "-", stdin=text)

    def get(self, kind: str, name: str) -> Manifest | None:
        """The object, or None when there is none."""
        text = self.run("get", kind, name, "--output", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def find(self, kind: str, selector: str = "") -> list[Manifest]:
        """Objects of a kind (comma-separated kinds work too), optionally by label selector."""
        extra = ["--selector", selector] if selector else []
        items: list[Manifest] = json.loads(self.run("get", kind, "--output", "json", *extra))["items"]
        return items

    def condition(self, kind: str, name: str, condition: str) -> dict[str, str]:
        """One status condition of an object; empty while there is none."""
        found = self.get(kind, name) or {}
        conditions = (found.get("status") or {}).get("conditions") or []
        return next((c for c in conditions if c["type"] == condition), {})

    @contextmanager
    def port_forward(self, target: str, port: int, timeout: float = 30) -> Iterator[int]:
        """A local port that leads to ``port`` of ``target`` (``pod/x``, ``svc/x``) while the context lasts."""
        argv = self.argv("port-forward", target, f":{port}", "--address", "127.0.0.1")
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            try:
                os.set_blocking(process.stdout.fileno(), False)  # type: ignore[union-attr]
                said = ""

                def forwarded() -> int | None:
                    nonlocal said
                    # Bytes: a text stream cannot be read without blocking (it fails when there is nothing yet).
                    said += ((process.stdout.read() or b"") if process.stdout else b"").decode()
                    if process.poll() is not None:
                        raise KubectlError(f"port-forward to {target} ended: {said.strip()}")
                    head, _, _ = said.partition(" -> ")
                    return int(head.rsplit(":", 1)[1]) if " -> " in said else None

                yield eventually(forwarded, f"port-forward to {target}", timeout, every=0.05)
            finally:
                process.kill()


def eventually(look: Callable[[], T | None], what: str, timeout: float, every: float = 0.5) -> T:
    """Look until there is something (neither None nor False), and return it.

    Raises:
        TimeoutError: nothing within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        found = look()
        if found is not None and found is not False:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:.0f} s for {what}")
        time.sleep(every)
