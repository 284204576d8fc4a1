"""A rotation is three writes, apart enough that every two processes accept each other at any moment."""

from __future__ import annotations

import base64
import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from bidikv_operator import names
from bidikv_operator.build.meta import token_secret_name
from bidikv_operator.peer_token import (
    Phase,
    TokenState,
    TokenTerms,
    build_token_secret,
    compute_digest,
    compute_pause,
    parse_state,
    plan_token,
)
from bidikv_operator.resolved import Resolved
from bidikv_operator.tests.samples import RUNTIME_IMAGE, make_resource
from bidikv_operator.validate import validate
from bidikv_runtime import contract

Object = dict[str, Any]
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
OLD, NEW, NEXT = "old-token-0123456789", "new-token-0123456789", "next-token-0123456789"
WAIT = 180


def terms(days: int = 0, rotation: str = "") -> TokenTerms:
    return TokenTerms(days=days, rotation=rotation, propagation_seconds=WAIT)


def state(*tokens: str, phase: Phase = "Settled", age: float = 0, rotation: str = "") -> TokenState:
    return TokenState(tokens, phase, NOW - timedelta(seconds=age), compute_digest(rotation))


DAY = 86_400
GRAPHIC = st.characters(min_codepoint=0x21, max_codepoint=0x7E)


@pytest.mark.parametrize(
    ("before", "wanted", "after"),
    [
        pytest.param(None, terms(), state(NEW), id="the first one"),
        pytest.param(None, terms(rotation="a"), state(NEW, rotation="a"), id="the first one carries out the wish"),
        pytest.param(state(OLD, age=999 * DAY), terms(), None, id="age alone means nothing"),
        pytest.param(state(OLD, age=30 * DAY - 1), terms(days=30), None, id="not old enough"),
        pytest.param(state(OLD, age=30 * DAY), terms(days=30), state(OLD, NEW, phase="Added"), id="old enough"),
        pytest.param(state(OLD, rotation="a"), terms(rotation="a"), None, id="a wish is carried out once"),
        pytest.param(state(OLD, rotation="a"), terms(), None, id="a wish that is withdrawn is none"),
        pytest.param(
            state(OLD, rotation="a", age=9),
            terms(rotation="b"),
            state(OLD, NEW, phase="Added", rotation="b"),
            id="another wish",
        ),
        pytest.param(
            state(OLD, rotation="a", age=DAY),
            terms(days=1),
            state(OLD, NEW, phase="Added", rotation="a"),
            id="age does not forget the last wish",
        ),
        pytest.param(state(OLD, NEW, phase="Added", age=WAIT - 1), terms(), None, id="not everywhere yet"),
        pytest.param(
            state(OLD, NEW, phase="Added", age=WAIT), terms(), state(NEW, OLD, phase="Switched"), id="everywhere"
        ),
        pytest.param(state(NEW, OLD, phase="Switched", age=WAIT - 1), terms(), None, id="signed for too short a time"),
        pytest.param(state(NEW, OLD, phase="Switched", age=WAIT), terms(), state(NEW), id="the end"),
        pytest.param(
            state(OLD, NEW, phase="Added", age=1, rotation="a"),
            terms(rotation="b"),
            None,
            id="a wish within a rotation waits for its end",
        ),
        pytest.param(
            state(OLD, NEXT, age=DAY),
            terms(days=1),
            state(OLD, NEXT, NEW, phase="Added"),
            id="more tokens than needed stay accepted while a rotation runs",
        ),
        pytest.param(state(OLD, phase="Added", age=WAIT), terms(), state(OLD, phase="Switched"), id="one was removed"),
    ],
)
def test_what_is_due(before: TokenState | None, wanted: TokenTerms, after: TokenState | None) -> None:
    assert plan_token(before, wanted, NOW, lambda: NEW) == (before if after is None else after)


def test_a_lost_secret_comes_back_as_a_rotation() -> None:
    """Engines still hold what they read before: a new token alone would lock them out until they mount it."""
    assert plan_token(None, terms(), NOW, lambda: NEW, known=(OLD,)) == state(OLD, NEW, phase="Added")


def test_there_is_always_room_for_the_new_token() -> None:
    many = tuple(f"token-{number}-0123456789" for number in range(contract.MAXIMUM_TOKENS))
    planned = plan_token(state(*many, age=DAY), terms(days=1), NOW, lambda: NEW)
    assert planned.tokens == (*many[:-1], NEW)


@pytest.mark.parametrize(
    ("at", "pause"),
    [
        (state(OLD), None),
        (state(OLD, NEW, phase="Added"), WAIT),
        (state(OLD, NEW, phase="Added", age=100), WAIT - 100),
        (state(OLD, NEW, phase="Switched", age=WAIT + 5), 0),
    ],
)
def test_the_next_look(at: TokenState, pause: float | None) -> None:
    assert compute_pause(at, terms(days=30), NOW) == pause


