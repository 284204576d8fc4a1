"""Every bound and deadline of the router, in one frozen value.

Why: an unbounded queue or an unlimited wait is how a proxy fails first. Whatever waits or grows in the router names its
bound here, so an operator on call can read all of them at once. There is deliberately no total time limit: agents'
generations run for longer than any fixed cap, so only *lack of progress* ends a turn.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from typing import Any

_MIB = 1024 * 1024


def _limit(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Limits:
    """Bounds in bytes, counts and seconds; each is also a command-line flag."""

    max_header_bytes: int = _limit(64 * 1024, "largest head of a request or a response")
    max_header_fields: int = _limit(256, "most header fields of a request; above it the client gets 431")
    max_body_bytes: int = _limit(64 * _MIB, "largest request body; above it the client gets 413")
    max_buffered_bytes: int = _limit(512 * _MIB, "request bodies held at once, all clients together")
    max_connections: int = _limit(16384, "client connections; above it new ones are closed at once")
    max_in_flight: int = _limit(4096, "requests in flight; above it clients get 503 with Retry-After")
    max_prefills_per_engine: int = _limit(64, "prefill legs under way per ready prefill engine; 0 for no bound")
    max_queued: int = _limit(1024, "turns that wait for a prefill engine; above it clients get 429 with Retry-After")
    queue_seconds: float = _limit(60.0, "longest wait for a prefill engine; after it clients get 503 with Retry-After")
    max_idle_per_engine: int = _limit(256, "idle connections kept to one engine")
    max_sessions_remembered: int = _limit(65536, "sessions remembered to count new ones")
    head_seconds: float = _limit(30.0, "time for a client to send a request's head once it began")
    body_seconds: float = _limit(60.0, "time for a client to send the next 256 KiB of a request's body, or its rest")
    keep_alive_seconds: float = _limit(75.0, "how long an idle client connection is kept")
    connect_seconds: float = _limit(2.0, "time to connect to an engine")
    prefill_seconds: float = _limit(600.0, "longest silence of prefill, queueing included")
    decode_first_byte_seconds: float = _limit(3600.0, "wait for decode's head (not streamed: the whole generation)")
    decode_idle_seconds: float = _limit(600.0, "longest silence within decode's answer")
    comment_seconds: float = _limit(15.0, "silence of a stream of events after which a comment is sent; 0 for never")
    token_ids_from: int = _limit(512, "prompt tokens from which decode is given prefill's token ids; 0 for never")
    upstream_idle_seconds: float = _limit(
        4.0, "how long an idle engine connection is kept; must stay below the 5 s at which uvicorn closes it"
    )
    spill_floor: int = _limit(8, "unfinished requests up to which a decode engine keeps all of its sessions")
    warm_seconds: float = _limit(30.0, "over which a decode engine that joins is given its full share of new sessions")
    zone_margin_seconds: float = _limit(0.25, "how much sooner prefill in another zone must begin to be chosen")
    local_backlog_tokens: int = _limit(2048, "prompt tokens that a decode engine may have to compute itself at once")
    local_stall_seconds: float = _limit(0.1, "for which decode alone may hold up other streams to compute a prompt")
    breaker_failures: int = _limit(3, "failures in a row after which an engine is left alone for a while")
    breaker_seconds: float = _limit(1.0, "how long at first; doubled with each failure of its health check")
    breaker_max_seconds: float = _limit(30.0, "how long at most")
    probe_seconds: float = _limit(2.0, "time for an engine to answer the health check that ends this")
    report_seconds: float = _limit(1.0, "between two reports of an engine")
    report_idle_seconds: float = _limit(5.0, "the same while no request is in flight")
    report_timeout_seconds: float = _limit(1.0, "time for an engine to report")
    report_keep_seconds: float = _limit(10.0, "how long the last report of an engine counts that reports no more")
    retry_ratio: float = _limit(0.2, "retries allowed per request, on average")
    retry_reserve: float = _limit(20.0, "retries allowed in a burst")
    drain_delay_seconds: float = _limit(5.0, "after SIGTERM: keep accepting this long while Endpoints catch up")
    drain_grace_seconds: float = _limit(600.0, "after that: wait this long for running requests")


def add_limit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag per limit (``--max-body-bytes`` and so on)."""
    group = parser.add_argument_group("limits")
    for item in fields(Limits):
        kind = type(item.default)
        group.add_argument(
            f"--{item.name.replace('_', '-')}",
            type=kind,
            default=item.default,
            metavar="N",
            help=f"{item.metadata['help']} (default: %(default)s)",
        )


def build_limits(arguments: argparse.Namespace) -> Limits:
    """The limits that the flags of :func:`add_limit_arguments` ask for.

    Raises:
        ValueError: a limit is negative; the sentence names the flag.
    """
    values = {item.name: getattr(arguments, item.name) for item in fields(Limits)}
    for name, value in values.items():
        if not value >= 0:  # nan neither
            raise ValueError(f"--{name.replace('_', '-')} is {value}; give a number of at least 0")
    return Limits(**values)
