"""Lookup port and client over loopback: answers, silence, restarts, refusals, and the choice among several sources."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq

from bidikv_runtime.connector import wire
from bidikv_runtime.connector.compatibility import Compatibility, explain_refusal
from bidikv_runtime.connector.index import PublicationIndex
from bidikv_runtime.connector.lookup_client import MAXIMUM_CONNECTIONS, LookupClient, Question
from bidikv_runtime.connector.lookup_server import LookupPortError, LookupServer
from bidikv_runtime.connector.reuse import Reuse
from bidikv_runtime.connector.sources import Source

LOOPBACK = "127.0.0.1"
COMPATIBILITY = Compatibility(
    **dict.fromkeys(Compatibility.__dataclass_fields__, "x") | {"kv_heads": "8", "kv_layout": "LBHNC"}
)
LOG = logging.getLogger("test")
HASHES = [bytes([n]) * 32 for n in range(4)]
PATIENCE = 5.0
"""For answers that come at once: long enough for a busy machine, and never waited for in full."""


@contextmanager
def running(index: PublicationIndex, engine: str = "engine", port: int = 0, size: int = 1) -> Iterator[LookupServer]:
    server = LookupServer(index, COMPATIBILITY, wire.Peer(engine, LOOPBACK, 5600, size), LOOPBACK, port, LOG)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def serving(index: PublicationIndex, engine: str = "engine", port: int = 0, size: int = 1) -> Iterator[Source]:
    with running(index, engine, port, size) as server:
        yield Source(LOOPBACK, server.port)


@pytest.fixture
def client() -> Iterator[LookupClient]:
    client = LookupClient(silent_period=60)
    yield client
    client.close()


@pytest.fixture
def silent() -> Iterator[Source]:
    """Accepts connections and says nothing."""
    with socket.create_server((LOOPBACK, 0)) as server:
        yield Source(LOOPBACK, server.getsockname()[1])


def ask_lookup(client: LookupClient, source: Source, seconds: float = PATIENCE) -> Question:
    digest = COMPATIBILITY.digest()
    return client.ask(source, lambda n: wire.Lookup(wire.VERSION, n, digest, HASHES), seconds)


def ask_validate(
    client: LookupClient, source: Source, epoch: int, blocks: list[int], publications: list[int]
) -> Question:
    return client.ask(source, lambda n: wire.Validate(wire.VERSION, n, epoch, blocks, publications), PATIENCE)


def answered(client: LookupClient, question: Question) -> wire.Reply:
    client.wait([question], PATIENCE)
    assert question.reply is not None
    return question.reply


def validated(client: LookupClient, source: Source, epoch: int, run: wire.Run) -> tuple[int, int]:
    """The source's epoch and how many blocks of the run it confirms."""
    reply = answered(client, ask_validate(client, source, epoch, run.blocks, run.publications))
    assert isinstance(reply, wire.Validated)
    return reply.epoch, reply.valid


def holding(count: int) -> PublicationIndex:
    index = PublicationIndex()
    index.publish(HASHES[:count], list(range(1, count + 1)))
    return index


def test_lookup_then_validate(client: LookupClient) -> None:
    index = holding(3)
    with serving(index) as source:
        found = answered(client, ask_lookup(client, source))
        assert isinstance(found, wire.Found)
        assert (found.epoch, found.peer.engine_id) == (index.epoch, "engine")
        [run] = found.runs
        assert (run.first, run.blocks) == (0, [1, 2, 3])
        assert validated(client, source, found.epoch, run) == (index.epoch, 3)
        index.unpublish([2])
        assert validated(client, source, found.epoch, run) == (index.epoch, 1)


