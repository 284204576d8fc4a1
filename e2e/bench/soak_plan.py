"""What ``make soak-kv`` does: a plan of turns and disturbances that follows from a seed alone. Pure.

Each lane is one client that has one conversation after the other: turns that grow it, edit it, cut it short or fork it,
with and without streams, stop strings, several choices and tenants (``cache_salt``), some of them left by the client at
a random moment. When something happens to an engine is planned in seconds; how far the lanes have come by then is not,
so a seed gives the same requests and the same disturbances, but not the same interleaving.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

ALPHABET: Final = string.ascii_letters + string.digits + " .,;:-"
CONVERSATION_TOKENS: Final = 3000
"""Longest conversation; the engines' limit is 4096."""
TURN_OVERHEAD: Final = 40
"""Tokens that the chat template adds to a turn, at most."""
SHARED_TEXTS: Final = 3
SHARED_TOKENS: Final = 400
"""Beginnings that several conversations have in common, as agents' instructions are."""
TENANTS: Final = ("tenant-a", "tenant-b")
KILL_GAP_SECONDS: Final = 80.0
"""At least this between two kills: a restart takes 25 to 60 s on two busy cores."""
LONG_FREEZE_SECONDS: Final = 14.0
"""Beyond the deadlines for lookups, validations and reads."""


class Kind(Enum):
    OPEN = "open"
    """The first turn of a new conversation."""
    NEXT = "next"
    EDIT = "edit"
    """Change a few characters of an earlier message, then go on."""
    SHORTEN = "shorten"
    """Drop the last messages and ask another question there."""
    BRANCH = "branch"
    """Ask two questions at once; the conversation goes on with the first."""


class Leave(Enum):
    """When the client leaves, if it does."""

    NEVER = "never"
    IN_PREFILL = "in prefill"
    IN_DECODE = "in decode"


@dataclass(frozen=True)
class Turn:
    lane: int
    number: int
    """Of the lane's turns."""
    conversation: str
    kind: Kind
    texts: tuple[str, ...]
    """What the user says; two texts for a branch."""
    shared: int | None
    """Which shared text an opened conversation begins with."""
    salt: str | None
    max_tokens: int
    choices: int
    stop: tuple[str, ...]
    stream: bool
    leave: Leave
    leave_after: float
    """Seconds into the prefill leg, or events of the decode leg."""
    where: float
    """For edits and cuts: position among the earlier messages, from 0 to 1."""
    pause_s: float
    """Before the turn."""


class Act(Enum):
    KILL = "kill"
    """SIGKILL, then a restart at once."""
    FREEZE = "freeze"
    """SIGSTOP for a while."""
    RESET = "reset"
    """Ask the engine to empty its prefix cache; it may refuse."""
    EVICT = "evict"
    """Other prompts that take the whole pool."""


@dataclass(frozen=True)
class Disturbance:
    at_s: float
    act: Act
    engine: int
    """Position in the list of the engines that are disturbed."""
    seconds: float
    """Of a freeze."""


def build_text(source: random.Random, length: int) -> str:
    return "".join(source.choices(ALPHABET, k=length))


def build_shared_text(seed: int, number: int) -> str:
    return build_text(random.Random(f"{seed}/shared/{number}"), SHARED_TOKENS)


def build_turns(seed: int, lane: int) -> Iterator[Turn]:
    """The endless turns of one lane. No conversation grows beyond ``CONVERSATION_TOKENS``."""
    source = random.Random(f"{seed}/lane/{lane}")
    conversation = number = turns = tokens = 0
    salt: str | None = None
    while True:
        length = source.choice((60, 200, 200, 500, 900))
        max_tokens = source.choice((4, 16, 16, 48, 96))
        cost = length + max_tokens + TURN_OVERHEAD
        over = tokens + cost > CONVERSATION_TOKENS or (turns and source.random() < 0.12)
        shared = None
        if turns == 0 or over:
            conversation, turns, tokens = conversation + 1, 0, 0
            kind = Kind.OPEN
            salt = source.choice(TENANTS) if source.random() < 0.3 else None
            if source.random() < 0.5:
                shared = source.randrange(SHARED_TEXTS)
                tokens = SHARED_TOKENS + TURN_OVERHEAD
        else:
            weights = (0.64, 0.12, 0.12, 0.12) if turns > 1 else (0.85, 0.0, 0.0, 0.15)
            [kind] = source.choices((Kind.NEXT, Kind.EDIT, Kind.SHORTEN, Kind.BRANCH), weights)
        tokens, turns, number = tokens + cost, turns + 1, number + 1
        leave = source.choices((Leave.NEVER, Leave.IN_PREFILL, Leave.IN_DECODE), (0.85, 0.07, 0.08))[0]
        stop = tuple(source.sample(string.ascii_letters, 4)) if source.random() < 0.15 else ()
        yield Turn(
            lane,
            number,
            f"{lane}-{conversation}",
            kind,
            tuple(build_text(source, length) for _ in range(2 if kind is Kind.BRANCH else 1)),
            shared,
            salt,
            max_tokens,
            2 if source.random() < 0.1 else 1,
            stop,
            source.random() < 0.7 or leave is Leave.IN_DECODE,
            leave,
            source.uniform(0.0, 0.6) if leave is Leave.IN_PREFILL else float(source.randint(1, max_tokens)),
            source.random(),
            source.choice((0.0, 0.0, 0.0, 0.2, 1.0)),
        )


def build_disturbances(seed: int, seconds: float, engines: int, *, kills: bool = True) -> list[Disturbance]:
    """What happens to which of ``engines`` engines, in order; none in the last tenth, so that all can come to rest."""
    source = random.Random(f"{seed}/disturbances")
    found: list[Disturbance] = []
    at, last_kill = 0.0, float("-inf")
    while (at := at + source.uniform(3.0, 9.0)) < seconds * 0.9:
        may_kill = kills and at > 20.0 and at - last_kill > KILL_GAP_SECONDS and at < seconds - 60.0
        if may_kill:
            act, last_kill = Act.KILL, at
        else:
            [act] = source.choices((Act.FREEZE, Act.RESET, Act.EVICT), (0.5, 0.2, 0.3))
        freeze = LONG_FREEZE_SECONDS if source.random() < 0.15 else source.uniform(0.1, 2.5)
        found.append(Disturbance(round(at, 2), act, source.randrange(engines), round(freeze, 2)))
    return found


def edit_text(text: str, where: float) -> str:
    """Three characters changed at the position ``where`` (0 to 1)."""
    at = int(where * max(0, len(text) - 3))
    return text[:at] + "#%&"[: len(text) - at] + text[at + 3 :]


def apply_turn(messages: Sequence[dict[str, str]], turn: Turn, seed: int) -> list[list[dict[str, str]]]:
    """The conversations to be answered, one for each of the turn's texts, from the messages so far.

    ``messages`` ends with an answer, or is empty; each result ends with a question.
    """
    base = [dict(message) for message in messages]
    if turn.kind is Kind.OPEN:
        base = []
        if turn.shared is not None:
            base = [{"role": "system", "content": build_shared_text(seed, turn.shared)}]
    elif turn.kind is Kind.EDIT and base:
        index = int(turn.where * (len(base) - 1))
        base[index]["content"] = edit_text(base[index]["content"], turn.where)
    elif turn.kind is Kind.SHORTEN:
        ends = [i + 1 for i, message in enumerate(base) if message["role"] == "assistant"]
        base = base[: ends[int(turn.where * (len(ends) - 1))]] if ends else base
    return [[*base, {"role": "user", "content": text}] for text in turn.texts]
