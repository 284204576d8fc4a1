"""Healing on a real cluster: a decode engine that prefill cannot reach is replaced under load, within its budget.

Engines are simulated; the fault is a lookup port that answers nobody, while probes, HTTP and reports go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bidikv_operator import names
from e2e.install import image_references
from e2e.kubectl import Kubectl, eventually
from e2e.load import Load, find_url
from e2e.operator_process import OperatorProcess
from e2e.simengine.local import SERVED_MODEL
from e2e.simengine.resource import build_resource, set_faults

pytestmark = pytest.mark.cluster

NAME = "healed"
CLIENTS = 4
WAIT = 300.0
SPEC = {
    "updateStrategy": {"drainSeconds": 10},
    "healing": {"unreachableSeconds": 30, "maximumPerHour": 1},
    "router": {"localLimitTokens": 0},  # every turn needs KV of another engine
}
SIMULATION = {"prefill_tokens_per_second": 2000}
"""Slow enough that reading KV pays."""


@dataclass
class Healed:
    """A resource of one prefill and two decode engines, and who reconciles it."""

    kubectl: Kubectl
    operator: OperatorProcess

    def status(self) -> dict[str, Any]:
        found = self.kubectl.get(names.SHORT_NAME, NAME)
        assert found is not None
        return found.get("status") or {}

    def await_condition(self, name: str, status: str, reason: str) -> str:
        """Returns its message."""
        return self.operator.await_condition(NAME, name, status, reason)["message"]

    def decode_pods(self) -> dict[str, str]:
        """Uid by name of the decode engines that are not being deleted."""
        found = self.kubectl.find("pods", f"{names.LABEL_OWNER}={NAME},{names.LABEL_ROLE}=decode")
        return {
            pod["metadata"]["name"]: pod["metadata"]["uid"]
            for pod in found
            if "deletionTimestamp" not in pod["metadata"]
        }

    def load(self) -> Load:
        return Load(find_url(self.kubectl, NAME), SERVED_MODEL, pause=0.05)


@pytest.fixture
def healed(namespace: Kubectl, crd: None, tmp_path: Path, no_other_operator: None) -> Iterator[Healed]:
    settings = {"BIDIKV_POLL_SECONDS": "2", "BIDIKV_LEASE_SECONDS": "6", "BIDIKV_RENEW_DEADLINE_SECONDS": "4"}
    settings |= {"BIDIKV_WRITE_TIMEOUT_SECONDS": "2", "BIDIKV_RETRY_SECONDS": "1"}
    operator = OperatorProcess(namespace, "one", image_references()["runtime"], tmp_path, settings).start()
    found = Healed(namespace, operator)
    try:
        namespace.apply(build_resource(NAME, prefill=1, decode=2, simulation=SIMULATION, spec=SPEC))
        found.await_condition(names.READY, "True", names.REASON_READY)
        yield found
    finally:
        operator.kill()


def test_an_engine_that_its_peers_cannot_reach_is_replaced_once_and_no_request_fails(healed: Healed) -> None:
    with healed.load().running(CLIENTS) as load:
        load.await_answers(20)
        verified = healed.await_condition(names.TRANSPORT_VERIFIED, "True", names.REASON_VERIFIED)
        assert "UCX over tcp" in verified
        first, second = healed.decode_pods().items()
        set_faults(healed.kubectl, first[0], silent=True)
        eventually(lambda: first[1] not in healed.decode_pods().values(), "the silent engine to be deleted", WAIT)
        healed.await_condition(names.DEGRADED, "False", names.REASON_AS_EXPECTED)
        # What the status said of before the deletion may still be there.
        eventually(lambda: len(healed.decode_pods()) == 2, "another engine in its place", WAIT)
        healed.await_condition(names.READY, "True", names.REASON_READY)
        assert second[1] in healed.decode_pods().values()
        [record] = healed.status()["healing"]["recycled"]
        assert record["role"] == "decode"

        # The budget is used up, and the next leader knows it.
        set_faults(healed.kubectl, second[0], silent=True)
        message = healed.await_condition(names.DEGRADED, "True", names.REASON_UNREACHABLE)
        assert "spec.healing.maximumPerHour (1)" in message
        healed.operator.kill()
        before = healed.operator.log()
        healed.operator.start()
        eventually(healed.operator.leads, "the operator to lead again", WAIT)
        set_faults(healed.kubectl, second[0])
        healed.await_condition(names.DEGRADED, "False", names.REASON_AS_EXPECTED)  # once this leader knows better
        set_faults(healed.kubectl, second[0], silent=True)
        healed.await_condition(names.DEGRADED, "True", names.REASON_UNREACHABLE)
        assert second[1] in healed.decode_pods().values()
        assert "deleting" not in healed.operator.log()[len(before) :]
        load.await_answers(20)
    recycled = [
        event
        for event in healed.kubectl.find("events", "")
        if event.get("reason") == names.REASON_RECYCLED and first[0] in str(event.get("message"))
    ]
    assert len(recycled) == 1