def test_whose_session_is_asked_for_and_read_is_told(client: LookupClient) -> None:
    index, told = holding(3), list[tuple[str, bool]]()
    peer = wire.Peer("engine", LOOPBACK, 5600, 1)
    server = LookupServer(
        index,
        COMPATIBILITY,
        peer,
        LOOPBACK,
        0,
        LOG,
        on_session=lambda session, has_read: told.append((session, has_read)),
    )
    source, digest = Source(LOOPBACK, server.port), COMPATIBILITY.digest()

    def validate(blocks: list[int], numbers: list[int], session: str) -> None:
        answered(
            client,
            client.ask(
                source, lambda n: wire.Validate(wire.VERSION, n, index.epoch, blocks, numbers, session), PATIENCE
            ),
        )

    try:
        answered(client, ask_lookup(client, source))
        answered(client, client.ask(source, lambda n: wire.Lookup(wire.VERSION, n, b"other", HASHES, 1, "s"), PATIENCE))
        assert told == [], "of no session, and refused"
        answered(client, client.ask(source, lambda n: wire.Lookup(wire.VERSION, n, digest, HASHES, 1, "s"), PATIENCE))
        validate([1, 2], [9, 9], "s")
        assert told == [("s", False)], "nothing valid was read"
        assert not server.has_read([1, 2, 3])
        validate([1, 2], [1, 2], "")
        assert told == [("s", False)]
        validate([2, 3], [2, 9], "s")
        assert told == [("s", False), ("s", True)]
        assert [block for block in (1, 2, 3) if server.has_read([block])] == [1, 2]
        assert set(server.take_read_blocks()) == {1, 2}
        assert not server.has_read([1, 2, 3])
    finally:
        server.stop()


def test_a_restarted_source_validates_nothing_of_its_former_life(client: LookupClient) -> None:
    with serving(holding(3)) as source:
        found = answered(client, ask_lookup(client, source))
        assert isinstance(found, wire.Found)
    index = holding(3)  # the same blocks under the same numbers
    with serving(index, port=source.port):
        assert validated(client, source, found.epoch, found.runs[0]) == (index.epoch, 0)


def test_an_incompatible_reader_is_refused_with_what_differs(client: LookupClient) -> None:
    reader = replace(COMPATIBILITY, dtype="float16")
    with serving(holding(3)) as source:
        question = client.ask(source, lambda n: wire.Lookup(wire.VERSION, n, reader.digest(), HASHES), PATIENCE)
        refused = answered(client, question)
    assert isinstance(refused, wire.Refused)
    assert explain_refusal(reader, 1, refused) == "dtype is 'float16' here and 'x' there"


def test_sizes_that_vllm_cannot_map_are_refused(client: LookupClient) -> None:
    def ask(size: int) -> wire.Reply:
        digest = COMPATIBILITY.digest()
        return answered(
            client, client.ask(source, lambda n: wire.Lookup(wire.VERSION, n, digest, HASHES, size), PATIENCE)
        )

    with serving(holding(3), size=2) as source:
        assert isinstance(ask(2), wire.Found)
        assert isinstance(ask(4), wire.Found)
        refused = ask(3)
    assert isinstance(refused, wire.Refused)
    assert explain_refusal(COMPATIBILITY, 3, refused) == (
        "tensor parallel sizes are 3 at the reader and 2 at the source: one must divide the other"
    )


def test_another_version_of_the_protocol_is_refused(client: LookupClient) -> None:
    with serving(holding(3)) as source:
        question = client.ask(source, lambda n: wire.Lookup(99, n, COMPATIBILITY.digest(), HASHES), PATIENCE)
        refused = answered(client, question)
    assert isinstance(refused, wire.Refused)
    assert (refused.version, refused.compatibility) == (wire.VERSION, {})
    older = msgspec.structs.replace(refused, version=1)
    assert explain_refusal(COMPATIBILITY, 1, older) == (
        f"it speaks version 1 of the protocol and this engine {wire.VERSION}"
    )


@pytest.mark.parametrize("frames", [[b"garbage"], [b""], [b"a", b"b", b"c"], [b"\xc1" * 1000]])
def test_garbage_is_dropped_and_the_port_goes_on(client: LookupClient, frames: list[bytes]) -> None:
    with serving(holding(2)) as source:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(f"tcp://{source}")
            dealer.send_multipart(frames)
            found = answered(client, ask_lookup(client, source))
        assert isinstance(found, wire.Found)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc/net/tcp")
def test_a_reader_that_vanished_is_noticed(client: LookupClient) -> None:
    """The kernel probes an idle connection (timer 02); only that ends one whose other side never says so."""
    with serving(holding(1)) as source:
        answered(client, ask_lookup(client, source))
        established, probing = "01", "02"
        timers: set[str] = set()
        end = time.monotonic() + PATIENCE
        # For a moment it still waits for an acknowledgement; and the list may miss or repeat a line when others change.
        while timers != {probing} and time.monotonic() < end:
            connections = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            accepted = [c for c in connections if c[1].endswith(f":{source.port:04X}") and c[3] == established]
            timers = {connection[5].split(":")[0] for connection in accepted}
            time.sleep(0.01)
        assert timers == {probing}


