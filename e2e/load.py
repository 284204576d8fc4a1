"""Conversations through a router's endpoint for as long as a test does something to what serves them.

Unless told otherwise, clients do what OpenAI's own do: a request whose connection broke before any byte of its answer
came is sent again. That can be told only of answers that are not streamed; streams have one try.
"""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from bidikv_runtime import contract
from e2e.demo.workload import user_text
from e2e.kubectl import Kubectl, eventually

TRIES = 10
CONNECT_SECONDS = 3
"""A pod that was killed answers no connection attempt, until kube-proxy forgets it."""
ANSWER_SECONDS = 180
IMPATIENT_SECONDS = 60
"""Of clients that send nothing again, to connect and to be answered: longer than what serves them takes to stop."""
PROMPT_CHARACTERS = 600
"""More than decode computes alone: every turn begins at prefill or reads its history from decode."""


@dataclass(frozen=True)
class Talk:
    """What one conversation is like; its client then begins another one under the same name."""

    turns: int = 2
    opening: int = PROMPT_CHARACTERS
    """Characters of the user's first message."""
    more: int = PROMPT_CHARACTERS
    """And of each further one."""
    answer_tokens: int = 8


def find_url(kubectl: Kubectl, name: str) -> str:
    """Where a resource's routers answer: the address of its Service."""
    service = kubectl.get("service", name)
    assert service is not None, f"there is no Service {name}"
    return f"http://{service['spec']['clusterIP']}:{contract.ROUTER_PORT}/v1"


def request_chat(
    url: str,
    model: str,
    messages: list[dict[str, str]],
    session: str,
    *,
    tokens: int = 8,
    stream: bool = False,
    connect_seconds: float = CONNECT_SECONDS,
    answer_seconds: float = ANSWER_SECONDS,
) -> str:
    """One whole answer.

    Raises:
        OSError, http.client.HTTPException: the connection broke; unless ``stream``, nothing of an answer came.
        AssertionError, ValueError: the service answered with an error, or with something that is not whole.
    """
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port or 80, timeout=connect_seconds)
    try:
        connection.connect()
        assert isinstance(connection.sock, socket.socket)
        connection.sock.settimeout(answer_seconds)
        body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json", "X-Session-ID": session}
        connection.request("POST", f"{where.path}/chat/completions", json.dumps(body | {"stream": stream}), headers)
        response = connection.getresponse()
        text = response.read().decode()
        assert response.status == 200, f"{response.status}: {text}"
        return _join_stream(text) if stream else str(json.loads(text)["choices"][0]["message"]["content"])
    finally:
        connection.close()


def _join_stream(text: str) -> str:
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1:] == ["[DONE]"], text[-400:]
    found = [json.loads(event) for event in events[:-1]]
    assert all("choices" in event for event in found), text[-400:]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in found)


@dataclass
class Load:
    """Conversations that go on until they are told to stop, or one of their requests has failed."""

    url: str
    model: str
    salt: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Its sessions are named after it, and their prompts share nothing with those of another."""
    talk: Talk = field(default_factory=Talk)
    pause: float = 0.0
    """Seconds between an answer and the next request of the same client."""
    patient: bool = True
    """False: nothing is sent again, and half of the clients stream."""
    stop: threading.Event = field(default_factory=threading.Event)
    answered: list[str] = field(default_factory=list)
    tried_again: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def converse(self, number: int) -> None:
        session, stream = f"{self.salt}-{number}", not self.patient and number % 2 == 0
        for begun in itertools.count():
            messages = [{"role": "user", "content": user_text(session, begun, length=self.talk.opening)}]
            for _ in range(self.talk.turns):
                if self.stop.is_set() or self.failures:
                    return
                answer = self._ask(messages, session, stream=stream)
                self.stop.wait(self.pause)
                messages += [
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": user_text(session, "more", length=self.talk.more)},
                ]

    def _ask(self, messages: list[dict[str, str]], session: str, *, stream: bool) -> str:
        connect_seconds, answer_seconds, tries = CONNECT_SECONDS, ANSWER_SECONDS, TRIES
        if not self.patient:
            connect_seconds, answer_seconds, tries = IMPATIENT_SECONDS, IMPATIENT_SECONDS, 1
        broken: list[str] = []
        for number in range(tries):
            if number:
                self.tried_again.append(broken[-1])
                time.sleep(0.2)
            try:
                answer = request_chat(
                    self.url,
                    self.model,
                    messages,
                    session,
                    tokens=self.talk.answer_tokens,
                    stream=stream,
                    connect_seconds=connect_seconds,
                    answer_seconds=answer_seconds,
                )
            except (OSError, http.client.HTTPException) as error:
                broken.append(repr(error))
            except (AssertionError, ValueError) as error:
                self.failures.append(f"{session}, {len(messages)} messages: {error!r}")
                return ""
            else:
                self.answered.append(session)
                return answer
        self.failures.append(f"{session}, {len(messages)} messages, {tries} tries: {broken}")
        return ""

    @contextmanager
    def running(self, clients: int) -> Iterator[Load]:
        """So many conversations at once, until the end of the block.

        Raises:
            AssertionError: at the end, that a request failed.
        """
        threads = [threading.Thread(target=self.converse, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self.stop.set()
            for thread in threads:
                thread.join(2 * ANSWER_SECONDS)
        assert not self.failures, self.failures
        assert not any(thread.is_alive() for thread in threads), "a client still waits for its answer"

    def await_answers(self, more: int) -> None:
        """Wait for so many answers from now on.

        Raises:
            AssertionError: a request failed, now or before.
        """
        wanted = len(self.answered) + more

        def enough() -> bool:
            return len(self.answered) >= wanted or bool(self.failures)

        eventually(enough, f"{more} more answers", timeout=ANSWER_SECONDS)
        assert not self.failures, self.failures
