"""Routers that go away under load, with real engines: no retriable request fails, and no session moves."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bidikv_operator import names
from bidikv_runtime.contract import ENGINE_PORT
from e2e.demo.__main__ import NAME, wait_until_ready
from e2e.demo.engines import EnginePods, parse_totals
from e2e.demo.workload import user_text
from e2e.kubectl import Kubectl, eventually
from e2e.load import ANSWER_SECONDS, PROMPT_CHARACTERS, Load, request_chat
from e2e.tests.test_service import Service, service  # noqa: F401  (the fixture)

pytestmark = pytest.mark.cluster

CLIENTS = 4
SESSIONS = 8


@pytest.fixture
def two_decode_engines(service: Service) -> Iterator[Service]:  # noqa: F811
    """The service with a second decode engine for as long as the test runs."""

    def scale(replicas: int) -> None:
        patch = json.dumps({"spec": {"decode": {"replicas": replicas}}})
        service.kubectl.run("patch", names.SHORT_NAME, NAME, "--type=merge", "-p", patch)
        wait_until_ready(service.kubectl, f"{replicas} decode engines are ready")

    scale(2)
    try:
        yield service
    finally:
        scale(1)
        # It waits for the next turns of its sessions, which do not come.
        selector = f"{names.LABEL_OWNER}={NAME},{names.LABEL_ROLE}={names.DECODE}"
        for pod in service.kubectl.find("pods", selector):
            if "deletionTimestamp" in pod["metadata"]:
                service.kubectl.run("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")


def find_decode_engine(service: Service, session: str) -> str:  # noqa: F811
    """The decode pod that answers a turn of ``session``; nothing else may run meanwhile."""

    def finished() -> dict[str, float]:
        found = {}
        for name in EnginePods(service.kubectl, NAME, names.DECODE).names:
            path = f"/api/v1/namespaces/{service.kubectl.namespace}/pods/{name}:{ENGINE_PORT}/proxy/metrics"
            totals = parse_totals(service.kubectl.run("get", "--raw", path))
            found[name] = totals.get("vllm:request_success_total", 0.0)
        return found

    before = finished()
    request_chat(
        service.url, NAME, [{"role": "user", "content": user_text(session, length=PROMPT_CHARACTERS)}], session
    )

    def find_served() -> list[str] | None:
        return [name for name, count in finished().items() if count > before.get(name, 0.0)] or None

    # An engine may count a request shortly after it has answered it.
    [served] = eventually(find_served, "an engine to have counted the request", timeout=ANSWER_SECONDS)
    return served


def find_routers(kubectl: Kubectl) -> list[dict[str, Any]]:
    selector = f"{names.LABEL_OWNER}={NAME},{names.LABEL_ROLE}={names.ROUTER}"
    return [pod for pod in kubectl.find("pods", selector) if "deletionTimestamp" not in pod["metadata"]]


def lose_router(service: Service, load: Load, *options: str) -> None:  # noqa: F811
    """Delete one router under load, and wait until another one has taken its place and turns were answered since."""
    kubectl = service.kubectl
    victim = find_routers(kubectl)[0]["metadata"]["name"]
    load.await_answers(CLIENTS)
    kubectl.run("delete", "pod", victim, "--wait=false", *options)

    def replaced() -> bool:
        routers = find_routers(kubectl)
        ready = [
            pod["metadata"]["name"]
            for pod in routers
            if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))
        ]
        return len(ready) == 2 and victim not in ready

    eventually(replaced, "another router in the place of the lost one", timeout=120)
    load.await_answers(2 * CLIENTS)


def test_losing_routers_under_load_fails_no_request_and_moves_no_session(two_decode_engines: Service) -> None:
    service = two_decode_engines  # noqa: F811
    salt = uuid.uuid4().hex
    # On one decode engine or on both: one that shares prefill's zone comes first until it has its share of load.
    before = {session: find_decode_engine(service, session) for session in (f"{salt}-{n}" for n in range(SESSIONS))}

    load = Load(service.url, NAME, f"{salt}-load")
    with load.running(CLIENTS):
        lose_router(service, load, "--grace-period=0", "--force")
        killed = len(load.tried_again)
        lose_router(service, load)
    print(f"{len(set(before.values()))} decode engines had the sessions")
    print(f"{len(load.answered)} answers; sent again: {killed} around the kill, {len(load.tried_again) - killed} later")

    check_quiet: Callable[[], bool] = lambda: (  # noqa: E731
        EnginePods(service.kubectl, NAME, names.DECODE).totals()["vllm:num_requests_running"] == 0
    )
    eventually(check_quiet, "the engines to be idle", timeout=ANSWER_SECONDS)
    assert {session: find_decode_engine(service, session) for session in before} == before
