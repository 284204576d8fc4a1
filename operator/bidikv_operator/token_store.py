"""Keep the Secret with the peers' tokens of every resource as ``peer_token.py`` plans it. The only one who reads it.

Secrets are neither listed nor watched: the operator could read every other one, too. Each is read by its name, once per
process and after ``expire`` (at every resync, or when an engine refused the token), and kept in memory. At rest a pass
costs no request.

A token goes into the Secret and into requests to engines, nowhere else: no log line, condition, annotation or hash has
one.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from bidikv_operator import names
from bidikv_operator.apply import NAME_TAKEN, choose_ownership
from bidikv_operator.cache import ChildRef, Key
from bidikv_operator.drift import cut
from bidikv_operator.kinds import SECRET, Kind
from bidikv_operator.kube import ApiError, ConflictError, NotFoundError, TransientError
from bidikv_operator.peer_token import (
    TokenState,
    TokenTerms,
    build_token_secret,
    compute_pause,
    is_due,
    parse_state,
    plan_token,
)
from bidikv_operator.resolved import Resolved
from bidikv_operator.state import Failure

Object = dict[str, Any]
logger = logging.getLogger(__name__)

TOKEN_BYTES: Final = 32
REFUSAL_PAUSE_SECONDS: Final = 60.0
"""A Secret is read again at most so often because engines refuse its token: their kubelet may just be behind."""
STEPS: Final = {
    "Added": "added a new peer token; it signs when every pod has it",
    "Switched": "the new peer token signs; the old one is still accepted",
    "Settled": "one peer token signs and is accepted",
}


class SecretClient(Protocol):
    """What this module needs of the API server (``kube.Kube``)."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Object: ...
    async def apply(self, kind: Kind, manifest: Object) -> Object: ...
    async def apply_new(self, kind: Kind, manifest: Object) -> Object: ...


@dataclass(frozen=True)
class TokenOutcome:
    """How one look at a Secret ended."""

    failure: Failure | None = None
    waiting: ChildRef | None = None
    """The Secret of an earlier resource of this name is still being deleted."""
    pause: float | None = None
    """Seconds until the next step of a rotation."""
    step: str | None = field(default=None, compare=False)
    """The step of a rotation that was just taken, as words for people."""


@dataclass
class _Known:
    owner_uid: str
    state: TokenState
    read_at: datetime
    is_stale: bool = False


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


@dataclass
class TokenStore:
    client: SecretClient
    propagation_seconds: float
    now: Callable[[], datetime] = _now
    """Whole seconds: what the Secret's annotations can hold."""
    make_token: Callable[[], str] = lambda: secrets.token_urlsafe(TOKEN_BYTES)
    _known: dict[Key, _Known] = field(default_factory=dict)

    def token(self, key: Key) -> str | None:
        """What shows engines of a resource that the operator asks; None while its Secret was not read."""
        known = self._known.get(key)
        return known.state.tokens[0] if known is not None else None

    def expire(self) -> None:
        """Read every Secret again at its resource's next pass."""
        for known in self._known.values():
            known.is_stale = True

    def refuse(self, key: Key) -> bool:
        """An engine did not accept the token. Returns whether a pass of the resource may help."""
        known = self._known.get(key)
        if known is None or (self.now() - known.read_at).total_seconds() < REFUSAL_PAUSE_SECONDS:
            return False
        known.is_stale = True
        return True

    def forget(self, key: Key) -> None:
        """The resource is gone; the garbage collector takes its Secret."""
        self._known.pop(key, None)

    async def load(self, key: Key, owner: Object) -> None:
        """Read the Secret of a resource that must not be changed (paused, invalid), unless it is known."""
        known = self._get_known(key, owner)
        if known is not None and not known.is_stale:
            return
        try:
            live = await self.client.get(SECRET, key.namespace, names.child_name(key.name, names.TOKEN_SECRET))
        except ApiError as error:
            logger.info("%s: the peer token was not read: %s", key, error)
            return
        now = self.now()
        state = parse_state(live, now)
        if state is not None and choose_ownership(live, owner) == "ours":
            self._known[key] = _Known(owner["metadata"]["uid"], state, now)

    async def ensure(self, resolved: Resolved, owner: Object) -> TokenOutcome:
        """Create the Secret, repair it, or take the next step of a rotation.

        Raises:
            TransientError: the API server is overloaded or away.
            ConflictError: the Secret changed between reading and writing.
        """
        key = Key(resolved.namespace, resolved.name)
        ref = ChildRef(SECRET, names.child_name(key.name, names.TOKEN_SECRET))
        terms = TokenTerms(
            days=resolved.security.token_rotation_days,
            rotation=resolved.security.token_rotation,
            propagation_seconds=self.propagation_seconds,
        )
        known = self._get_known(key, owner)
        if known is not None and not known.is_stale:
            now = self.now()
            if not is_due(known.state, terms, now):
                return TokenOutcome(pause=compute_pause(known.state, terms, now))
        try:
            return await self._ensure(resolved, owner, ref, terms, known)
        except (TransientError, ConflictError):
            raise
        except ApiError as error:
            return TokenOutcome(failure=Failure(ref, names.REASON_APPLY_FAILED, str(error)))

    async def _ensure(
        self, resolved: Resolved, owner: Object, ref: ChildRef, terms: TokenTerms, known: _Known | None
    ) -> TokenOutcome:
        key = Key(resolved.namespace, resolved.name)
        if known is None and not owner.get("status"):
            # New, so most likely without a Secret: asking first would be one request more for each.
            with suppress(ConflictError):
                return await self._bring(resolved, None, terms, known)
        try:
            live = await self.client.get(SECRET, key.namespace, ref.name)
        except NotFoundError:
            live = None
        if live is not None:
            ownership = choose_ownership(live, owner)
            if ownership == "foreign":
                return TokenOutcome(failure=Failure(ref, names.REASON_NAME_TAKEN, NAME_TAKEN))
            if ownership == "previous" or live["metadata"].get("deletionTimestamp"):
                return TokenOutcome(waiting=ref)
        return await self._bring(resolved, live, terms, known)

    async def _bring(
        self, resolved: Resolved, live: Object | None, terms: TokenTerms, known: _Known | None
    ) -> TokenOutcome:
        """Write what the Secret should be now, given what it is.

        Raises:
            ConflictError: it is not, or no longer, ``live``.
        """
        key, now = Key(resolved.namespace, resolved.name), self.now()
        state = parse_state(live, now) if live is not None else None
        planned = plan_token(state, terms, now, self.make_token, known=known.state.tokens if known else ())
        await self._write(resolved, live, planned)
        if planned != state:
            logger.info("%s: %s", key, STEPS[planned.phase])
        self._known[key] = _Known(resolved.uid, planned, now)
        is_step = planned != state and not (state is None and known is None)
        return TokenOutcome(pause=compute_pause(planned, terms, now), step=STEPS[planned.phase] if is_step else None)

    async def _write(self, resolved: Resolved, live: Object | None, planned: TokenState) -> None:
        manifest = build_token_secret(resolved, planned)
        # A write of somebody else in between must not be undone: it may hold the tokens in use.
        if live is None:
            await self.client.apply_new(SECRET, manifest)
        elif cut(live, manifest) != manifest:
            manifest["metadata"]["resourceVersion"] = live["metadata"]["resourceVersion"]
            await self.client.apply(SECRET, manifest)

    def _get_known(self, key: Key, owner: Object) -> _Known | None:
        known = self._known.get(key)
        if known is not None and known.owner_uid != owner["metadata"]["uid"]:
            del self._known[key]  # of an earlier resource of this name
            return None
        return known
