"""Simulated engines in pods: a ``BidiKVInference`` whose engines are ``e2e.simengine``, run by the operator unchanged.

The operator's own command line, init container, probes, hooks, tokens and security settings apply; only the image is
another one. An engine takes about 60 MB and is ready within seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from bidikv_operator import names
from bidikv_runtime import contract
from e2e.images.catalog import SIMULATED_ENGINE_STABLE_NAME
from e2e.kubectl import Kubectl, Manifest
from e2e.simengine.faults import PATH
from e2e.simengine.local import SERVED_MODEL
from e2e.simengine.settings import PREFIX

CONTROL_PORT: Final = 5900
"""Where faults are set in pods."""
RESOURCES: Final = {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}


def build_resource(
    name: str,
    *,
    prefill: int = 1,
    decode: int = 2,
    routers: int = 1,
    simulation: Mapping[str, Any] | None = None,
    faults: Mapping[str, Mapping[str, Any]] | None = None,
    spec: Mapping[str, Any] | None = None,
) -> Manifest:
    """A resource, ready to be applied.

    Args:
        name: of the resource.
        prefill: engines, as the next two.
        decode: engines.
        routers: replicas.
        simulation: of all engines, by the names of ``settings.Simulation``. Another ``vllm_version`` is another
            release, whose engines share no KV with those before.
        faults: by role (``prefill``, ``decode``), as ``faults.FaultSet`` takes them; present from the start on.
        spec: more of the resource's spec, by its own names; the roles' fields are merged.
    """
    more: Mapping[str, Any] = spec or {}
    settings = {"control_port": CONTROL_PORT, **(simulation or {})}

    def build_role(role: str, replicas: int) -> Manifest:
        variables: dict[str, Any] = dict(settings)
        if own := (faults or {}).get(role):
            variables["faults"] = json.dumps(own)
        env = [{"name": PREFIX + key.upper(), "value": str(value)} for key, value in variables.items()]
        container = {"name": names.ENGINE_CONTAINER, "resources": RESOURCES}
        template = {"spec": {"containers": [container]}}
        return {"replicas": replicas, "gpusPerPod": 0, "env": env, "podTemplate": template, **more.get(role, {})}

    fixed: Manifest = {
        "model": {"source": {"path": f"/{SERVED_MODEL}"}, "servedName": SERVED_MODEL, "maxLength": 32_768},
        "image": SIMULATED_ENGINE_STABLE_NAME,
        "fabric": {"type": "TCP"},
    }
    roles = {
        names.PREFILL: build_role(names.PREFILL, prefill),
        names.DECODE: build_role(names.DECODE, decode),
        names.ROUTER: {"replicas": routers, **more.get(names.ROUTER, {})},
    }
    return {
        "apiVersion": f"{names.GROUP}/{names.VERSION}",
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": {**fixed, **more, **roles},
    }


def set_faults(kubectl: Kubectl, pod: str, **faults: Any) -> None:
    """These faults and no others in a running pod, from now on (none: it is well again)."""
    kubectl.run("create", "--raw", _proxy(kubectl, pod, CONTROL_PORT, PATH), "-f", "-", stdin=json.dumps(faults))


def read_metrics(kubectl: Kubectl, pod: str) -> str:
    """A pod's ``/metrics``."""
    return kubectl.run("get", "--raw", _proxy(kubectl, pod, contract.ENGINE_PORT, "/metrics"))


def _proxy(kubectl: Kubectl, pod: str, port: int, path: str) -> str:
    return f"/api/v1/namespaces/{kubectl.namespace}/pods/{pod}:{port}/proxy{path}"
