"""Conversations through a router's endpoint for as long as a test does something to what serves them.

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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from e2e.demo.workload import user_text
from e2e.kubectl import eventually

TRIES = 10
CONNECT_SECONDS = 3
"""A pod that was killed answers no connection attempt, until kube-proxy forgets it."""
ANSWER_SECONDS = 180
PROMPT_CHARACTERS = 600
"""More than decode computes alone: every turn begins at prefill or reads its history from decode."""


def request_chat(url: str, model: str, messages: list[dict[str, str]], session: str) -> str:
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
        body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
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
    model: str
    salt: str
    """Its sessions are named after it, and their prompts share nothing with those of another."""
    pause: float = 0.0
    """Seconds between an answer and the next request of the same client."""
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
                self.stop.wait(self.pause)
                messages += [
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": user_text(session, "more", length=PROMPT_CHARACTERS)},
                ]

    def _ask(self, messages: list[dict[str, str]], session: str) -> str:
        for _ in range(TRIES):
            try:
                answer = request_chat(self.url, self.model, messages, session)
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

    @contextmanager
    def running(self, clients: int) -> Iterator[Load]:
        """So many conversations at once, until the end of the block."""
        threads = [threading.Thread(target=self.converse, args=(f"{self.salt}-{n}",)) for n in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self.stop.set()
            for thread in threads:
                thread.join(ANSWER_SECONDS)

    def await_answers(self, more: int) -> None:
        """Wait for so many answers from now on, or the first failure."""
        wanted = len(self.answered) + more

        def enough() -> bool:
            return len(self.answered) >= wanted or bool(self.failures)

        eventually(enough, f"{more} more answers", timeout=ANSWER_SECONDS)
