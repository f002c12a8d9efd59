"""What bigger caches would have hit: exact as long as every hash is followed, bounded and honest beyond."""

from collections.abc import Sequence
from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.block_hash import BlockHashes
from core.memory.block_manager import BlockManager
from core.memory.prefix_ghost import PrefixGhost

SIZE = 4
branches = st.lists(st.integers(0, 2), min_size=1, max_size=5)  # a path down a tree: one number a block


def hashes_of(path: Sequence[int]) -> list[bytes]:
    return BlockHashes(SIZE).up_to([number for number in path for _ in range(SIZE)], len(path))


def serve(ghost: PrefixGhost, path: Sequence[int]) -> None:
    hashes = hashes_of(path)
    ghost.look_up(hashes, len(hashes) * SIZE)
    ghost.publish(hashes)


def test_before_anything_all_is_zero():
    ghost = PrefixGhost(SIZE, 10)

    assert (0.0, 0.0, 0.0, 1.0) == (
        ghost.infinite_hit_rate,
        ghost.doubled_hit_rate,
        ghost.standard_error,
        ghost.rate,
    )


def test_the_rate_is_in_tokens_and_the_tail_of_a_prompt_counts_as_missed():
    """Twice 10 tokens in blocks of 4: the second time two blocks of them are hits."""
    ghost = PrefixGhost(SIZE, 10)
    for _ in range(2):
        ghost.look_up(hashes_of([1, 2]), 10)
        ghost.publish(hashes_of([1, 2]))

    assert 8 / 20 == ghost.infinite_hit_rate == ghost.doubled_hit_rate


def test_looking_up_publishes_nothing():
    ghost = PrefixGhost(SIZE, 10)
    for _ in range(2):
        ghost.look_up(hashes_of([1, 2]), 8)

    assert 0.0 == ghost.infinite_hit_rate


def test_a_look_up_counts_as_use():
    """The bigger cache holds two blocks; "a" was published first and asked for last."""
    ghost, (a, b, c) = PrefixGhost(SIZE, 1), (hashes_of([number]) for number in range(3))
    ghost.publish(a)
    ghost.publish(b)
    ghost.look_up(a, SIZE)
    ghost.publish(c)
    ghost.look_up(a, SIZE)
    assert 1.0 == ghost.doubled_hit_rate
    ghost.look_up(b, SIZE)

    assert (2 / 3, 1.0) == (ghost.doubled_hit_rate, ghost.infinite_hit_rate)


@given(st.lists(branches, min_size=1, max_size=40), st.integers(3, 8))
def test_it_is_exact_while_every_hash_is_followed(paths: list[list[int]], num_blocks: int):
    """Against what was ever seen, and against a real pool of twice the size that serves one request at a time."""
    ghost, manager = PrefixGhost(SIZE, num_blocks), BlockManager(2 * num_blocks, SIZE)
    seen, names = set[bytes](), count()
    num_blocks_asked = infinite_hits = doubled_hits = 0
    for path in paths:
        hashes, name = hashes_of(path), next(names)
        num_blocks_asked += len(hashes)
        infinite_hits += len(seen.intersection(hashes))
        taken = manager.allocate(name, len(hashes) * SIZE, block_hashes=hashes)
        assert taken is not None
        doubled_hits += len(hashes) - len(taken)
        seen.update(hashes)
        manager.publish(name, hashes)
        manager.free(name)
        serve(ghost, path)

    assert (infinite_hits / num_blocks_asked, doubled_hits / num_blocks_asked) == (
        pytest.approx(ghost.infinite_hit_rate),
        pytest.approx(ghost.doubled_hit_rate),
    )
    assert (1.0, 0.0) == (ghost.rate, ghost.standard_error)


def skewed_paths(num_requests: int) -> list[list[int]]:
    """Conversations that are gone on with: the younger, the likelier."""
    random, paths = Random(3), [[0]]
    for i in range(num_requests):
        old = paths[-1 - min(len(paths) - 1, int(random.expovariate(0.02)))]
        paths.append([*old[: random.randrange(1, 9)], i + 1, -i % 2**40])
    return paths


def test_memory_is_bounded_and_the_estimates_lie_within_their_stated_error():
    paths = skewed_paths(4000)
    exact, sampled = PrefixGhost(SIZE, 200), PrefixGhost(SIZE, 200, max_entries=256)
    for path in paths:
        serve(exact, path)
        serve(sampled, path)
        assert len(sampled._seen) <= 256
        assert len(sampled._recent) <= 256

    assert 1.0 == exact.rate
    assert 256 / 8000 / 2 <= sampled.rate <= 256 / 4000
    assert 0.0 < sampled.standard_error < 0.2
    assert abs(exact.infinite_hit_rate - sampled.infinite_hit_rate) <= 3 * sampled.standard_error
    assert abs(exact.doubled_hit_rate - sampled.doubled_hit_rate) <= 3 * sampled.standard_error
    assert 0.0 < exact.doubled_hit_rate < exact.infinite_hit_rate < 1.0


def test_a_bigger_sample_has_the_smaller_error():
    small, big = (PrefixGhost(SIZE, 200, max_entries=entries) for entries in (64, 1024))
    for path in skewed_paths(3000):
        serve(small, path)
        serve(big, path)

    assert big.standard_error < small.standard_error
