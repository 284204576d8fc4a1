"""Which sources to read from, and when to stop waiting for the others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bidikv_runtime.connector import wire
from bidikv_runtime.connector.lookup_client import Question
from bidikv_runtime.connector.sources import Source


@dataclass(frozen=True)
class Part:
    """Blocks to read from one source: ``blocks[i]`` holds block ``offset + i`` of the match."""

    source: Source
    epoch: int
    peer: wire.Peer
    offset: int
    blocks: tuple[int, ...]
    publications: tuple[int, ...]

    def trim(self, count: int) -> Part:
        """The first ``count`` blocks."""
        return Part(self.source, self.epoch, self.peer, self.offset, self.blocks[:count], self.publications[:count])


@dataclass(frozen=True)
class Match:
    """Contiguous blocks that sources hold, in one part or joined from two."""

    parts: tuple[Part, ...]

    @property
    def count(self) -> int:
        last = self.parts[-1]
        return last.offset + len(last.blocks)

    def trim(self, count: int) -> Match:
        """The first ``count`` blocks; ``count`` is at least 1."""
        return Match(tuple(part.trim(count - part.offset) for part in self.parts if part.offset < count))


class _Piece(NamedTuple):
    """A run that one source holds; ``end`` is where its use ends, which may come before the run's own end."""

    source: Source
    found: wire.Found
    run: wire.Run
    end: int


def choose_parts(
    answers: Iterable[tuple[Source, wire.Found]],
    start: int = 0,
    limit: int = wire.MAXIMUM_BLOCKS,
    drop_last: bool = False,
) -> Match | None:
    """The longest match of blocks from ``start`` on, joined from at most two parts; None if there is none.

    Of equally long matches, one with fewer parts wins, then the one whose sources come first in ``answers``. A part
    takes all that its run offers before the next one begins.

    Args:
        answers: what each source found, in the order in which the request names the sources.
        start: position in the question of the first block that is wanted: the local prefix ends there.
        limit: position in the question after the last block that is wanted.
        drop_last: leave out the last block of every run. vLLM drops the last block of a prefix hit for draft models
            that read the target's hidden states (EAGLE, MTP): their KV at a block's last position depends on the token
            after it, which the block's hash does not cover. The acceptance of drafts is at stake, never the answer.
    """
    pieces = [
        _Piece(source, found, run, min(run.end - drop_last, limit)) for source, found in answers for run in found.runs
    ]
    best: tuple[_Piece, ...] = ()
    best_end = start
    for first in pieces:
        if first.run.first <= start and first.end > best_end:
            best, best_end = (first,), first.end
    if best_end < limit:
        for first in pieces:
            if first.run.first > start or first.end <= start:
                continue
            for second in pieces:
                if second.run.first <= first.end and second.end > best_end:
                    best, best_end = (first, second), second.end
    if not best:
        return None
    parts: list[Part] = []
    position = start
    for piece in best:
        taken = slice(position - piece.run.first, piece.end - piece.run.first)
        parts.append(
            Part(
                piece.source,
                piece.found.epoch,
                piece.found.peer,
                position - start,
                tuple(piece.run.blocks[taken]),
                tuple(piece.run.publications[taken]),
            )
        )
        position = piece.end
    return Match(tuple(parts))


def is_decided(questions: Sequence[Question], complete: bool, found: bool, settle_until: float, now: float) -> bool:
    """Whether waiting longer cannot help enough: all have answered, all blocks asked for were found (``complete``), or
    some were ``found`` and the slower sources have had until ``settle_until``."""
    if not any(question.open for question in questions):
        return True
    return complete or (found and now >= settle_until)
