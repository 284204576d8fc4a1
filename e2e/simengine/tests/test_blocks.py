"""Hashes that are vLLM's, and a pool that forgets what it must."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e.simengine.blocks import Block, BlockHasher, BlockPool, hash_block, hash_canonical

NONE = "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"
FIRST = "ab7436a298c3180a2b6278abdd8cc2361a66b63164175c5fa10a9654ab07662f"
TOKENS = [70000, 5, 300, 24, 23, 255, 256, 65535, 65536, 2**31]


@pytest.mark.parametrize(
    ("parent", "tokens", "extra", "expected"),
    [
        (NONE, TOKENS, None, FIRST),
        (NONE, [70000] * 40, (("cache_salt", "pepper-ü"),),
         "6710ba8aea913a3941eafbf033033a05f52620c4b937d1afc46815568afec0e8"),
        (FIRST, list(range(100000, 100032)), None,
         "9cfeb4e28d2269765c5e03c2b1f501e44768274bc1156ef60ef043edeb50a218"),
    ],
)  # fmt: skip
def test_hashes_are_those_of_vllm(
    parent: str, tokens: list[int], extra: tuple[tuple[str, str], ...] | None, expected: str
) -> None:
    """The expected values come from vLLM 0.32's ``sha256_cbor`` (cbor2, canonical) with PYTHONHASHSEED=0."""
    assert hash_canonical("0").hex() == NONE
    assert hash_block(bytes.fromhex(parent), tokens, extra).hex() == expected


@given(st.lists(st.integers(2**16, 2**32 - 1), min_size=1, max_size=40))
def test_the_fast_way_gives_the_same_hash(tokens: list[int]) -> None:
    assert hash_block(b"parent", tokens, None) == hash_canonical((b"parent", tuple(tokens), None))


def test_a_salt_and_every_earlier_token_are_part_of_a_hash() -> None:
    hasher = BlockHasher("0", 4)
    plain, salted, other = list[bytes](), list[bytes](), list[bytes]()
    hasher.extend(plain, range(10), None)
    hasher.extend(salted, range(10), "salt")
    hasher.extend(other, [9, *range(1, 10)], None)
    assert len(plain) == len(salted) == len(other) == 2
    assert len({*plain, *salted, *other}) == 6
    assert hasher.compute_tail(plain, range(10), 10, None) == hash_block(plain[1], [8, 9], None)
    assert hasher.compute_tail(plain, range(10), 8, None) is None
    assert hasher.compute_tail(plain, range(10), 3, None) is None


def test_blocks_are_found_until_they_are_used_again_and_their_watchers_are_told_before() -> None:
    pool = BlockPool(5)
    hashes = [bytes([number]) * 32 for number in range(4)]
    blocks = pool.get_new_blocks(4)
    assert pool.free == 0
    assert pool.usage == 1
    pool.cache(blocks, hashes)
    told: list[Block] = []
    pool.touch(blocks)
    pool.unpin_blocks(blocks, told.append)
    pool.free_blocks(reversed(blocks))
    assert pool.count_cached(hashes) == pool.estimate_cached(hashes) == 4
    taken = pool.take_cached(hashes[:1])
    assert taken == blocks[:1]
    assert pool.get_new_blocks(1) == [blocks[3]]  # the end of a sequence is evicted first
    assert told == [blocks[3]]
    assert pool.count_cached(hashes) == 3
    assert not pool.reset()
    pool.free_blocks([blocks[0], blocks[3]])
    assert pool.reset()
    assert pool.count_cached(hashes) == 0
    assert len(told) == 4
