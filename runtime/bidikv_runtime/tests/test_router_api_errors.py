"""Errors in the form of each API."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from bidikv_runtime.router.api.errors import ApiError, build_error_body, build_error_event
from bidikv_runtime.router.observe.record import Route

ERROR = ApiError(503, "Come back later.", retry_after=3)


def openai(status: int, kind: str, message: str = "Come back later.") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


@pytest.mark.parametrize("route", ["chat", "completions", "responses", "passed", "models", "local"])
def test_openais_form(route: Route) -> None:
    assert json.loads(build_error_body(route, ERROR)) == openai(503, "ServiceUnavailableError")
    assert json.loads(build_error_body(route, ApiError(404, "No."))) == openai(404, "invalid_request_error", "No.")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((400, "invalid_request_error"), (404, "not_found_error"), (413, "request_too_large")),
        *((429, "rate_limit_error"), (503, "overloaded_error"), (504, "timeout_error")),
        *((405, "invalid_request_error"), (500, "api_error"), (502, "api_error")),
    ],
)
def test_anthropics_form(status: int, kind: str) -> None:
    body = build_error_body("messages", ApiError(status, "Why."))
    assert json.loads(body) == {"type": "error", "error": {"type": kind, "message": "Why."}}


def event(route: Route, carried: bytes = b"") -> tuple[str, Any]:
    raw = build_error_event(route, ERROR, carried).decode()
    assert raw.startswith("\n\n")  # closes what may be half written
    assert raw.endswith("\n\n")
    *names, data = raw.strip().split("\n")
    return "".join(names), json.loads(data.removeprefix("data: "))


def test_events() -> None:
    error = openai(503, "ServiceUnavailableError")
    assert event("chat") == ("", error)
    assert event("completions") == ("", error)
    assert event("messages") == (
        "event: error",
        {"type": "error", "error": {"type": "overloaded_error", "message": "Come back later."}},
    )
    assert event("responses") == (
        "event: error",
        error | {"type": "error", "code": "503", "message": "Come back later.", "param": None, "sequence_number": 0},
    )


def test_an_engines_error_is_told_instead() -> None:
    verdict = {"error": {"message": "too\nlong", "type": "BadRequestError", "param": "x", "code": 400}}
    assert event("chat", json.dumps(verdict, indent=1).encode()) == ("", verdict)
    assert event("responses", json.dumps(verdict).encode())[1] == verdict | {
        "type": "error",
        "code": "400",
        "message": "too\nlong",
        "param": "x",
        "sequence_number": 0,
    }
    anthropic = {"type": "error", "error": {"type": "x", "message": "too long"}}
    assert event("messages", json.dumps(anthropic).encode()) == ("event: error", anthropic)


@pytest.mark.parametrize(
    "odd", [b"Internal Server Error", b"[]", b"{}", b'{"error": "text"}', b"\xff", b'{"detail": 1}']
)
def test_an_engines_answer_without_an_error_is_not_told(odd: bytes) -> None:
    assert event("chat", odd) == ("", openai(503, "ServiceUnavailableError"))


def test_headers_say_when_to_come_back() -> None:
    assert ERROR.headers() == [(b"retry-after", b"3")]
    assert ApiError(400, "No.").headers() == []


def test_an_error_may_leave_a_context_manager() -> None:
    @contextlib.contextmanager
    def passing() -> Iterator[None]:
        yield

    with pytest.raises(ApiError), passing():
        raise ERROR
