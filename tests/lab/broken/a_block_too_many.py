"""Fault: exact multiples are counted a block too high, the usual `n // size + 1`."""

from core import *  # noqa: F403
from core import blocks_needed as correct_blocks_needed


def blocks_needed(num_tokens, block_size):
    return correct_blocks_needed(num_tokens + 1, block_size) if num_tokens else 0
