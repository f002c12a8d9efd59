"""The KV cache: a slot is one token's place in every layer, and nothing else moves."""

import numpy as np
import pytest

from core.model.kv_cache import KVCache
from tests.core.small_models import TARGET

G, E = TARGET.num_kv_heads, TARGET.head_dim


def test_starts_as_zeros_of_the_models_shape() -> None:
    cache = KVCache(TARGET, num_blocks=5, block_size=4)
    for array in (cache.keys_LBSGE, cache.values_LBSGE):
        assert (TARGET.num_layers, 5, 4, G, E) == array.shape
        assert np.float32 == array.dtype
        assert not array.any()


def test_slot_is_block_times_size_plus_offset() -> None:
    cache = KVCache(TARGET, num_blocks=5, block_size=4)
    keys = np.arange(1, 3 * G * E + 1, dtype=np.float32).reshape(3, G, E)
    cache.write(1, np.array([13, 2, 8]), keys, -keys)

    for row, (block, offset) in enumerate([(3, 1), (0, 2), (2, 0)]):
        assert np.array_equal(keys[row], cache.keys_LBSGE[1, block, offset])
        assert np.array_equal(-keys[row], cache.values_LBSGE[1, block, offset])
    assert 3 == cache.keys_LBSGE.any(axis=(0, 3, 4)).sum()
    assert not cache.keys_LBSGE[[0, 2]].any()


def test_block_is_copied_in_every_layer_and_its_source_stays() -> None:
    cache = _filled()
    before = cache.keys_LBSGE.copy(), cache.values_LBSGE.copy()
    cache.copy_blocks([(1, 3)])

    for array, old in zip((cache.keys_LBSGE, cache.values_LBSGE), before, strict=True):
        assert np.array_equal(old[:, 1], array[:, 3])
        assert np.array_equal(old[:, [0, 1, 2, 4]], array[:, [0, 1, 2, 4]])


def test_copies_are_made_in_order() -> None:
    """A block may be taken as a copy's destination after it was another's source."""
    cache = _filled()
    before = cache.keys_LBSGE.copy()
    cache.copy_blocks([(1, 3), (0, 1)])

    assert np.array_equal(before[:, 1], cache.keys_LBSGE[:, 3])
    assert np.array_equal(before[:, 0], cache.keys_LBSGE[:, 1])


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_every_slot_is_another_place(block_size: int) -> None:
    cache = KVCache(TARGET, num_blocks=4, block_size=block_size)
    slots = np.random.default_rng(0).permutation(4 * block_size)
    marks = np.broadcast_to(slots[:, None, None].astype(np.float32), (len(slots), G, E))
    cache.write(0, slots, marks, marks)
    assert np.array_equal(np.arange(4 * block_size), cache.keys_LBSGE[0, ..., 0, 0].ravel())


def _filled() -> KVCache:
    cache = KVCache(TARGET, num_blocks=5, block_size=4)
    rng = np.random.default_rng(1)
    cache.keys_LBSGE[:] = rng.standard_normal(cache.keys_LBSGE.shape)
    cache.values_LBSGE[:] = rng.standard_normal(cache.values_LBSGE.shape)
    return cache