def test_a_port_in_use_is_one_sentence() -> None:
    with (
        serving(holding(0)) as source,
        pytest.raises(LookupPortError, match=rf"{source.port} cannot be opened .*: set bidikv_lookup_port"),
        serving(holding(0), port=source.port),
    ):
        pass


def test_the_scheduler_learns_which_blocks_were_read(client: LookupClient) -> None:
    index = holding(3)
    with running(index) as server:
        source = Source(LOOPBACK, server.port)
        found = answered(client, ask_lookup(client, source))
        assert isinstance(found, wire.Found)
        assert server.take_read_blocks() == []  # found is not read
        for _rank in range(2):
            validated(client, source, found.epoch, found.runs[0])
        assert sorted(server.take_read_blocks()) == [1, 2, 3]
        assert server.take_read_blocks() == []
        index.unpublish([3])
        validated(client, source, found.epoch, found.runs[0])
        validated(client, source, found.epoch + 1, found.runs[0])
        assert sorted(server.take_read_blocks()) == [1, 2]


def test_the_state_counts_messages_by_what_became_of_them(client: LookupClient) -> None:
    with running(holding(3)) as server:
        source = Source(LOOPBACK, server.port)
        found = answered(client, ask_lookup(client, source))
        assert isinstance(found, wire.Found)
        validated(client, source, found.epoch, found.runs[0])
        answered(client, client.ask(source, lambda n: wire.Lookup(wire.VERSION, n, b"other", HASHES), PATIENCE))
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(f"tcp://{source}")
            dealer.send(b"garbage")
            dealer.send(wire.encode(wire.Lookup(wire.VERSION, 1, COMPATIBILITY.digest(), HASHES)))
            assert dealer.poll(int(PATIENCE * 1000))
        assert server.describe() == {
            "lookups": 2,
            "validations": 1,
            "refused": 1,
            "malformed": 1,
            "unauthenticated": 0,
        }


def test_a_refusal_is_remembered_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = replace(COMPATIBILITY, dtype="float16")
    client = LookupClient(1, 1, explain=lambda refused: explain_refusal(reader, 1, refused))
    with serving(holding(3)) as source:
        for _ in range(3):
            question = client.ask(source, lambda n: wire.Lookup(wire.VERSION, n, reader.digest(), HASHES), PATIENCE)
            assert isinstance(answered(client, question), wire.Refused)
        assert client.is_refused(source)
        assert not client.is_silent(source)
        [state] = client.describe()["sources"]
        assert (state["source"], state["refusal"]) == (str(source), "dtype is 'float16' here and 'x' there")
    client.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"source {source} refuses to share KV: dtype is 'float16' here and 'x' there; its KV is recomputed instead"
    ]


def test_questions_that_are_silent_together_count_once(silent: Source) -> None:
    client = LookupClient(silent_period=30)
    questions = [ask_lookup(client, silent, seconds=0.01 * n) for n in range(1, 6)]
    client.wait(questions, PATIENCE)
    assert all(question.silent for question in questions)
    [state] = client.describe()["sources"]
    assert state["silences"] == 1
    client.close()


def test_a_question_is_answered_although_an_earlier_one_was_given_up(client: LookupClient) -> None:
    with socket.create_server((LOOPBACK, 0)) as reserve:
        port = reserve.getsockname()[1]
    early, late = (ask_lookup(client, Source(LOOPBACK, port), seconds) for seconds in (0.02, PATIENCE))
    client.wait([early], PATIENCE)
    assert early.silent
    with serving(holding(1), port=port) as source:
        assert isinstance(answered(client, late), wire.Found)
        assert not client.is_silent(source)


def test_a_source_cannot_answer_for_another(client: LookupClient, silent: Source) -> None:
    """It sees the sequence numbers of its own questions, and could count on from there."""
    question = ask_lookup(client, silent)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port(f"tcp://{LOOPBACK}")
        own = ask_lookup(client, Source(LOOPBACK, port))
        identity, data = router.recv_multipart()
        request = wire.decode_request(data)
        peer = wire.Peer("engine", LOOPBACK, 5600, 1)
        for sequence in (request.sequence - 1, request.sequence):
            router.send_multipart((identity, wire.encode(wire.Found(sequence, 1, [], peer))))
        assert isinstance(answered(client, own), wire.Found)
        client.poll()
    assert question.open


