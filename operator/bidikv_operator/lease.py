"""Leader election with a Lease: one operator acts, the others wait and are healthy.

Own loop, not ``kubernetes.aio.leaderelection`` (37.0): that one writes local time marked as UTC, reads the wall clock
(a clock step makes it lose or keep a lease wrongly), lets connection errors end the election, has no limit on a
hanging request, and never releases the lease on a clean stop.

Rules, as in client-go: whether another's lease has run out is judged by the local monotonic clock from when its
record was last seen to change, so clocks need not agree; a holder that could not renew within the deadline no longer
holds, even if nobody else took over. Deadline < lease duration is what keeps two writers apart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from bidikv_operator.kinds import LEASE, Kind
from bidikv_operator.kube import ApiError, ConflictError, NotFoundError

Object = dict[str, Any]
logger = logging.getLogger(__name__)


class LeaseClient(Protocol):
    async def get(self, kind: Kind, namespace: str, name: str) -> Object: ...
    async def create_lease(self, manifest: Object) -> Object: ...
    async def replace_lease(self, manifest: Object) -> Object: ...


@dataclass(frozen=True, kw_only=True)
class LeaseTerms:
    namespace: str
    name: str
    identity: str
    lease_seconds: int
    renew_deadline_seconds: int
    retry_seconds: int


class Lease:
    """One candidate. ``acquire``, then ``hold`` until it returns, then ``release``."""

    def __init__(
        self,
        client: LeaseClient,
        terms: LeaseTerms,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._terms = terms
        self._clock = clock
        self._sleep = sleep
        self._seen: tuple[Any, ...] | None = None
        self._seen_at = 0.0
        self._renewed_at: float | None = None
        self._attempted_at = clock()

    def is_held(self) -> bool:
        """Whether this process may write at this very moment."""
        if self._renewed_at is None:
            return False
        return self._clock() - self._renewed_at < self._terms.renew_deadline_seconds

    def idle_seconds(self) -> float:
        """Since the last attempt to take or renew: a loop that hangs shows here."""
        return self._clock() - self._attempted_at

    async def acquire(self) -> None:
        """Wait until the lease is held."""
        logger.info("%s waits for the lease %s/%s", self._terms.identity, self._terms.namespace, self._terms.name)
        while not await self._try():
            await self._sleep(self._terms.retry_seconds)
        logger.info("%s holds the lease %s/%s", self._terms.identity, self._terms.namespace, self._terms.name)

    async def hold(self) -> None:
        """Renew; returns only when the lease is lost."""
        while self.is_held():
            await self._sleep(self._terms.retry_seconds)
            await self._try()
        logger.error("%s lost the lease %s/%s", self._terms.identity, self._terms.namespace, self._terms.name)

    async def release(self) -> None:
        """Let another take over at once. Best effort: an unreleased lease runs out by itself."""
        if not self.is_held():
            return
        self._renewed_at = None
        try:
            lease = await self._client.get(LEASE, self._terms.namespace, self._terms.name)
            if lease["spec"].get("holderIdentity") != self._terms.identity:
                return
            spec = {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _micro_time()}
            await self._client.replace_lease({**lease, "spec": spec})
            logger.info("%s released the lease", self._terms.identity)
        except ApiError as error:
            logger.warning("The lease could not be released: %s", error)

    async def _try(self) -> bool:
        """One attempt to take or renew. The time that counts is from before the request: an answer may be slow."""
        started = self._attempted_at = self._clock()
        try:
            if not await self._write():
                return False
        except ConflictError:
            return False  # another candidate was faster
        except ApiError as error:
            logger.warning("The lease could not be read or written: %s", error)
            return False
        self._renewed_at = started
        return True

    async def _write(self) -> bool:
        terms = self._terms
        try:
            lease = await self._client.get(LEASE, terms.namespace, terms.name)
        except NotFoundError:
            await self._client.create_lease(self._build({}, transitions=0, acquired=_micro_time()))
            return True
        spec = lease.get("spec") or {}
        record = (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions"))
        if record != self._seen:
            self._seen, self._seen_at = record, self._clock()
        holder = spec.get("holderIdentity") or ""
        if holder == terms.identity:
            manifest = self._build(
                lease, transitions=spec.get("leaseTransitions", 0), acquired=spec.get("acquireTime") or _micro_time()
            )
        elif not holder or self._clock() - self._seen_at >= (spec.get("leaseDurationSeconds") or terms.lease_seconds):
            manifest = self._build(lease, transitions=spec.get("leaseTransitions", 0) + 1, acquired=_micro_time())
        else:
            self._renewed_at = None  # somebody else holds it, whatever was believed here
            return False
        await self._client.replace_lease(manifest)
        return True

    def _build(self, lease: Object, *, transitions: int, acquired: str) -> Object:
        metadata = lease.get("metadata") or {"name": self._terms.name, "namespace": self._terms.namespace}
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": metadata,
            "spec": {
                "holderIdentity": self._terms.identity,
                "leaseDurationSeconds": self._terms.lease_seconds,
                "acquireTime": acquired,
                "renewTime": _micro_time(),
                "leaseTransitions": transitions,
            },
        }


def _micro_time() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
