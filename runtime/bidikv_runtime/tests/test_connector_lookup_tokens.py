"""Lookup port and client with a token file: whoever has no token learns nothing and changes nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from bidikv_runtime.connector import wire
from bidikv_runtime.connector.compatibility import Compatibility
from bidikv_runtime.connector.index import PublicationIndex
from bidikv_runtime.connector.lookup_client import LookupClient, Question
from bidikv_runtime.connector.lookup_server import LookupServer
from bidikv_runtime.connector.sources import Source
from bidikv_runtime.connector.tokens import REPLY, REQUEST, Tokens

LOOPBACK = "127.0.0.1"
COMPATIBILITY = Compatibility(
    **dict.fromkeys(Compatibility.__dataclass_fields__, "x") | {"kv_heads": "8", "kv_layout": "LBHNC"}
)
LOG = logging.getLogger("test")
HASHES = [bytes([n]) * 32 for n in range(4)]
PEER = wire.Peer("engine", LOOPBACK, 5600, 1)
PATIENCE = 5.0
"""For answers that come at once: long enough for a busy machine, and never waited for in full."""


@contextmanager
def running(tokens: Tokens | None) -> Iterator[LookupServer]:
    index = PublicationIndex()
    index.publish(HASHES, [1, 2, 3, 4])
    server = LookupServer(index, COMPATIBILITY, PEER, LOOPBACK, 0, LOG, tokens)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def make_client() -> Iterator[Callable[[Tokens | None], LookupClient]]:
    clients: list[LookupClient] = []

    def make(tokens: Tokens | None) -> LookupClient:
        clients.append(LookupClient(60, tokens=tokens, logger=LOG))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def write_tokens(folder: Path, *tokens: str) -> Tokens:
    path = folder / "-".join(token[:3] for token in tokens)
    path.write_text("\n".join(tokens))
    return Tokens(path, LOG)


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return write_tokens(tmp_path, "one-token-0123456789")


@pytest.fixture
def other_tokens(tmp_path: Path) -> Tokens:
    return write_tokens(tmp_path, "two-token-0123456789")


def ask(client: LookupClient, port: int) -> Question:
    return client.ask(
        Source(LOOPBACK, port), lambda n: wire.Lookup(wire.VERSION, n, COMPATIBILITY.digest(), HASHES), PATIENCE
    )


def answer(client: LookupClient, port: int) -> wire.Reply | None:
    question = ask(client, port)
    client.wait([question], PATIENCE)
    return question.reply


def wait_for(condition: Callable[[], bool], client: LookupClient) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        client.poll(0.01)
        time.sleep(0.001)


def test_peers_with_a_common_token_exchange_messages(
    tokens: Tokens, tmp_path: Path, make_client: Callable[[Tokens | None], LookupClient]
) -> None:
    rotating = write_tokens(tmp_path, "two-token-0123456789", "one-token-0123456789")
    with running(tokens) as server:
        assert isinstance(answer(make_client(tokens), server.port), wire.Found)
        late = make_client(rotating)
        question = ask(late, server.port)
        wait_for(lambda: server.describe()["unauthenticated"] == 1, late)  # it signs with the new token already
        assert question.open
    with running(rotating) as server:
        assert isinstance(answer(make_client(rotating), server.port), wire.Found)
        early = make_client(tokens)
        question = ask(early, server.port)
        wait_for(lambda: early.unauthenticated == 1, early)  # the reply is signed with the new one
        assert question.open
        assert server.describe()["unauthenticated"] == 0


@pytest.mark.parametrize("reader", ["without", "with another"])
def test_a_reader_without_the_token_gets_no_answer(
    tokens: Tokens,
    other_tokens: Tokens,
    make_client: Callable[[Tokens | None], LookupClient],
    caplog: pytest.LogCaptureFixture,
    reader: str,
) -> None:
    client = make_client(None if reader == "without" else other_tokens)
    with running(tokens) as server:
        questions = [ask(client, server.port) for _ in range(2)]
        wait_for(lambda: server.describe()["unauthenticated"] == 2, client)
        assert server.describe()["lookups"] == 0
        assert isinstance(answer(make_client(tokens), server.port), wire.Found)  # the port goes on
        client.poll()
        assert all(question.open for question in questions)
    assert [record.getMessage() for record in caplog.records] == [
        "the lookup port drops unauthenticated messages, the first one because no token fits: give all engines the "
        "same token file"
    ]


def test_a_source_without_the_token_is_not_believed(
    tokens: Tokens, make_client: Callable[[Tokens | None], LookupClient], caplog: pytest.LogCaptureFixture
) -> None:
    """It answers whatever it gets."""
    client = make_client(tokens)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port(f"tcp://{LOOPBACK}")
        source = Source(LOOPBACK, port)
        question = client.ask(source, lambda n: wire.Lookup(wire.VERSION, n, b"", HASHES), PATIENCE)
        identity, sealed = router.recv_multipart()
        data = tokens.open(REQUEST, sealed)
        assert data is not None
        found = wire.encode(wire.Found(wire.decode_request(data).sequence, 1, [], PEER))
        replies = [
            found,
            sealed,  # the request sent back
            tokens.seal(REQUEST, found),  # what a signer of requests could be made to sign
            tokens.seal(REPLY, found)[:-1],
            bytes(16) + found,
        ]
        for reply in replies:
            router.send_multipart((identity, reply))
        while client.unauthenticated < len(replies):
            client.poll(PATIENCE)
            assert question.open
        router.send_multipart((identity, tokens.seal(REPLY, found)))
        client.wait([question], PATIENCE)
    assert isinstance(question.reply, wire.Found)
    assert [record.getMessage() for record in caplog.records] == [
        "replies that no token fits are dropped: give all engines the same token file"
    ]


def test_an_old_reply_does_not_answer_a_new_question(
    tokens: Tokens, make_client: Callable[[Tokens | None], LookupClient]
) -> None:
    """Recorded from one process and played to the next, at the same address with the same token."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port(f"tcp://{LOOPBACK}")
        recorded: list[bytes] = []
        for _ in range(2):
            client = make_client(tokens)
            question = client.ask(Source(LOOPBACK, port), lambda n: wire.Lookup(wire.VERSION, n, b"", HASHES), PATIENCE)
            identity, sealed = router.recv_multipart()
            for reply in recorded:
                router.send_multipart((identity, reply))
            client.poll(PATIENCE if recorded else 0)
            assert question.open
            assert client.unauthenticated == 0  # it is genuine
            data = tokens.open(REQUEST, sealed)
            assert data is not None
            recorded = [tokens.seal(REPLY, wire.encode(wire.Found(wire.decode_request(data).sequence, 1, [], PEER)))]
