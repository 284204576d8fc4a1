"""The peers' token is rotated under conversations: nobody is refused, nothing restarts, and the old token ends.

Engines are simulated, with the product's own lookup and report ports; Secrets, kubelets and routers are real. The
namespace enforces the restricted Pod Security Standard.
"""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bidikv_operator import names
from bidikv_runtime import contract
from e2e.cluster.configuration import SYNC_SECONDS
from e2e.cluster.paths import find_external_kubeconfig, find_paths
from e2e.install import image_references
from e2e.kubectl import Kubectl, Manifest, eventually
from e2e.load import Load, find_url
from e2e.operator_process import OperatorProcess
from e2e.simengine.local import SERVED_MODEL
from e2e.simengine.resource import build_resource

pytestmark = pytest.mark.cluster

NAME = "secured"
SECRET = f"{NAME}-peer-token"
WAIT = 240.0


def find_propagation_seconds() -> int:
    """Until every kubelet has mounted what was written: it looks within 1.5 of its periods, and takes a while then."""
    period = SYNC_SECONDS if find_external_kubeconfig(find_paths()) is None else 60
    return period * 3 // 2 + 15


@dataclass
class Secured:
    kubectl: Kubectl
    operator: OperatorProcess
    propagation_seconds: int

    def apply(self, rotation: str | None = None) -> None:
        security = {} if rotation is None else {"security": {"peerToken": {"rotation": rotation}}}
        self.kubectl.apply(build_resource(NAME, prefill=1, decode=2, spec=security))

    def tokens(self) -> list[str]:
        secret = self.kubectl.get("secret", SECRET)
        if secret is None:
            return []
        return base64.b64decode(secret["data"][contract.TOKEN_KEY]).decode().split()

    def await_two_tokens(self) -> list[str]:
        return eventually(lambda: found if len(found := self.tokens()) == 2 else None, "a second token", WAIT)

    def await_tokens(self, wanted: list[str]) -> None:
        eventually(lambda: self.tokens() == wanted, f"{len(wanted)} tokens in their order", WAIT)

    def pods(self) -> list[Manifest]:
        return self.kubectl.find("pods", f"{names.LABEL_OWNER}={NAME}")

    def engines(self) -> list[str]:
        """Their addresses."""
        engines = [pod for pod in self.pods() if pod["metadata"]["labels"][names.LABEL_ROLE] != names.ROUTER]
        return [pod["status"]["podIP"] for pod in engines]

    def lives(self) -> set[tuple[str, int]]:
        """Pods and how often their containers were started."""
        return {
            (pod["metadata"]["uid"], sum(status["restartCount"] for status in pod["status"]["containerStatuses"]))
            for pod in self.pods()
        }

    def ask_engines(self, path: str, token: str) -> list[tuple[int, str]]:
        return [ask(f"http://{engine}:{contract.STATE_PORT}{path}", token) for engine in self.engines()]

    def accepted(self, token: str) -> set[int]:
        """How engines answer to a token."""
        return {status for status, _ in self.ask_engines(contract.REPORT_PATH, token)}

    def count_strangers(self, token: str) -> int:
        """Messages at engines' lookup ports, and answers to them, that no token fitted."""
        states = [json.loads(text) for _, text in self.ask_engines("/state", token)]
        return sum(state["server"]["unauthenticated"] + state["client"]["unauthenticated_replies"] for state in states)

    def logs(self, role: str) -> str:
        selector = f"{names.LABEL_OWNER}={NAME},{names.LABEL_ROLE}={role}"
        return self.kubectl.run("logs", "--selector", selector, "--tail=-1", "--prefix")

    def load(self) -> Load:
        return Load(find_url(self.kubectl, NAME), SERVED_MODEL, pause=0.2)


def ask(url: str, token: str) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


@pytest.fixture
def secured(namespace: Kubectl, crd: None, tmp_path: Path, no_other_operator: None) -> Iterator[Secured]:
    restricted = "pod-security.kubernetes.io/enforce=restricted"
    namespace.run("label", "namespace", namespace.namespace or "", restricted)
    propagation_seconds = find_propagation_seconds()
    settings = {
        "BIDIKV_TOKEN_PROPAGATION_SECONDS": str(propagation_seconds),
        "BIDIKV_RESYNC_SECONDS": "10",
        "BIDIKV_POLL_SECONDS": "2",
    }
    operator = OperatorProcess(namespace, "one", image_references()["runtime"], tmp_path, settings).start()
    found = Secured(namespace, operator, propagation_seconds)
    try:
        found.apply()
        operator.await_condition(NAME, names.READY, "True")
        yield found
    finally:
        operator.kill()


def test_a_rotation_refuses_nobody_and_restarts_nothing(secured: Secured) -> None:
    [old] = secured.tokens()
    lives, started = secured.lives(), time.time()
    assert secured.accepted(old) == {200}
    assert secured.accepted("not-the-token-0123456789") == {401}
    with secured.load().running(2) as load:
        load.await_answers(10)
        secured.apply(rotation="one")
        first, new = secured.await_two_tokens()
        assert first == old
        secured.await_tokens([new, old])
        assert secured.accepted(new) == {200}, "everybody has mounted it before it signs"
        load.await_answers(10)
        secured.await_tokens([new])
        # The Secret keeps times in whole seconds: of each step up to one is lost.
        assert time.time() - started >= 2 * (secured.propagation_seconds - 1)
        eventually(lambda: secured.accepted(old) == {401}, "the old token to end", WAIT)
        assert secured.accepted(new) == {200}
        load.await_answers(10)
        # A Secret that gets lost comes back as a rotation: engines know the token that they have mounted.
        secured.kubectl.run("delete", "secret", SECRET)
        assert secured.await_two_tokens()[0] == new
        load.await_answers(10)
        assert secured.accepted(new) == {200}
    assert load.tried_again == []
    assert secured.lives() == lives
    assert secured.count_strangers(new) == 0
    assert "refuses the router's token" not in secured.logs(names.ROUTER)
    assert secured.operator.metric("bidikv_operator_engine_polls_total", result="refused") == 0
    assert secured.operator.metric("bidikv_operator_engine_polls_total", result="answered") > 0
    shown = secured.kubectl.run("get", f"events,{names.PLURAL},deployments", "--output", "json")
    assert not any(token in shown + secured.operator.log() for token in (old, *secured.tokens()))
