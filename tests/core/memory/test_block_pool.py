"""Physical blocks: reference counts, the order of reuse, and what a hash finds."""

import pytest

from core.errors import InvariantViolation
from core.memory.block_pool import BlockPool


def test_a_pool_needs_a_block():
    with pytest.raises(ValueError, match="num_blocks is 0, at least 1 is needed"):
        BlockPool(0)


def test_free_and_used_always_make_the_total():
    pool = BlockPool(3)
    first = pool.take()
    pool.take()

    assert (1, 2) == (pool.num_free_blocks, pool.num_used_blocks)
    pool.release(first)
    assert (2, 1) == (pool.num_free_blocks, pool.num_used_blocks)


def test_a_block_is_free_only_when_the_last_reference_goes():
    pool = BlockPool(1)
    block = pool.take()
    pool.share(block)
    assert 1 == pool.num_shared_blocks

    pool.release(block)
    assert (0, 0) == (pool.num_free_blocks, pool.num_shared_blocks)
    pool.release(block)
    assert 1 == pool.num_free_blocks


def test_releasing_what_nobody_holds_is_our_own_mistake():
    with pytest.raises(InvariantViolation, match="block 0 is released but nobody holds it"):
        BlockPool(1).release(0)


def test_a_free_block_keeps_its_contents_until_it_is_taken_again():
    pool = BlockPool(1)
    block = pool.take()
    pool.publish(block, "hello")
    pool.release(block)

    assert (block, 1, 1) == (pool.find("hello"), pool.num_free_blocks, pool.num_cached_blocks)
    assert block == pool.take()
    assert (None, 0) == (pool.find("hello"), pool.num_cached_blocks)


def test_a_hit_revives_a_cached_block():
    pool = BlockPool(2)
    block = pool.take()
    pool.publish(block, "hello")
    pool.release(block)
    pool.share(block)

    assert (1, 1, 0) == (pool.ref_count(block), pool.num_free_blocks, pool.num_cached_blocks)
    assert block != pool.take()
    assert block == pool.find("hello")


def test_blocks_without_contents_are_taken_before_cached_ones_and_those_in_order_of_release():
    pool = BlockPool(3)
    cached, later, plain = pool.take(), pool.take(), pool.take()
    pool.publish(cached, "c")
    pool.publish(later, "l")
    for block in (cached, later, plain):
        pool.release(block)

    assert [plain, cached, later] == [pool.take() for _ in range(3)]


def test_the_first_block_with_given_contents_stays_the_known_one():
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    pool.publish(first, "same")
    pool.publish(second, "same")
    pool.publish(first, "other")

    assert (first, None) == (pool.find("same"), pool.find("other"))
    pool.check_invariants()


def test_only_a_held_block_can_be_published():
    with pytest.raises(InvariantViolation, match="block 0 is published but nobody holds it"):
        BlockPool(1).publish(0, "x")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._free.clear(), "free list"),
        (lambda pool: pool._ref_counts.__setitem__(0, 1), "free list"),
        (lambda pool: setattr(pool, "_num_shared", 1), "counted as shared"),
        (lambda pool: pool._hash_of_block.__setitem__(0, "x"), "hash index"),
    ],
)
def test_books_that_do_not_balance_are_noticed(damage, message):
    pool = BlockPool(2)
    pool.check_invariants()
    damage(pool)

    with pytest.raises(InvariantViolation, match=message):
        pool.check_invariants()
