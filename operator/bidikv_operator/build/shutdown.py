"""How pods end: the phases between a deletion and the kernel's SIGKILL, in seconds.

An engine: leave (until every router has seen that it stops), drain (until its sessions and hand-overs were read by
others, both within the preStop hook), running requests (after SIGTERM), margin. The kubelet counts all of it within
``terminationGracePeriodSeconds``. A router waits by itself after SIGTERM and needs no hook.
"""

from __future__ import annotations

from typing import Final

from bidikv_operator.build.meta import Manifest
from bidikv_operator.resolved import Resolved, ResolvedEngine
from bidikv_runtime import contract

REQUEST_SECONDS: Final = 600
"""A stopping engine or router lets running requests finish for so long."""
ENGINE_LEAVE_SECONDS: Final = 10
"""Between leaving the EndpointSlices and anything else: until every router has seen that the engine leaves."""
ROUTER_LEAVE_SECONDS: Final = 5
"""The same for a router, which waits by itself after SIGTERM."""
MARGIN_SECONDS: Final = 30
"""For the process to end after its last request, before the kubelet kills it."""

ROUTER_GRACE_SECONDS: Final = ROUTER_LEAVE_SECONDS + REQUEST_SECONDS + MARGIN_SECONDS


def compute_engine_grace(resolved: Resolved) -> int:
    """``terminationGracePeriodSeconds`` of an engine."""
    return ENGINE_LEAVE_SECONDS + resolved.updates.drain_seconds + REQUEST_SECONDS + MARGIN_SECONDS


def build_engine_hook(resolved: Resolved, settings: ResolvedEngine) -> Manifest:
    """``preStop`` of an engine."""
    command = [
        *("python3", "-m", contract.DRAIN_MODULE),
        *("--leave-seconds", str(ENGINE_LEAVE_SECONDS)),
        *("--seconds", str(resolved.updates.drain_seconds)),
    ]
    if settings.data_parallel_size > 1:
        command += ["--ranks", str(settings.data_parallel_size)]
    return {"exec": {"command": command}}
