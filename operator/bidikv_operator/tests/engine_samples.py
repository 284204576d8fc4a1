"""Engine pods and their facts for tests."""

from __future__ import annotations

from typing import Any

from bidikv_operator import names
from bidikv_operator.names import Role
from bidikv_operator.state import EngineFacts
from bidikv_runtime.contract import EngineReport, TransportReport

Object = dict[str, Any]


def make_pod(name: str, role: Role = "decode", ip: str | None = "10.0.0.1", **changes: Any) -> Object:
    """A pod whose engine runs and is ready; ``changes``: labels, started, ready, deleted."""
    labels = {names.LABEL_ROLE: role, names.LABEL_OWNER: "chat"} | changes.get("labels", {})
    metadata: Object = {
        "name": name,
        "namespace": "team",
        "uid": f"uid-{name}",
        "labels": labels,
        "resourceVersion": "7",
    }
    if changes.get("deleted"):
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    started = changes.get("started", True)
    status: Object = {
        "containerStatuses": [
            {"name": "sidecar", "started": True},
            {"name": names.ENGINE_CONTAINER, "started": started},
        ],
        "conditions": [{"type": "Ready", "status": "True" if changes.get("ready", True) else "False"}],
    }
    if ip is not None:
        status["podIP"] = ip
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status}


def make_report(transport: TransportReport | None = None, **changes: Any) -> EngineReport:
    """An idle engine's."""
    values: Object = {
        "engine": "engine",
        "epoch": "1",
        "sequence": 0,
        "compatibility": "c",
        "requests": 0,
        "queued_tokens": 0,
        "prefill_tokens_per_second": 0.0,
        "free_blocks": 1.0,
        "transport": transport,
    }
    return EngineReport(**(values | changes))


def make_facts(address: str, role: Role = "decode", report: EngineReport | None = None, **changes: Any) -> EngineFacts:
    """Facts of the only rank of the pod ``pod-<address>``."""
    values: Object = {"pod": f"pod-{address}", "uid": f"uid-{address}", **changes}
    return EngineFacts(role=role, address=address, report=report, **values)
