"""Where a request stands in a distributed trace (W3C Trace Context, https://www.w3.org/TR/trace-context/); pure.

Why apart from the exporter: the ids must exist before the first leg is sent, whether or not OpenTelemetry is installed,
and cost about a microsecond. Both legs carry the router's own span as their parent.

Invariant: a malformed ``traceparent`` starts a new trace, as the specification asks (section 3.2.2.3), and is never an
error.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Final

TRACEPARENT: Final = b"traceparent"
_FORM: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1
_RATIO_BITS: Final = (1 << 64) - 1
"""OpenTelemetry's TraceIdRatioBased compares the low 64 bits of the trace id, so that all services agree."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The router's span of one request."""

    trace_id: int
    """128 bits."""
    span_id: int
    """64 bits."""
    parent_id: int
    """The client's span; 0 for none."""
    sampled: bool

    def header(self) -> bytes:
        """The value of ``traceparent`` for the engines."""
        return b"00-%032x-%016x-%02x" % (self.trace_id, self.span_id, self.sampled)


def start_trace(traceparent: bytes | None, ratio: float) -> TraceContext:
    """The context of a new request: below the client's span if it sent one, else of a new trace.

    Args:
        traceparent: the client's header; its sampling decision is kept.
        ratio: share of new traces that are sampled, 0 to 1.
    """
    span_id = random.getrandbits(64) or 1
    match = _FORM.fullmatch(traceparent) if traceparent else None
    # Later versions may append fields, version 00 may not; ff is no version.
    if match is not None and match[1] != b"ff" and (match[5] is None or match[1] != b"00"):
        trace_id, parent_id = int(match[2], 16), int(match[3], 16)
        if trace_id and parent_id:
            return TraceContext(trace_id, span_id, parent_id, bool(int(match[4], 16) & _SAMPLED))
    trace_id = random.getrandbits(128) or 1
    return TraceContext(trace_id, span_id, 0, trace_id & _RATIO_BITS < ratio * (1 << 64))
