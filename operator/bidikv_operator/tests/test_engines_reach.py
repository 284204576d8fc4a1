"""The vote on who cannot be reached."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from bidikv_operator.engines.reach import GRACE_SECONDS, STALE_SECONDS, find_unreachable, is_pending
from bidikv_operator.state import EngineFacts
from bidikv_operator.tests.engine_samples import make_facts, make_report


def vote(opinions: dict[str, tuple[str, str]]) -> list[EngineFacts]:
    """Engines by address; each with the addresses it does not reach and does, one letter each."""
    return [
        make_facts(address, report=make_report(unreachable=tuple(silent), reached=tuple(reached)))
        for address, (silent, reached) in opinions.items()
    ]


@pytest.mark.parametrize(
    ("opinions", "expected"),
    [
        ({"a": ("", "b"), "b": ("", "a")}, ""),
        ({"a": ("b", ""), "b": ("", "a")}, "b"),
        ({"a": ("b", ""), "b": ("a", "")}, "ab"),
        ({"a": ("d", ""), "b": ("", "d"), "d": ("", "ab")}, ""),  # a tie is no majority
        ({"a": ("d", ""), "b": ("", "d"), "c": ("d", ""), "d": ("", "")}, "d"),
        ({"a": ("bcd", ""), "b": ("", "cd"), "c": ("", "bd"), "d": ("", "bc")}, ""),  # one that reaches nobody
        ({"a": ("", "bc"), "b": ("d", "a"), "c": ("d", "a"), "d": ("", "")}, "d"),
        ({"a": ("x", "")}, ""),  # an address of nobody that runs
        ({"a": ("a", "")}, ""),
    ],
)
def test_the_majority_of_those_that_tried_decides(opinions: dict[str, tuple[str, str]], expected: str) -> None:
    assert find_unreachable(vote(opinions)) == frozenset(expected)


def test_ranks_of_one_pod_do_not_vote_on_each_other() -> None:
    accuse = make_report(unreachable=("b",))
    one, two = make_facts("a", report=accuse, uid="same"), make_facts("b", report=make_report(), uid="same")
    assert find_unreachable([one, two]) == frozenset()


def test_old_reports_do_not_count() -> None:
    accuse = make_report(unreachable=("b",))
    engines = [make_facts("a", report=accuse, age_seconds=STALE_SECONDS), make_facts("b")]
    assert find_unreachable(engines) == frozenset()


def test_it_is_too_early_until_an_engine_was_asked_for_a_while() -> None:
    assert is_pending(make_facts("a"))
    assert is_pending(make_facts("a", fault="silent", age_seconds=GRACE_SECONDS - 1))
    assert not is_pending(make_facts("a", fault="silent", age_seconds=GRACE_SECONDS))
    assert not is_pending(make_facts("a", report=make_report()))


@given(st.dictionaries(st.sampled_from("abcde"), st.tuples(st.text("abcde"), st.text("abcde"))))
def test_nobody_is_accused_whom_nobody_accuses(opinions: dict[str, tuple[str, str]]) -> None:
    found = find_unreachable(vote(opinions))
    for address in found:
        against = sum(address in silent for name, (silent, _) in opinions.items() if name != address)
        assert against >= 1
