"""Write the status by server-side apply, only when it says something new. I/O.

A CRD that is older than the operator lacks fields of the status, and the API server refuses such a patch as a whole.
Then what every version of the CRD has is written, so that users still learn how their resource is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from bidikv_operator import names
from bidikv_operator.cache import ObjectCache
from bidikv_operator.kinds import INFERENCE, Kind
from bidikv_operator.kube import InvalidError

Object = dict[str, Any]
logger = logging.getLogger(__name__)

FIRST_FIELDS: Final = ("observedGeneration", "conditions", "endpoint", *names.ROLES)
FIRST_ROLE_FIELDS: Final = ("replicas", "readyReplicas", "updatedReplicas", "selector")
"""What the first CRD has of the status and of a role in it."""
UNDECLARED: Final = "field not declared in schema"
"""The API server's words for a field that the CRD lacks."""
RETRY_SECONDS: Final = 600.0
"""How long the shorter form is kept before the whole is tried again: the CRD may have been replaced."""


class StatusClient(Protocol):
    async def apply(self, kind: Kind, manifest: Object, *, subresource: str | None = None) -> Object: ...


def build_patch(resource: Object, status: Object) -> Object:
    """The apply patch of ``status``.

    It carries the uid: a resource deleted and recreated meanwhile must not get its predecessor's status, nor come back
    to life.
    """
    metadata = resource["metadata"]
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"]},
        "status": status,
    }


def shorten(status: Mapping[str, Any]) -> Object:
    """The part of a status that every CRD knows."""
    kept: Object = {key: status[key] for key in FIRST_FIELDS if key in status}
    for role in names.ROLES:
        if role in kept:
            kept[role] = {key: value for key, value in kept[role].items() if key in FIRST_ROLE_FIELDS}
    return kept


def is_same(live: Object, status: Object) -> bool:
    """Whether the live status says all of ``status``; what other writers added does not count."""
    return all(_by_type(live.get(key)) | _by_type(value) == _by_type(live.get(key)) for key, value in status.items())


def _by_type(value: Any) -> dict[str, Any]:
    """Conditions by type, objects as they are, scalars boxed: things that ``|`` merges."""
    if isinstance(value, list):
        return {item["type"]: item for item in value}
    return value if isinstance(value, dict) else {"": value}


@dataclass
class StatusWriter:
    client: StatusClient
    cache: ObjectCache
    clock: Callable[[], float] = time.monotonic
    _shortened_until: float = field(init=False, default=float("-inf"))

    async def write(self, resource: Object, status: Object) -> bool:
        """Returns whether anything was written.

        Raises:
            ApiError: the API server refused it, for another reason than an older CRD.
        """
        live = resource.get("status") or {}
        if self.clock() < self._shortened_until:
            status = shorten(status)
        if is_same(live, status):
            return False
        try:
            await self._apply(resource, status)
        except InvalidError as error:
            if UNDECLARED not in str(error) or shorten(status) == status:
                raise
            logger.warning("The CRD is older than this operator: apply its crds/. Told in short until then: %s", error)
            self._shortened_until = self.clock() + RETRY_SECONDS
            if is_same(live, shorten(status)):
                return False
            await self._apply(resource, shorten(status))
        return True

    async def _apply(self, resource: Object, status: Object) -> None:
        self.cache.put(
            INFERENCE, await self.client.apply(INFERENCE, build_patch(resource, status), subresource="status")
        )
