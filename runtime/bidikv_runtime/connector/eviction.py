"""The order in which free KV blocks are handed out again: vLLM's, with worthless blocks before it and held ones after.

vLLM evicts a cached block by handing it out, in the order of its free queue: least recently used first. ``TieredQueue``
takes that queue's place and hands out

1. blocks without content (as vLLM does), then blocks of groups that are over,
2. blocks of groups whose hold has expired: they are older than all that follows,
3. all others in vLLM's own order,
4. blocks of held groups, one group after another, the policy's least valuable first.

A hold is nothing but a place in this order. It takes no reference, so a held block counts as free, any allocation gets
it when nothing else is left, and there is nothing to give back that could leak. Invariants:

- without groups, or with none held and none over, an allocation gets the very blocks that vLLM would give it;
- ``num_free_blocks`` is the number of blocks in all lists; a block is in one list at most;
- a group applies to a block whenever the block is free: it may be in use when it is put into the group;
- a block that is handed out leaves its group, for its content is gone.

Blocks are vLLM's ``KVCacheBlock``; only ``block_id``, ``block_hash``, ``prev_free_block`` and ``next_free_block`` are
used. Not thread-safe: it belongs to the scheduler's thread, as the block pool does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any, Final

Block = Any
"""vLLM's ``KVCacheBlock``."""
_BY_ADDRESS: Final = attrgetter("block_id")


class Place(Enum):
    """Where the free blocks of a group wait."""

    FIRST = "first"
    AGED = "aged"
    RECENT = "recent"
    HELD = "held"


class _Fence:
    """End of a list: neighbour of real blocks, never handed out."""

    __slots__ = ("block_id", "next_free_block", "owner", "prev_free_block")

    def __init__(self, owner: _Chain) -> None:
        self.block_id = -1
        self.owner = owner
        self.prev_free_block: Any = None
        self.next_free_block: Any = None


class _Chain:
    """A doubly linked list through the blocks' own links, as in vLLM: O(1) to remove from the middle."""

    __slots__ = ("head", "tail")

    def __init__(self) -> None:
        self.head, self.tail = _Fence(self), _Fence(self)
        self.clear()

    def clear(self) -> None:
        self.head.next_free_block, self.tail.prev_free_block = self.tail, self.head

    @property
    def is_empty(self) -> bool:
        return self.head.next_free_block is self.tail

    def link(self, blocks: Iterable[Block], before: Block) -> None:
        """Insert blocks, in their order, before a member or the tail."""
        last = before.prev_free_block
        for block in blocks:
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        last.next_free_block = before
        before.prev_free_block = last

    def splice(self, other: _Chain, before: Block) -> None:
        """Move all of another list before a member or the tail, in O(1)."""
        if other.is_empty:
            return
        first, last, previous = other.head.next_free_block, other.tail.prev_free_block, before.prev_free_block
        previous.next_free_block, first.prev_free_block = first, previous
        last.next_free_block, before.prev_free_block = before, last
        other.clear()


class Group:
    """Blocks that are kept or given up together. Held at first; policies derive their own."""

    __slots__ = ("chain", "place", "size")

    def __init__(self) -> None:
        self.place = Place.HELD
        self.size = 0
        """Blocks that belong to the group, in use or free."""
        self.chain = _Chain()
        """The group's free blocks while it is held."""


