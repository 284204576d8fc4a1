"""Which way a turn takes; pure.

- ``local``: decode alone. It holds nearly all of the prompt, or the prompt is tiny, so that computing the rest there
  costs less than a prefill leg and does not hold up its other streams.
- ``bidirectional``: prefill reads the history from decode engines and computes the rest.
- ``plain``: prefill computes all of it: there is nothing to reuse, or reuse is off.

All of it rests on estimates. The decode engine keeps the bound (``contract.COMPUTE_LIMIT_PARAM``): a wrong ``local``
costs one refusal, no stall.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from bidikv_runtime.router.choice.holdings import Holding
from bidikv_runtime.router.observe.record import Path

Reason = Literal[
    "forced",
    "oneway",
    "off",
    "first",
    "tiny",
    "held",
    "explore",
    "new",
    "unknown",
    "edited",
    "refused",
    "busy",
    "stall",
    "slower",
]
"""forced: by a header. oneway: reuse is off. off: the local path is. first: a conversation's first turn. tiny: the
whole prompt is small. held: decode holds nearly all of it. explore: a path that seemed slower, to see whether it is so.
new: too much of the prompt is. unknown: nothing is known of decode's KV. edited: the history shrank. refused: decode
refused this session lately. busy: decode has enough to compute. stall: decode's streams would wait too long. slower:
the prefill path seems faster."""

_LEAST_COMPUTED: Final = 16
"""Tokens that a turn computes in any case: vLLM reuses whole blocks, and never the whole prompt."""
_UNLIMITED: Final = 2**31 - 1


@dataclass(slots=True)
class TurnFacts:
    """What is known of a turn before anything is sent."""

    session: bytes
    body_bytes: int
    first_turn: bool = False
    """There is no message of an assistant in it yet."""
    forced: Path | None = None
    """By ``contract.PATH_HEADER``."""
    repeated: bool = False
    """A decode leg of it was refused: not ``local`` again."""


class Decision(NamedTuple):
    """The path of a turn, and what was expected of it."""

    path: Path
    reason: Reason
    limit: int = 0
    """For ``local``: how many tokens decode may compute."""
    uncached_tokens: int = 0
    """Of the prompt, that the path's first engine will compute; an estimate."""
    prompt_tokens: int = 0
    """An estimate."""
    compute_seconds: float = math.nan
    """Expected for queue and computation on the chosen path; nan when speeds are unknown."""
    local_seconds: float = math.nan
    """Expected to the first token if decode does it alone; nan when that is out of the question or unknown."""
    prefill_seconds: float = math.nan
    """Expected to the first token with a prefill leg."""


class Estimate(NamedTuple):
    """A prompt, as one engine's past suggests."""

    prompt_tokens: int
    uncached_tokens: int
    edited: bool = False


def estimate_turn(last: Holding | None, body_bytes: int, usual_tokens: int) -> Estimate:
    """How many tokens the prompt has, and how many of these are not held.

    Args:
        last: the session's last turn where its KV is, if known.
        body_bytes: of the turn's body.
        usual_tokens: that a body of this length has on average.
    """
    if last is None or last.body_bytes <= 0 or last.prompt_tokens <= 0:
        held = min(last.held_tokens, usual_tokens) if last is not None else 0
        return Estimate(usual_tokens, max(usual_tokens - held, _LEAST_COMPUTED))
    growth = body_bytes - last.body_bytes
    prompt = max(1, last.prompt_tokens + math.ceil(growth * last.prompt_tokens / last.body_bytes))
    if growth < 0:
        return Estimate(prompt, prompt, True)  # how much of the beginning is still the same, nobody knows
    return Estimate(prompt, max(prompt - last.held_tokens, _LEAST_COMPUTED))


@dataclass(slots=True)
class Situation:
    """What the choice rests on."""

    turn: TurnFacts
    reuse: bool
    """KV flows back from decode to prefill."""
    local_limit: int
    """Tokens; 0: never ``local``."""
    at_decode: Estimate
    known_at_decode: bool
    """Decode is known to hold some of the session."""
    at_sources: Estimate
    """By the best source for prefill."""
    known_at_sources: bool
    refused: bool
    """Decode refused this session lately."""
    backlog: int
    """Prompt tokens that decode has yet to compute."""
    backlog_limit: int
    streams: int
    """Unfinished requests of decode without this one."""
    stall_seconds: float
    """Longest computation beside other streams."""
    decode_speed: float
    """Prompt tokens per second; 0 when unknown."""
    prefill_speed: float
    prefill_wait: float
    """Seconds until prefill would begin."""
    local_overhead: float
    """Seconds; nan when unknown, as the next."""
    prefill_overhead: float
    explore: bool
    """Take the path that seems slower."""


def choose_path(situation: Situation) -> Decision:
    """The way of a turn, and why."""
    turn, at_decode, at_sources = situation.turn, situation.at_decode, situation.at_sources
    reuse = situation.reuse
    usual: Path = "bidirectional" if reuse and (situation.known_at_sources or not turn.first_turn) else "plain"
    if turn.forced == "plain" or (turn.forced == "bidirectional" and reuse):
        usual = turn.forced
    computed = at_sources.prompt_tokens if usual == "plain" else at_sources.uncached_tokens
    prefill_compute = situation.prefill_wait + _divide(computed, situation.prefill_speed)
    prefill_seconds = prefill_compute + situation.prefill_overhead
    local_compute = _divide(situation.backlog + at_decode.uncached_tokens, situation.decode_speed)
    local_seconds = math.nan
    reason: Reason
    limit = 0
    if turn.forced == "local" and not turn.repeated:
        reason, limit = "forced", _UNLIMITED
    elif turn.forced == usual:
        reason = "forced"
    elif not reuse:
        reason = "oneway"
    else:
        reason, limit = _judge_local(situation)
        if limit:
            overhead = situation.local_overhead
            local_seconds = local_compute + (0.0 if math.isnan(overhead) else overhead)
            # False while something is unknown: decode alone is tried then, and so becomes known.
            if local_seconds > prefill_seconds:
                reason, limit = ("explore", limit) if situation.explore else ("slower", 0)
        elif usual == "plain" and reason in ("new", "unknown"):
            reason = "first"
    if limit:
        tokens = at_decode.uncached_tokens, at_decode.prompt_tokens
        return Decision("local", reason, limit, *tokens, local_compute, local_seconds, prefill_seconds)
    return Decision(
        usual, reason, 0, computed, at_sources.prompt_tokens, prefill_compute, local_seconds, prefill_seconds
    )


def _judge_local(situation: Situation) -> tuple[Reason, int]:
    """Whether decode may do it alone: why (not), and how many tokens it may compute, 0 for no."""
    estimate, limit = situation.at_decode, situation.local_limit
    if limit <= 0:
        return "off", 0
    if situation.refused or situation.turn.repeated:
        return "refused", 0
    tiny = estimate.prompt_tokens <= limit
    if not tiny:
        if not situation.known_at_decode:
            return "unknown", 0
        if estimate.edited:
            return "edited", 0
        if estimate.uncached_tokens > limit:
            return "new", 0
    limit = min(limit, situation.backlog_limit - situation.backlog)
    if estimate.uncached_tokens > limit:
        return "busy", 0
    if situation.streams > 0 and situation.decode_speed > 0:
        limit = min(limit, int(situation.stall_seconds * situation.decode_speed))
        if estimate.uncached_tokens > limit:
            return "stall", 0
    return ("tiny" if tiny and (estimate.edited or not situation.known_at_decode) else "held"), limit


def _divide(tokens: float, speed: float) -> float:
    return tokens / speed if speed > 0 else math.nan
