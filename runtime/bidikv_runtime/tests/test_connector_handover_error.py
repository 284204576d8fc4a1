"""The middleware, against the answers that vLLM 0.32 gives and those that 0.33 gives by its source."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import pytest

from bidikv_runtime import contract
from bidikv_runtime.connector.handover_error import HandoverErrors, Message, Receive, Send

GUARDED = [(b"host", b"d"), (b"x-bidikv-handover", b"guarded")]
JSON = [(b"content-length", b"1"), (b"content-type", b"application/json"), (b"x-request-id", b"7")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-request-id", b"7")]


def error(code: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "X", "param": None, "code": code}}


UNEXPLAINED = error(500, "Internal server error")
EXPLAINED = error(400, "Invalid structured outputs: bidikv_handover_lost: 3 of 900 tokens arrived")
TOKEN = {"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None}]}
TOOL = {"choices": [{"index": 0, "delta": {"role": "assistant", "tool_calls": []}, "finish_reason": None}]}
COMPLETION = {"choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": None}]}


def role(index: int = 0, finish_reason: str | None = None) -> dict[str, Any]:
    delta = {"role": "assistant", "content": ""}
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return {"id": "1", "object": "chat.completion.chunk", "choices": [choice], "prompt_token_ids": [1, 2]}


def event(document: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(document).encode()


def named(name: str, document: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json.dumps(document).encode())


MESSAGE_START = named("message_start", {"type": "message_start", "message": {"usage": {"input_tokens": 70}}})
RESPONSE_START = [named(name, {"type": name, "response": {}}) for name in ("response.created", "response.in_progress")]
BROKEN_CHUNK = named(
    "error",
    {
        "type": "error",
        "error": {
            "type": "internal_error",
            "message": "2 validation errors for ChatCompletionStreamResponse\nmodel\n  Field required [type=missing, "
            "input_value={'error': {'message': 'In...am': None, 'code': 500}}, input_type=dict]",
        },
    },
)


def stream(*documents: Any) -> list[Message]:
    """What vLLM sends for a stream."""
    return raw_stream(*(event(document) for document in documents), b"data: [DONE]\n\n")


def raw_stream(*chunks: bytes) -> list[Message]:
    """A stream of events that are encoded already."""
    bodies: list[Message] = [{"type": "http.response.body", "body": chunk, "more_body": True} for chunk in chunks]
    start: Message = {"type": "http.response.start", "status": 200, "headers": EVENTS}
    return [start, *bodies, {"type": "http.response.body", "body": b"", "more_body": False}]


def document(status: int, body: Any) -> list[Message]:
    """What vLLM sends for an answer in one piece."""
    return [
        {"type": "http.response.start", "status": status, "headers": JSON},
        {"type": "http.response.body", "body": json.dumps(body).encode()},
    ]


class Engine:
    """The application behind the middleware; after each of its messages it notes how many had reached the client."""

    def __init__(self, messages: list[Message], failure: Exception | None = None) -> None:
        self.messages = messages
        self.failure = failure
        self.sent: list[Message] = []
        self.sent_after: list[int] = []

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        for message in self.messages:
            await send(message)
            self.sent_after.append(len(self.sent))
        if self.failure is not None:
            raise self.failure

    async def serve(self, headers: list[tuple[bytes, bytes]]) -> list[Message]:
        async def send(message: Message) -> None:
            self.sent.append(message)

        async def receive() -> Message:
            raise AssertionError("the middleware reads no request")

        await HandoverErrors(self)({"type": "http", "headers": headers}, receive, send)
        return self.sent


LOST = {
    "0.32": document(500, UNEXPLAINED),
    "0.33": document(400, EXPLAINED),
    "in pieces": [
        {"type": "http.response.start", "status": 500, "headers": JSON},
        {"type": "http.response.body", "body": json.dumps(UNEXPLAINED).encode()[:20], "more_body": True},
        {"type": "http.response.body", "body": json.dumps(UNEXPLAINED).encode()[20:], "more_body": False},
    ],
    "0.32 chat stream": stream(role(), UNEXPLAINED),
    "0.32 chat stream of three": stream(role(0), role(1), role(2), UNEXPLAINED),
    "0.32 completions stream": stream(UNEXPLAINED),
    "0.33 stream": stream(EXPLAINED),
    "messages": document(500, {"type": "error", "error": {"type": "X", "message": "Internal server error"}}),
    "messages stream": raw_stream(MESSAGE_START, BROKEN_CHUNK),
}


@pytest.mark.parametrize("messages", LOST.values(), ids=LOST)
async def test_a_refused_request_becomes_one_distinct_error(messages: list[Message]) -> None:
    start, body = await Engine(messages).serve(GUARDED)
    assert start["status"] == 503
    headers = dict(start["headers"])
    assert len(headers) == len(start["headers"])
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"content-length"] == b"%d" % len(body["body"])
    assert headers[b"retry-after"] == b"1"
    assert headers[b"x-bidikv-handover"] == b"lost"
    assert headers[b"x-request-id"] == b"7"
    assert not body.get("more_body", False)
    told = json.loads(body["body"])["error"]
    assert (told["type"], told["code"]) == ("bidikv_handover_lost", 503)


@pytest.mark.parametrize("messages", LOST.values(), ids=LOST)
@pytest.mark.parametrize("headers", [[], [(b"x-bidikv-handover", b"other")]])
async def test_without_the_header_the_same_answers_pass(
    messages: list[Message], headers: list[tuple[bytes, bytes]]
) -> None:
    assert await Engine(messages).serve(headers) == messages


OTHER = {
    "answer": document(200, COMPLETION),
    "answer that speaks of it": document(200, EXPLAINED),
    "client's mistake": document(400, error(400, "max_tokens is too large")),
    "validation": document(400, {"detail": "x"}),
    "dead engine": document(500, error(500, "EngineCore encountered an issue.")),
    "overload": document(503, error(503, "Internal server error")),
    "not JSON": [
        {"type": "http.response.start", "status": 500, "headers": [(b"content-type", b"text/plain")]},
        {"type": "http.response.body", "body": b"Internal Server Error"},
    ],
    "broken JSON": [
        {"type": "http.response.start", "status": 500, "headers": JSON},
        {"type": "http.response.body", "body": b'{"error": '},
    ],
    "large error": document(500, error(500, "bidikv_handover_lost" + "x" * 2 * 1024 * 1024)),
    "stream": stream(role(), TOKEN, TOKEN),
    "stream that fails later": stream(role(), TOKEN, UNEXPLAINED),
    "stream of tools": stream(TOOL, UNEXPLAINED),
    "completions stream": stream(COMPLETION, UNEXPLAINED),
    "stream with another error": stream(role(), error(500, "EngineCore encountered an issue.")),
    "stream that ends at once": stream(role(finish_reason="stop"), UNEXPLAINED),
    "stream of nothing": stream(),
    "messages stream": raw_stream(MESSAGE_START, named("content_block_start", {}), BROKEN_CHUNK),
    "messages with another error": raw_stream(MESSAGE_START, named("error", error(500, "EngineCore died."))),
    "messages with an odd error": raw_stream(MESSAGE_START, named("error", [])),
    "messages that are a mistake": document(400, {"type": "error", "error": {"type": "X", "message": "too long"}}),
    "response stream": raw_stream(*RESPONSE_START, named("response.output_item.added", {}), event(UNEXPLAINED)),
    "stream of roles": stream(*[role(index) for index in range(20)]),
    "stream of endless roles": stream(*[role() | {"prompt_text": "x" * 100_000} for _ in range(20)], UNEXPLAINED),
}


@pytest.mark.parametrize("messages", OTHER.values(), ids=OTHER)
async def test_other_answers_pass_unchanged(messages: list[Message]) -> None:
    assert await Engine(messages).serve(GUARDED) == messages


async def test_a_stream_waits_for_its_first_word_only() -> None:
    engine = Engine(stream(role(), TOKEN, TOKEN))
    await engine.serve(GUARDED)
    # start, role: held; from the first token on each message at once
    assert engine.sent_after == [0, 0, 3, 4, 5, 6]


def broken_event() -> Exception:
    """What vLLM's stream of a response ends with; it cannot write an error."""
    error = RuntimeError("Caught handled exception, but response already started.")
    error.__cause__ = ValueError("103 validation errors for union[ResponseCreatedEvent,ResponseInProgressEvent]\nmore")
    return error


