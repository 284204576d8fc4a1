"""Tokens: only peers with one are believed, in the right direction, and the file may change at any time."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from bidikv_runtime import contract
from bidikv_runtime.connector import tokens as module
from bidikv_runtime.connector.tokens import (
    CHUNK,
    MAXIMUM_FILE_BYTES,
    MAXIMUM_TOKENS,
    REPLY,
    REQUEST,
    TAG_BYTES,
    TokenFileError,
    Tokens,
    load_tokens,
    parse_tokens,
)

LOG = logging.getLogger("test")
OLD, NEW, OTHER = "old-token-0123456789", "new-token-0123456789", "other-token-0123456789"
PATH = Path("tokens")


def make(folder: Path, *tokens: str, name: str = "tokens") -> Tokens:
    path = folder / name
    path.write_text("\n".join(tokens) + "\n")
    return Tokens(path, LOG)


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return make(tmp_path, OLD)


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is looked at with every message."""
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.0)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_what_is_sealed_opens(tokens: Tokens, size: int) -> None:
    data = os.urandom(size)
    sealed = tokens.seal(REQUEST, data)
    assert len(sealed) == TAG_BYTES + size
    assert tokens.open(REQUEST, sealed) == data


def test_a_request_sent_back_does_not_pass_for_a_reply(tokens: Tokens) -> None:
    assert tokens.open(REPLY, tokens.seal(REQUEST, b"data")) is None
    assert tokens.open(REQUEST, tokens.seal(REPLY, b"data")) is None


def test_another_token_does_not_fit(tmp_path: Path, tokens: Tokens) -> None:
    other = make(tmp_path, OTHER, name="other")
    assert other.open(REQUEST, tokens.seal(REQUEST, b"data")) is None


@given(data=st.binary(max_size=3 * CHUNK), position=st.integers(0), flip=st.integers(1, 255))
def test_a_changed_byte_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, position: int, flip: int
) -> None:
    tokens = make(tmp_path_factory.mktemp("tokens"), OLD)
    sealed = bytearray(tokens.seal(REQUEST, data))
    sealed[position % len(sealed)] ^= flip
    assert tokens.open(REQUEST, bytes(sealed)) is None


@given(message=st.binary(max_size=64))
def test_arbitrary_bytes_do_not_open(tmp_path_factory: pytest.TempPathFactory, message: bytes) -> None:
    assert make(tmp_path_factory.mktemp("tokens"), OLD).open(REQUEST, message) is None


def test_cutting_a_message_short_or_making_it_longer_is_noticed(tokens: Tokens) -> None:
    sealed = tokens.seal(REQUEST, b"data")
    for other in (sealed[:-1], sealed + b"\0", sealed[:TAG_BYTES], sealed[: TAG_BYTES - 1], b""):
        assert tokens.open(REQUEST, other) is None


def test_the_first_token_signs_and_all_are_accepted(tmp_path: Path) -> None:
    both, old, new = make(tmp_path, NEW, OLD), make(tmp_path, OLD, name="old"), make(tmp_path, NEW, name="new")
    assert both.open(REQUEST, old.seal(REQUEST, b"data")) == b"data"
    assert both.open(REQUEST, new.seal(REQUEST, b"data")) == b"data"
    assert new.open(REQUEST, both.seal(REQUEST, b"data")) == b"data"
    assert old.open(REQUEST, both.seal(REQUEST, b"data")) is None


def test_a_bearer_token_is_any_of_the_tokens(tmp_path: Path) -> None:
    tokens = make(tmp_path, NEW, OLD)
    assert tokens.accepts(NEW)
    assert tokens.accepts(OLD)
    for other in (OTHER, "", OLD[:-1], OLD + " ", "ö" * 20, "\ud800"):
        assert not tokens.accepts(other)


