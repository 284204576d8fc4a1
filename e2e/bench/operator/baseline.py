"""What the API server alone costs: the operator's writes, computed before, sent by a client that does nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bidikv_operator.cache import Key, ObjectCache
from bidikv_operator.kinds import INFERENCE, Kind
from bidikv_operator.reconcile import Reconciler
from bidikv_operator.tests.samples import FakeKube
from e2e.bench.operator.client import Client, do_all
from e2e.bench.operator.plan import RUNTIME_IMAGE

Object = dict[str, Any]


@dataclass(frozen=True)
class Write:
    method: str
    path: str
    body: bytes


class RecordingKube(FakeKube):
    """Keeps the operator's writes as they would be sent."""

    def __init__(self, cache: ObjectCache) -> None:
        super().__init__(cache)
        self.sent: list[Write] = []

    async def apply(self, kind: Kind, manifest: Object, **options: Any) -> Object:
        metadata = manifest["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"], options.get("subresource"))
        self.sent.append(Write("PATCH", path, json.dumps(manifest).encode()))
        return await super().apply(kind, manifest, **options)

    async def create(self, kind: Kind, manifest: Object) -> Object:
        path = kind.path(manifest["metadata"]["namespace"])
        self.sent.append(Write("POST", path, json.dumps(manifest).encode()))
        return await super().create(kind, manifest)


async def record_writes(resource: Object) -> list[Write]:
    """All writes of the operator for one new resource, as the API server answered its creation."""
    cache = ObjectCache()
    kube = RecordingKube(cache)
    stored = kube.store(INFERENCE, resource)
    reconciler = Reconciler(kube=kube, cache=cache, runtime_image=RUNTIME_IMAGE, identity="bench")  # type: ignore[arg-type]
    await reconciler.reconcile(Key(stored["metadata"]["namespace"], stored["metadata"]["name"]))
    return kube.sent


async def send_writes(client: Client, writes: Sequence[Sequence[Write]]) -> float:
    """Send the writes of many resources, those of one resource in their order. Returns seconds."""

    async def send(group: Sequence[Write]) -> None:
        for write in group:
            if write.method == "PATCH":
                await client.apply(write.path, write.body)
            else:
                await client.call("POST", write.path, write.body, "application/json")

    began = time.monotonic()
    await do_all(send, writes)
    return time.monotonic() - began