@given(
    lags=st.lists(st.integers(0, WAIT), min_size=2, max_size=4),
    wishes=st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=12, max_size=12),
    pauses=st.lists(st.integers(1, 3 * WAIT), min_size=12, max_size=12),
    losses=st.sets(st.integers(0, 11)),
)
def test_peers_accept_each_other_at_any_moment(
    lags: list[int], wishes: list[str], pauses: list[int], losses: set[int]
) -> None:
    """Each process sees the Secret with a lag of its own, at most what a step waits; the Secret may get lost."""
    fresh = (f"token-{number:020}" for number in itertools.count())
    now, current = NOW, None
    known: tuple[str, ...] = ()
    history: list[tuple[datetime, tuple[str, ...]]] = []
    for step, (wish, pause) in enumerate(zip(wishes, pauses, strict=True)):
        if step in losses:
            current = None
        current = plan_token(current, terms(rotation=wish), now, lambda: next(fresh), known=known)
        known = current.tokens
        if not history or history[-1][1] != current.tokens:
            history.append((now, current.tokens))
        for moment in (now + timedelta(seconds=second) for second in range(0, pause, 7)):
            seen = []
            for lag in lags:
                visible = [tokens for written, tokens in history if written <= moment - timedelta(seconds=lag)]
                seen.append(visible[-1] if visible else history[0][1])
            for one, other in itertools.product(seen, repeat=2):
                assert one[0] in other
        now += timedelta(seconds=pause)


@given(
    tokens=st.lists(
        st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=16), min_size=1, max_size=8
    ),
    phase=st.sampled_from(["Settled", "Added", "Switched"]),
    age=st.integers(0, 10**9),
    rotation=st.text(max_size=20),
)
def test_what_is_written_is_read(tokens: list[str], phase: Phase, age: int, rotation: str) -> None:
    written = state(*tokens, phase=phase, age=age, rotation=rotation)
    assert parse_state(build_token_secret(resolved(), written), NOW) == written


def resolved() -> Resolved:
    found = validate(make_resource(), runtime_image=RUNTIME_IMAGE)
    assert isinstance(found, Resolved)
    return found


def secret(content: bytes | str, **annotations: str) -> Object:
    data = content if isinstance(content, str) else base64.b64encode(content).decode()
    return {"metadata": {"annotations": annotations}, "data": {contract.TOKEN_KEY: data}}


@pytest.mark.parametrize(
    "damaged",
    [
        secret(b""),
        secret(b"\n \n"),
        secret(b"short\n"),
        secret(OLD.encode() + b"\nshort\n"),
        secret(b"white space within a token\n"),
        secret("ö".encode() * 20),
        secret(b"\xff" * 20),
        secret(f"{OLD}\n".encode() * 9),
        secret("no base64!"),
        {"metadata": {}, "data": {"other": ""}},
        {"metadata": {}},
    ],
)
def test_a_damaged_secret_has_no_state(damaged: Object) -> None:
    assert parse_state(damaged, NOW) is None


@pytest.mark.parametrize(
    "annotations",
    [
        {},
        {names.ANNOTATION_TOKEN_PHASE: "Added"},
        {names.ANNOTATION_TOKEN_PHASE: "Added", names.ANNOTATION_TOKEN_SINCE: "yesterday"},
        {names.ANNOTATION_TOKEN_PHASE: "bogus", names.ANNOTATION_TOKEN_SINCE: "2026-03-01T12:00:00Z"},
    ],
)
def test_damaged_annotations_are_a_rest_that_begins_now(annotations: dict[str, str]) -> None:
    assert parse_state(secret(f"{OLD}\n{NEW}".encode(), **annotations), NOW) == state(OLD, NEW)


def test_a_time_to_come_counts_as_now() -> None:
    annotations = {names.ANNOTATION_TOKEN_PHASE: "Added", names.ANNOTATION_TOKEN_SINCE: "2031-01-01T00:00:00Z"}
    assert parse_state(secret(f"{OLD}\n{NEW}".encode(), **annotations), NOW) == state(OLD, NEW, phase="Added")


def test_the_secret() -> None:
    written = build_token_secret(resolved(), state(NEW, OLD, phase="Switched", rotation="a"))
    metadata = written["metadata"]
    assert (written["kind"], metadata["name"]) == ("Secret", "chat-peer-token")
    assert metadata["name"] == token_secret_name(resolved())
    assert metadata["labels"][names.LABEL_OWNER] == "chat"
    assert metadata["ownerReferences"][0]["controller"] is True
    assert metadata["annotations"] == {
        "serving.bidikv.io/token-phase": "Switched",
        "serving.bidikv.io/token-since": "2026-03-01T12:00:00Z",
        "serving.bidikv.io/token-rotation": "ca978112ca1bbdca",
    }
    assert base64.b64decode(written["data"]["tokens"]).decode() == f"{NEW}\n{OLD}\n"


def test_a_state_does_not_show_its_tokens() -> None:
    assert OLD not in repr(state(OLD))
