"""The block pool: who holds a block, what is found by content, what is evicted first."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.blocks import BlockPool, chain_hash
from octavo.core.events import CacheReset, Event, Evicted
from octavo.errors import InvalidConfig


def sealed(pool: BlockPool, count: int, name: str = "x") -> tuple[list[int], list[bytes]]:
    """Allocate and seal a chain of `count` blocks."""
    blocks, hashes = pool.allocate(count), [pool.seed(name)]
    assert blocks is not None
    for i, block in enumerate(blocks):
        hashes.append(chain_hash(hashes[-1], [i]))
        pool.seal(block, hashes[-1])
    return blocks, hashes[1:]


def test_block_0_is_never_handed_out() -> None:
    pool = BlockPool(5, 16)
    assert pool.num_usable == pool.num_free == 4
    blocks = pool.allocate(4)
    assert sorted(blocks or []) == [1, 2, 3, 4]
    assert pool.allocate(1) is None
    pool.check()


def test_all_or_nothing() -> None:
    pool = BlockPool(5, 16)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    assert pool.allocate(0) == []


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 16), (0, 16), (8, 0)])
def test_a_pool_that_holds_nothing_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(InvalidConfig, match=f"num_blocks={num_blocks}.*block_size={block_size}"):
        BlockPool(num_blocks, block_size)


def test_freed_blocks_stay_findable_and_can_be_shared() -> None:
    pool = BlockPool(5, 1)
    blocks, hashes = sealed(pool, 2)
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached) == (4, 2)
    assert pool.match(hashes) == blocks
    assert pool.num_free_without(blocks) == 2
    pool.acquire(blocks)
    pool.acquire(blocks)
    assert (pool.num_free, pool.num_cached) == (2, 0)
    pool.release(blocks)
    assert pool.num_free == 2
    pool.release(blocks)
    assert pool.num_free == 4
    pool.check()


def test_a_match_ends_at_the_first_unknown_block() -> None:
    pool = BlockPool(9, 1)
    blocks, hashes = sealed(pool, 3)
    assert pool.match([hashes[0], b"unknown", hashes[2]]) == blocks[:1]
    assert pool.match([b"unknown", *hashes]) == []


def test_empty_blocks_are_taken_before_cached_ones_and_those_oldest_first_tails_before_heads() -> None:
    pool = BlockPool(6, 1)
    old, old_hashes = sealed(pool, 2, "old")
    young, young_hashes = sealed(pool, 2, "young")
    pool.release(old)
    pool.release(young)
    pool.allocate(1)
    assert pool.match(old_hashes) == old, "the empty block was there"
    assert pool.allocate(1) == [old[1]]
    assert pool.match(old_hashes) == old[:1]
    assert pool.allocate(2) == [old[0], young[1]]
    assert pool.match(young_hashes) == young[:1]
    pool.check()


def test_a_hit_makes_a_block_young_again() -> None:
    pool = BlockPool(3, 1)
    (first,), first_hash = sealed(pool, 1, "first")
    (second,), second_hash = sealed(pool, 1, "second")
    pool.release([first])
    pool.release([second])
    pool.acquire([first])
    pool.release([first])
    assert pool.allocate(1) == [second]
    assert (pool.match(first_hash), pool.match(second_hash)) == ([first], [])


def test_the_first_block_with_a_content_wins() -> None:
    pool = BlockPool(4, 1)
    first, second = pool.allocate(2) or []
    pool.seal(first, b"same")
    pool.seal(second, b"same")
    assert pool.match([b"same"]) == [first]
    pool.release([first, second])
    assert pool.num_cached == 1
    pool.check()


def test_a_promise_ends_with_its_seal_or_its_release() -> None:
    pool = BlockPool(4, 1)
    first, second, third = pool.allocate(3) or []
    pool.promise(first, b"a")
    pool.promise(second, b"b")
    pool.promise(third, b"a")
    assert pool.is_promised(b"a") and pool.is_promised(b"b")
    assert pool.match([b"a"]) == [], "a promised block holds nothing yet"
    pool.seal(first, b"a")
    assert not pool.is_promised(b"a")
    pool.release([second])
    assert not pool.is_promised(b"b")
    pool.check()
    pool.promise(third, b"a")
    assert not pool.is_promised(b"a"), "what can be found need not be promised"


def test_another_block_may_keep_a_promise() -> None:
    pool = BlockPool(4, 1)
    first, second = pool.allocate(2) or []
    pool.promise(first, b"a")
    pool.seal(second, b"a")
    assert not pool.is_promised(b"a")
    assert pool.match([b"a"]) == [second]
    pool.check()
    pool.release([first, second])
    pool.check()


def test_forgotten_content_is_not_found() -> None:
    pool = BlockPool(5, 1)
    blocks, hashes = sealed(pool, 2)
    pool.release(blocks[1:])
    pool.forget([*hashes, b"unknown"])
    assert pool.match(hashes) == []
    assert (pool.num_free, pool.num_cached) == (3, 0)
    pool.check()
    pool.release(blocks[:1])
    assert pool.num_free == 4


def test_a_reset_leaves_users_their_blocks_and_changes_every_seed() -> None:
    pool = BlockPool(6, 1)
    seed = pool.seed("x")
    used, used_hashes = sealed(pool, 2)
    cached, cached_hashes = sealed(pool, 1, "y")
    (promised,) = pool.allocate(1) or []
    pool.promise(promised, b"p")
    pool.release(cached)
    pool.reset_cache()
    pool.check()
    assert pool.match(used_hashes) == pool.match(cached_hashes) == []
    assert not pool.is_promised(b"p")
    assert (pool.num_free, pool.num_cached) == (2, 0)
    assert pool.seed("x") != seed
    pool.release([*used, promised])
    assert pool.num_free == 5
    pool.check()


def test_subscribers_hear_of_evictions_and_resets() -> None:
    pool, heard = BlockPool(3, 1), list[Event]()
    pool.subscribers.append(heard.append)
    blocks, _ = sealed(pool, 2)
    pool.release(blocks)
    assert heard == []
    pool.allocate(2)
    pool.reset_cache()
    assert heard == [Evicted((blocks[1], blocks[0])), CacheReset()]


def test_a_hash_stands_for_namespace_parents_order_and_tokens() -> None:
    pool = BlockPool(2, 2)
    seeds = {pool.seed(name) for name in ("", "a", "b", "\udcff", "a" * 1_000_000)}
    assert len(seeds) == 5
    chains = [chain_hash(chain_hash(seed, first), second) for seed in seeds for first in ([1, 2], [2, 1], [1, 3])
              for second in ([1, 2], [0x10001, 2], [2**32 - 1, 2])]  # fmt: skip
    assert len(set(chains)) == len(chains)
    assert {len(chain) for chain in chains} == {16}


def test_hashes_are_the_same_in_another_process() -> None:
    program = "from octavo.core.blocks import *; print(chain_hash(BlockPool(2, 1).seed('name'), [5, 70000]).hex())"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == chain_hash(BlockPool(2, 1).seed("name"), [5, 70000]).hex()


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (lambda pool: pool._refs.__setitem__(0, 1), "block 0"),
        (lambda pool: pool._refs.__setitem__(1, -1), "negative"),
        (lambda pool: pool._refs.__setitem__(5, 1), "free exactly when"),
        (lambda pool: pool._empty.append(1), "free exactly when"),
        (lambda pool: pool._empty.append(5), "free exactly when"),
        (lambda pool: pool._cached.update({5: None}), "free exactly when"),
        (lambda pool: pool._hash_of.__setitem__(5, b"new"), "hash"),
        (lambda pool: pool._promised.__setitem__(b"a", 2), "both findable and promised"),
        (lambda pool: pool._block_of.pop(b"a"), "hash"),
        (lambda pool: pool._refs.__setitem__(2, 0), "a promised block is in use"),
    ],
)
def test_check_names_what_is_wrong(spoil: object, rule: str) -> None:
    pool = BlockPool(6, 1)
    first, second = pool.allocate(2) or []
    pool.seal(first, b"a")
    pool.promise(second, b"b")
    pool.check()
    spoil(pool)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=rule):
        pool.check()


def test_references_are_those_held() -> None:
    pool = BlockPool(4, 1)
    blocks = pool.allocate(2) or []
    pool.acquire(blocks[:1])
    pool.check_references([*blocks, blocks[0]])
    with pytest.raises(RuntimeError, match="references that nobody holds"):
        pool.check_references(blocks)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(0, 5)), max_size=60))
def test_books_balance_whatever_is_asked(operations: list[tuple[int, int, int]]) -> None:
    """Against a list of (owner's blocks, contents): what is held is held, what is sealed is found until evicted."""
    pool = BlockPool(9, 1)
    held: list[list[int]] = []
    content: dict[int, bytes] = {}
    for operation, i, j in operations:
        match operation:
            case 0 if (blocks := pool.allocate(j)) is not None:
                held.append(blocks)
                assert not set(blocks) & {b for other in held[:-1] for b in other}
                for block in blocks:
                    content.pop(block, None)
            case 1 if held:
                pool.release(held.pop(i % len(held)))
            case 2 if held and held[i % len(held)]:
                block = held[i % len(held)][-1]
                if block not in content and pool._hash_of.get(block) in (None, bytes([j])):
                    content[block] = bytes([j])
                    pool.seal(block, content[block])
            case 3:
                found = pool.match([bytes([j])])
                assert all(content[block] == bytes([j]) for block in found)
                pool.acquire(found)
                held.append(found)
            case 4 if held and held[i % len(held)] and held[i % len(held)][-1] not in content:
                block = held[i % len(held)][-1]
                if block not in pool._hash_of:
                    pool.promise(block, bytes([j]))
            case 5 if i == 0:
                pool.reset_cache()
        pool.check()
        pool.check_references([block for blocks in held for block in blocks])
    for blocks in held:
        pool.release(blocks)
    assert pool.num_free == pool.num_usable