class TieredQueue:
    """Stands in for vLLM's ``FreeKVCacheBlockQueue`` (0.32 and 0.33: the same methods).

    Args:
        blocks: all blocks of the pool; ``block_id`` is the position.
        free: those that are free, in the order to keep.
    """

    def __init__(self, blocks: Sequence[Block], free: Iterable[Block]) -> None:
        self._blocks = blocks
        self._first, self._aged, self._recent = _Chain(), _Chain(), _Chain()
        self._open = (self._first, self._aged, self._recent)
        self._held: dict[Group, None] = {}
        self.group_of: list[Group | None] = [None] * len(blocks)
        """The group of each block, by ``block_id``; to read only."""
        self._grouped = False
        self.choose_hold: Callable[[Sequence[Group]], Group] = lambda groups: groups[0]
        """Names the held group to give up when an allocation finds nothing else; the groups given have free blocks, in
        the order in which they were first used. The policy's part."""
        kept = list(free)
        empty = next((i for i, block in enumerate(kept) if block.block_hash is not None), len(kept))
        # Blocks never used yet stay ahead of groups that are over.
        self._first.link(kept[:empty], self._first.tail)
        self._recent.link(kept[empty:], self._recent.tail)
        self.num_free_blocks = len(kept)

    # --- what vLLM's block pool calls ---------------------------------------------------------------------------------

    def popleft(self) -> Block:
        """The next block.

        Raises:
            ValueError: no block is free.
        """
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Block]:
        """The next ``n`` blocks, in the order of their addresses; they leave their groups. Takes held blocks when no
        others are left.

        A request's blocks are read as one piece where they lie side by side, in the same order at both ends: of two
        pools that have been in use for a while, sorting makes 0.12 pieces per block of 0.5 to 0.6.

        Raises:
            ValueError: fewer blocks are free; nothing was taken.
        """
        if n > self.num_free_blocks:
            raise ValueError(f"{n} blocks are asked for, {self.num_free_blocks} are free")
        self.num_free_blocks -= n
        taken: list[Block] = []
        while True:
            for chain in self._open:
                block, tail = chain.head.next_free_block, chain.tail
                missing = n - len(taken)
                while missing and block is not tail:
                    taken.append(block)
                    following = block.next_free_block
                    block.prev_free_block = block.next_free_block = None
                    block = following
                    missing -= 1
                chain.head.next_free_block, block.prev_free_block = block, chain.head
            if len(taken) == n:
                break
            candidates = [group for group in self._held if not group.chain.is_empty]
            chosen = self.choose_hold(candidates)
            assert chosen.place is Place.HELD, "the policy chose a group that is not held"
            self.release(chosen, Place.RECENT)
        if self._grouped:
            groups = self.group_of
            for block in taken:
                if (group := groups[block.block_id]) is not None:
                    group.size -= 1
                    groups[block.block_id] = None
        taken.sort(key=_BY_ADDRESS)
        return taken

    def remove(self, block: Block) -> None:
        """Take a block out of the middle: a request found it in the prefix cache. It stays in its group.

        Raises:
            RuntimeError: the block is not free.
        """
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise RuntimeError(f"block {block.block_id} is not in the free queue")
        before.next_free_block, after.prev_free_block = after, before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: Block) -> None:
        """A cached block becomes free, as the most recently used one of its place."""
        self.append_n([block])

    def append_n(self, blocks: Sequence[Block]) -> None:
        """Cached blocks become free; of these the first is evicted first."""
        if not blocks:
            return
        self.num_free_blocks += len(blocks)
        if not self._grouped:
            self._recent.link(blocks, self._recent.tail)
            return
        groups, start, chain = self.group_of, 0, self._recent
        previous: Group | None = None
        for i, block in enumerate(blocks):
            group = groups[block.block_id]
            if group is not previous:  # a request's blocks mostly share a group: link them run by run
                previous = group
                own = self._recent if group is None else self._chain(group)
                if own is not chain:
                    chain.link(blocks[start:i], chain.tail)
                    start, chain = i, own
        chain.link(blocks[start:], chain.tail)

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        """Blocks without cached content become free: they are handed out before all others, and leave their groups.

        Held ones stay: the tail of a prompt that is handed over is read by others and never cached here.
        """
        unheld = blocks
        if self._grouped:
            groups, unheld = self.group_of, []
            for block in blocks:
                group = groups[block.block_id]
                if group is not None and group.place is Place.HELD:
                    chain = self._chain(group)
                    chain.link([block], chain.head.next_free_block)
                    continue
                if group is not None:
                    self._leave(group)
                    groups[block.block_id] = None
                unheld.append(block)
        self._first.link(unheld, self._first.head.next_free_block)
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[Block]:
        """All free blocks in the order of eviction, held groups in the order in which they were first used."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: Block | None) -> Iterator[Block]:
        """Free blocks after a free one (None: from the start), in the order of ``get_all_free_blocks``."""
        chains = [*self._open, *(group.chain for group in self._held)]
        block = chains[0].head if cursor is None else cursor
        while True:
            block = block.next_free_block
            if not isinstance(block, _Fence):
                if block is None:
                    return  # the cursor is no longer free
                yield block
                continue
            following = chains.index(block.owner) + 1
            if following == len(chains):
                return
            block = chains[following].head

    # --- what a policy calls ------------------------------------------------------------------------------------------

    def assign(self, block_ids: Sequence[int], group: Group) -> None:
        """Put blocks into a group, out of the ones they were in. Blocks in use join its list when they become free."""
        self._grouped = True
        groups, blocks = self.group_of, self._blocks
        if block_ids and group.place is Place.HELD:
            self._held[group] = None
        for block_id in block_ids:
            old = groups[block_id]
            if old is group:
                continue
            if old is not None:
                self._leave(old)
            groups[block_id] = group
            group.size += 1
            block = blocks[block_id]
            if block.prev_free_block is not None:
                self.remove(block)
                self.append(block)

    def release(self, group: Group, place: Place) -> None:
        """End a hold in O(1): its free blocks go to the end of another place, and those in use when they are freed.

        Args:
            group: a held group; nothing happens to another one.
            place: FIRST for blocks without further use, AGED for those not used for long, RECENT for vLLM's order.
        """
        if group.place is not Place.HELD:
            return
        self._held.pop(group, None)
        group.place = place
        chain = self._chain(group)
        chain.splice(group.chain, chain.tail)
        if place is Place.AGED:
            group.place = Place.RECENT  # blocks in use are not aged

    def clear(self) -> None:
        """Dissolve all groups: the cache's content became invalid. The order stays."""
        for group in list(self._held):
            self.release(group, Place.RECENT)
        self.group_of[:] = [None] * len(self._blocks)
        self._grouped = False

    def _chain(self, group: Group) -> _Chain:
        if group.place is Place.HELD:
            return group.chain
        if group.place is Place.AGED:
            return self._aged
        return self._first if group.place is Place.FIRST else self._recent

    def _leave(self, group: Group) -> None:
        group.size -= 1
        if not group.size:
            self._held.pop(group, None)


def install(pool: Any) -> TieredQueue:
    """Put a tiered queue into a live block pool, with its free blocks in their order.

    Raises:
        RuntimeError: the pool's queue has not what this module knows of vLLM's.
    """
    stock = pool.free_block_queue
    used = {name for name in dir(type(stock)) if not name.startswith("_")}
    unknown = used - {name for name in dir(TieredQueue) if not name.startswith("_")}
    if unknown:
        raise RuntimeError(
            f"vLLM's free block queue has the unknown method {min(unknown)}: use a vLLM that this supports"
        )
    free = stock.get_all_free_blocks()
    if len(free) != stock.num_free_blocks:
        raise RuntimeError(f"vLLM's free block queue counts {stock.num_free_blocks} blocks and lists {len(free)}")
    queue = TieredQueue(pool.blocks, free)
    pool.free_block_queue = queue
    return queue
