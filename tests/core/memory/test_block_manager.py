"""Block tables: examples, one for each promise. The machine in test_block_manager_machine.py mixes them all."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import DuplicateRequest, InvariantViolation, UnknownRequest
from core.memory.block_manager import BlockManager, blocks_needed, kv_cache_blocks_fragmentation


def manager_with(num_blocks: int, block_size: int, **tokens: int) -> BlockManager:
    manager = BlockManager(num_blocks, block_size)
    for request_id, num_tokens in tokens.items():
        manager.allocate(request_id, num_tokens)
    return manager


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "blocks"), [(0, 4, 0), (1, 4, 1), (8, 4, 2), (9, 4, 3), (5, 1, 5)]
)
def test_blocks_needed_is_a_ceiling(num_tokens: int, block_size: int, blocks: int):
    assert blocks == blocks_needed(num_tokens, block_size)


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "message"), [(-1, 4, "num_tokens is -1"), (1, 0, "block_size is 0")]
)
def test_blocks_needed_refuses_what_cannot_be(num_tokens: int, block_size: int, message: str):
    with pytest.raises(ValueError, match=message):
        blocks_needed(num_tokens, block_size)


def test_fragmentation_of_a_skewed_batch_is_28_against_54():
    assert (28, 54) == kv_cache_blocks_fragmentation([1, 30, 5], 16)
    assert (0, 0) == kv_cache_blocks_fragmentation([], 16)


def test_fragmentation_refuses_a_block_without_slots_even_of_no_lengths():
    with pytest.raises(ValueError, match="block_size is 0"):
        kv_cache_blocks_fragmentation([], 0)


@given(st.lists(st.integers(0, 200), min_size=1), st.integers(1, 32))
def test_paged_waste_is_less_than_a_block_each(seq_lens: list[int], block_size: int):
    paged, naive = kv_cache_blocks_fragmentation(seq_lens, block_size)

    assert sum(ceil(n / block_size) * block_size - n for n in seq_lens) == paged
    assert sum(max(seq_lens) - n for n in seq_lens) == naive
    assert 0 <= paged <= (block_size - 1) * len(seq_lens)


def test_a_manager_needs_a_slot_in_a_block():
    with pytest.raises(ValueError, match="block_size is 0, at least 1 is needed"):
        BlockManager(1, 0)


def test_allocate_takes_the_ceiling_and_says_which():
    manager = BlockManager(4, 4)
    taken = manager.allocate("a", 9)

    assert taken == manager.block_table("a")
    assert (3, 1, 9) == (len(set(taken or [])), manager.num_free_blocks, manager.num_tokens("a"))


def test_out_of_memory_is_none_and_changes_nothing():
    manager = manager_with(3, 4, a=5)
    table = manager.block_table("a")

    assert manager.allocate("b", 5) is None
    assert manager.append("a", 8) is None
    assert (1, table, 5) == (manager.num_free_blocks, manager.block_table("a"), manager.num_tokens("a"))
    with pytest.raises(UnknownRequest):
        manager.block_table("b")
    assert [2] == manager.allocate("b", 4)


def test_append_takes_a_block_only_when_the_last_one_is_exactly_full():
    manager = manager_with(3, 4, a=3)

    assert [] == manager.append("a")
    assert [1] == manager.append("a")
    assert [] == manager.append("a", 3)
    assert [2] == manager.append("a")


def test_append_of_nothing_succeeds_without_memory():
    manager = manager_with(1, 4, a=4)

    assert [] == manager.append("a", 0)
    with pytest.raises(ValueError, match="num_tokens is -1"):
        manager.append("a", -1)


def test_a_table_may_lie_anywhere_in_the_pool():
    manager = manager_with(3, 2, a=2, b=2)
    manager.append("a")

    assert ([0, 2], [1]) == (manager.block_table("a"), manager.block_table("b"))


def test_a_table_handed_out_is_the_readers_own():
    manager = manager_with(2, 2, a=2)
    manager.block_table("a").append(1)

    assert [0] == manager.block_table("a")


@pytest.mark.parametrize(
    ("tokens", "expected"), [({"a": 3}, 1 + 2 * 4), ({"a": 4}, 2 * 4), ({"a": 0}, 3 * 4), ({"a": 12}, 0)]
)
def test_max_append_is_the_spare_slots_and_the_free_blocks(tokens: dict[str, int], expected: int):
    manager = manager_with(3, 4, **tokens)

    assert expected == manager.max_append("a")
    assert manager.append("a", expected + 1) is None
    assert manager.append("a", expected) is not None


def test_max_append_counts_the_copy_of_a_shared_block():
    manager = manager_with(3, 4, a=3)
    manager.fork("a", "b")

    assert 1 + 1 * 4 == manager.max_append("a")
    manager.allocate("c", 8)
    assert 0 == manager.max_append("a")


def test_truncate_gives_back_the_blocks_behind_the_cut():
    manager = manager_with(3, 4, a=12)

    manager.truncate("a", 5)
    assert (2, 1, 5) == (len(manager.block_table("a")), manager.num_free_blocks, manager.num_tokens("a"))
    manager.truncate("a", 4)
    assert 2 == manager.num_free_blocks
    manager.truncate("a", 0)
    assert (3, []) == (manager.num_free_blocks, manager.block_table("a"))


@pytest.mark.parametrize("num_tokens", [-1, 6])
def test_truncate_cannot_lengthen(num_tokens: int):
    with pytest.raises(ValueError, match=f"cannot truncate to {num_tokens} tokens, 'a' has 5"):
        manager_with(2, 4, a=5).truncate("a", num_tokens)


def test_a_fork_shares_all_and_takes_nothing():
    manager = manager_with(3, 4, a=6)
    manager.fork("a", "b")

    assert (manager.block_table("a"), 1, 2) == (
        manager.block_table("b"),
        manager.num_free_blocks,
        manager.pool.num_shared_blocks,
    )


def test_a_shared_block_is_copied_by_the_first_writer_and_kept_by_the_last():
    manager = manager_with(4, 4, a=6)
    manager.fork("a", "b")

    assert [2] == manager.append("b")
    assert [] == manager.append("a")
    assert ([0, 1], [0, 2]) == (manager.block_table("a"), manager.block_table("b"))
    assert [(1, 2)] == manager.take_copies()
    assert [] == manager.take_copies()


def test_a_full_shared_block_needs_no_copy():
    manager = manager_with(4, 4, a=4)
    manager.fork("a", "b")
    manager.append("b")

    assert ([0], [0, 1]) == (manager.block_table("a"), manager.block_table("b"))
    assert [] == manager.take_copies()


def test_a_copy_without_room_is_out_of_memory_and_changes_nothing():
    manager = manager_with(1, 4, a=3)
    manager.fork("a", "b")

    assert manager.append("b") is None
    assert ([0], 3, []) == (manager.block_table("b"), manager.num_tokens("b"), manager.take_copies())


@pytest.mark.parametrize(
    ("num_samples", "prompt", "generated"), [(4, 64, 64), (4, 61, 35), (2, 19, 58), (6, 16, 1), (3, 5, 0)]
)
def test_blocks_of_parallel_samples_follow_the_formula_at_every_token(num_samples: int, prompt: int, generated: int):
    """T1.3: shared full blocks once, the rest for each; copies n - 1 if the prompt ends inside a block, else none."""
    block_size, num_copies = 16, 0
    manager = manager_with(200, block_size, s0=prompt)
    for sample in range(1, num_samples):
        manager.fork("s0", f"s{sample}")
    for t in range(1, generated + 1):
        for sample in range(num_samples):
            manager.append(f"s{sample}")
        num_copies += len(manager.take_copies())
        shared = prompt // block_size
        assert shared + num_samples * (ceil((prompt + t) / block_size) - shared) == manager.pool.num_used_blocks
    assert (num_samples - 1 if prompt % block_size and generated else 0) == num_copies


def test_four_samples_of_64_and_64_save_46_percent_over_time():
    """THEORY B1: the time-averaged saving of sharing is .4615 for n = 4, prompt 64, 64 tokens, block size 16."""
    manager = manager_with(200, 16, s0=64)
    for sample in range(1, 4):
        manager.fork("s0", f"s{sample}")
    used = unshared = 0
    for t in range(1, 65):
        for sample in range(4):
            manager.append(f"s{sample}")
        used += manager.pool.num_used_blocks
        unshared += 4 * ceil((64 + t) / 16)

    assert 0.4615 == round(1 - used / unshared, 4)


def test_freeing_a_parent_leaves_its_child_its_blocks():
    manager = manager_with(3, 4, a=6)
    manager.fork("a", "b")
    manager.free("a")

    assert ([0, 1], 1) == (manager.block_table("b"), manager.num_free_blocks)
    manager.free("b")
    assert 3 == manager.num_free_blocks


def test_published_blocks_are_shared_by_whoever_brings_their_hashes():
    manager = manager_with(4, 4, a=9)
    manager.publish("a", ["h0", "h1", "too far"])

    assert [3] == manager.allocate("b", 9, block_hashes=["h0", "h1"])
    assert [0, 1, 3] == manager.block_table("b")
    assert 2 == manager.pool.num_shared_blocks


def test_a_partly_filled_block_is_not_published():
    manager = manager_with(4, 4, a=7)
    manager.publish("a", ["h0", "h1"])

    assert [2] == manager.allocate("b", 8, block_hashes=["h0", "h1"])


def test_only_leading_blocks_are_hit():
    manager = manager_with(5, 4, a=8)
    manager.publish("a", ["h0", "h1"])

    assert [2, 3] == manager.allocate("b", 8, block_hashes=["other", "h1"])


def test_hits_that_must_be_revived_count_against_the_free_blocks():
    """Both cached blocks are free, but reviving them leaves none for the third that is needed."""
    manager = manager_with(2, 4, a=8)
    manager.publish("a", ["h0", "h1"])
    manager.free("a")

    assert manager.allocate("b", 9, block_hashes=["h0", "h1"]) is None
    assert (2, 2) == (manager.num_free_blocks, manager.pool.num_cached_blocks)
    assert [] == manager.allocate("b", 8, block_hashes=["h0", "h1"])


def test_of_a_freed_prefix_the_tail_is_forgotten_first():
    manager = manager_with(3, 4, a=12)
    manager.publish("a", ["h0", "h1", "h2"])
    manager.free("a")
    manager.allocate("b", 4)

    assert [0, 1, None] == [manager.pool.find(h) for h in ("h0", "h1", "h2")]


def test_a_block_that_is_written_again_is_no_longer_found_by_its_old_contents():
    manager = manager_with(4, 4, a=8)
    manager.publish("a", ["h0", "h1"])
    manager.truncate("a", 6)
    manager.append("a")

    assert (0, None) == (manager.pool.find("h0"), manager.pool.find("h1"))


def test_truncating_alone_keeps_a_block_findable():
    """Nothing has been written over its contents yet."""
    manager = manager_with(4, 4, a=8)
    manager.publish("a", ["h0", "h1"])
    manager.truncate("a", 6)

    assert [2] == manager.allocate("b", 9, block_hashes=["h0", "h1"])


def test_ids_in_use_and_unknown_ids_raise():
    manager = manager_with(4, 4, a=4, b=4)

    with pytest.raises(DuplicateRequest, match="request 'a' has blocks already"):
        manager.allocate("a", 1)
    with pytest.raises(DuplicateRequest, match="request 'b' has blocks already"):
        manager.fork("a", "b")
    for call in (
        lambda: manager.append("x"),
        lambda: manager.free("x"),
        lambda: manager.truncate("x", 0),
        lambda: manager.block_table("x"),
        lambda: manager.num_tokens("x"),
        lambda: manager.max_append("x"),
        lambda: manager.publish("x", []),
        lambda: manager.fork("x", "y"),
    ):
        with pytest.raises(UnknownRequest, match="request 'x' has no blocks"):
            call()
    manager.free("a")
    with pytest.raises(UnknownRequest, match="request 'a' has no blocks"):
        manager.free("a")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda manager: manager.pool.take(), "block 3 stands in 0 tables but has 1 references"),
        (lambda manager: manager._tables["a"].pop(), "stands in 0 tables"),
        (lambda manager: manager._num_tokens.update(a=4), "'a' has 4 tokens in 2 blocks of 4"),
        (lambda manager: (manager._tables.update(a=[0, 0]), manager.pool.share(0), manager.pool.release(1)), "twice"),
    ],
)
def test_books_that_do_not_balance_are_noticed(damage, message):
    manager = manager_with(4, 4, a=5, b=1)
    manager.check_invariants()
    damage(manager)

    with pytest.raises(InvariantViolation, match=message):
        manager.check_invariants()


def test_pinned_blocks_count_as_held():
    manager = manager_with(2, 4, a=4)
    manager.pool.share(0)

    manager.check_invariants(pinned=[0])
