"""Fault: a sequence that ends with its block is said to waste a whole one."""

from core import *  # noqa: F403
from core import kv_cache_blocks_fragmentation as correct_fragmentation


def kv_cache_blocks_fragmentation(seq_lens, block_size):
    waste = correct_fragmentation(seq_lens, block_size)
    num_full = sum(length % block_size == 0 for length in seq_lens)
    return waste._replace(paged_waste=waste.paged_waste + num_full * block_size)
