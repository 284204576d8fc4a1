"""Install the operator with its chart into the cluster in use, as a user would with helm."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from e2e.cluster.paths import find_paths, find_tool
from e2e.kubectl import Kubectl

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "bidikv"
IMAGES = ROOT / "build" / "images.json"
RELEASE = "bidikv"
NAMESPACE = "bidikv-system"
TIMEOUT_SECONDS = 180


def image_references() -> dict[str, str]:
    """The images to use: ``BIDIKV_OPERATOR_IMAGE`` and ``BIDIKV_RUNTIME_IMAGE``, else what ``make images`` built.

    Raises:
        SystemExit: neither is there.
    """
    built: dict[str, str] = json.loads(IMAGES.read_text()) if IMAGES.exists() else {}
    found = {
        name: os.environ.get(f"BIDIKV_{name.upper()}_IMAGE", built.get(name, "")) for name in ("operator", "runtime")
    }
    for name, reference in found.items():
        if not reference:
            raise SystemExit(f"no {name} image: run `make images`, or set BIDIKV_{name.upper()}_IMAGE")
    return found


def install_operator(kubectl: Kubectl, *overrides: str) -> None:
    """``helm upgrade --install`` and wait until the operator is ready; ``overrides`` are ``key=value`` chart values.

    Raises:
        SystemExit: helm failed; the message holds its words and the operator's last log lines.
    """
    images = image_references()
    values = [f"image.reference={images['operator']}", f"runtimeImage.reference={images['runtime']}", *overrides]
    argv = [
        find_tool("helm", find_paths()),
        "upgrade",
        "--install",
        RELEASE,
        str(CHART),
        "--kubeconfig",
        kubectl.kubeconfig,
    ]
    argv += ["--namespace", NAMESPACE, "--create-namespace", "--wait", "--timeout", f"{TIMEOUT_SECONDS}s"]
    # Tests without the operator apply the CRD with kubectl; helm would refuse to adopt it otherwise.
    argv += ["--take-ownership"]
    for value in values:
        argv += ["--set", value]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_SECONDS + 60)
    if done.returncode:
        pods = kubectl.within(NAMESPACE)
        log = pods.run("logs", "deployment/bidikv", "--tail", "20") if pods.get("deployment", "bidikv") else ""
        raise SystemExit(f"helm could not install the operator:\n{done.stderr.strip()}\n{log}")


def uninstall_operator(kubectl: Kubectl) -> None:
    """``helm uninstall``; the CRD and the resources stay."""
    argv = [
        find_tool("helm", find_paths()),
        "uninstall",
        RELEASE,
        "--kubeconfig",
        kubectl.kubeconfig,
        "--namespace",
        NAMESPACE,
    ]
    subprocess.run([*argv, "--ignore-not-found", "--wait"], check=True, capture_output=True, timeout=120)
