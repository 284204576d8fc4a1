"""What a request spent its time on; pure. Metrics, access log and traces all show these stages.

Invariants: the stages of a request follow each other without gaps, from its arrival on; those of one that was answered
end with it, so that they add up to its whole time. Up to ``first_token`` they add up to the time to the first token.
"""

from __future__ import annotations

import math
from typing import Final, Literal

from bidikv_runtime.router.observe.record import TurnRecord

Stage = Literal["queue", "prefill", "handover", "first_token", "stream", "answer"]
"""queue: until it was admitted, after a try of decode alone if that was refused. prefill: until prefill's answer, the
last one if the legs ran again.
Of streams: handover, until decode's head; first_token, until the first byte of its body; stream, until the end.
Of other answers: answer, the rest."""
_SUCCESS: Final = range(200, 300)


def compute_stages(record: TurnRecord) -> list[tuple[Stage, float, float]]:
    """The stages that ``record`` completed, each with its begin and end."""
    stages: list[tuple[Stage, float, float]] = []
    isnan = math.isnan
    reached = record.received_at
    if not isnan(end := record.admitted_at):
        stages.append(("queue", reached, end))
        reached = end
    if not isnan(end := record.prefill_done_at):
        stages.append(("prefill", reached, end))
        reached = end
    if record.streamed and record.status in _SUCCESS:
        if isnan(record.first_byte_at):
            return stages
        if record.prefills and not isnan(end := record.decode_head_at):
            stages.append(("handover", reached, end))
            reached = end
        stages.append(("first_token", reached, record.first_byte_at))
        reached = record.first_byte_at
        last: Stage = "stream"
    else:
        last = "answer"
    if record.outcome == "answered":
        stages.append((last, reached, record.ended_at))
    return stages


def compute_first_token_seconds(record: TurnRecord) -> float:
    """Time to the first token of a stream; nan for anything else."""
    if not record.streamed or record.status not in _SUCCESS:
        return math.nan
    return record.first_byte_at - record.received_at
