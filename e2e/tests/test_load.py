"""The load fails its test for what a client would notice, and for nothing that a client would not."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from e2e.kubectl import eventually
from e2e.load import Load, Talk

WHOLE = "data: " + json.dumps({"choices": [{"delta": {"content": "yes"}}]}) + "\n\ndata: [DONE]\n\n"
Answer = Callable[[dict[str, Any]], tuple[int, str] | None]


def answer_well(body: dict[str, Any]) -> tuple[int, str]:
    return 200, WHOLE if body["stream"] else json.dumps({"choices": [{"message": {"content": "yes"}}]})


@contextmanager
def serve(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A router's endpoint, and what it was asked; an answer of None is a connection that breaks before any byte."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body | {"session": self.headers["X-Session-ID"]})
            answered = answer(body)
            if answered is None:
                return
            status, text = answered
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", asked
        finally:
            server.shutdown()
            thread.join()


def fail_each_second(answer: tuple[int, str] | None) -> Answer:
    numbers = iter(range(1_000_000))
    return lambda body: answer if next(numbers) % 2 else answer_well(body)


def test_conversations_grow_and_begin_anew() -> None:
    with serve(answer_well) as (url, asked):
        load = Load(url, "model", talk=Talk(turns=3, opening=50, more=20, answer_tokens=5))
        with load.running(1):
            load.await_answers(4)
    assert [len(body["messages"]) for body in asked[:4]] == [1, 3, 5, 1]
    assert [len(message["content"]) for message in asked[2]["messages"]] == [50, 3, 20, 3, 20]
    assert asked[2]["messages"][:3] == asked[1]["messages"]
    assert asked[3]["messages"] != asked[0]["messages"], "another conversation"
    assert {body["session"] for body in asked} == {f"{load.salt}-0"}
    assert {(body["model"], body["max_tokens"], body["stream"]) for body in asked} == {("model", 5, False)}
    assert (load.failures, load.tried_again) == ([], [])


def test_a_connection_that_breaks_is_tried_again() -> None:
    with serve(fail_each_second(None)) as (url, _):
        load = Load(url, "model")
        with load.running(1):
            load.await_answers(2)
    assert load.tried_again


def test_an_impatient_load_streams_half_and_tries_nothing_again() -> None:
    with serve(answer_well) as (url, asked):
        load = Load(url, "model", patient=False)
        with load.running(2):
            eventually(lambda: len({body["session"] for body in [*asked]}) == 2, "both clients", timeout=60, every=0.01)
    assert {(body["session"], body["stream"]) for body in asked} == {
        (f"{load.salt}-0", True),
        (f"{load.salt}-1", False),
    }
    with serve(fail_each_second(None)) as (url, _):
        load = Load(url, "model", patient=False)
        with pytest.raises(AssertionError, match="1 tries"), load.running(1):
            load.await_answers(2)
    assert load.tried_again == []


@pytest.mark.parametrize(
    "answer",
    [
        (503, "no engine"),
        (200, WHOLE.removesuffix("data: [DONE]\n\n")),
        (200, 'data: {"error": {"message": "gone"}}\n\n' + WHOLE),
    ],
    ids=["error", "cut", "error-in-stream"],
)
def test_a_bad_answer_fails_and_ends_the_load(answer: tuple[int, str]) -> None:
    with serve(fail_each_second(answer)) as (url, asked):
        load = Load(url, "model", patient=False)
        with pytest.raises(AssertionError), load.running(1):
            load.await_answers(1_000)
    assert len(load.failures) == 1
    assert len(asked) == 2


def test_a_failure_that_nobody_waited_for_fails_the_block() -> None:
    with serve(lambda body: (500, "broken")) as (url, _):
        load = Load(url, "model")
        with pytest.raises(AssertionError, match="500: broken"), load.running(1):
            eventually(lambda: bool(load.failures), "a failure", timeout=60, every=0.01)
