"""The demo's pure parts: the traffic it plans and the figures it reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e.demo.engines import EnginePods, parse_totals
from e2e.demo.report import summarise, table
from e2e.demo.workload import CONVERSATIONS, NEW_TOKENS_PER_TURN, TURNS, Measured, other_requests, user_text
from e2e.kubectl import Kubectl, Manifest


@given(st.integers(2, TURNS), st.integers(1, 100_000))
def test_prefill_has_forgotten_a_conversation_when_it_returns(turn: int, cache_tokens: int) -> None:
    """Between two turns of a conversation at least the whole cache is filled by others, and no request is in vain."""
    conversations = (CONVERSATIONS - 1) * (turn - 1) * NEW_TOKENS_PER_TURN
    others = other_requests(turn, cache_tokens)
    assert conversations + others * NEW_TOKENS_PER_TURN >= cache_tokens
    assert others == 0 or conversations + (others - 1) * NEW_TOKENS_PER_TURN < cache_tokens


def test_texts_depend_on_their_seed_alone() -> None:
    assert user_text("agent", 0, 1) == user_text("agent", 0, 1)
    assert user_text("agent", 0, 1) != user_text("agent", 1, 1)
    assert len(user_text("x", length=17)) == 17


def measured(conversation: int, turn: int, ttft: float, text: str = "t", reused: int = 0) -> Measured:
    return Measured(conversation, turn, 2000 * turn, ttft, text, reused, 0)


def test_the_report_holds_medians_over_conversations() -> None:
    off = [measured(c, t, ttft=10.0 * t + c) for c in range(3) for t in (1, 2)]
    on = [measured(c, t, ttft=4.0 * t + c, reused=100 * c) for c in range(3) for t in (1, 2)]
    result = summarise(off, on, {"vllm": "1"})
    assert result["turns"][1] == {
        "turn": 2,
        "prompt_tokens": 4000,
        "ttft_off_s": 21.0,
        "ttft_on_s": 9.0,
        "reused_tokens": 100,
        "prefill_hit_tokens": 0,
    }
    assert result["ratio_last_turn"] == pytest.approx(2.33)
    assert result["outputs_equal"] is True
    assert "2.3x" in table(result)


def test_one_different_text_makes_the_outputs_unequal() -> None:
    off = [measured(0, 1, 1.0, "same"), measured(0, 2, 1.0, "one")]
    on = [measured(0, 1, 1.0, "same"), measured(0, 2, 1.0, "other")]
    assert summarise(off, on, {})["outputs_equal"] is False


def test_counters_are_summed_over_their_labels() -> None:
    text = '# HELP a_total x\na_total{engine="0"} 3.0\na_total{engine="1",x="y"} 4\nb 1e3\n'
    assert parse_totals(text) == {"a_total": 7.0, "b": 1000.0}


def test_pods_that_a_rollout_is_ending_are_not_asked() -> None:
    class Rolling(Kubectl):
        def find(self, kind: str, selector: str = "") -> list[Manifest]:
            return [{"metadata": {"name": "new"}}, {"metadata": {"name": "old", "deletionTimestamp": "now"}}]

    assert EnginePods(Rolling("kubectl", "none"), "demo", "prefill").names == ["new"]
