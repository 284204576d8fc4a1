"""The C tools of the router's bench: the load notices every wrong answer, the mock answers as it is told, and a quick
run of the whole bench gives figures."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bidikv_runtime.contract import EngineReport
from e2e.bench.processes import guardian
from e2e.bench.router.__main__ import main, parse_options
from e2e.bench.router.bodies import build_body
from e2e.bench.router.measure import CHAT
from e2e.bench.router.report import LEAST_ROUNDS
from e2e.bench.router.targets import DECODE, PREFILL, Engines, choose_ports, fetch
from e2e.bench.router.tools import Tools, apply_tools, read_peer_version
from e2e.cluster.paths import find_paths

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler; `make bench-router` installs one")

EXPECTED = b"data: one\n\ndata: [DONE]\n\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
RIGHT = CHUNKED + b"b\r\ndata: one\n\n\r\nE;x=y\r\ndata: [DONE]\n\n\r\n0\r\ntrailer: 1\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 25\r\n\r\n" + EXPECTED


@pytest.fixture(scope="module")
def tools() -> Tools:
    return apply_tools(find_paths())


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that gives every request to ``answer``; its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(10)

    def serve() -> None:
        client, _ = listener.accept()
        with client:
            client.settimeout(10)
            while True:
                received = b""
                while b"\r\n\r\n" not in received or not received.endswith(b"}"):
                    data = client.recv(65536)
                    if not data:
                        return
                    received += data
                answer(client)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()
        thread.join(10)


def load(tools: Tools, folder: Path, address: str, *options: str, expected: bytes = EXPECTED) -> dict[str, Any]:
    (folder / "body").write_bytes(b'{"messages":[]}')
    (folder / "expected").write_bytes(expected)
    files = ("--body", str(folder / "body"), "--expect", str(folder / "expected"))
    command = [str(tools.load), "--address", address, *files, *options]
    done = subprocess.run(command, capture_output=True, check=True, timeout=30)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


@pytest.mark.parametrize("whole", [RIGHT, PLAIN])
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_right_answers_count_however_they_are_cut(tools: Tools, tmp_path: Path, whole: bytes, piece: int) -> None:
    def answer(client: socket.socket) -> None:
        for start in range(0, len(whole), piece):
            client.sendall(whole[start : start + piece])

    with answering(answer) as port:
        figures = load(tools, tmp_path, f"127.0.0.1:{port}", "--requests", "3")
    assert (figures["requests"], figures["errors"]) == (3, 0), figures["first_error"]
    assert figures["received_bytes"] == 3 * len(whole)
    assert 0 < figures["first_byte_us"]["p50"] <= figures["latency_us"]["p50"] <= figures["latency_us"]["max"]
    assert figures["requests_per_second"] == pytest.approx(3 / figures["seconds"], rel=0.05)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (RIGHT.replace(b"one", b"two"), "other bytes"),
        (PLAIN.replace(b"one", b"two"), "other bytes"),
        (CHUNKED + b"b\r\ndata: one\n\n\r\n0\r\n\r\n", "too short"),
        (RIGHT.replace(b"0\r\ntrailer", b"1\r\nx\r\n0\r\ntrailer"), "other bytes"),
        (RIGHT + b"x", "behind an answer"),
        (PLAIN.replace(b"25", b"24"), "another length"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nfull", "status 503 full"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 25\r\ntransfer-encoding: chunked\r\n\r\n", "malformed"),
        (CHUNKED + b"zz\r\n", "malformed"),
        (CHUNKED + b"ffffffffffffffff\r\n", "malformed"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "malformed"),
        (PLAIN.replace(b"200 OK\r\n", b"200 OK\r\nconnection: close\r\n"), "not kept"),
    ],
)
def test_a_wrong_answer_is_an_error(tools: Tools, tmp_path: Path, answer: bytes, reason: str) -> None:
    with answering(lambda client: client.sendall(answer)) as port:
        figures = load(tools, tmp_path, f"127.0.0.1:{port}", "--requests", "3")
    assert figures["errors"] == 1
    assert reason in figures["first_error"]


def test_a_connection_that_ends_within_an_answer_is_an_error(tools: Tools, tmp_path: Path) -> None:
    def answer(client: socket.socket) -> None:
        client.sendall(RIGHT[:60])
        client.shutdown(socket.SHUT_RDWR)

    with answering(answer) as port:
        figures = load(tools, tmp_path, f"127.0.0.1:{port}", "--requests", "1")
    assert (figures["requests"], figures["errors"]) == (0, 1)
    assert figures["first_error"] == "the connection was closed within an answer"


def test_silence_is_an_error_after_the_limit(tools: Tools, tmp_path: Path) -> None:
    with answering(lambda client: None) as port:
        figures = load(tools, tmp_path, f"127.0.0.1:{port}", "--seconds", "0.05", "--timeout", "0.2")
    assert (figures["requests"], figures["errors"], figures["first_error"]) == (0, 1, "an answer took too long")


def test_nobody_listening_is_an_error(tools: Tools, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        figures = load(tools, tmp_path, address, "--requests", "1", "--connections", "3")
    assert figures["errors"] == 3
    assert figures["first_error"] == "connecting: Connection refused"


@pytest.fixture(scope="module")
def engines(tools: Tools, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with guardian() as guard:
        running = Engines(tools, choose_ports(), 0, tmp_path_factory.mktemp("mock"))
        try:
            running.start(guard)
            yield running
        finally:
            running.process.stop()


def ask(engines: Engines, host: str, body: bytes) -> tuple[int, bytes]:
    return fetch(engines.address(host), CHAT, body, {"content-type": "application/json"})


def test_decode_streams_the_events_that_were_asked_for(engines: Engines, tools: Tools, tmp_path: Path) -> None:
    engines.set(chunks=3, gap_us=2000, spoil=0)
    status, answer = ask(engines, DECODE[0], b'{"messages":[]}')
    events = answer.split(b"\n\n")
    assert status == 200
    assert [event[:6] for event in events] == [b"data: "] * 4 + [b""]
    assert json.loads(events[0][6:])["choices"][0]["delta"] == {"content": " word"}
    assert events[3] == b"data: [DONE]"
    for gap in (0, 500):
        engines.set(gap_us=gap)
        options = ("--requests", "40", "--connections", "8", "--ramp", "0.01")
        figures = load(tools, tmp_path, engines.address(DECODE[0]), *options, expected=answer)
        assert (figures["requests"], figures["errors"]) == (40, 0), figures["first_error"]
        # Two gaps lie between three events, whatever the machine does besides.
        assert figures["latency_us"]["p50"] >= 2 * gap


def test_the_load_notices_a_spoilt_word(engines: Engines, tools: Tools, tmp_path: Path) -> None:
    for chunks in (0, 2):
        engines.set(chunks=chunks, gap_us=0, spoil=0)
        _, answer = ask(engines, DECODE[0], b'{"messages":[]}')
        engines.set(spoil=1)
        figures = load(tools, tmp_path, engines.address(DECODE[0]), "--requests", "1", expected=answer)
        assert (figures["requests"], figures["errors"]) == (0, 1)
        assert figures["first_error"] == "an answer had other bytes than expected"
    engines.set(spoil=0)


def test_prefill_answers_as_upstreams_connector(engines: Engines) -> None:
    engines.set(prompt_tokens=77)
    body = b'{"messages":["' + b"x" * 1000 + b'"]}'
    before = engines.count([PREFILL[0]])
    status, text = ask(engines, PREFILL[0], body)
    answer = json.loads(text)
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == 77
    assert len(answer["kv_transfer_params"]["remote_block_ids"][0]) == len(body) // 64 + 1
    assert engines.count([PREFILL[0]]) == (before[0] + 1, before[1] + len(body))


def test_bodies_are_kept_on_demand_and_refused_when_cut(engines: Engines) -> None:
    engines.set(keep_bodies=1)
    ask(engines, PREFILL[1], b'{"a":1}')
    assert engines.read_last(PREFILL[1]) == b'{"a":1}'
    engines.set(keep_bodies=0)
    ask(engines, PREFILL[1], b'{"a":2}')
    assert engines.read_last(PREFILL[1]) == b'{"a":1}'
    assert ask(engines, PREFILL[1], b'{"a":')[0] == 400


def test_reports_have_the_contracts_shape_and_only_what_is_new(engines: Engines) -> None:
    def report(query: str) -> EngineReport:
        status, text = fetch(f"{DECODE[1]}:{engines.ports.state}", f"/report{query}")
        assert status == 200
        return msgspec.json.decode(text, type=EngineReport)

    engines.set(chunks=0, prompt_tokens=250)
    for name in ("aa", "bb"):
        ask(engines, DECODE[1], b'{"messages":[],"kv_transfer_params":{"bidikv_session":"%b"}}' % name.encode())
    everything = report("")
    assert {session.name for session in everything.sessions} == {"aa", "bb"}
    since = everything.sequence
    ask(engines, DECODE[1], b'{"messages":[],"kv_transfer_params":{"bidikv_session":"bb"}}')
    news = report(f"?epoch={everything.epoch}&since={since}")
    assert [(session.name, session.prompt_tokens) for session in news.sessions] == [("bb", 250)]
    assert len(report(f"?epoch=other&since={since}").sessions) == 2


def test_a_quick_run_gives_figures_of_our_router(tmp_path: Path) -> None:
    output = tmp_path / "router.json"
    rows = ("--rows", "small c=1", "100 KB stream c=1", "64 streams", "1 MB c=8", "memory")
    assert main(["--quick", "--seed", "5", "--output", str(output), *rows]) == 0
    result = json.loads(output.read_text())
    assert result["problems"] == []
    assert {(run["row"], run["target"]) for run in result["runs"]} == {
        ("small c=1", "ours"),
        ("100 KB stream c=1", "ours"),
        ("100 KB stream c=1", "direct"),
        ("64 streams", "ours"),
        ("1 MB c=8", "ours"),
    }
    for run in result["runs"]:
        assert run["errors"] == 0
        assert run["requests"] > 0
        assert run["first_byte_p50_us"] > 0
        if run["target"] == "ours":
            assert run["prefill_requests"] == run["decode_requests"] == run["requests"]
            assert run["cpu_us"] > 0
    for leg in ("prefill", "decode"):
        seen = result["fidelity"]["ours"][leg]
        assert seen["messages_equal"]
        assert "kv_transfer_params" in seen["added"]
    assert result["fidelity"]["ours"]["decode"]["changed"] == []
    assert result["memory"]["requests"] > 0
    assert all(goal["met"] is None for goal in result["goals"] if goal["rounds"] < LEAST_ROUNDS and goal["id"] != "P7")

    # What the design rests on, with room for a busy machine (measured: a fifth): no history is decoded and encoded.
    body = build_body(1_000_000, stream=True, seed=5)
    began = time.process_time()
    for _ in range(3):
        json.dumps(json.loads(body))
    reencoding_us = (time.process_time() - began) / 3 * 1e6
    assert next(run["cpu_us"] for run in result["runs"] if run["row"] == "1 MB c=8") < reencoding_us


def test_options_name_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_options(["--quick"]).targets == ["ours", "ours-local", "direct"]
    assert parse_options(["--against", "HEAD"]).targets == ["ours", "before"]
    assert [parse_options(rows).memory for rows in ([], ["--rows", "64 streams"], ["--rows", "memory"])] == [
        True,
        False,
        True,
    ]
    assert parse_options(["--rows", "memory"]).rows == []
    assert main(["--rows", "nothing"]) == 2
    assert "no row 'nothing'" in capsys.readouterr().err
    assert read_peer_version().startswith("vllm-router==")
