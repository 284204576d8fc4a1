"""Sources: the lookup addresses that a request names as holders of its prompt's KV.

They come from the router over the API, so they may be anything. A bad value costs the reuse of that request, with a
warning, and never the request or the engine.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from bidikv_runtime import contract

MAXIMUM_SOURCES: Final = 8
"""More sources than this are not asked: each costs a connection and a message per request."""


class Source(NamedTuple):
    """Address of a lookup port."""

    host: str
    """An IP address. A name would make zmq's one I/O thread wait for DNS, and every other source with it."""
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class SourcesError(ValueError):
    """The request's sources cannot be used."""


def parse_sources(params: Any) -> tuple[Source, ...]:
    """Sources named in a request's ``kv_transfer_params``, without repeats, at most ``MAXIMUM_SOURCES``.

    The params may be of any type: vLLM checks that of its own field only, not of ``vllm_xargs``.

    Raises:
        SourcesError: one sentence that names the bad value.
    """
    if not params:
        return ()
    if not isinstance(params, Mapping):
        raise SourcesError(f"{contract.KV_TRANSFER_PARAMS} is a {type(params).__name__}: it must be an object")
    if contract.SOURCES_PARAM not in params:
        return ()
    value = params[contract.SOURCES_PARAM]
    if not isinstance(value, list | tuple):
        raise SourcesError(f"{contract.SOURCES_PARAM} is a {type(value).__name__}: it must be a list of 'address:port'")
    return tuple(dict.fromkeys(_parse(item) for item in value[:MAXIMUM_SOURCES]))


def _parse(item: object) -> Source:
    host, colon, port = item.rpartition(":") if isinstance(item, str) else ("", "", "")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""  # an IPv6 address needs brackets, or its last group would be taken for the port
    if not colon or not _is_address(host) or not _is_port(port):
        raise SourcesError(
            f"{contract.SOURCES_PARAM} holds {item!r}: write it as 'address:port', the address in digits"
        )
    return Source(host, int(port))


def _is_address(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not address.is_multicast and not address.is_unspecified


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) <= 65535
