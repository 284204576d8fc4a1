"""The one door to the API server: plain dicts in and out, errors by meaning, a deadline on every request.

Writes pass a gate: a process that no longer holds the lease must not write, even from a coroutine that was already on
its way. The gate and the request's time limit together bound how late a write of a deposed leader can be.

The Kubernetes client knows where the API server is and how to log in; requests go to aiohttp directly: the client's own
way through them takes about twice the CPU.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
import msgspec
from kubernetes.aio import client, config

from bidikv_operator import names
from bidikv_operator.kinds import LEASE, Kind

Object = dict[str, Any]

APPLY_CONTENT_TYPE: Final = "application/apply-patch+yaml"
APPLY_QUERY: Final = {"fieldManager": names.FIELD_MANAGER, "force": "true", "fieldValidation": "Ignore"}
"""A field that a schema lacks is refused by server-side apply itself. Field validation would only look for keys given
twice, by parsing each body once more: a seventh of the API server's CPU while 1,000 resources were brought up."""
MERGE_CONTENT_TYPE: Final = "application/merge-patch+json"
PAGE_SIZE: Final = 100
"""Objects per page of a list: that many Deployments take 5 MB for a moment."""
READ_TIMEOUT_SECONDS: Final = 30.0
MESSAGE_LIMIT: Final = 1024
CONNECTIONS: Final = 32
"""Open at the same time, at most; more requests wait."""
NEVER_A_VERSION: Final = "1"
"""A resource version that no object has: etcd's revision is 1 when it is empty, and each write raises it."""


class ApiError(Exception):
    """The API server refused or did not answer; ``str()`` is its sentence, without random ids or times."""

    def __init__(self, message: str, *, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message[:MESSAGE_LIMIT])
        self.status = status
        self.retry_after = retry_after


class NotFoundError(ApiError):
    """There is no such object, or the kind is not served."""


class ConflictError(ApiError):
    """The object changed meanwhile, exists already, or another manager owns the field."""


class ForbiddenError(ApiError):
    """RBAC, a quota or an admission policy refuses, or a webhook that has to be asked does not answer."""


class InvalidError(ApiError):
    """The object itself is wrong; the same request will never succeed."""


class TransientError(ApiError):
    """Overload, restart or network; the same request may succeed later."""


class NotLeaderError(Exception):
    """A write was attempted without holding the lease."""


@dataclass(frozen=True)
class Listed:
    """A page of a list and the moment of the cluster's history that it shows, which all pages share."""

    items: tuple[Object, ...]
    resource_version: str


class Kube:
    """Requests for any kind; ``may_write`` is asked before each write."""

    def __init__(
        self, api: client.ApiClient, *, write_timeout_seconds: float, may_write: Callable[[], bool] = lambda: True
    ) -> None:
        self._api = api
        self._session: aiohttp.ClientSession | None = None
        self._write_timeout = write_timeout_seconds
        self.may_write = may_write
        self.on_write: Callable[[str, str], None] = lambda verb, kind: None
        """Told the HTTP method and the kind of every write that is sent."""

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await self._api.close()  # type: ignore[no-untyped-call]

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        return await self._request("GET", kind.path(namespace, name))

    async def pages(self, kind: Kind, namespace: str | None, *, label_selector: str = "") -> AsyncIterator[Listed]:
        """All objects of a kind, page by page: together they may be too large for the memory."""
        query = {"limit": str(PAGE_SIZE)}
        if label_selector:
            query["labelSelector"] = label_selector
        while True:
            page = await self._request("GET", kind.path(namespace), query=query)
            # Items of a list carry neither apiVersion nor kind.
            items = tuple({"apiVersion": kind.api_version, "kind": kind.kind, **item} for item in page["items"])
            yield Listed(items, page["metadata"]["resourceVersion"])
            following = page["metadata"].get("continue")
            if not following:
                return
            query["continue"] = following

    async def apply(self, kind: Kind, manifest: Object, *, subresource: str | None = None) -> Object:
        """Server-side apply; fields of other managers stay, a clash over one of ours is won."""
        metadata = manifest["metadata"]
        return await self._write(
            "PATCH",
            kind,
            kind.path(metadata["namespace"], metadata["name"], subresource),
            query=APPLY_QUERY,
            body=manifest,
            content_type=APPLY_CONTENT_TYPE,
        )

    async def apply_new(self, kind: Kind, manifest: Object) -> Object:
        """Server-side apply of what must not exist yet, in one request.

        The API server compares a resource version with that of an object that exists, and ignores it where there is
        none. Were it to refuse it there as well, the caller would find nothing and apply without.

        Raises:
            ConflictError: there is such an object.
        """
        return await self.apply(
            kind, {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": NEVER_A_VERSION}}
        )

    async def patch(self, kind: Kind, namespace: str, name: str, *, uid: str, change: Object) -> Object:
        """Merge patch of this very object: for single fields of what is not applied as a whole.

        Raises:
            ConflictError: another object took its name meanwhile.
        """
        body = {**change, "metadata": {**change.get("metadata", {}), "uid": uid}}
        return await self._write(
            "PATCH",
            kind,
            kind.path(namespace, name),
            query={"fieldManager": names.FIELD_MANAGER},
            body=body,
            content_type=MERGE_CONTENT_TYPE,
        )

    async def create(self, kind: Kind, manifest: Object) -> Object:
        return await self._write("POST", kind, kind.path(manifest["metadata"]["namespace"]), body=manifest)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        """Delete this very object: one that took its name meanwhile stays. Gone already is success."""
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._write("DELETE", kind, kind.path(namespace, name), body=body)
        except (NotFoundError, ConflictError):
            return

    async def create_lease(self, manifest: Object) -> Object:
        """Not gated: the lease is what the gate depends on."""
        return await self._request("POST", _lease_path(manifest), body=manifest)

    async def replace_lease(self, manifest: Object) -> Object:
        """Refused with ConflictError when the lease changed since ``metadata.resourceVersion``."""
        return await self._request("PUT", f"{_lease_path(manifest)}/{manifest['metadata']['name']}", body=manifest)

    async def discover(self, kind: Kind) -> bool:
        """Whether the API server serves the kind."""
        try:
            found = await self._request("GET", kind.root())
        except NotFoundError:
            return False
        return any(resource["name"] == kind.plural for resource in found["resources"])

    async def try_list(self, kind: Kind, namespace: str | None) -> None:
        """Ask for one object, to learn whether the kind may be listed.

        Raises:
            ForbiddenError: it may not.
        """
        await self._request("GET", kind.path(namespace), query={"limit": "1"})

    async def _write(self, method: str, kind: Kind, path: str, **options: Any) -> Object:
        if not self.may_write():
            raise NotLeaderError(f"{method} {path} was not sent: this process does not hold the lease")
        self.on_write(method, kind.kind)
        return await self._request(method, path, may_send=self.may_write, **options)

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
        may_send: Callable[[], bool] = lambda: True,
    ) -> Object:
        # Lease traffic is timed like a write: a lease that is read slowly is renewed late.
        is_quick = method != "GET" or LEASE.plural in path
        limit = self._write_timeout if is_quick else READ_TIMEOUT_SECONDS
        try:
            # The client's own time limit excludes the refresh of credentials and the reading of the body.
            async with asyncio.timeout(limit):
                headers = {"Content-Type": content_type, **await self._authorize()}
                data = None if body is None else msgspec.json.encode(body)
                async with self._open().request(
                    method,
                    self._api.configuration.host + path,
                    params=query,
                    headers=headers,
                    data=data,
                    proxy=self._api.configuration.proxy,
                    proxy_headers=self._api.configuration.proxy_headers,
                    server_hostname=self._api.configuration.tls_server_name,
                    trace_request_ctx=may_send,
                ) as response:
                    payload = await response.read()
        except TimeoutError:
            raise TransientError(f"{method} {path} had no answer within {limit:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise TransientError(f"{method} {path} did not reach the API server ({type(error).__name__})") from error
        answer: Object = _parse(payload)
        if 200 <= response.status < 300:
            return answer
        raise build_error(response.status, answer, response.headers.get("Retry-After"), what=f"{method} {path}")

    async def _authorize(self) -> dict[str, str]:
        """The credentials as they are now: a service account's token is read again from its file before it expires."""
        settings = await self._api.configuration.auth_settings()
        return {setting["key"]: setting["value"] for setting in settings.values() if setting["value"]}

    def _open(self) -> aiohttp.ClientSession:
        """The session, opened inside the event loop that will use it."""
        if self._session is None:
            trust: ssl.SSLContext = self._api.rest_client.ssl_context
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS, ssl=trust),
                headers={"Accept": "application/json", "User-Agent": self._api.user_agent},
                timeout=aiohttp.ClientTimeout(total=None),  # each request has its limit
                trace_configs=[_build_gate()],
            )
        return self._session


