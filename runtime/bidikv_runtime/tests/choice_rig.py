"""Builders for tests of the choice of engines: endpoints, reports, and a fleet with a clock of its own."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from bidikv_runtime.contract import EngineReport, RouterConfig, SessionReport
from bidikv_runtime.router.choice.endpoints import Endpoint, Pools
from bidikv_runtime.router.choice.fleet import Fleet
from bidikv_runtime.router.choice.ring import compute_weights
from bidikv_runtime.router.limits import Limits

CONFIG = RouterConfig(namespace="ns", prefill_service="p", decode_service="d", served_model_name="m")


def endpoint(
    number: int, *, ready: bool = True, serving: bool = True, terminating: bool = False, **more: Any
) -> Endpoint:
    return Endpoint(f"10.0.0.{number}", 8000, 5700, ready, serving, terminating, **more)


def prefill(number: int, **more: Any) -> Endpoint:
    return endpoint(number, **more)


def decode(number: int, **more: Any) -> Endpoint:
    return endpoint(100 + number, **more)


def sessions(count: int) -> list[bytes]:
    """Keys as the router derives them."""
    return [blake2b(b"%d" % number, digest_size=16).digest() for number in range(count)]


def held(session: bytes, tokens: int, *, prompt: int = 0, body: int = 0) -> SessionReport:
    """A session of which ``tokens`` are held; of a prompt of that length unless told."""
    return SessionReport(session.hex(), prompt or tokens, max(prompt, tokens), tokens, body or 4 * (prompt or tokens))


def report(*held_sessions: SessionReport, **more: Any) -> EngineReport:
    values: dict[str, Any] = {
        "engine": "e",
        "epoch": "1",
        "sequence": 1,
        "compatibility": "a",
        "requests": 0,
        "queued_tokens": 0,
        "prefill_tokens_per_second": 0.0,
        "free_blocks": 1.0,
    }
    return EngineReport(**(values | more), sessions=held_sessions)


class FleetRig:
    """A fleet whose time the test moves."""

    def __init__(
        self,
        prefills: Sequence[Endpoint],
        decodes: Sequence[Endpoint],
        *,
        limits: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:
        self.now = 1000.0
        self.fleet = Fleet(
            lambda: self.now, replace(Limits(), **(limits or {})), replace(CONFIG, **config), random.Random(1)
        )
        self.fleet.replace(Pools(tuple(prefills), tuple(decodes)))

    def report(self, endpoint: Endpoint, *held_sessions: SessionReport, **more: Any) -> None:
        """The engine reports now."""
        self.fleet.take_report(endpoint.address, report(*held_sessions, **more))

    def first(self, session: bytes) -> Endpoint:
        """The decode engine that a turn of ``session`` would go to."""
        return self.fleet.choose_decode(session)[0]


def rank(key: bytes, names: Iterable[str]) -> list[str]:
    """What a ranking must be: ``names`` from the highest to the lowest weight, whatever their order."""
    names = list(names)
    weights = compute_weights(key, [name.encode() for name in names])
    return [name for _, name in sorted(zip(weights, names, strict=True), reverse=True)]
