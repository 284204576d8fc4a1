"""Two operators and one Lease: whatever happens to the leader, nothing is lost, and never do two write side by side.

On an API server of the tests' own, whose audit log tells the replicas apart by their user agents.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest

from bidikv_operator import names
from e2e.bench.operator.control_plane import URL
from e2e.kubectl import Kubectl, Manifest, eventually
from e2e.operator_process import OperatorProcess
from e2e.own_api_server import OwnApiServer, Request
from e2e.small_resource import build_small_resource

pytestmark = pytest.mark.cluster

WAIT = 90.0
WORKERS = 4
TERMS = {
    "BIDIKV_WORKERS": str(WORKERS),
    "BIDIKV_LEASE_SECONDS": "6",
    "BIDIKV_RENEW_DEADLINE_SECONDS": "4",
    "BIDIKV_RETRY_SECONDS": "1",
    "BIDIKV_WRITE_TIMEOUT_SECONDS": "2",
}
MANY = 25
DELAY_SECONDS = 0.1
"""Of every request of the first operator: MANY * 15 of them by 4 workers take 9 s at least, on a fast machine too."""
ON_ITS_WAY = timedelta(seconds=2)
"""What was sent before the lease was known to be lost may arrive so much later: the limit of a write."""


def make_resource(number: int, replicas: int = 1) -> Manifest:
    return build_small_resource(f"chat-{number}", prefill={"replicas": replicas, "gpusPerPod": 0})


@dataclass
class World:
    server: OwnApiServer
    kubectl: Kubectl
    folder: Path
    way: Relay
    """Of the first operator to the API server."""
    stack: ExitStack = field(default_factory=ExitStack)

    def operator(self, identity: str, kubectl: Kubectl | None = None) -> OperatorProcess:
        namespace = self.kubectl.namespace or ""
        bound = (kubectl or self.kubectl).within(namespace)
        process = OperatorProcess(bound, identity, "runtime.example/none:v1", self.folder, TERMS)
        self.stack.callback(process.kill)
        return process.start()

    def leader(self) -> OperatorProcess:
        """It leads, and is slow: what happens to it happens within its work."""
        first = self.operator("first", self.server.reach_through(self.way.url))
        eventually(first.leads, "the first to lead", WAIT)
        return first

    def pair(self) -> tuple[OperatorProcess, OperatorProcess]:
        """A leader, and one that stands by."""
        return self.leader(), self.operator("second")

    def writes(self, identity: str) -> list[Request]:
        """Of one operator in this namespace, Leases aside, in the order of their arrival."""
        return [
            request
            for request in self.server.requests()
            if request.agent == f"{names.FIELD_MANAGER}/{identity}"
            and request.namespace == self.kubectl.namespace
            and request.is_write
            and request.resource != "leases"
        ]

    def load(self) -> None:
        """Much to do, of which the leader has done some and not all."""
        self.kubectl.apply(*(make_resource(number) for number in range(MANY)))
        eventually(lambda: len(self.writes("first")) > 3 * MANY, "the first to be at work", WAIT, every=0.05)
        assert not self.is_complete(), "too late: the first has done everything"

    def is_complete(self) -> bool:
        """Every resource has all its children, and its status says so."""
        resources = self.kubectl.find("bidikvinferences")
        told = [item for item in resources if "conditions" in item.get("status", {})]
        secrets = [item for item in self.kubectl.find("secrets") if item["metadata"]["name"].endswith("-peer-token")]
        routers = self.kubectl.find("deployments", f"{names.LABEL_ROLE}={names.ROUTER}")
        engines = self.kubectl.find("deployments", f"{names.LABEL_ROLE} in ({names.PREFILL},{names.DECODE})")
        return (len(told), len(secrets), len(routers), len(engines)) == (MANY, MANY, MANY, 2 * MANY)

    def change_all(self) -> None:
        self.kubectl.apply(*(make_resource(number, replicas=3) for number in range(MANY)))

    def is_changed(self) -> bool:
        found = self.kubectl.find("deployments", f"{names.LABEL_ROLE}={names.PREFILL}")
        return [item["spec"]["replicas"] for item in found] == [3] * MANY

    def assert_the_second_took_over(self) -> None:
        first, second = self.writes("first"), self.writes("second")
        assert first
        assert second
        assert first[-1].received < second[0].received, "two operators wrote"

    def steal_the_lease(self) -> None:
        stolen = '{"spec":{"holderIdentity":"thief","leaseDurationSeconds":600}}'
        self.kubectl.run("patch", "lease", "operator", "--type=merge", "-p", stolen)

    def holder(self) -> str:
        lease = self.kubectl.get("lease", "operator")
        assert lease is not None
        return str(lease["spec"]["holderIdentity"])


@pytest.fixture
def world(own_api_server: OwnApiServer, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    # Not deleted afterwards: there is no controller that would empty the namespace.
    kubectl = own_api_server.create_namespace(request.node.name.removeprefix("test_").replace("_", "-")[:63])
    with relay(URL) as way:
        found = World(own_api_server, kubectl, tmp_path, way)
        with found.stack:
            yield found


def test_a_leader_that_stops_hands_over_at_once(world: World) -> None:
    first, second = world.pair()
    assert second.page("healthz") == (200, "ok\n")
    assert second.page("readyz") == (200, "ok, waiting for the lease\n")
    world.load()
    assert world.writes("second") == []
    assert first.terminate() == 0
    assert "released the lease" in first.log()
    eventually(second.leads, "the second to lead", WAIT)
    world.change_all()
    eventually(lambda: world.is_complete() and world.is_changed(), "everything to be done", WAIT)
    world.assert_the_second_took_over()


def test_a_leader_that_is_killed_at_work_is_replaced(world: World) -> None:
    first, second = world.pair()
    world.load()
    first.kill()
    world.change_all()  # while there is no leader
    eventually(second.leads, "the second to lead", WAIT)
    eventually(lambda: world.is_complete() and world.is_changed(), "everything to be done", WAIT)
    world.assert_the_second_took_over()
    assert second.metric("bidikv_operator_leader") == 1


def test_a_leader_that_was_stopped_past_its_lease_begins_nothing_more(world: World) -> None:
    first, successor = world.pair()
    world.load()
    first.send(signal.SIGSTOP)
    eventually(successor.leads, "the second to lead", WAIT)
    world.change_all()
    eventually(lambda: world.is_complete() and world.is_changed(), "everything to be done", WAIT)
    first.send(signal.SIGCONT)
    assert first.wait(WAIT) == 1
    assert "lost the lease" in first.log()
    assert world.holder() == "second"
    # Nothing begins any more. What the event loop had taken from workers when the process was stopped cannot be held
    # back; it may arrive now, is refused if it would create what exists, and else is corrected.
    second = world.writes("second")
    late = [request for request in world.writes("first") if request.received > second[0].received]
    assert len(late) <= WORKERS
    assert all(request.received < first.logged_at("lost the lease") + ON_ITS_WAY for request in late)
    eventually(lambda: world.is_complete() and world.is_changed(), "what is wanted to be so again", WAIT)


def test_a_leader_that_cannot_reach_the_api_server_stops(world: World) -> None:
    first, second = world.pair()
    world.load()
    world.way.cut()
    assert first.wait(WAIT) == 1
    assert "lost the lease" in first.log()
    eventually(second.leads, "the second to lead", WAIT)
    world.change_all()
    eventually(lambda: world.is_complete() and world.is_changed(), "everything to be done", WAIT)
    world.assert_the_second_took_over()


def test_a_leader_whose_lease_was_taken_stops_and_leaves_it(world: World) -> None:
    first = world.leader()
    world.load()
    world.steal_the_lease()
    assert first.wait(WAIT) == 1
    lost = first.logged_at("lost the lease")
    assert world.writes("first")[-1].received < lost + ON_ITS_WAY
    assert world.holder() == "thief", "a lease that another holds is not released"
    assert not world.is_complete(), "it has stopped within its work"


class Relay:
    """TCP to one place, slow on the way there.

    Once it is cut, bytes vanish and connections stay open, as behind a dead switch.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._cut = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listener]
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._cut.set()

    def close(self) -> None:
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                self._open.append(near)
                if self._cut.is_set():
                    continue
                far = socket.create_connection(self._target)
                self._open.append(far)
                for source, sink, delay in ((near, far, DELAY_SECONDS), (far, near, 0.0)):
                    threading.Thread(target=self._pass_on, args=(source, sink, delay), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, delay: float) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                time.sleep(delay)
                if not self._cut.is_set():
                    sink.sendall(data)
            if not self._cut.is_set():
                sink.shutdown(socket.SHUT_WR)


@contextmanager
def relay(url: str) -> Iterator[Relay]:
    host, _, port = url.removeprefix("https://").partition(":")
    found = Relay(host, int(port))
    try:
        yield found
    finally:
        found.close()