def _build_gate() -> aiohttp.TraceConfig:
    """Ask again when a request has got its connection, right before it is sent.

    A process that was stopped while it waited for one goes on with what arrived meanwhile before it looks at its
    timers: the request's time limit alone would let a deposed leader's write pass. What remains are requests that the
    event loop has taken and not yet handed to the kernel when the process is stopped, at most one for each worker:
    Kubernetes knows no token by which it could refuse them.
    """

    async def ask(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
        if not context.trace_request_ctx():
            raise NotLeaderError("a write was not sent: this process does not hold the lease any more")

    gate = aiohttp.TraceConfig()
    gate.on_connection_create_end.append(ask)
    gate.on_connection_reuseconn.append(ask)
    return gate


def _lease_path(manifest: Object) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{manifest['metadata']['namespace']}/leases"


def _parse(payload: bytes) -> Object:
    try:
        answer = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}  # a proxy in between answered with something else than JSON; the status code speaks
    return answer if isinstance(answer, dict) else {}


def build_error(status: int, answer: Object, retry_after: str | None, *, what: str) -> ApiError:
    """The error class that a response means."""
    message = str(answer.get("message") or f"{what} was answered with status {status}")
    wait = float(retry_after) if retry_after and retry_after.isdigit() else None
    if status == 429 or status >= 500:
        # Server-side apply reports fields that no schema declares as an internal error; repeating cannot help.
        if "failed to create typed patch object" in message or "field not declared in schema" in message:
            return InvalidError(message, status=status)
        # A webhook that is away concerns the kinds that it guards, not the API server: the others go on.
        if "failed calling webhook" in message:
            return ForbiddenError(message, status=status, retry_after=wait)
        return TransientError(message, status=status, retry_after=wait)
    if status == 401:
        return TransientError(message, status=status)  # a token is about to be re-read
    if "metadata.uid" in message and "field is immutable" in message:
        return ConflictError(message, status=status)  # an apply that names its object's uid, and another has its name
    known = {403: ForbiddenError, 404: NotFoundError, 409: ConflictError}
    return known.get(status, InvalidError)(message, status=status)


async def connect(*, write_timeout_seconds: float, identity: str) -> Kube:
    """A client with the pod's service account, else with KUBECONFIG (or ~/.kube/config).

    The API server's audit log tells replicas apart by ``identity`` in the user agent.

    Raises:
        config.ConfigException: neither exists.
    """
    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except config.ConfigException:
        await config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    api = client.ApiClient(configuration=configuration)
    api.user_agent = f"{names.FIELD_MANAGER}/{identity}"
    return Kube(api, write_timeout_seconds=write_timeout_seconds)
