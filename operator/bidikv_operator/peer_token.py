"""The token by which engines and routers of one resource know each other, and its rotation without a restart. Pure.

The Secret holds one token per line: the first signs, every one is accepted (``contract.ENV_TOKEN_FILE``), and engines
read the mounted file again when it changes. A rotation therefore takes three writes, between which every kubelet gets
the time to mount what was written: the new token is *Added* behind the old one, *Switched* to the front, and then alone
(*Settled*). At any moment two processes that see different steps accept each other.

The Secret alone carries the state, in its annotations, so that the next leader goes on where the last one stopped.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from bidikv_operator import names
from bidikv_operator.build.meta import Manifest, build_object, token_secret_name
from bidikv_operator.kinds import SECRET
from bidikv_operator.resolved import Resolved
from bidikv_runtime import contract

Object = dict[str, Any]
Phase = Literal["Settled", "Added", "Switched"]
PHASES: Final[dict[str, Phase]] = {"Settled": "Settled", "Added": "Added", "Switched": "Switched"}
TIME_FORMAT: Final = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class TokenState:
    """What the Secret says. Never shown: the tokens are left out of ``repr``."""

    tokens: tuple[str, ...] = field(repr=False)
    phase: Phase
    since: datetime
    rotation: str
    """Digest of the text that last asked for a rotation; empty when none did."""


@dataclass(frozen=True, kw_only=True)
class TokenTerms:
    """When to rotate, and how slowly."""

    days: int
    """Age at which the token is replaced; 0: never because of its age."""
    rotation: str
    """Another text than the last one replaces the token; an empty one never does."""
    propagation_seconds: float
    """Within so many seconds every kubelet has mounted what was written."""


def plan_token(
    state: TokenState | None,
    terms: TokenTerms,
    now: datetime,
    make_token: Callable[[], str],
    *,
    known: tuple[str, ...] = (),
) -> TokenState:
    """What the Secret should say now; equal to ``state`` when nothing is due.

    Args:
        state: what it says; None when it does not exist or cannot be used.
        known: tokens that it held before: engines still accept them, so a lost Secret comes back as a rotation.
    """
    asked = compute_digest(terms.rotation)
    if state is None:
        if not known:
            return TokenState((make_token(),), "Settled", now, asked)
        return TokenState((*_keep(known), make_token()), "Added", now, asked)
    elapsed = now - state.since
    if state.phase == "Settled":
        is_asked = asked not in ("", state.rotation)
        is_old = terms.days > 0 and elapsed >= timedelta(days=terms.days)
        if not is_asked and not is_old:
            return state
        return TokenState((*_keep(state.tokens), make_token()), "Added", now, asked or state.rotation)
    if elapsed < timedelta(seconds=terms.propagation_seconds):
        return state
    if state.phase == "Added":
        return replace(state, tokens=(state.tokens[-1], *state.tokens[:-1]), phase="Switched", since=now)
    return replace(state, tokens=state.tokens[:1], phase="Settled", since=now)


def is_due(state: TokenState, terms: TokenTerms, now: datetime) -> bool:
    """Whether the Secret has to change."""
    return plan_token(state, terms, now, lambda: "") != state


def compute_pause(state: TokenState, terms: TokenTerms, now: datetime) -> float | None:
    """Seconds until the next step of a rotation; None at rest, where age is looked at whenever the resource is."""
    if state.phase == "Settled":
        return None
    return max(0.0, terms.propagation_seconds - (now - state.since).total_seconds())


def parse_state(secret: Object, now: datetime) -> TokenState | None:
    """The state in a Secret as the API server returned it; None when its tokens cannot be used.

    Annotations that somebody removed or damaged count as a rest that begins now: more tokens than needed harm nobody.
    """
    tokens = _parse_tokens((secret.get("data") or {}).get(contract.TOKEN_KEY) or "")
    if tokens is None:
        return None
    annotations = secret["metadata"].get("annotations") or {}
    phase = PHASES.get(annotations.get(names.ANNOTATION_TOKEN_PHASE, ""))
    since = _parse_time(annotations.get(names.ANNOTATION_TOKEN_SINCE, ""))
    return TokenState(
        tokens=tokens,
        phase=phase if phase is not None and since is not None else "Settled",
        # A time to come (somebody's clock was wrong) would make the next step wait for it.
        since=now if since is None or since > now else since,
        rotation=annotations.get(names.ANNOTATION_TOKEN_ROTATION, ""),
    )


def build_token_secret(resolved: Resolved, state: TokenState) -> Manifest:
    """Without the annotation that holds the hash of other children: it would be one of the token."""
    secret = build_object(SECRET, resolved, token_secret_name(resolved))
    secret["metadata"]["annotations"] = {
        names.ANNOTATION_TOKEN_PHASE: state.phase,
        names.ANNOTATION_TOKEN_SINCE: state.since.strftime(TIME_FORMAT),
        names.ANNOTATION_TOKEN_ROTATION: state.rotation,
    }
    content = "".join(f"{token}\n" for token in state.tokens)
    secret["data"] = {contract.TOKEN_KEY: base64.b64encode(content.encode()).decode()}
    return secret


def compute_digest(text: str) -> str:
    """Of the text that asks for a rotation; any text fits into an annotation so."""
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""


def _keep(tokens: tuple[str, ...]) -> tuple[str, ...]:
    """Room for one more."""
    return tokens[: contract.MAXIMUM_TOKENS - 1]


def _parse_tokens(encoded: str) -> tuple[str, ...] | None:
    """As ``connector/tokens.py`` reads the file; None where it would refuse it."""
    try:
        lines = base64.b64decode(encoded, validate=True).decode("ascii").splitlines()
    except (binascii.Error, ValueError):
        return None
    tokens = tuple(line.strip() for line in lines if line.strip())
    are_usable = all(len(token) >= contract.MINIMUM_TOKEN_LENGTH and _is_graphic(token) for token in tokens)
    return tokens if are_usable and 1 <= len(tokens) <= contract.MAXIMUM_TOKENS else None


def _is_graphic(token: str) -> bool:
    return all("!" <= character <= "~" for character in token)


def _parse_time(text: str) -> datetime | None:
    try:
        return datetime.strptime(text, TIME_FORMAT).replace(tzinfo=UTC)
    except ValueError:
        return None
