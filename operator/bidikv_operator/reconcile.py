"""One resource, one pass: observe, validate, build, apply, tell the status.

The middle is pure; whatever fails is repeated by the queue. A pass is idempotent and writes only differences.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final

from bidikv_operator.apply import Applier
from bidikv_operator.build import build_all
from bidikv_operator.cache import Key, ObjectCache
from bidikv_operator.engines.facts import FactStore, build_expectation
from bidikv_operator.events import post_events
from bidikv_operator.healing import Healer, Healing
from bidikv_operator.kinds import Kind
from bidikv_operator.kube import ApiError, ConflictError, Kube, NotFoundError, NotLeaderError, TransientError
from bidikv_operator.observe import observe
from bidikv_operator.resolved import Resolved
from bidikv_operator.state import Applied, Observed
from bidikv_operator.status.compute import compute_status
from bidikv_operator.status.write import write_status
from bidikv_operator.token_store import TokenOutcome, TokenStore
from bidikv_operator.validate import Rejected, validate
from bidikv_operator.workqueue import Done, RequeueAfter, Result, RetryLaterError

logger = logging.getLogger(__name__)

WAITING_SECONDS: Final = 2.0
"""How soon a child that is still being deleted is looked at again; its deletion event usually comes first."""


@dataclass
class Reconciler:
    kube: Kube
    cache: ObjectCache
    tokens: TokenStore
    runtime_image: str
    identity: str
    missing_kinds: frozenset[Kind] = frozenset()
    """Optional kinds that this cluster does not serve, or not to this operator."""
    engines: FactStore = field(default_factory=FactStore)
    _applier: Applier = field(init=False)
    _healer: Healer = field(init=False)

    def __post_init__(self) -> None:
        self._applier = Applier(self.kube, self.cache)
        self._healer = Healer(self.kube)

    async def reconcile(self, key: Key) -> Result:
        """Bring one resource to its desired state.

        Raises:
            RetryLaterError: something failed that may succeed later.
        """
        try:
            return await self._reconcile(key)
        except TransientError as error:
            raise RetryLaterError(str(error), after=error.retry_after) from error
        except (ApiError, NotLeaderError) as error:
            raise RetryLaterError(str(error)) from error

    async def _reconcile(self, key: Key) -> Result:
        observed = observe(self.cache, key, self.missing_kinds)
        if observed is None:
            self._applier.forget(key)
            self.tokens.forget(key)
            self.engines.forget(key)
            self._healer.forget(key)
            return Done()
        if observed.resource["metadata"].get("deletionTimestamp"):
            return Done()  # the garbage collector is at work; a write would only delay it
        checked = validate(observed.resource, runtime_image=self.runtime_image)
        token, healing = TokenOutcome(), None
        if not isinstance(checked, Rejected):
            self.engines.expect(key, build_expectation(checked))
        observed = replace(observed, engines=self.engines.observe(key, observed.pods))
        if isinstance(checked, Rejected):
            await self.tokens.load(key, observed.resource)
            # What runs keeps running: a typing mistake must not take a service down.
            applied = Applied(children=observed.children)
        else:
            token = await self.tokens.ensure(checked, observed.resource)
            applied = _include(token, await self._applier.apply_all(observed, build_all(checked)))
            healing = self._healer.decide(key, observed, checked, is_rolling=False)
        await self._tell(observed, checked, applied, healing)
        if healing is not None:
            await self._healer.recycle(key, healing)  # the status tells of it by now
        if applied.failures:
            raise RetryLaterError("; ".join(str(failure) for failure in applied.failures))
        if applied.waiting:
            return RequeueAfter(WAITING_SECONDS)
        return Done() if token.pause is None else RequeueAfter(token.pause)

    async def _tell(
        self, observed: Observed, checked: Resolved | Rejected, applied: Applied, healing: Healing | None
    ) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        status = compute_status(observed, checked, applied, None, healing, now=now)
        before = (observed.resource.get("status") or {}).get("conditions") or []
        try:
            if await write_status(self.kube, self.cache, observed.resource, status):
                await post_events(self.kube, observed.resource, before, status["conditions"], identity=self.identity)
        except (NotFoundError, ConflictError):
            return  # deleted (and perhaps recreated) meanwhile: its event is on the way


def _include(token: TokenOutcome, applied: Applied) -> Applied:
    """What kept the Secret from being as it should, among what kept other children."""
    return replace(
        applied,
        failures=applied.failures if token.failure is None else (token.failure, *applied.failures),
        waiting=applied.waiting if token.waiting is None else (token.waiting, *applied.waiting),
    )
