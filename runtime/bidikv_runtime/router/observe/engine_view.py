"""What is known of one engine, for gauges and /debug/engines; pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

EngineState = Literal["ready", "unready", "terminating"]
BreakerState = Literal["closed", "half_open", "open"]


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine at this moment."""

    role: Literal["prefill", "decode"]
    address: str
    name: str = ""
    """Of its pod."""
    zone: str = ""
    state: EngineState = "ready"
    breaker: BreakerState = "closed"
    load: float = 0.0
    """Unfinished requests, of all replicas, as the choice of engines counts them."""
    queued_tokens: int = 0
    """Prompt tokens that it has yet to compute, likewise."""
    prefill_tokens_per_second: float = 0.0
    """As it reported; 0 when not known."""
    report_age: float = math.inf
    """Seconds since its last report; infinite without one."""
    compatibility: str = ""
    sessions: int = 0
    """That it reported to hold."""
