"""The publication index never confirms a block that was re-allocated since the lookup."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from bidikv_runtime.connector.index import PublicationIndex, compute_final_tokens
from bidikv_runtime.connector.wire import MAXIMUM_RUNS

A, B, C, D = b"hash-a", b"hash-b", b"hash-c", b"hash-d"


def found(index: PublicationIndex, hashes: list[bytes]) -> tuple[list[int], list[int]]:
    """Blocks and numbers of the run that a lookup of ``hashes`` starts with."""
    runs = index.lookup(hashes)
    return (runs[0].blocks, runs[0].publications) if runs and runs[0].first == 0 else ([], [])


def published(hashes: list[bytes], blocks: list[int]) -> PublicationIndex:
    index = PublicationIndex()
    index.publish(hashes, blocks)
    return index


@pytest.mark.parametrize(
    ("found", "computed", "in_flight", "total", "final"),
    [
        (0, 100, 0, 101, 100),  # finished: the sampled token has no KV
        (0, 101, 1, 101, 100),  # asynchronous scheduling: the next step is under way
        (96, 97, 0, 98, 97),
        (96, 100, 0, 100, 99),
        (0, 64, 64, 500, 0),  # aborted in its first step
        (0, 128, 64, 500, 64),  # aborted in its second
        # Aborted in its first step, which may be the one that computes what it found:
        (96, 500, 404, 500, 0),
        (96, 96, 0, 500, 0),
        (96, 160, 64, 500, 0),
        (96, 224, 64, 500, 160),
        (96, 0, 0, 500, 0),  # preempted
        (0, 0, 64, 500, 0),
    ],
)
def test_only_what_an_ended_step_proves_is_final(
    found: int, computed: int, in_flight: int, total: int, final: int
) -> None:
    assert compute_final_tokens(found, computed, in_flight, total) == final


@pytest.mark.parametrize(
    ("asked", "runs"),
    [
        ([A, B, C], [(0, [1, 2, 3])]),
        ([A, B], [(0, [1, 2])]),
        ([A, D, C], [(0, [1]), (2, [3])]),
        ([D, A], [(1, [1])]),
        ([A, B, C, D], [(0, [1, 2, 3])]),
        ([D, D, B, C], [(2, [2, 3])]),
        ([D, D], []),
        ([], []),
    ],
)
def test_lookup_gives_the_runs_that_are_published(asked: list[bytes], runs: list[tuple[int, list[int]]]) -> None:
    looked_up = published([A, B, C], [1, 2, 3]).lookup(asked)
    assert [(run.first, run.blocks) for run in looked_up] == runs
    assert all(run.publications == run.blocks for run in looked_up)  # published in order, from number 1 on


def test_only_the_first_runs_are_given() -> None:
    hashes = [bytes([n]) * 8 for n in range(20)]
    index = published(hashes[::2], list(range(10)))
    assert [run.first for run in index.lookup(hashes)] == [2 * i for i in range(MAXIMUM_RUNS)]


def test_publishing_again_keeps_the_number_and_reports_nothing_new() -> None:
    index = PublicationIndex()
    assert index.publish([A, B], [1, 2]) == [1, 2]
    blocks, numbers = found(index, [A, B])
    assert index.publish([A, B, C], [1, 2, 3]) == [3]
    assert index.validate(blocks, numbers) == 2


def test_a_republished_block_has_another_number_even_with_equal_content() -> None:
    index = published([A], [1])
    blocks, numbers = found(index, [A])
    assert index.unpublish([1]) == 1
    index.publish([A], [1])
    assert found(index, [A])[0] == [1]
    assert index.validate(blocks, numbers) == 0


def test_validation_ends_at_the_first_block_that_changed() -> None:
    index = published([A, B, C], [1, 2, 3])
    blocks, numbers = found(index, [A, B, C])
    index.unpublish([2])
    assert index.validate(blocks, numbers) == 1


def test_unpublishing_the_older_of_two_equal_blocks_keeps_the_newer() -> None:
    index = published([A], [1])
    index.publish([A], [2])
    index.unpublish([1])
    assert found(index, [A])[0] == [2]
    index.unpublish([2])
    assert found(index, [A])[0] == []
    assert len(index) == 0


def test_a_block_published_under_another_hash_leaves_the_first() -> None:
    index = published([A], [1])
    blocks, numbers = found(index, [A])
    assert index.publish([B], [1]) == [1]
    assert found(index, [A])[0] == []
    assert found(index, [B])[0] == [1]
    assert index.validate(blocks, numbers) == 0


def test_clearing_invalidates_reads_in_flight() -> None:
    index = published([A], [1])
    blocks, numbers = found(index, [A])
    index.clear()
    index.publish([A], [1])
    assert index.validate(blocks, numbers) == 0


def test_unknown_blocks_neither_validate_nor_unpublish() -> None:
    index = PublicationIndex()
    assert index.validate([7], [1]) == 0
    assert index.unpublish([7]) == 0


def test_epochs_differ_between_processes() -> None:
    assert len({PublicationIndex().epoch for _ in range(100)}) == 100


def test_lists_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        PublicationIndex().publish([A, B], [1])


POOL = 6
HASHES = [f"prefix-{length}-{branch}".encode() for branch in range(2) for length in range(4)]


@dataclass(frozen=True)
class Ticket:
    hashes: tuple[bytes, ...]
    blocks: tuple[int, ...]
    numbers: tuple[int, ...]
    allocations: tuple[int, ...]
    """How often each block had been allocated at the lookup."""


class Pool(RuleBasedStateMachine):
    """A block pool that really re-uses blocks, beside the index: what the index says must hold for the pool."""

    tickets: Bundle[Ticket] = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.index = PublicationIndex()
        self.allocations = [0] * POOL
        self.content: list[bytes | None] = [None] * POOL

    @rule(branch=st.sampled_from([0, 1]), blocks=st.lists(st.integers(0, POOL - 1), max_size=4, unique=True))
    def compute_and_publish(self, branch: int, blocks: list[int]) -> None:
        """A request takes blocks, fills them with a prefix and finishes."""
        self.reallocate(blocks)
        hashes = HASHES[4 * branch : 4 * branch + len(blocks)]
        for block, content in zip(blocks, hashes, strict=True):
            self.content[block] = content
        self.index.publish(hashes, blocks)

    @rule(blocks=st.lists(st.integers(0, POOL - 1), max_size=3, unique=True))
    def reallocate(self, blocks: list[int]) -> None:
        """A request takes blocks, and may write to them from then on."""
        self.index.unpublish(blocks)
        for block in blocks:
            self.allocations[block] += 1
            self.content[block] = None

    @rule(blocks=st.lists(st.integers(0, POOL - 1), max_size=3, unique=True))
    def publish_again(self, blocks: list[int]) -> None:
        """A request that hit the cache finishes: the same blocks under the same hashes."""
        full = [(content, block) for block in blocks if (content := self.content[block]) is not None]
        self.index.publish([content for content, _ in full], [block for _, block in full])

    @rule()
    def clear(self) -> None:
        self.index.clear()

    @rule(target=tickets, branch=st.sampled_from([0, 1]), length=st.integers(0, 4))
    def lookup(self, branch: int, length: int) -> Ticket:
        hashes = HASHES[4 * branch : 4 * branch + length]
        runs = self.index.lookup(hashes)
        for run in runs:
            assert [self.content[block] for block in run.blocks] == hashes[run.first : run.end]
        blocks, numbers = found(self.index, hashes)
        return Ticket(tuple(hashes), tuple(blocks), tuple(numbers), tuple(self.allocations[block] for block in blocks))

    @rule(target=tickets, ticket=consumes(tickets))
    def validate(self, ticket: Ticket) -> Ticket | MultipleResults[Ticket]:
        valid = self.index.validate(ticket.blocks, ticket.numbers)
        for block, allocations, content in list(zip(ticket.blocks, ticket.allocations, ticket.hashes, strict=False))[
            :valid
        ]:
            assert self.allocations[block] == allocations, "a block was re-allocated between lookup and validation"
            assert self.content[block] == content
        return ticket if valid else multiple()

    @invariant()
    def size_is_bounded_by_the_pool(self) -> None:
        assert len(self.index) <= POOL


TestPool = Pool.TestCase
