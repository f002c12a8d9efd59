"""Build a serving engine's heart yourself: fill in these six names until the lab's tests pass.

    LAB_MODULE=tests.lab.lab pytest tests/lab/test_lab.py

Take them in the order of this file; each leans only on those above it. docs/lab.md says why every rule is
there. Nothing but the names and signatures is fixed: keep whatever state you like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Fragmentation(NamedTuple):
    """Token slots held but not filled, by paging and by reserving the longest length for everybody."""

    paged_waste: int
    naive_waste: int


class StepReport(NamedTuple):
    """What one step did.

    scheduled: ids that computed something in this step; those that finish in it included.
    finished: ids that got their last token in this step and have given their blocks back.
    num_running: requests holding a place in this step; those that finish in it included.
    """

    scheduled: Sequence[str]
    finished: Sequence[str]
    num_running: int


class Rng(Protocol):
    """All that acceptance needs of a generator."""

    def random(self) -> float:
        """A number uniform in [0, 1)."""
        ...


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """How many blocks hold `num_tokens`: 8 tokens in blocks of 4 need 2, 9 need 3, none need 0.

    Raises:
        ValueError: fewer than 0 tokens, or fewer than 1 slot in a block.
    """
    raise NotImplementedError


def kv_cache_blocks_fragmentation(seq_lens: Sequence[int], block_size: int) -> Fragmentation:
    """Slots held but empty: in each sequence's last block, against max(seq_lens) reserved for each.

    [1, 30, 5] at 16 wastes 28 paged and 54 naive; no sequences waste (0, 0).
    """
    raise NotImplementedError


class BlockManager:
    """Which blocks belong to which request. A call that returns None has changed nothing.

    An unknown request id, or one that is already there, raises (any exception) and changes nothing either.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        raise NotImplementedError

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds: what `allocate` could take now."""
        raise NotImplementedError

    def allocate(self, request_id: str, num_tokens: int) -> list[int] | None:
        """Give a new request blocks for `num_tokens`; the ids taken, or None when there are too few."""
        raise NotImplementedError

    def append(self, request_id: str, num_tokens: int = 1) -> list[int] | None:
        """Make room for more tokens: the ids taken, [] if the last block has room, None if memory is short.

        A new block is taken only when the last one is exactly full. If the last block has room but is
        shared with another request, this request first gets a copy of its own.
        """
        raise NotImplementedError

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens; blocks behind them go back."""
        raise NotImplementedError

    def fork(self, parent_id: str, child_id: str) -> None:
        """Start `child_id` with the parent's tokens in the parent's very blocks, which both now hold."""
        raise NotImplementedError

    def free(self, request_id: str) -> None:
        """Forget a request; a block goes back once nobody else holds it."""
        raise NotImplementedError

    def block_table(self, request_id: str) -> Sequence[int]:
        """The request's block ids in the order of its tokens, from anywhere in the pool."""
        raise NotImplementedError


class ContinuousBatchingScheduler:
    """Who computes in the next step: first come, first served, and a place is refilled once it is left.

    When blocks run out, the youngest running request gives up its own and starts over later; the oldest
    never does, so that somebody always gets on.
    """

    def __init__(self, max_batch: int, block_manager: BlockManager) -> None:
        raise NotImplementedError

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether anyone waits or runs."""
        raise NotImplementedError

    def add(self, request_id: str, num_prompt_tokens: int, max_tokens: int) -> None:
        """Queue a request that will get exactly `max_tokens` tokens.

        Raises (any exception): the id is already there, or its tokens cannot fit even an empty pool.
        """
        raise NotImplementedError

    def step(self) -> StepReport:
        """Admit, move each running request on by one token, let go of those that are done.

        The step that computes the last of a prompt yields its first token.
        """
        raise NotImplementedError


def static_batching_steps(output_lens: Sequence[int], max_batch: int) -> int:
    """Steps if groups of `max_batch`, in the given order, each run until their longest is done."""
    raise NotImplementedError


def speculative_accept(
    draft_tokens: NDArray[np.int64],
    target_probs: NDArray[np.float64],
    draft_probs: NDArray[np.float64],
    rng: Rng,
) -> tuple[int, int]:
    """Accept a prefix of the draft and add one token, so that output is distributed as the target alone.

    Draft token i is kept with probability min(1, target / draft). At the first refusal the bonus token is
    drawn from the normalised positive part of (target - draft) of that row; if all are kept, from row K.

    Args:
        draft_tokens: (K,).
        target_probs: (K+1, V); row i is the target's law after i draft tokens.
        draft_probs: (K, V); the laws the draft tokens were drawn from.
        rng: always asked for K + 1 numbers: one per draft token in order, then one for the bonus token.

    Returns:
        (num_accepted, bonus_token).

    Raises:
        ValueError: the shapes disagree.
    """
    raise NotImplementedError
