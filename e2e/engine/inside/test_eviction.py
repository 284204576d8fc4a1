"""The tiered queue in vLLM's own block pool: without holds it is vLLM's queue, with holds it gives them up last."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, FreeKVCacheBlockQueue, KVCacheBlock, make_block_hash_with_group_id

from bidikv_runtime.connector.eviction import Group, Place, TieredQueue, install

BLOCKS = 24
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "free", "touch", "unpin", "evict", "append", "popleft"]),
        st.integers(0, 10**6),
        st.booleans(),
    ),
    max_size=60,
)


def build_pool() -> Any:
    return BlockPool(BLOCKS, enable_caching=True, hash_block_size=4)


class Driver:
    """Random requests on one pool; what it does depends on the pool's answers alone."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.requests: list[list[Any]] = []
        self.names = 0
        self.reused: list[int] = []

    def step(self, action: str, number: int, cached: bool) -> object:
        pool, requests = self.pool, self.requests
        if action == "allocate":
            count = number % 7
            if count > pool.get_num_free_blocks():
                return "full"
            before = len(self.reused)
            blocks = sorted(pool.get_new_blocks(count), key=lambda block: block.block_id)  # the tiered queue sorts
            self.reused[before:] = sorted(self.reused[before:])
            for block in blocks if cached else ():
                self.names += 1
                name = make_block_hash_with_group_id(BlockHash(self.names.to_bytes(8, "big")), 0)
                pool._insert_block_hash(name, block, num_tokens=4)
            if blocks:
                requests.append(blocks)
            return [block.block_id for block in blocks]
        if action == "popleft" and pool.get_num_free_blocks():
            block = pool.free_block_queue.popleft()
            pool.free_block_queue.append(block)
            return block.block_id
        if not requests:
            return None
        blocks = requests[number % len(requests)]
        if action == "free":
            requests.remove(blocks)
            pool.free_blocks(reversed(blocks))
        elif action == "touch":
            pool.touch(blocks)
            requests.append(list(blocks))
        elif action == "unpin":
            requests.remove(blocks)
            pool.unpin_blocks(blocks, lambda block: self.reused.append(block.block_id))
        elif action == "evict":
            pool.evict_blocks({block.block_id for block in blocks})
        return None

    def look(self) -> tuple[list[int], list[int], int]:
        free = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        after = [block.block_id for block in self.pool.free_block_queue.iter_blocks_after(None)]
        assert after == free
        return free, self.reused, self.pool.get_num_free_blocks()


@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(before=STEPS, steps=STEPS, grouped=st.booleans())
def test_without_holds_every_step_is_as_with_vllms_own_queue(
    before: list[tuple[str, int, bool]], steps: list[tuple[str, int, bool]], grouped: bool
) -> None:
    stock, tiered = Driver(build_pool()), Driver(build_pool())
    for step in before:  # a pool that is in use when the queue is installed
        stock.step(*step)
        tiered.step(*step)
    queue = install(tiered.pool)
    assert isinstance(stock.pool.free_block_queue, FreeKVCacheBlockQueue)
    assert isinstance(tiered.pool.free_block_queue, TieredQueue)
    assert tiered.look() == stock.look()
    for step in steps:
        if grouped:  # blocks that belong to somebody but are not held
            group = Group()
            group.place = Place.RECENT
            queue.assign([block.block_id for blocks in tiered.requests for block in blocks], group)
        assert tiered.step(*step) == stock.step(*step)
        assert tiered.look() == stock.look()


def test_held_blocks_stay_cached_until_nothing_else_is_left() -> None:
    driver = Driver(build_pool())
    queue = install(driver.pool)
    driver.step("allocate", 6, True)
    held = [block.block_id for block in driver.requests[0]]
    queue.assign(held, Group())
    driver.step("free", 0, False)
    others = driver.pool.get_new_blocks(BLOCKS - 1 - len(held))  # one block is vLLM's null block
    assert not set(held) & {block.block_id for block in others}
    assert all(driver.pool.blocks[block].block_hash is not None for block in held)
    assert driver.pool.get_num_free_blocks() == len(held)
    last = driver.pool.get_new_blocks(len(held))
    assert [block.block_id for block in last] == sorted(held)
    assert all(block.block_hash is None for block in last)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_asking_for_too_much_takes_nothing(count: int) -> None:
    driver = Driver(build_pool())
    install(driver.pool)
    driver.pool.get_new_blocks(BLOCKS - count)
    with pytest.raises(ValueError, match="free"):
        driver.pool.get_new_blocks(count)
    assert driver.pool.get_num_free_blocks() == count - 1


def test_a_queue_of_another_vllm_is_refused() -> None:
    class Renamed(FreeKVCacheBlockQueue):  # type: ignore[misc]
        def pop_many(self) -> None: ...

    pool = build_pool()
    pool.free_block_queue = Renamed([KVCacheBlock(i) for i in range(3)])
    with pytest.raises(RuntimeError, match="pop_many"):
        install(pool)
