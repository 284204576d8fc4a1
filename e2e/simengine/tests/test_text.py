"""Tokens and answers: what sessions rest on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e.simengine.text import END_ID, WORDS, Answer, cut, render_chat, tokenize


@given(st.text())
def test_tokens_are_the_text(text: str) -> None:
    assert "".join(cut(text)) == text
    assert len(tokenize(text)) == len(cut(text))


@given(st.text(), st.integers(0, 40))
def test_an_answer_behind_its_prompt_is_the_same_tokens(text: str, length: int) -> None:
    prompt = render_chat([{"role": "user", "content": text}])
    tokens = tokenize(prompt)
    answer = Answer(tokens, 10**9)
    generated = [answer.next(may_end=False) for _ in range(length)]
    said = "".join(piece for _, piece in generated)
    again = render_chat(
        [{"role": "user", "content": text}, {"role": "assistant", "content": said}, {"role": "user", "content": "on"}]
    )
    full = [*tokens, *(token for token, _ in generated)]
    assert tokenize(again)[: len(full)] == full


@given(st.text(), st.integers(1, 30))
def test_an_answer_that_is_cut_ends_as_if_it_had_not_been(text: str, at: int) -> None:
    tokens = tokenize(text)
    whole = Answer(tokens, 20)
    generated = [whole.next() for _ in range(60)]
    rest = Answer([*tokens, *(token for token, _ in generated[:at])], 20)
    assert [rest.next() for _ in range(60 - at)] == generated[at:]


def test_answers_differ_with_any_token_and_end_by_themselves() -> None:
    lengths = []
    for number in range(300):
        answer = Answer(tokenize(render_chat([{"role": "user", "content": str(number)}])), 20)
        tokens = []
        while (token := answer.next()[0]) != END_ID:
            tokens.append(token)
        lengths.append(len(tokens))
    assert min(lengths) >= 1
    assert 14 < sum(lengths) / len(lengths) < 28
    assert len({Answer([number, 5], 20).next(may_end=False) for number in range(1000)}) == len(WORDS)


@pytest.mark.parametrize(
    ("messages", "options", "prompt"),
    [
        ([{"role": "user", "content": "a"}], {}, "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
         {"generate": False}, "<|im_start|>user\nab<|im_end|>\n"),
        ([{"role": "assistant", "content": "a b"}], {"go_on": True}, "<|im_start|>assistant\na b"),
        ([{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
         {"generate": False}, '<|im_start|>assistant\n[{"id":"1"}]<|im_end|>\n'),
    ],
)  # fmt: skip
def test_prompts(messages: list[dict[str, object]], options: dict[str, bool], prompt: str) -> None:
    assert render_chat(messages, **options) == prompt
