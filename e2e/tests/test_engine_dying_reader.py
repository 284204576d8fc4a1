"""A reader that dies in the middle of a read leaves its source alive, on real NIXL over TCP."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from e2e.engine.local import ENVIRONMENT, ROOT
from e2e.engine.provision import ENGINE_LINK

pytestmark = pytest.mark.engine
LIMIT_SECONDS = 60.0
SETTLE_SECONDS = 2.0
"""For the source to take all requests of the reader in, and for what follows the reader's end."""


def _start(*arguments: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as errors:
        return subprocess.Popen(
            [str(ENGINE_LINK / "bin" / "python"), "-m", "e2e.engine.nixl_dying_reader", *arguments],
            # MALLOC_PERTURB_: what malloc returns is not zero, as in a process that has run for a while.
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": f"{ROOT / 'runtime'}:{ROOT}", "MALLOC_PERTURB_": "165"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )


def _wait_until_stopped(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        if Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return
        assert process.poll() is None, "the reader has ended before its read was under way"
        time.sleep(0.05)
    raise AssertionError("the reader has not begun to read in time")


def _end_of_source_whose_reader_dies(tmp_path: Path, *arguments: str) -> int | None:
    """The source's exit status after its reader was killed in the middle of a read; None if it lives."""
    source = _start("source", *arguments, log=tmp_path / "source.log")
    reader = _start("reader", log=tmp_path / "reader.log")
    try:
        assert source.stdout is not None
        assert reader.stdin is not None
        line = b""
        while not line.startswith(b"["):  # NIXL's log comes first
            line = source.stdout.readline()
            assert line, (tmp_path / "source.log").read_text()[-4000:]
        reader.stdin.write(line)
        reader.stdin.flush()
        _wait_until_stopped(reader)
        time.sleep(SETTLE_SECONDS)
        assert source.poll() is None
        reader.kill()
        reader.wait(LIMIT_SECONDS)
        time.sleep(SETTLE_SECONDS)
        return source.poll()
    finally:
        for process in (source, reader):
            process.kill()
            process.wait(LIMIT_SECONDS)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


def test_a_source_survives_a_reader_that_dies(tmp_path: Path) -> None:
    assert _end_of_source_whose_reader_dies(tmp_path) is None


def test_without_the_correction_it_does_not(tmp_path: Path) -> None:
    """When this fails, UCX no longer needs ``ucx_requests``."""
    assert _end_of_source_whose_reader_dies(tmp_path, "as-is") == -signal.SIGSEGV
