"""Records of requests for tests of what is made of them."""

from __future__ import annotations

from bidikv_runtime.router.observe.record import TurnRecord

STREAM = TurnRecord(
    received_at=10.0,
    route="chat",
    session=b"s" * 16,
    path="bidirectional",
    reason="history",
    phase="stream",
    status=200,
    prefill="10.0.0.1:8000",
    decode="10.0.0.2:8000",
    body_bytes=5000,
    prompt_tokens=1200,
    admitted_at=10.25,
    prefill_sent_at=10.25,
    prefill_done_at=11.0,
    decode_sent_at=11.0,
    decode_head_at=11.5,
    first_byte_at=11.75,
    last_byte_at=13.75,
    ended_at=14.0,
    chunks=5,
    longest_gap=0.75,
    prefills=1,
    handed_over=1,
    streamed=True,
)
"""A streamed turn by the long path; all of its times are exact in binary."""