async def test_a_stream_of_a_response_that_breaks_off_becomes_the_error_too() -> None:
    start, body = await Engine(raw_stream(*RESPONSE_START)[:3], failure=broken_event()).serve(GUARDED)
    assert start["status"] == 503
    assert json.loads(body["body"])["error"]["type"] == "bidikv_handover_lost"


async def test_a_stream_of_a_response_may_break_off_later_or_otherwise() -> None:
    later = Engine(raw_stream(*RESPONSE_START, named("response.output_item.added", {}))[:4], failure=broken_event())
    with pytest.raises(RuntimeError, match="already started"):
        await later.serve(GUARDED)
    assert len(later.sent) == 4
    otherwise = Engine(raw_stream(*RESPONSE_START)[:3], failure=ValueError("something else"))
    with pytest.raises(ValueError, match="something else"):
        await otherwise.serve(GUARDED)
    assert otherwise.sent == []
    unguarded = Engine(raw_stream(*RESPONSE_START)[:3], failure=broken_event())
    with pytest.raises(RuntimeError, match="already started"):
        await unguarded.serve([])


async def test_an_exception_of_the_application_reaches_the_server_with_nothing_sent() -> None:
    engine = Engine(stream(role())[:2], failure=RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        await engine.serve(GUARDED)
    assert engine.sent == []


def test_the_contract_names_the_class() -> None:
    module, name = contract.ENGINE_MIDDLEWARE.rsplit(".", 1)  # as vLLM does
    assert getattr(import_module(module), name) is HandoverErrors


async def test_other_protocols_pass() -> None:
    seen: list[str] = []

    async def application(scope: Message, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    async def unused(*_: Any) -> Any:
        raise AssertionError

    await HandoverErrors(application)({"type": "lifespan"}, unused, unused)
    assert seen == ["lifespan"]
