"""Which of a request's blocks can be found, and which are known to have the draft model's KV too."""

import pytest

from core.memory.block_manager import BlockManager
from core.request import Request
from core.scheduling.publishing import BlockPublisher
from tests.builders import request

SIZE = 2


def computed(num_tokens: int, num_computed: int, num_draft_computed: int = 0) -> tuple[Request, BlockManager]:
    """A request in a pool of its own, with KV of so many of its tokens."""
    it, manager = request("a", range(num_tokens)), BlockManager(8, SIZE)
    manager.allocate("a", max(num_tokens, num_computed))
    it.num_computed_tokens, it.num_draft_computed_tokens = num_computed, num_draft_computed
    return it, manager


@pytest.mark.parametrize(("num_computed", "num_known"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)])
def test_full_blocks_are_found(num_computed: int, num_known: int):
    it, manager = computed(5, num_computed)
    BlockPublisher(manager).publish(it)

    assert num_known == manager.num_known(request("b", range(8)).block_hashes(SIZE, 4))


def test_tokens_that_a_stop_cut_off_fill_no_block():
    it, manager = computed(3, num_computed=4)
    BlockPublisher(manager).publish(it)

    assert 1 == it.num_published_blocks


def test_who_may_share_none_publishes_none():
    it, manager = computed(5, num_computed=4)
    it.is_unshareable = True
    BlockPublisher(manager).publish(it)

    assert 0 == manager.num_known(it.block_hashes(SIZE, 2))


@pytest.mark.parametrize(("num_draft_computed", "num_filled"), [(4, 2), (3, 1), (0, 0)])
def test_the_draft_model_fills_the_blocks_that_it_has_come_through(num_draft_computed: int, num_filled: int):
    it, manager = computed(5, 4, num_draft_computed)
    BlockPublisher(manager).publish(it)

    assert num_filled == manager.num_draft_filled("a") == it.num_draft_filled_blocks
