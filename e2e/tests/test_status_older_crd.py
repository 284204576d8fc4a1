"""The status under a CRD of an earlier release: what the API server refuses, and what is told all the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from bidikv_operator import names
from bidikv_operator.cache import ObjectCache
from bidikv_operator.kinds import INFERENCE
from bidikv_operator.kube import connect
from bidikv_operator.status.write import FIRST_FIELDS, FIRST_ROLE_FIELDS, RETRY_SECONDS, StatusWriter, shorten
from e2e.kubectl import Manifest, eventually
from e2e.own_api_server import CRD, OwnApiServer
from e2e.tests.test_subresources import STORED

pytestmark = pytest.mark.cluster

WAIT = 60.0
CONDITION = {
    "type": "Ready",
    "status": "True",
    "observedGeneration": 1,
    "lastTransitionTime": "2026-01-01T00:00:00Z",
    "reason": "Ready",
    "message": "m",
}
STATUS: Manifest = {
    "observedGeneration": 1,
    "conditions": [CONDITION],
    "decode": {"replicas": 1, "readyReplicas": 1, "group": "0a0b0c0d"},
    "kvReuse": {"sessions": 4},
}


def make_older() -> Manifest:
    """The CRD without the fields of the status that came later."""
    older: Manifest = yaml.safe_load(CRD.read_text())
    status = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    for name in [name for name in status if name not in FIRST_FIELDS]:
        del status[name]
    for role in names.ROLES:
        fields = status[role]["properties"]
        for name in [name for name in fields if name not in FIRST_ROLE_FIELDS]:
            del fields[name]
    return older


async def test_an_older_crd_gets_what_it_knows(own_api_server: OwnApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server, now = own_api_server, [0.0]
    kubectl = server.create_namespace("older-crd")
    kubectl.run("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(make_older()))
    kubectl.run("wait", "--for=condition=Established", "--timeout=30s", f"crd/{names.CRD_NAME}")
    eventually(lambda: _is_stored(kubectl), "the resource stored", WAIT)
    # Read from the environment when the client is imported.
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", kubectl.kubeconfig)
    kube = await connect(write_timeout_seconds=10, identity="test")
    try:
        writer = StatusWriter(kube, ObjectCache(), clock=lambda: now[0])

        async def live() -> dict[str, Any]:
            return await kube.get(INFERENCE, "older-crd", STORED["metadata"]["name"])

        assert await writer.write(await live(), STATUS)
        assert (await live())["status"] == shorten(STATUS)
        assert not await writer.write(await live(), STATUS)
        # The chart is upgraded: a while later the rest is told, too.
        kubectl.run("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
        now[0] = 2 * RETRY_SECONDS

        async def is_whole() -> bool:
            await writer.write(await live(), STATUS)
            now[0] += RETRY_SECONDS
            return bool((await live())["status"] == STATUS)

        for _ in range(30):  # the API server takes a moment to serve another schema
            if await is_whole():
                break
        else:
            pytest.fail("the whole status was not written under the newer CRD")
    finally:
        await kube.close()


def _is_stored(kubectl: Any) -> bool:
    try:
        kubectl.apply(STORED)
    except Exception:
        return False
    return True
