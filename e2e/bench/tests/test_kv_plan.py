"""What bench-kv asks."""

from __future__ import annotations

from itertools import takewhile

from e2e.bench.kv_plan import LARGE, SMALL, TEMPLATE_TOKENS, Sizes, build_conversation, choose_order


def test_large_and_small_turns_alternate_and_have_exact_lengths() -> None:
    turns = build_conversation("seed", Sizes(steps=3, large=500, small=60))
    assert [(t.number, t.kind, t.new_tokens) for t in turns] == [
        (1, LARGE, 500),
        (2, SMALL, 60),
        (3, LARGE, 500),
        (4, SMALL, 60),
        (5, LARGE, 500),
        (6, SMALL, 60),
    ]
    assert all(len(t.text) == t.new_tokens - TEMPLATE_TOKENS for t in turns)


def test_default_conversation_reaches_10k_of_history_for_both_kinds() -> None:
    turns = build_conversation("seed", Sizes())
    history = [sum(t.new_tokens for t in turns[:i]) for i in range(len(turns))]
    assert history[:2] == [0, 2000]
    assert history[-2] + turns[-2].new_tokens > 10_000
    assert turns[-2].kind == LARGE
    assert history[-1] > 10_000


def test_conversations_are_deterministic_and_share_no_block() -> None:
    first, again, other = (build_conversation(seed, Sizes()) for seed in ("a", "a", "b"))
    assert first == again
    for turn, stranger in zip(first, other, strict=True):
        common = takewhile(lambda pair: pair[0] == pair[1], zip(turn.text, stranger.text, strict=True))
        assert len(list(common)) < 32


def test_every_set_up_is_first_equally_often() -> None:
    names = ["a", "b", "c", "d"]
    orders = [choose_order(names, number, turn) for number in (1, 2) for turn in range(1, 9)]
    assert all(sorted(order) == names for order in orders)
    assert [sum(order[0] == name for order in orders) for name in names] == [4, 4, 4, 4]
