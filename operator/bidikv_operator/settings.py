"""The operator's own settings: frozen, read once from environment variables with the prefix ``BIDIKV_``.

What belongs to one inference service is a field of the resource, never a setting here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

PREFIX: Final = "BIDIKV_"
NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
LOG_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")

_T = TypeVar("_T")


class SettingsError(ValueError):
    """A setting is missing or wrong; the message names the variable and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    runtime_image: str
    """BIDIKV_RUNTIME_IMAGE (required): image of the router and of the init container that installs the connector."""

    namespaces: tuple[str, ...] = ()
    """BIDIKV_NAMESPACES: comma-separated namespaces to serve; empty serves all."""

    lease_namespace: str = "default"
    """BIDIKV_LEASE_NAMESPACE: where the leader's Lease lives; the pod's own namespace when unset."""

    operator_namespace: str = ""
    """BIDIKV_OPERATOR_NAMESPACE: where the operator's pods are, which engines' NetworkPolicies let in; the pod's own
    namespace when unset, none outside of a cluster."""

    lease_name: str = "bidikv-operator"
    """BIDIKV_LEASE_NAME: operators that share this name elect one leader."""

    identity: str = "bidikv-operator"
    """BIDIKV_IDENTITY: this candidate's name in the Lease; the pod's name in a cluster, else host name and process
    id."""

    lease_seconds: int = 15
    """BIDIKV_LEASE_SECONDS: how long others wait for a leader that no longer renews."""

    renew_deadline_seconds: int = 10
    """BIDIKV_RENEW_DEADLINE_SECONDS: a leader that could not renew for so long stops writing; below lease_seconds."""

    retry_seconds: int = 2
    """BIDIKV_RETRY_SECONDS: pause between attempts to take or renew the Lease."""

    http_host: str = ""
    """BIDIKV_HTTP_HOST: address of /metrics, /healthz and /readyz; empty listens on all."""

    http_port: int = 8080
    """BIDIKV_HTTP_PORT: their port."""

    log_level: str = "INFO"
    """BIDIKV_LOG_LEVEL: DEBUG, INFO, WARNING or ERROR."""

    workers: int = 8
    """BIDIKV_WORKERS: resources reconciled at the same time."""

    queue_limit: int = 100_000
    """BIDIKV_QUEUE_LIMIT: keys that may wait; one more makes the process unhealthy, so that it restarts and relists."""

    resync_seconds: int = 600
    """BIDIKV_RESYNC_SECONDS: the cache is compared with the API server itself about this often."""

    write_timeout_seconds: int = 5
    """BIDIKV_WRITE_TIMEOUT_SECONDS: limit of one writing request; bounds what is in flight when a lease is lost."""

    poll_seconds: int = 15
    """BIDIKV_POLL_SECONDS: how often every engine is asked for its report."""

    token_propagation_seconds: int = 180
    """BIDIKV_TOKEN_PROPAGATION_SECONDS: what each step of a rotation of the peers' token gives kubelets to mount it.
    They look every 60 to 90 s; the default lets each of them fail once."""


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings from the environment.

    Raises:
        SettingsError: a variable is missing or malformed.
    """
    source = _Source(environ)
    settings = Settings(
        runtime_image=source.text("RUNTIME_IMAGE", required=True),
        namespaces=tuple(sorted({part.strip() for part in source.text("NAMESPACES").split(",") if part.strip()})),
        lease_namespace=source.text("LEASE_NAMESPACE") or _own_namespace() or "default",
        operator_namespace=source.text("OPERATOR_NAMESPACE") or _own_namespace(),
        lease_name=source.text("LEASE_NAME") or "bidikv-operator",
        identity=source.text("IDENTITY") or f"{socket.gethostname()}_{os.getpid()}",
        lease_seconds=source.whole("LEASE_SECONDS", default=15, low=2, high=600),
        renew_deadline_seconds=source.whole("RENEW_DEADLINE_SECONDS", default=10, low=1, high=600),
        retry_seconds=source.whole("RETRY_SECONDS", default=2, low=1, high=60),
        http_host=source.text("HTTP_HOST"),
        http_port=source.whole("HTTP_PORT", default=8080, low=0, high=65535),
        log_level=source.one_of("LOG_LEVEL", default="INFO", allowed=LOG_LEVELS),
        workers=source.whole("WORKERS", default=8, low=1, high=64),
        queue_limit=source.whole("QUEUE_LIMIT", default=100_000, low=1, high=10_000_000),
        resync_seconds=source.whole("RESYNC_SECONDS", default=600, low=5, high=86_400),
        write_timeout_seconds=source.whole("WRITE_TIMEOUT_SECONDS", default=5, low=1, high=300),
        poll_seconds=source.whole("POLL_SECONDS", default=15, low=1, high=30),
        token_propagation_seconds=source.whole("TOKEN_PROPAGATION_SECONDS", default=180, low=1, high=86_400),
    )
    if not settings.retry_seconds < settings.renew_deadline_seconds < settings.lease_seconds:
        raise SettingsError(
            f"{PREFIX}RETRY_SECONDS < {PREFIX}RENEW_DEADLINE_SECONDS < {PREFIX}LEASE_SECONDS must hold, but they are "
            f"{settings.retry_seconds}, {settings.renew_deadline_seconds} and {settings.lease_seconds}"
        )
    if settings.renew_deadline_seconds + settings.write_timeout_seconds > settings.lease_seconds:
        raise SettingsError(
            f"{PREFIX}RENEW_DEADLINE_SECONDS + {PREFIX}WRITE_TIMEOUT_SECONDS must not exceed {PREFIX}LEASE_SECONDS, or "
            "a deposed leader's last write could still arrive under the next one; they are "
            f"{settings.renew_deadline_seconds}, {settings.write_timeout_seconds} and {settings.lease_seconds}"
        )
    return settings


def _own_namespace() -> str:
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError:
        return ""  # not in a cluster


class _Source:
    """Typed reads of prefixed variables; an empty variable counts as unset."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, name: str, *, required: bool = False) -> str:
        value = self._environ.get(PREFIX + name, "").strip()
        if required and not value:
            raise SettingsError(f"{PREFIX}{name} is not set; set it in the operator's Deployment (the chart does)")
        return value

    def whole(self, name: str, *, default: int, low: int, high: int) -> int:
        value = self._convert(name, default, int, "a whole number")
        if not low <= value <= high:
            raise SettingsError(f"{PREFIX}{name} is {value}; set it to between {low} and {high}")
        return value

    def one_of(self, name: str, *, default: str, allowed: tuple[str, ...]) -> str:
        value = self.text(name).upper() or default
        if value not in allowed:
            raise SettingsError(f"{PREFIX}{name} is {value!r}; set it to one of {', '.join(allowed)}")
        return value

    def _convert(self, name: str, default: _T, convert: Callable[[str], _T], what: str) -> _T:
        text = self.text(name)
        if not text:
            return default
        try:
            return convert(text)
        except ValueError:
            raise SettingsError(f"{PREFIX}{name} is {text!r}; set it to {what}") from None