def test_sequence_numbers_start_at_random() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port(f"tcp://{LOOPBACK}")
        seen = set()
        for _ in range(5):
            client = LookupClient(silent_period=60)
            ask_lookup(client, Source(LOOPBACK, port))
            seen.add(wire.decode_request(router.recv_multipart()[1]).sequence)
            client.close()
    assert len(seen) == 5


def test_a_silent_source_is_given_up_and_then_left_alone(client: LookupClient, silent: Source) -> None:
    question = ask_lookup(client, silent, seconds=0.05)
    assert question.open
    assert not client.is_silent(silent)
    client.wait([question], PATIENCE)
    assert question.silent
    assert client.is_silent(silent)


def test_a_source_to_be_avoided_is_left_alone_too(client: LookupClient) -> None:
    with serving(holding(1)) as source:
        assert isinstance(answered(client, ask_lookup(client, source)), wire.Found)
        client.avoid(source)
        assert client.is_silent(source)


def test_a_silent_source_is_asked_again_after_a_while() -> None:
    client = LookupClient(silent_period=0.01)
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            source = Source(LOOPBACK, server.getsockname()[1])
            question = ask_lookup(client, source, seconds=0.01)
            client.wait([question], PATIENCE)
            assert question.silent
        time.sleep(0.02)
        assert not client.is_silent(source)
        with serving(holding(1), port=source.port):
            assert isinstance(answered(client, ask_lookup(client, source)), wire.Found)
    finally:
        client.close()


def test_a_source_that_starts_late_answers_within_the_deadline(client: LookupClient) -> None:
    with socket.create_server((LOOPBACK, 0)) as reserve:
        port = reserve.getsockname()[1]
    question = ask_lookup(client, Source(LOOPBACK, port))
    with serving(holding(1), port=port):
        assert isinstance(answered(client, question), wire.Found)


def test_an_unusable_address_is_silent_at_once(client: LookupClient) -> None:
    question = ask_lookup(client, Source("-", 1))
    assert question.silent


def test_a_full_queue_is_silent_at_once(client: LookupClient, silent: Source) -> None:
    questions = [ask_lookup(client, silent, seconds=60) for _ in range(20_000)]
    assert any(question.silent for question in questions)


def test_a_burst_of_questions_is_answered(client: LookupClient) -> None:
    with serving(holding(3)) as source:
        questions = [ask_lookup(client, source) for _ in range(500)]
        client.wait(questions, PATIENCE)
        assert all(isinstance(question.reply, wire.Found) for question in questions)


def test_a_reply_that_nobody_looked_at_before_the_deadline_counts(client: LookupClient) -> None:
    with serving(holding(3)) as source:
        question = ask_lookup(client, source, seconds=0)
        assert client._sockets[source].poll(int(PATIENCE * 1000))
        client.poll()
        assert isinstance(question.reply, wire.Found)
        assert not client.is_silent(source)


def test_connections_are_bounded(client: LookupClient) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        for number in range(1, MAXIMUM_CONNECTIONS + 20):
            ask_lookup(client, Source(f"127.0.0.{number}", port), seconds=60)
        assert len(client._sockets) == MAXIMUM_CONNECTIONS


def test_the_longest_prefix_wins_and_a_silent_source_does_not_count(client: LookupClient, silent: Source) -> None:
    with serving(holding(1), "short") as short, serving(holding(3), "long") as long, serving(holding(4), "me") as own:
        questions = [ask_lookup(client, source) for source in (short, silent, long, own)]
        client.wait([question for question in questions if question.source != silent], PATIENCE)
        reuse = Reuse([short, silent, long, own])
        reuse.start(questions, 0, len(HASHES), now=0.0)
        assert reuse.decide("me", 0, settle_wait=1.0, now=1.0) is None
        assert reuse.decide("me", 0, settle_wait=1.0, now=2.0) == "hit"
    assert reuse.match(0, len(HASHES)) == 3
    [part] = reuse.begin_read(3).parts
    assert (part.source, part.peer.engine_id, part.blocks) == (long, "long", (1, 2, 3))


def test_nothing_published_is_no_answer(client: LookupClient) -> None:
    with serving(holding(0)) as source:
        question = ask_lookup(client, source)
        found = answered(client, question)
    assert isinstance(found, wire.Found)
    assert found.runs == []
