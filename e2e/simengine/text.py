"""Tokens of a text, prompts of conversations, and answers: each a pure function, equal in every process.

- A token is a word of up to twelve letters with the space before it, up to three digits, or any other character. So the
  tokens of a text and of more text behind it begin alike wherever an answer ends, as sessions need it.
- The next token follows from all tokens before it. So every path through the engines gives the same answer to the same
  prompt, and an answer that is cut anywhere and continued elsewhere ends as if it had not been cut.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

START: Final = "<|im_start|>"
END: Final = "<|im_end|>"
_PIECES: Final = re.compile(r"<\|im_start\|>|<\|im_end\|>| ?[A-Za-z]{1,12}|[0-9]{1,3}|.", re.DOTALL)
LOWEST_ID: Final = 2**16
_IDS: Final = 2**31 - LOWEST_ID
WORDS: Final = tuple(
    re.findall(
        "[a-z]+",
        """
        river stone light cloud amber north field quiet copper maple winter signal harbor violet engine garden
        marble silver thunder meadow planet forest island bridge candle window letter summer valley mirror orange falcon
        pepper rocket velvet timber saddle anchor basket cotton dragon fabric guitar hammer insect jungle kettle ladder
        magnet needle oyster pebble quartz ribbon shovel tunnel urchin vessel walnut yellow zephyr bamboo cactus dahlia
        """,
    )
)
assert len(WORDS) == 64


@lru_cache(maxsize=65_536)
def find_id(piece: str) -> int:
    """Of a token by its text. All of them take five bytes of CBOR, see ``blocks.hash_block``."""
    return LOWEST_ID + zlib.crc32(piece.encode("utf-8", "surrogatepass")) % _IDS


NEWLINE: Final = find_id("\n")
END_ID: Final = find_id(END)


def cut(text: str) -> list[str]:
    """The tokens of a text, as texts."""
    return _PIECES.findall(text)


def tokenize(text: str) -> list[int]:
    """The tokens of a text."""
    return [find_id(piece) for piece in _PIECES.findall(text)]


class Answer:
    """What follows a sequence of tokens."""

    def __init__(self, tokens: Sequence[int], mean_tokens: int) -> None:
        """``mean_tokens``: an answer ends before each of its tokens but the first with the chance of one in so many."""
        self._hash = hashlib.blake2b(array("q", tokens).tobytes(), digest_size=8)
        self._last = tokens[-1] if tokens else NEWLINE
        self._ends_below = 2**32 // max(1, mean_tokens)

    def next(self, may_end: bool = True) -> tuple[int, str]:
        """The next token and its text, which is empty for the answer's end."""
        number = int.from_bytes(self._hash.copy().digest(), "big")
        first = self._last == NEWLINE
        if may_end and not first and number >> 32 < self._ends_below:
            piece, token = "", END_ID
        else:
            piece = ("" if first else " ") + WORDS[number % len(WORDS)]
            token = find_id(piece)
        self._hash.update(token.to_bytes(8, "little"))
        self._last = token
        return token, piece


def render_chat(
    messages: Iterable[Mapping[str, Any]], tools: Any = None, *, generate: bool = True, go_on: bool = False
) -> str:
    """The prompt of a chat.

    Args:
        messages: in OpenAI's form.
        tools: in any form; they are part of the prompt.
        generate: end with the beginning of an answer (``add_generation_prompt``).
        go_on: leave the last message open (``continue_final_message``).
    """
    parts = [f"{START}system\n{_dump(tools)}{END}\n"] if tools else []
    for message in messages:
        text = read_content(message.get("content"))
        if calls := message.get("tool_calls"):
            text += _dump(calls)
        parts.append(f"{START}{message.get('role', 'user')}\n{text}{END}\n")
    if go_on and parts:
        parts[-1] = parts[-1].removesuffix(END + "\n")
    elif generate:
        parts.append(f"{START}assistant\n")
    return "".join(parts)


def read_content(content: Any) -> str:
    """The text of a message's or an item's content: a string, or a list of parts of which not all need be text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return _dump(content)
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    return "".join(text if isinstance(text, str) else _dump(part) for text, part in zip(texts, content, strict=True))


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
