"""The order in which the tiered queue hands out blocks, against a model made of plain lists."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bidikv_runtime.connector.eviction import Group, Place, TieredQueue
from bidikv_runtime.tests.kv_blocks import Block, Pool

BLOCKS = 16


class QueueModel(RuleBasedStateMachine):
    """The model moves single block ids between lists; groups are given up in the order of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(BLOCKS)
        self.queue = self.pool.queue
        self.first: list[int] = list(range(BLOCKS))
        self.aged: list[int] = []
        self.recent: list[int] = []
        self.held: dict[str, list[int]] = {}
        self.member: dict[int, str] = {}
        self.groups: dict[str, Group] = {}
        self.in_use: list[int] = []
        self.queue.choose_hold = lambda groups: min(groups, key=self.name_of)

    def name_of(self, group: Group) -> str:
        return next(name for name, other in self.groups.items() if other is group)

    def home(self, block: int) -> list[int]:
        name = self.member.get(block)
        if name is None:
            return self.recent
        place = self.groups[name].place
        return self.held[name] if place is Place.HELD else self.first if place is Place.FIRST else self.recent

    @rule(count=st.integers(0, BLOCKS + 1))
    def allocate(self, count: int) -> None:
        free = BLOCKS - len(self.in_use)
        if count > free:
            with pytest.raises(ValueError, match=f"{count} blocks are asked for, {free} are free"):
                self.queue.popleft_n(count)
            return
        expected: list[int] = []
        while len(expected) < count:
            for chain in (self.first, self.aged, self.recent):
                while chain and len(expected) < count:
                    expected.append(chain.pop(0))
            if len(expected) < count:
                name = min(name for name, blocks in self.held.items() if blocks)
                self.recent.extend(self.held.pop(name))
        assert self.pool.allocate(count) == sorted(expected)
        self.in_use += expected
        for block in expected:
            self.member.pop(block, None)

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.in_use), unique=True, min_size=1))
        self.pool.free(chosen)
        for block in reversed(chosen):
            self.in_use.remove(block)
            self.home(block).append(block)

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def free_without_content(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.in_use), unique=True, min_size=1))
        unheld: list[int] = []
        for block in chosen:
            self.in_use.remove(block)
            self.pool.blocks[block].ref_cnt = 0
            name = self.member.get(block)
            if name is not None and self.groups[name].place is Place.HELD:
                self.held[name].insert(0, block)
            else:
                self.member.pop(block, None)
                unheld.append(block)
        self.queue.prepend_n([self.pool.blocks[block] for block in chosen])
        self.first[:0] = unheld

    @precondition(lambda self: len(self.in_use) < BLOCKS)
    @rule(data=st.data())
    def find_in_cache(self, data: st.DataObject) -> None:
        free = [block for block in range(BLOCKS) if block not in self.in_use]
        block = data.draw(st.sampled_from(free))
        self.pool.touch([block])
        for chain in (self.first, self.aged, self.recent, *self.held.values()):
            if block in chain:
                chain.remove(block)
        self.in_use.append(block)

    @rule(data=st.data(), fresh=st.booleans())
    def assign(self, data: st.DataObject, fresh: bool) -> None:
        blocks = data.draw(st.lists(st.integers(0, BLOCKS - 1), unique=True, min_size=1))
        if fresh or not self.groups:
            self.groups[f"{len(self.groups):03}"] = Group()
        name = data.draw(st.sampled_from(sorted(self.groups)))
        if self.groups[name].place is Place.HELD:
            self.held.setdefault(name, [])
        for block in blocks:
            if self.member.get(block) == name:
                continue
            for chain in (self.first, self.aged, self.recent, *self.held.values()):
                if block in chain:
                    chain.remove(block)
            self.member[block] = name
            if block not in self.in_use:
                self.home(block).append(block)
        self.queue.assign(blocks, self.groups[name])

    @precondition(lambda self: self.held)
    @rule(place=st.sampled_from([Place.FIRST, Place.AGED, Place.RECENT]), data=st.data())
    def release(self, place: Place, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        chain = {Place.FIRST: self.first, Place.AGED: self.aged, Place.RECENT: self.recent}[place]
        chain.extend(self.held.pop(name))
        self.queue.release(self.groups[name], place)

    @rule()
    def clear(self) -> None:
        for name in list(self.queue_names()):
            self.recent.extend(self.held.pop(name))
        self.held.clear()
        self.queue.clear()
        self.member.clear()
        self.groups.clear()

    def queue_names(self) -> list[str]:
        """Held groups in the order in which the queue lists them."""
        return [self.name_of(group) for group in self.queue._held]

    @invariant()
    def order_is_the_models(self) -> None:
        expected = self.first + self.aged + self.recent
        for name in self.queue_names():
            expected = expected + self.held.get(name, [])
        assert self.pool.free_ids == expected
        assert self.queue.num_free_blocks == BLOCKS - len(self.in_use)
        if expected:
            middle = len(expected) // 2
            after = self.queue.iter_blocks_after(self.pool.blocks[expected[middle]])
            assert [block.block_id for block in after] == expected[middle + 1 :]

    @invariant()
    def sizes_count_members(self) -> None:
        for name, group in self.groups.items():
            assert group.size == sum(owner == name for owner in self.member.values())


TestQueueModel = QueueModel.TestCase


def test_a_hold_applies_when_a_block_in_use_becomes_free() -> None:
    pool = Pool(6)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.queue.assign(first, Group())
    pool.free(first)
    pool.free(second)
    assert pool.allocate(4) == [*second, 4, 5]
    assert pool.allocate(2) == first


def test_a_block_that_is_handed_out_leaves_its_group() -> None:
    pool = Pool(2)
    blocks, group = pool.allocate(2), Group()
    pool.queue.assign(blocks, group)
    pool.free(blocks)
    pool.allocate(1)
    assert group.size == 1
    assert pool.queue.group_of == [group, None]


def test_only_as_many_holds_end_as_the_allocation_needs() -> None:
    pool = Pool(6)
    groups = [Group(), Group(), Group()]
    for group in groups:
        blocks = pool.allocate(2)
        pool.queue.assign(blocks, group)
        pool.free(blocks)
    pool.queue.choose_hold = lambda given: given[-1]
    pool.allocate(3)
    assert [group.place for group in groups] == [Place.HELD, Place.RECENT, Place.RECENT]


def test_over_goes_before_everything_but_blocks_without_content() -> None:
    pool = Pool(5)
    old, over = pool.allocate(2), pool.allocate(2)
    group = Group()
    group.place = Place.FIRST
    pool.queue.assign(over, group)
    pool.free(old)
    pool.free(over)
    assert pool.free_ids == [4, *reversed(over), *reversed(old)]


def test_taking_out_a_block_that_is_not_free_is_an_error() -> None:
    pool = Pool(2)
    [taken] = pool.allocate(1)
    with pytest.raises(RuntimeError, match=f"block {taken} is not in the free queue"):
        pool.queue.remove(pool.blocks[taken])


def test_an_empty_queue_has_no_next_block() -> None:
    queue = TieredQueue([Block(0)], [])
    with pytest.raises(ValueError, match="1 blocks are asked for, 0 are free"):
        queue.popleft()
