"""Write the status by server-side apply, only when it says something new. I/O."""

from __future__ import annotations

from typing import Any, Protocol

from bidikv_operator import names
from bidikv_operator.cache import ObjectCache
from bidikv_operator.kinds import INFERENCE, Kind

Object = dict[str, Any]


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


def is_same(live: Object, status: Object) -> bool:
    """Whether the live status says all of ``status``; what other writers added does not count."""
    return all(_by_type(live.get(key)) | _by_type(value) == _by_type(live.get(key)) for key, value in status.items())


def _by_type(value: Any) -> dict[str, Any]:
    """Conditions by type, objects as they are, scalars boxed: things that ``|`` merges."""
    if isinstance(value, list):
        return {item["type"]: item for item in value}
    return value if isinstance(value, dict) else {"": value}


async def write_status(client: StatusClient, cache: ObjectCache, resource: Object, status: Object) -> bool:
    """Returns whether anything was written."""
    if is_same(resource.get("status") or {}, status):
        return False
    cache.put(INFERENCE, await client.apply(INFERENCE, build_patch(resource, status), subresource="status"))
    return True
