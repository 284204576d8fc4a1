"""A request's read ends once per rank, with the prefix that is valid without a gap over its parts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_runtime.connector.reads import Outcome, Part, Reads, compute_outcome
from bidikv_runtime.connector.sources import Source
from bidikv_runtime.connector.ticket import Ticket, build_part_id

SOURCES = (Source("10.0.0.1", 5700), Source("10.0.0.2", 5700))


def make_parts(lengths: Sequence[int], request_id: str = "r", deadline: float = 10.0) -> list[Part]:
    """Parts of ``lengths`` blocks, one after the other; the local blocks are 100, 101, ..."""
    parts, offset = [], 0
    for number, length in enumerate(lengths):
        blocks = tuple(range(offset, offset + length))
        ticket = Ticket(request_id, len(lengths), offset, SOURCES[number % 2], 1, blocks, blocks)
        parts.append(Part(ticket, [100 + block for block in blocks], 0.0, deadline))
        offset += length
    return parts


def start(reads: Reads, parts: Sequence[Part]) -> list[str]:
    ids = [build_part_id(part.ticket.request_id, number) for number, part in enumerate(parts)]
    for part_id, part in zip(ids, parts, strict=True):
        reads.start(part_id, part)
    return ids


@pytest.mark.parametrize(
    ("valid", "failed", "quarantined", "expected"),
    [
        pytest.param((3, 2), (), (), Outcome("r", 5, frozenset(), False), id="all valid"),
        pytest.param((3, 1), (), (), Outcome("r", 4, frozenset({104}), False), id="the second in part"),
        pytest.param((2, 2), (), (), Outcome("r", 2, frozenset({102, 103, 104}), False), id="a gap in the first"),
        pytest.param((0, 2), (), (), Outcome("r", 0, frozenset({100, 101, 102, 103, 104}), False), id="none is valid"),
        pytest.param((3, 0), (1,), (), Outcome("r", 3, frozenset({103, 104}), False), id="the second fails"),
        pytest.param((0, 2), (0,), (), Outcome("r", 0, frozenset(range(100, 105)), True), id="the first fails"),
        pytest.param((0, 0), (1,), (), Outcome("r", 0, frozenset(range(100, 105)), True), id="nothing at all"),
        pytest.param((3, 0), (1,), (1,), Outcome("r", 0, frozenset({103, 104}), True), id="the second in quarantine"),
        pytest.param((0, 2), (0,), (0,), Outcome("r", 0, frozenset(range(100, 105)), True), id="the first in it"),
    ],
)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_outcome_of_two_parts(
    valid: tuple[int, int],
    failed: tuple[int, ...],
    quarantined: tuple[int, ...],
    expected: Outcome,
    order: tuple[int, int],
) -> None:
    reads = Reads()
    ids = start(reads, make_parts((3, 2)))
    first, last = order
    reads.end(ids[first], valid[first], failed=first in failed, quarantined=first in quarantined)
    assert reads.take_outcomes() == []
    reads.end(ids[last], valid[last], failed=last in failed, quarantined=last in quarantined)
    assert reads.take_outcomes() == [expected]
    assert reads.take_outcomes() == []
    assert len(reads) == 0


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=4))
def test_what_counts_and_what_is_recomputed_make_up_the_read(lengths_and_valid: list[tuple[int, int]]) -> None:
    parts = make_parts([length for length, _ in lengths_and_valid])
    for part, (length, valid) in zip(parts, lengths_and_valid, strict=True):
        part.valid = min(valid, length)
    outcome = compute_outcome(parts)
    local_blocks = [block for part in parts for block in part.local_blocks]
    assert local_blocks[outcome.valid :] == sorted(outcome.invalid_blocks)
    first_gap = next((i for i, part in enumerate(parts) if part.valid != len(part.local_blocks)), len(parts))
    assert outcome.valid == sum(part.valid or 0 for part in parts[: first_gap + 1])


def test_requests_end_for_themselves() -> None:
    reads = Reads()
    a = start(reads, make_parts((1, 1), "a"))
    b = start(reads, make_parts((2,), "b"))
    reads.end(a[0], 1)
    reads.end(b[0], 2)
    assert [outcome.request_id for outcome in reads.take_outcomes()] == ["b"]
    assert reads.find(a[0]) is None
    assert reads.find(a[1]) is not None
    reads.end(a[1], 1)
    assert [outcome.request_id for outcome in reads.take_outcomes()] == ["a"]


def test_only_transfers_are_overdue() -> None:
    reads = Reads()
    parts = make_parts((1, 1), deadline=10.0)
    ids = start(reads, parts)
    assert reads.find_overdue(9.9) == []
    assert reads.find_overdue(10.0) == ids
    parts[0].transferred = True  # its source has been asked; that question has a deadline of its own
    assert reads.find_overdue(10.0) == ids[1:]
    reads.end(ids[1], 0, failed=True)
    assert reads.find_overdue(10.0) == []


def test_a_part_is_named_after_its_request() -> None:
    assert [build_part_id("chat-1", part) for part in range(2)] == ["chat-1", "chat-1/1"]
