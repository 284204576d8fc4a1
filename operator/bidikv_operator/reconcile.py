"""One resource, one pass: observe, validate, plan, build, apply, tell the status.

The middle is pure; whatever fails is repeated by the queue. A pass is idempotent and writes only differences.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from bidikv_operator import names
from bidikv_operator.apply import Applier
from bidikv_operator.build import build_all
from bidikv_operator.cache import Key, ObjectCache
from bidikv_operator.engines.facts import FactStore, build_expectation
from bidikv_operator.events import post_events, post_note
from bidikv_operator.healing import Healer, Healing
from bidikv_operator.kinds import Kind
from bidikv_operator.kube import ApiError, ConflictError, Kube, NotFoundError, NotLeaderError, TransientError
from bidikv_operator.observe import observe
from bidikv_operator.resolved import Resolved
from bidikv_operator.rollout.describe import describe_rollout
from bidikv_operator.rollout.plan import Rollout
from bidikv_operator.rollout.scale import plan_scaling
from bidikv_operator.state import Applied, Observed
from bidikv_operator.status.compute import compute_status
from bidikv_operator.status.write import StatusWriter
from bidikv_operator.token_store import TokenOutcome, TokenStore
from bidikv_operator.validate import Rejected, validate
from bidikv_operator.workqueue import Done, RequeueAfter, Result, RetryLaterError

Object = dict[str, Any]
logger = logging.getLogger(__name__)

WAITING_SECONDS: Final = 2.0
"""How soon a child that is still being deleted is looked at again; its deletion event usually comes first."""
LEAVING_SECONDS: Final = 30.0
"""How soon a rollout is looked at again that waits for pods to end: no event tells that one is overdue."""


@dataclass
class Reconciler:
    kube: Kube
    cache: ObjectCache
    tokens: TokenStore
    runtime_image: str
    identity: str
    operator_namespace: str = ""
    missing_kinds: frozenset[Kind] = frozenset()
    """Optional kinds that this cluster does not serve, or not to this operator."""
    engines: FactStore = field(default_factory=FactStore)
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    _applier: Applier = field(init=False)
    _healer: Healer = field(init=False)
    _status_writer: StatusWriter = field(init=False)

    def __post_init__(self) -> None:
        self._applier = Applier(self.kube, self.cache)
        self._healer = Healer(self.kube, self.clock)
        self._status_writer = StatusWriter(self.kube, self.cache)

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
        checked = validate(
            observed.resource, runtime_image=self.runtime_image, operator_namespace=self.operator_namespace
        )
        now = self.clock()
        token, healing = TokenOutcome(), None
        if not isinstance(checked, Rejected):
            self.engines.expect(key, build_expectation(checked))
        observed = replace(observed, engines=self.engines.observe(key, observed.pods))
        if isinstance(checked, Rejected) or checked.paused:
            # What runs keeps running: a typing mistake must not take a service down.
            await self.tokens.load(key, observed.resource)
            applied = Applied(children=observed.children)
        else:
            observed = await self._applier.find_lost(observed)
            token = await self.tokens.ensure(checked, observed.resource)
            scaling = plan_scaling(checked, observed, now)
            desired = build_all(checked, observed.children, scaling.replicas, scaling.inputs)
            applied = _include(token, await self._applier.apply_all(observed, desired, scaling))
        resolved = None if isinstance(checked, Rejected) else checked
        rollout = describe_rollout(resolved, applied.children, observed.pods, now)
        if resolved is not None:
            healing = self._healer.decide(key, observed, resolved, is_rolling=rollout.is_rolling)
        await self._tell(observed, checked, applied, rollout, healing, now)
        if healing is not None:
            await self._healer.recycle(key, healing)  # the status tells of it by now
        await self._post_notes(observed.resource, token, healing)
        if applied.failures:
            raise RetryLaterError("; ".join(str(failure) for failure in applied.failures))
        pauses = [token.pause] if token.pause is not None else []
        if applied.waiting:
            pauses.append(WAITING_SECONDS)
        if any(found.leaving for found in rollout.sets if not found.is_current):
            pauses.append(LEAVING_SECONDS)
        # Nor does one tell that a deadline has passed.
        pauses += [
            (found.late_at - now).total_seconds()
            for found in rollout.sets
            if found.late_at is not None and not found.is_late
        ]
        return RequeueAfter(min(pauses)) if pauses else Done()

    async def _post_notes(self, resource: Object, token: TokenOutcome, healing: Healing | None) -> None:
        """Events about what was done without having been asked for."""
        if token.step is not None:
            now = self.clock().isoformat()
            reason = names.REASON_TOKEN_ROTATED
            await post_note(self.kube, resource, reason, token.step, told=(now,), identity=self.identity)
        for one in healing.recycle if healing is not None else ():
            note = f"deleted {one.pod}, a {one.role} engine that its peers could not reach"
            await post_note(self.kube, resource, names.REASON_RECYCLED, note, told=(one.uid,), identity=self.identity)

    async def _tell(
        self,
        observed: Observed,
        checked: Resolved | Rejected,
        applied: Applied,
        rollout: Rollout,
        healing: Healing | None,
        now: datetime,
    ) -> None:
        time = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        status = compute_status(observed, checked, applied, rollout, healing, now=time)
        before = (observed.resource.get("status") or {}).get("conditions") or []
        try:
            if await self._status_writer.write(observed.resource, status):
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
