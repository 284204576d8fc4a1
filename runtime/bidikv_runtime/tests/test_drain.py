"""The preStop hook: when it ends, and that it always does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bidikv_runtime import contract, drain
from bidikv_runtime.contract import EngineReport
from bidikv_runtime.drain import Engine, Left, NoAnswer, build_parser, parse_report

WAIT_SECONDS = 30
TOKEN = "token-of-all-engines"
NOTHING = {"requests": 0, "unread_sessions": 0, "unread_handovers": 0}


class Reports:
    """State ports of an engine's ranks, the first at a free port and the others behind it."""

    def __init__(self) -> None:
        self.now: dict[str, int] = dict(NOTHING)
        self.later: list[dict[str, int]] = []
        """What the next questions are answered with."""
        self.status = 200
        self.asked: list[tuple[str, str | None]] = []
        self.hangs = threading.Event()
        self.freed = threading.Event()
        self.port = 0

    def answer(self) -> bytes:
        if self.hangs.is_set():
            self.freed.wait(WAIT_SECONDS)
        return json.dumps(self.later.pop(0) if self.later else self.now).encode()


@contextmanager
def serving(reports: Reports, port: int = 0) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reports.asked.append((self.path, self.headers["Authorization"]))
            body = reports.answer()
            self.send_response(reports.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

        def handle(self) -> None:
            with suppress(OSError):
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        reports.freed.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def reports() -> Iterator[Reports]:
    made = Reports()
    with serving(made) as made.port:
        yield made


def engine(reports: Reports, **more: Any) -> Engine:
    values: dict[str, Any] = {"ranks": 1, "token_file": ""}
    return Engine("127.0.0.1", reports.port, **(values | more))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "LOOK_SECONDS", 0.01)


@pytest.mark.parametrize("what", ["requests", "unread_sessions", "unread_handovers"])
def test_it_stays_until_nothing_is_left(reports: Reports, what: str) -> None:
    reports.later = [NOTHING | {what: count} for count in (3, 1, 1)]
    assert "nothing is left" in drain.drain(engine(reports), leave_seconds=0, seconds=WAIT_SECONDS)
    assert len(reports.asked) == 3 + drain.QUIET_LOOKS


def test_one_quiet_look_is_not_enough(reports: Reports) -> None:
    reports.later = [NOTHING, NOTHING | {"requests": 1}, NOTHING]
    drain.drain(engine(reports), leave_seconds=0, seconds=WAIT_SECONDS)
    assert len(reports.asked) == 4


def test_it_stays_at_least_until_routers_know(reports: Reports) -> None:
    began = time.monotonic()
    drain.drain(engine(reports), leave_seconds=0.3, seconds=WAIT_SECONDS)
    assert time.monotonic() - began >= 0.3


def test_when_its_time_is_over_it_says_what_was_left(reports: Reports) -> None:
    reports.now = {"requests": 1, "unread_sessions": 2, "unread_handovers": 3}
    sentence = drain.drain(engine(reports), leave_seconds=0, seconds=0.05)
    assert "1 requests, 2 sessions and 3 finished prefills" in sentence


def test_an_engine_that_has_gone_is_not_waited_for() -> None:
    reports = Reports()
    with serving(reports) as reports.port:
        pass
    assert "does not answer" in drain.drain(engine(reports), leave_seconds=WAIT_SECONDS, seconds=WAIT_SECONDS)


def test_a_refused_token_is_no_reason_to_stay(reports: Reports) -> None:
    reports.status = 401
    assert "answers 401" in drain.drain(engine(reports), leave_seconds=0, seconds=WAIT_SECONDS)
    assert len(reports.asked) == drain.TRIES


def test_all_ranks_are_asked_with_the_token_of_the_moment(reports: Reports, tmp_path: Path) -> None:
    tokens, other = tmp_path / "tokens", Reports()
    tokens.write_text(f"\n{TOKEN}\nanother-one\n")
    try:
        with serving(other, reports.port + 1):
            other.now = NOTHING | {"unread_sessions": 4}
            looked = engine(reports, ranks=2, token_file=str(tokens)).look()
    except OSError as error:
        pytest.skip(f"the next port is taken: {error}")
    assert looked == Left(sessions=4)
    assert reports.asked == other.asked == [(f"{contract.REPORT_PATH}?sessions=0", f"Bearer {TOKEN}")]


def test_a_report_of_the_product_is_understood() -> None:
    report = EngineReport("e", "1", 0, "c", 1, 0, 0.0, 1.0, unread_sessions=2, unread_handovers=3)
    assert parse_report(msgspec.json.encode(report)) == Left(1, 2, 3)
    for body in (b"", b"[]", b"{}", b'{"requests": null}'):
        with pytest.raises(NoAnswer):
            parse_report(body)


@pytest.mark.parametrize("wrong", ["-1", "nan", "1e9", "soon"])
def test_durations_are_bounded(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--seconds", wrong])
    assert "--seconds" in capsys.readouterr().err


@pytest.mark.parametrize("hangs", [False, True])
def test_the_process_ends_well_whatever_the_engine_does(reports: Reports, hangs: bool) -> None:
    """As the kubelet runs it: with the standard library alone."""
    if hangs:
        reports.hangs.set()
    package = str(Path(contract.__file__).parents[1])
    done = subprocess.run(
        [
            *(sys.executable, "-S", "-m", contract.DRAIN_MODULE),
            *("--leave-seconds=0.1", f"--seconds={1 if hangs else WAIT_SECONDS}", f"--state-port={reports.port}"),
        ],
        env={"PYTHONPATH": package, contract.ENV_LOOKUP_HOST: "127.0.0.1", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("is over" if hangs else "nothing is left") in done.stdout
