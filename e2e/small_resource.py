"""A resource for tests of what the operator writes and says: complete, and nothing that could run."""

from __future__ import annotations

from typing import Any

from bidikv_operator import names
from e2e.kubectl import Manifest


def build_small_resource(name: str = "chat", **changes: Any) -> Manifest:
    """``changes`` take the place of fields of the spec."""
    spec: Manifest = {
        "model": {"source": {"path": "/models/none"}},
        "image": "engine.example/none:v1",
        "fabric": {"type": "TCP"},
        "prefill": {"gpusPerPod": 0},
        "decode": {"gpusPerPod": 0},
    }
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": {**spec, **changes},
    }
