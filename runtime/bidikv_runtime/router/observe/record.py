"""What happened to one request: filled while it is served, then read by metrics, access log, traces and /debug.

Why one record: every observer sees the same facts, and serving costs a few attribute stores however many observe. Times
are ``time.monotonic`` in seconds; ``nan`` for what did not happen. Nothing in it holds on to a body.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bidikv_runtime.router.observe.trace_context import TraceContext

Path = Literal["local", "bidirectional", "plain", "direct"]
"""local: decode alone, which holds nearly all of the prompt. bidirectional: prefill reads the history from decode.
plain: prefill computes all of it. direct: not a turn, or one whose KV vLLM would not reuse: one engine, no choice."""
Route = Literal["chat", "completions", "responses", "messages", "models", "passed", "local"]
Phase = Literal["receive", "queue", "prefill", "decode", "stream"]
Outcome = Literal["answered", "refused", "broken", "disconnected"]
"""answered: a whole answer, whatever its status. refused: an error of the router itself. broken: cut off within."""


@dataclass(slots=True)
class TurnRecord:
    """One request."""

    received_at: float
    """Its last byte came."""
    route: Route = "passed"
    session: bytes = b""
    path: Path = "direct"
    reason: str = ""
    """Why this path: one word, a label."""
    phase: Phase = "receive"
    """Where it is, or where it ended."""
    outcome: Outcome = "answered"
    status: int = 0
    """Of the answer; 0 when there was none."""
    prefill: str = ""
    """Address of the engine of the last prefill leg."""
    decode: str = ""
    body_bytes: int = 0
    prompt_tokens: int = 0
    """As prefill reported them; 0 when unknown."""
    admitted_at: float = math.nan
    """It left the queue. Of this and the following times those of the legs before the first byte count, not those of
    legs with which a broken stream went on."""
    prefill_sent_at: float = math.nan
    prefill_done_at: float = math.nan
    decode_sent_at: float = math.nan
    decode_head_at: float = math.nan
    first_byte_at: float = math.nan
    """First byte of decode's body went to the client."""
    last_byte_at: float = math.nan
    ended_at: float = math.nan
    chunks: int = 0
    """Pieces of decode's body; of a stream about one per token."""
    longest_gap: float = 0.0
    """Between two of these."""
    retries: int = 0
    prefills: int = 0
    """Prefill legs that succeeded."""
    handed_over: int = 0
    """Of these, those whose decode engine began to answer; the others were abandoned when the request ends."""
    handovers_lost: int = 0
    """Of the abandoned ones: decode did not find what prefill had computed."""
    local_refusals: int = 0
    """How often decode, asked alone, would have had to compute too much."""
    unannounced: int = 0
    """Prefill answers that did not say what was computed."""
    streamed: bool = False
    """The answer was a stream of events."""
    keep_alives: int = 0
    """Comments sent while nothing else was there."""
    continued: int = 0
    """How often a broken stream went on elsewhere."""
    client: str = ""
    """Address of the peer."""
    trace: TraceContext | None = None
    """Its place in a distributed trace; None when tracing is off."""
