"""Where the engines are: a list and watch of their EndpointSlices.

One watch covers both headless Services. The pure half (:func:`build_pools`) turns slices into a snapshot; the watch
keeps the slices. While the API server is away the last snapshot stays in force: engines do not move because it
restarts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from bidikv_runtime.contract import RouterConfig
from bidikv_runtime.router.choice.endpoints import Endpoint, Pools, expand_ranks

logger = logging.getLogger(__name__)

SERVICE_LABEL: Final = "kubernetes.io/service-name"
_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_WATCH_SECONDS: Final = 120
"""The API server ends a watch after this; a connection that died silently is noticed a little later."""
_SILENCE_SECONDS: Final = _WATCH_SECONDS + 30
_LIST_SECONDS: Final = 30
_BACKOFF_SECONDS: Final = (0.2, 10.0)
_GONE: Final = 410


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Reference(msgspec.Struct):
    name: str = ""


class _SliceEndpoint(msgspec.Struct):
    addresses: list[str]
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)
    zone: str | None = None
    targetRef: _Reference | None = None


class _Metadata(msgspec.Struct):
    name: str = ""
    resourceVersion: str = ""
    labels: dict[str, str] | None = None


class EndpointSlice(msgspec.Struct):
    """The fields of a ``discovery.k8s.io/v1`` EndpointSlice that matter here."""

    metadata: _Metadata
    endpoints: list[_SliceEndpoint] | None = None


class _SliceList(msgspec.Struct):
    metadata: _Metadata
    items: list[EndpointSlice]


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class WatchExpired(Exception):
    """The API server no longer has the version that the watch asked for: list again."""


def build_pools(slices: Iterable[EndpointSlice], config: RouterConfig) -> Pools:
    """The snapshot that ``slices`` describe.

    A nil ``ready`` means true and a nil ``serving`` means the value of ``ready`` (the API's documented defaults). An
    address may be in two slices for a moment; the entry that serves wins. Each data-parallel rank is an endpoint.
    """
    found: dict[str, dict[str, Endpoint]] = {config.prefill_service: {}, config.decode_service: {}}
    for item in slices:
        service = found.get((item.metadata.labels or {}).get(SERVICE_LABEL, ""))
        if service is None:
            continue
        for entry in item.endpoints or ():
            if not entry.addresses:
                continue
            ready = entry.conditions.ready is not False
            endpoint = Endpoint(
                host=entry.addresses[0],
                port=config.engine_port,
                lookup_port=config.lookup_port,
                ready=ready,
                serving=ready if entry.conditions.serving is None else entry.conditions.serving,
                terminating=bool(entry.conditions.terminating),
                zone=entry.zone or "",
                state_port=config.state_port,
                name=entry.targetRef.name if entry.targetRef else "",
            )
            known = service.get(endpoint.address)
            if known is None or (endpoint.serving, endpoint.ready) > (known.serving, known.ready):
                service[endpoint.address] = endpoint

    def in_order(service: str, ranks: int) -> tuple[Endpoint, ...]:
        return tuple(rank for _, endpoint in sorted(found[service].items()) for rank in expand_ranks(endpoint, ranks))

    return Pools(
        in_order(config.prefill_service, config.prefill_ranks), in_order(config.decode_service, config.decode_ranks)
    )


@dataclass(frozen=True)
class ApiServer:
    """How to reach the Kubernetes API."""

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None

    @staticmethod
    def in_cluster() -> ApiServer:
        """As every pod finds it.

        Raises:
            ValueError: this process does not run in a pod with a service account.
        """
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port or not (_ACCOUNT / "token").exists():
            raise ValueError(
                "no Kubernetes service account found; run in a pod, or name the engines with "
                "--static-prefill and --static-decode"
            )
        host = f"[{host}]" if ":" in host else host
        return ApiServer(f"https://{host}:{port}", _ACCOUNT / "token", _ACCOUNT / "ca.crt")


class EndpointWatch:
    """Follows the EndpointSlices and reports every new snapshot."""

    def __init__(self, api: ApiServer, config: RouterConfig, on_pools: Callable[[Pools], None]) -> None:
        self._api = api
        self._config = config
        self._on_pools = on_pools
        self._slices: dict[str, EndpointSlice] = {}
        self._reported: Pools | None = None
        self._url = f"{api.url}/apis/discovery.k8s.io/v1/namespaces/{config.namespace}/endpointslices"
        self._selector = f"{SERVICE_LABEL} in ({config.prefill_service},{config.decode_service})"

    async def run(self) -> None:
        """Watch until cancelled; failures are logged and tried again with a growing, jittered delay."""
        tls = ssl.create_default_context(cafile=str(self._api.ca_file)) if self._api.ca_file else True
        delay, longest = _BACKOFF_SECONDS
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as http:
            version = ""
            while True:
                try:
                    if not version:
                        version = await self._list(http)
                    async for seen in self._watch(http, version):
                        version = seen
                        delay = _BACKOFF_SECONDS[0]
                    # A server that ends watches at once must not be asked in a loop without pause.
                    await asyncio.sleep(_BACKOFF_SECONDS[0])
                except WatchExpired:
                    version = ""
                    await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # it may expire again at once
                    delay = min(longest, delay * 2)
                except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
                    version = ""
                    logger.warning(
                        "Watching EndpointSlices failed, next try in %.1f s: %s", delay, error or type(error)
                    )
                    await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                    delay = min(longest, delay * 2)

    def _headers(self) -> dict[str, str]:
        # Read every time: the kubelet renews the token about once an hour.
        token = self._api.token_file.read_text().strip() if self._api.token_file else ""
        return {"Authorization": f"Bearer {token}"} if token else {}

    async def _list(self, http: aiohttp.ClientSession) -> str:
        timeout = aiohttp.ClientTimeout(total=_LIST_SECONDS)
        async with http.get(
            self._url, params={"labelSelector": self._selector}, headers=self._headers(), timeout=timeout
        ) as response:
            response.raise_for_status()
            listed = msgspec.json.decode(await response.read(), type=_SliceList)
        self._slices = {item.metadata.name: item for item in listed.items}
        self._report()
        return listed.metadata.resourceVersion

    async def _watch(self, http: aiohttp.ClientSession, version: str) -> Any:
        """Apply events; yields the resource version after each.

        Raises:
            WatchExpired: the version is too old.
        """
        params = {
            "labelSelector": self._selector,
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_LIST_SECONDS, sock_read=_SILENCE_SECONDS)
        async with http.get(self._url, params=params, headers=self._headers(), timeout=timeout) as response:
            if response.status == _GONE:
                raise WatchExpired
            response.raise_for_status()
            pending = bytearray()
            async for data in response.content.iter_any():
                pending += data  # not readline(): a slice of 100 endpoints is longer than aiohttp's line limit
                while (end := pending.find(b"\n")) >= 0:
                    line = bytes(pending[:end])
                    del pending[: end + 1]
                    if line.strip():
                        yield self._apply(line)

    def _apply(self, line: bytes) -> str:
        event = msgspec.json.decode(line, type=_Event)
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            if status.code == _GONE:
                raise WatchExpired
            raise aiohttp.ClientError(f"the watch reported {status.code} {status.message}")
        item = msgspec.json.decode(event.object, type=EndpointSlice)
        if event.type == "DELETED":
            self._slices.pop(item.metadata.name, None)
        elif event.type in ("ADDED", "MODIFIED"):
            self._slices[item.metadata.name] = item
        if event.type != "BOOKMARK":
            self._report()
        return item.metadata.resourceVersion

    def _report(self) -> None:
        pools = build_pools(self._slices.values(), self._config)
        if pools != self._reported:
            self._reported = pools
            logger.info(
                "Engines: %d of %d prefill and %d of %d decode are ready",
                len(pools.ready_prefill),
                len(pools.prefill),
                len(pools.ready_decode),
                len(pools.decode),
            )
            self._on_pools(pools)
