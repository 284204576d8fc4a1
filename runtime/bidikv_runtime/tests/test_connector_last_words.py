"""What an engine that fails leaves in its container's termination message."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from bidikv_runtime.connector import last_words
from bidikv_runtime.connector.last_words import ENV_FILE, LIMIT, LastWords, install_handler


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "termination-log"
    path.write_text("")
    monkeypatch.setenv(ENV_FILE, str(path))
    return path


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """vLLM's own place of these records."""
    root = logging.getLogger("vllm")
    before = list(root.handlers)
    yield logging.getLogger("vllm.v1.engine.core")
    root.handlers = before


def fail(logger: logging.Logger, error: Exception, words: str = "EngineCore failed to start.") -> None:
    try:
        raise error
    except type(error):
        logger.exception(words)


def test_the_first_cause_stays(file: Path, logger: logging.Logger) -> None:
    install_handler()
    fail(logger, ValueError("No available memory\n for the cache blocks."), "WorkerProc failed to start.")
    fail(logger, RuntimeError("see above"))
    assert file.read_text() == "ValueError: No available memory for the cache blocks."


def test_classes_are_named_in_full(file: Path, logger: logging.Logger) -> None:
    install_handler()
    fail(logger, UnicodeError("x"), "EngineCore encountered a fatal error.")
    assert file.read_text() == "UnicodeError: x"
    assert last_words.describe(LastWordsError("y")) == f"{__name__}.LastWordsError: y"


class LastWordsError(Exception):
    pass


def test_what_an_engine_survives_is_not_told(file: Path, logger: logging.Logger) -> None:
    install_handler()
    fail(logger, ValueError("one request"), "Unexpected error pre-processing request 1")
    logger.error("EngineCore failed to start.")  # without an exception
    logger.info("EngineCore failed to start.", exc_info=ValueError("not an error"))
    assert file.read_text() == ""


def test_it_is_installed_once_and_only_where_there_is_a_file(
    file: Path, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_FILE, str(file / "absent"))
    install_handler()
    assert not any(isinstance(handler, LastWords) for handler in logging.getLogger("vllm").handlers)
    monkeypatch.setenv(ENV_FILE, str(file))
    install_handler()
    install_handler()
    assert sum(isinstance(handler, LastWords) for handler in logging.getLogger("vllm").handlers) == 1


def test_words_have_a_bound(file: Path, logger: logging.Logger) -> None:
    install_handler()
    fail(logger, ValueError("é" * LIMIT))
    assert len(file.read_bytes()) == LIMIT


def test_a_file_that_cannot_be_written_harms_nothing(
    file: Path, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_handler()
    file.unlink()
    monkeypatch.setattr(logging, "raiseExceptions", False)
    fail(logger, ValueError("x"))
