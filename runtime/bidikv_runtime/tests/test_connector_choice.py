"""The longest match, joined from at most two sources: by hand and against trying everything."""

from __future__ import annotations

from itertools import product

import hypothesis.strategies as st
import pytest
from hypothesis import given

from bidikv_runtime.connector import wire
from bidikv_runtime.connector.choice import Match, choose_parts
from bidikv_runtime.connector.sources import Source

Span = tuple[int, int]


def holding(source: int, *spans: Span) -> tuple[Source, wire.Found]:
    """A source that holds ``spans`` (first, end): its block ``1000 * source + i`` for position i."""
    runs = [
        wire.Run(first, [1000 * source + i for i in range(first, end)], [1 + i for i in range(first, end)])
        for first, end in spans
    ]
    peer = wire.Peer(f"engine-{source}", "10.0.0.1", 5600, 1)
    return Source(f"10.0.0.{source}", 5700), wire.Found(1, source, runs, peer)


def shape(match: Match | None) -> list[tuple[int, int, int]]:
    """(source, offset, blocks) of each part."""
    return [(part.epoch, part.offset, len(part.blocks)) for part in match.parts] if match else []


@pytest.mark.parametrize(
    ("answers", "start", "limit", "parts"),
    [
        ([], 0, 99, []),
        ([holding(1)], 0, 99, []),
        ([holding(1, (0, 5))], 0, 99, [(1, 0, 5)]),
        ([holding(1, (0, 5))], 0, 3, [(1, 0, 3)]),
        ([holding(1, (0, 5))], 2, 99, [(1, 0, 3)]),  # the local prefix has two blocks
        ([holding(1, (0, 5))], 5, 99, []),
        ([holding(1, (2, 5))], 0, 99, []),
        ([holding(1, (2, 5))], 2, 99, [(1, 0, 3)]),
        ([holding(1, (0, 5)), holding(2, (0, 7))], 0, 99, [(2, 0, 7)]),
        ([holding(1, (0, 5)), holding(2, (0, 5))], 0, 99, [(1, 0, 5)]),  # the first named
        ([holding(1, (0, 5)), holding(2, (5, 9))], 0, 99, [(1, 0, 5), (2, 5, 4)]),
        ([holding(1, (0, 5)), holding(2, (3, 9))], 0, 99, [(1, 0, 5), (2, 5, 4)]),  # the first as far as it goes
        ([holding(1, (3, 9)), holding(2, (0, 5))], 0, 99, [(2, 0, 5), (1, 5, 4)]),
        ([holding(1, (0, 5)), holding(2, (6, 9))], 0, 99, [(1, 0, 5)]),  # a gap
        ([holding(1, (0, 2), (5, 9)), holding(2, (0, 6))], 0, 99, [(2, 0, 6), (1, 6, 3)]),
        ([holding(1, (0, 5)), holding(2, (5, 7)), holding(3, (7, 9))], 0, 99, [(1, 0, 5), (2, 5, 2)]),  # two at most
        ([holding(1, (0, 5)), holding(2, (0, 9)), holding(3, (5, 9))], 0, 99, [(2, 0, 9)]),  # one part is better
        ([holding(1, (0, 5)), holding(2, (5, 9))], 0, 5, [(1, 0, 5)]),  # the second is not needed
        ([holding(1, (0, 5)), holding(2, (5, 9)), holding(3, (5, 9))], 0, 99, [(1, 0, 5), (2, 5, 4)]),
    ],
)
def test_choice(
    answers: list[tuple[Source, wire.Found]], start: int, limit: int, parts: list[tuple[int, int, int]]
) -> None:
    assert shape(choose_parts(answers, start, limit)) == parts


@pytest.mark.parametrize(
    ("answers", "parts"),
    [
        ([holding(1, (0, 5))], [(1, 0, 4)]),
        ([holding(1, (0, 1))], []),
        ([holding(1, (0, 5)), holding(2, (5, 9))], [(1, 0, 4)]),  # the first one's last block is needed for the join
        ([holding(1, (0, 5)), holding(2, (4, 9))], [(1, 0, 4), (2, 4, 4)]),
    ],
)
def test_the_last_block_of_a_run_can_be_left_out(
    answers: list[tuple[Source, wire.Found]], parts: list[tuple[int, int, int]]
) -> None:
    assert shape(choose_parts(answers, drop_last=True)) == parts


def test_a_trimmed_match_keeps_its_leading_blocks() -> None:
    match = choose_parts([holding(1, (0, 5)), holding(2, (5, 9))])
    assert match is not None
    assert [shape(match.trim(count)) for count in (9, 6, 5, 1)] == [
        [(1, 0, 5), (2, 5, 4)],
        [(1, 0, 5), (2, 5, 1)],
        [(1, 0, 5)],
        [(1, 0, 1)],
    ]


def to_spans(held: list[bool]) -> list[Span]:
    """Maximal runs of True."""
    edges = [i for i in range(len(held) + 1) if (i and held[i - 1]) != (i < len(held) and held[i])]
    return list(zip(edges[::2], edges[1::2], strict=True))


WIDTH = 9


def try_everything(sources: list[list[bool]], start: int, limit: int, drop_last: bool) -> tuple[int, int]:
    """(blocks, parts) of the best assignment of each position to a source that holds it there, in at most two parts."""
    usable = [list(held) for held in sources]
    if drop_last:
        usable = [[held[i] and i + 1 < WIDTH and held[i + 1] for i in range(WIDTH)] for held in sources]
    best = (0, 0)
    for first, second in product(range(len(sources)), repeat=2):
        for split in range(start, limit + 1):
            end = start
            while end < limit and usable[first if end < split else second][end]:
                end += 1
            parts = 1 if end <= split or first == second else 2
            best = max(best, (end - start, -parts)) if end > start else best
    return best[0], -best[1]


@given(
    sources=st.lists(st.lists(st.booleans(), min_size=WIDTH, max_size=WIDTH), min_size=1, max_size=4),
    start=st.integers(0, WIDTH - 1),
    limit=st.integers(1, WIDTH),
    drop_last=st.booleans(),
)
def test_choice_is_as_good_as_trying_everything(
    sources: list[list[bool]], start: int, limit: int, drop_last: bool
) -> None:
    answers = [holding(number, *to_spans(held)) for number, held in enumerate(sources, 1)]
    match = choose_parts(answers, start, limit, drop_last)
    blocks, parts = try_everything(sources, start, max(start, limit), drop_last)
    assert (match.count, len(match.parts)) == (blocks, parts) if match else blocks == 0
    position = start
    for part in match.parts if match else ():
        assert start + part.offset == position
        assert part.blocks == tuple(1000 * part.epoch + position + i for i in range(len(part.blocks)))
        assert part.publications == tuple(1 + position + i for i in range(len(part.blocks)))
        position += len(part.blocks)
