"""Engines as the router sees them: one immutable snapshot at a time; pure.

``ready`` engines get requests. ``serving`` ones include those that terminate but still answer: their KV can be read, so
they remain sources until they are gone, and where no other is left they get requests, too, as kube-proxy does it. Both
follow the conditions of ``discovery.k8s.io/v1`` EndpointSlices.

A data-parallel rank has a KV cache of its own, so it is an engine of its own here: its pod's API is told which rank is
meant, and its ports count up by its number, as vLLM's side channel does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine."""

    host: str
    """IP address, or a name in static mode."""
    port: int
    """Of vLLM's HTTP API."""
    lookup_port: int
    """Of the connector's lookup port."""
    ready: bool = True
    serving: bool = True
    terminating: bool = False
    zone: str = ""
    """``topology.kubernetes.io/zone`` of its node; empty when unknown."""
    state_port: int = 0
    """Of its reports; 0 when it gives none."""
    name: str = ""
    """Of the pod, for people."""
    rank: int = -1
    """Of the data-parallel ranks behind this API the one that is meant; -1: there is only one."""
    address: str = field(init=False)
    """``host:port`` or ``host:port#rank``: the identity in rankings, loads and pools."""
    lookup: str = field(init=False)
    """``host:lookup_port``: the identity as a source of KV."""

    def __post_init__(self) -> None:
        host = f"[{self.host}]" if ":" in self.host else self.host
        suffix = f"#{self.rank}" if self.rank >= 0 else ""
        object.__setattr__(self, "address", f"{host}:{self.port}{suffix}")
        object.__setattr__(self, "lookup", f"{host}:{self.lookup_port}")


def expand_ranks(endpoint: Endpoint, ranks: int) -> tuple[Endpoint, ...]:
    """The data-parallel ranks of the engine at ``endpoint``, which holds the ports of the first one."""
    if ranks == 1:
        return (endpoint,)
    return tuple(
        replace(
            endpoint,
            rank=rank,
            lookup_port=endpoint.lookup_port + rank,
            state_port=endpoint.state_port + rank if endpoint.state_port else 0,
        )
        for rank in range(ranks)
    )


@dataclass(frozen=True, slots=True)
class Pools:
    """All known engines."""

    prefill: tuple[Endpoint, ...] = ()
    decode: tuple[Endpoint, ...] = ()
    ready_prefill: tuple[Endpoint, ...] = field(init=False)
    ready_decode: tuple[Endpoint, ...] = field(init=False)
    serving_prefill: tuple[Endpoint, ...] = field(init=False)
    serving_decode: tuple[Endpoint, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ready_prefill", _select_ready(self.prefill))
        object.__setattr__(self, "ready_decode", _select_ready(self.decode))
        object.__setattr__(self, "serving_prefill", tuple(e for e in self.prefill if e.serving))
        object.__setattr__(self, "serving_decode", tuple(e for e in self.decode if e.serving))

    def explain_unready(self) -> str | None:
        """Why no turn can be served now, in one sentence; None when one can."""
        missing = [
            role for role, usable in (("prefill", self.serving_prefill), ("decode", self.serving_decode)) if not usable
        ]
        return f"No {' and no '.join(missing)} engine is ready." if missing else None


def _select_ready(endpoints: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
    # A Service that publishes unready addresses reports ready for all; serving still tells the truth then.
    return tuple(e for e in endpoints if is_ready(e))


def is_ready(endpoint: Endpoint) -> bool:
    """Whether it gets requests while others do."""
    return endpoint.ready and endpoint.serving and not endpoint.terminating


def parse_static(text: str, lookup_port: int, state_port: int = 0, ranks: int = 1) -> tuple[Endpoint, ...]:
    """Engines from ``host:port[@lookup_port[@state_port]][,...]``, each of so many data-parallel ranks.

    Raises:
        ValueError: an entry is malformed; the sentence names it.
    """
    endpoints: list[Endpoint] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        address, *ports = entry.split("@")
        host, _, port = address.rpartition(":")
        if not host or len(ports) > 2 or not all(number.isdigit() for number in (port, *ports)):
            raise ValueError(f"the static engine {entry!r} is not host:port or host:port@lookup_port[@state_port]")
        lookup, state = [*map(int, ports), *(lookup_port, state_port)[len(ports) :]]
        endpoints += expand_ranks(Endpoint(host.strip("[]"), int(port), lookup, state_port=state), ranks)
    return tuple(endpoints)