@pytest.mark.usefixtures("no_wait")
def test_a_rotation_never_breaks_two_peers_that_see_it_at_different_times(tmp_path: Path) -> None:
    steps = [(OLD,), (OLD, NEW), (NEW, OLD), (NEW,)]
    first, second = make(tmp_path, OLD, name="first"), make(tmp_path, OLD, name="second")

    def write(name: str, tokens: tuple[str, ...]) -> None:
        replacement = tmp_path / "replacement"
        replacement.write_text("\n".join(tokens))
        replacement.replace(tmp_path / name)

    for step in steps:
        for name in ("first", "second"):
            write(name, step)
            assert second.open(REQUEST, first.seal(REQUEST, b"data")) == b"data"
            assert first.open(REPLY, second.seal(REPLY, b"data")) == b"data"
    assert not first.accepts(OLD)
    assert first.accepts(NEW)


def test_the_file_is_looked_at_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tokens = make(tmp_path, OLD)
    (tmp_path / "tokens").write_text(NEW)
    now = 100.99
    assert tokens.accepts(OLD)
    now = 101.0
    assert not tokens.accepts(OLD)
    assert tokens.accepts(NEW)


@pytest.mark.usefixtures("no_wait")
@pytest.mark.parametrize("content", ["", "short", None])
def test_a_bad_file_keeps_the_tokens_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    tokens = make(tmp_path, OLD)
    path = tmp_path / "tokens"
    path.unlink() if content is None else path.write_text(content)
    for _ in range(3):
        assert tokens.accepts(OLD)
    [record] = caplog.records
    assert record.getMessage().endswith("; the tokens read before stay in use")
    path.write_text(NEW)
    assert tokens.accepts(NEW)
    assert not tokens.accepts(OLD)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "holds 0 tokens"),
        (b"\n \n", "holds 0 tokens"),
        (b"short\n", "has a token of 5 characters in line 1"),
        (OLD.encode() + b"\n\n123456789012345\n", "has a token of 15 characters in line 3"),
        (b"white space in a token\n", "white space or a character outside ASCII within line 1"),
        ("öööööööööööööööö".encode(), "outside ASCII within line 1"),
        (b"\xff" * 20, "outside ASCII within line 1"),
        ((OLD + "\n").encode() * (MAXIMUM_TOKENS + 1), f"holds {MAXIMUM_TOKENS + 1} tokens"),
        (b"x" * (MAXIMUM_FILE_BYTES + 1), "is larger than"),
    ],
)
def test_a_malformed_file_is_one_sentence_without_the_token(content: bytes, fault: str) -> None:
    with pytest.raises(TokenFileError) as caught:
        parse_tokens(PATH, content)
    message = str(caught.value)
    assert message.startswith(f"the token file {PATH} ({contract.ENV_TOKEN_FILE}) ")
    assert fault in message
    assert "write 1 to 8 tokens of at least 16 ASCII characters into it, one per line" in message
    assert OLD not in message


@pytest.mark.parametrize(
    "content", [OLD, OLD + "\n", OLD + "\r\n" + NEW, f"\n  {OLD} \n\n{NEW}\n"], ids=["bare", "line", "crlf", "spaced"]
)
def test_lines_are_read_without_their_ends(content: str) -> None:
    expected = [OLD.encode(), NEW.encode()]
    assert parse_tokens(PATH, content.encode()) == expected[: 1 + (NEW in content)]


@given(st.binary(max_size=200))
def test_a_file_of_any_content_is_read_or_refused(content: bytes) -> None:
    try:
        tokens = parse_tokens(PATH, content)
    except TokenFileError:
        return
    assert all(len(token) >= 16 for token in tokens)


def test_without_a_file_peers_are_not_authenticated() -> None:
    assert load_tokens({}, LOG) is None
    assert load_tokens({contract.ENV_TOKEN_FILE: ""}, LOG) is None


def test_a_missing_file_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match=r"missing \(BIDIKV_TOKEN_FILE\) cannot be read \(No such file"):
        load_tokens({contract.ENV_TOKEN_FILE: str(tmp_path / "missing")}, LOG)
