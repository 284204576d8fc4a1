"""Which source to read from, and when to stop waiting for the others. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bidikv_runtime.connector import wire
from bidikv_runtime.connector.lookup_client import Question
from bidikv_runtime.connector.sources import Source


@dataclass(frozen=True)
class Answer:
    """The published prefix at the chosen source; ``blocks[i]`` holds the i-th block that was asked for."""

    source: Source
    epoch: int
    blocks: Sequence[int]
    publications: Sequence[int]
    peer: wire.Peer


def choose_answer(questions: Sequence[Question], own_engine: str) -> Answer | None:
    """The longest non-empty published prefix; the first source named wins a tie. An engine never reads from itself."""
    best: Answer | None = None
    for question in questions:
        reply = question.reply
        if not isinstance(reply, wire.Found) or reply.peer.engine_id == own_engine:
            continue
        if len(reply.blocks) > (len(best.blocks) if best else 0):
            best = Answer(question.source, reply.epoch, reply.blocks, reply.publications, reply.peer)
    return best


def is_decided(questions: Sequence[Question], best: Answer | None, asked: int, settle_until: float, now: float) -> bool:
    """Whether waiting longer cannot help enough: all have answered, all of ``asked`` blocks were found, or some were
    found and the slower sources have had until ``settle_until``."""
    if not any(question.open for question in questions):
        return True
    return best is not None and (len(best.blocks) >= asked or now >= settle_until)
