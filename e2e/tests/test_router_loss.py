"""Routers that go away under load, with real engines: no retriable request fails, and no session moves.

Clients here do what OpenAI's own do: a request whose connection broke before any byte of its answer came is sent again.
The answers are not streamed, so that this holds for all of them; streams that broke are the subject of the router's own
tests.
"""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

from bidikv_operator import names
from bidikv_runtime.contract import ENGINE_PORT
from e2e.demo.__main__ import NAME, wait_until_ready
from e2e.demo.engines import EnginePods, parse_totals
from e2e.demo.workload import user_text
from e2e.kubectl import Kubectl, eventually
from e2e.tests.test_service import Service, service  # noqa: F401  (the fixture)

pytestmark = pytest.mark.cluster

CLIENTS = 4
SESSIONS = 8
TRIES = 10
CONNECT_SECONDS = 3
"""A pod that was killed answers no connection attempt, until kube-proxy forgets it."""
ANSWER_SECONDS = 180
PROMPT_CHARACTERS = 600
"""More than decode computes alone: every turn begins at prefill or reads its history from decode."""


def request_chat(url: str, messages: list[dict[str, str]], session: str) -> str:
    """One answer.

    Raises:
        ConnectionError, TimeoutError, http.client.HTTPException: nothing of an answer came.
        AssertionError: the service answered with an error.
    """
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port or 80, timeout=CONNECT_SECONDS)
    try:
        connection.connect()
        assert isinstance(connection.sock, socket.socket)
        connection.sock.settimeout(ANSWER_SECONDS)
        body = {"model": NAME, "messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json", "X-Session-ID": session}
        connection.request("POST", f"{where.path}/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200, f"{response.status}: {text}"
        answer: str = json.loads(text)["choices"][0]["message"]["content"]
        return answer
    finally:
        connection.close()


@dataclass
class Load:
    """Conversations that go on until they are told to stop."""

    url: str
    stop: threading.Event = field(default_factory=threading.Event)
    answered: list[str] = field(default_factory=list)
    tried_again: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def converse(self, session: str) -> None:
        for number in itertools.count():
            messages = [{"role": "user", "content": user_text(session, number, length=PROMPT_CHARACTERS)}]
            for _ in range(2):
                if self.stop.is_set():
                    return
                answer = self._ask(messages, session)
                messages += [
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": user_text(session, "more", length=PROMPT_CHARACTERS)},
                ]

    def _ask(self, messages: list[dict[str, str]], session: str) -> str:
        for _ in range(TRIES):
            try:
                answer = request_chat(self.url, messages, session)
            except (ConnectionError, TimeoutError, OSError, http.client.HTTPException) as error:
                self.tried_again.append(repr(error))
                time.sleep(0.2)
            except AssertionError as error:
                self.failures.append(str(error))
                return ""
            else:
                self.answered.append(session)
                return answer
        self.failures.append(f"{TRIES} tries: {self.tried_again[-TRIES:]}")
        return ""


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
    request_chat(service.url, [{"role": "user", "content": user_text(session, length=PROMPT_CHARACTERS)}], session)
    [served] = [name for name, count in finished().items() if count > before.get(name, 0.0)]
    return served


def find_routers(kubectl: Kubectl) -> list[dict[str, Any]]:
    selector = f"{names.LABEL_OWNER}={NAME},{names.LABEL_ROLE}={names.ROUTER}"
    return [pod for pod in kubectl.find("pods", selector) if "deletionTimestamp" not in pod["metadata"]]


def lose_router(service: Service, load: Load, *options: str) -> None:  # noqa: F811
    """Delete one router under load, and wait until another one has taken its place and turns were answered since."""
    kubectl = service.kubectl
    victim = find_routers(kubectl)[0]["metadata"]["name"]
    await_answers(load, CLIENTS)
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
    await_answers(load, 2 * CLIENTS)


def await_answers(load: Load, more: int) -> None:
    wanted = len(load.answered) + more

    def enough() -> bool:
        return len(load.answered) >= wanted or bool(load.failures)

    eventually(enough, f"{more} more answers", timeout=ANSWER_SECONDS)


def test_losing_routers_under_load_fails_no_request_and_moves_no_session(two_decode_engines: Service) -> None:
    service = two_decode_engines  # noqa: F811
    salt = uuid.uuid4().hex
    # On one decode engine or on both: one that shares prefill's zone comes first until it has its share of load.
    before = {session: find_decode_engine(service, session) for session in (f"{salt}-{n}" for n in range(SESSIONS))}

    load = Load(service.url)
    clients = [threading.Thread(target=load.converse, args=(f"{salt}-load-{n}",)) for n in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        lose_router(service, load, "--grace-period=0", "--force")
        killed = len(load.tried_again)
        lose_router(service, load)
    finally:
        load.stop.set()
        for client in clients:
            client.join(ANSWER_SECONDS)
    assert load.failures == []
    print(f"{len(set(before.values()))} decode engines had the sessions")
    print(f"{len(load.answered)} answers; sent again: {killed} around the kill, {len(load.tried_again) - killed} later")

    check_quiet: Callable[[], bool] = lambda: (  # noqa: E731
        EnginePods(service.kubectl, NAME, names.DECODE).totals()["vllm:num_requests_running"] == 0
    )
    eventually(check_quiet, "the engines to be idle", timeout=ANSWER_SECONDS)
    assert {session: find_decode_engine(service, session) for session in before} == before
