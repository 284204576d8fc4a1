"""The soak's plan: deterministic, bounded, and with everything in it that a soak is for."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e.bench.soak_plan import (
    CONVERSATION_TOKENS,
    KILL_GAP_SECONDS,
    TURN_OVERHEAD,
    Act,
    Kind,
    Leave,
    Turn,
    apply_turn,
    build_disturbances,
    build_shared_text,
    build_turns,
    edit_text,
)


def turns(seed: int, lane: int, count: int) -> list[Turn]:
    return list(islice(build_turns(seed, lane), count))


def test_a_seed_gives_one_plan() -> None:
    assert turns(1, 0, 50) == turns(1, 0, 50)
    assert turns(1, 0, 50) != turns(1, 1, 50)
    assert turns(1, 0, 50) != turns(2, 0, 50)
    assert build_disturbances(1, 300, 3) == build_disturbances(1, 300, 3)


def test_everything_occurs() -> None:
    plan = turns(3, 0, 400)
    assert {t.kind for t in plan} == set(Kind)
    assert {t.leave for t in plan} == set(Leave)
    assert {t.choices for t in plan} == {1, 2}
    assert {t.stream for t in plan} == {True, False}
    assert {bool(t.stop) for t in plan} == {True, False}
    assert len({t.salt for t in plan}) == 3
    assert {t.shared is None for t in plan if t.kind is Kind.OPEN} == {True, False}
    assert all(len(t.texts) == (2 if t.kind is Kind.BRANCH else 1) for t in plan)
    assert all(t.stream for t in plan if t.leave is Leave.IN_DECODE)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(0, 7))
def test_no_conversation_outgrows_the_engines(seed: int, lane: int) -> None:
    """Played with answers of full length: the longest prompt and its answer stay within the limit."""
    messages: list[dict[str, str]] = []
    name = ""
    for turn in turns(seed, lane, 40):
        assert (turn.kind is Kind.OPEN) == (turn.conversation != name)
        name = turn.conversation
        asked = apply_turn(messages, turn, seed)
        for question in asked:
            assert question[-1]["role"] == "user"
            tokens = sum(len(m["content"]) + TURN_OVERHEAD // 2 for m in question) + turn.max_tokens
            assert tokens <= CONVERSATION_TOKENS
        messages = [*asked[0], {"role": "assistant", "content": "x" * turn.max_tokens}]


def test_edits_change_an_earlier_message_and_keep_the_rest() -> None:
    [edit] = [t for t in turns(3, 0, 400) if t.kind is Kind.EDIT][:1]
    before = [
        {"role": r, "content": c * 30}
        for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    ]
    [after] = apply_turn(before, edit, 3)
    assert len(after) == 5
    assert [len(m["content"]) for m in after[:4]] == [30] * 4
    assert sum(a != b for a, b in zip(after[:4], before, strict=True)) == 1


def test_cuts_end_with_an_answer_before_the_new_question() -> None:
    [cut] = [t for t in turns(3, 0, 400) if t.kind is Kind.SHORTEN][:1]
    before = [{"role": r, "content": str(i)} for i, r in enumerate(["user", "assistant"] * 4)]
    [after] = apply_turn(before, cut, 3)
    assert after[-2]["role"] == "assistant"
    assert after[:-1] == before[: len(after) - 1]


def test_conversations_with_one_shared_text_share_its_tokens() -> None:
    opened = [t for t in turns(3, 0, 400) if t.shared == 1][:2]
    [[first], [second]] = [apply_turn([], turn, 3) for turn in opened]
    assert first[0] == second[0] == {"role": "system", "content": build_shared_text(3, 1)}


@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("text", ["", "a", "ab", "abc", "abcdefgh"])
def test_edited_texts_keep_their_length(text: str, where: float) -> None:
    edited = edit_text(text, where)
    assert len(edited) == len(text)
    assert edited != text or not text


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.floats(60, 1200), st.integers(1, 4))
def test_disturbances_are_in_order_and_leave_time_to_come_to_rest(seed: int, seconds: float, engines: int) -> None:
    plan = build_disturbances(seed, seconds, engines)
    times = [d.at_s for d in plan]
    assert times == sorted(times)
    assert all(0 <= d.engine < engines and 0 < d.at_s <= 0.91 * seconds for d in plan)
    kills = [d.at_s for d in plan if d.act is Act.KILL]
    assert all(b - a >= KILL_GAP_SECONDS - 0.01 for a, b in pairwise(kills))
    assert not [d for d in build_disturbances(seed, seconds, engines, kills=False) if d.act is Act.KILL]


def test_ten_minutes_have_every_disturbance_several_times() -> None:
    plan = build_disturbances(1, 600, 3)
    counts = {act: sum(d.act is act for d in plan) for act in Act}
    assert all(count >= 4 for count in counts.values()), counts
