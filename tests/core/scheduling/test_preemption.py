"""What recompute and swap cost, from what was measured."""

import pytest

from core.scheduling.preemption import CostModel, always_swap


def model_of(*steps: tuple[int, float], copies: tuple[int, float] | None = None) -> CostModel:
    model = CostModel()
    for num_tokens, seconds in steps:
        model.observe_step(num_tokens, seconds)
    if copies is not None:
        model.observe_copies(*copies)
    return model


def test_nothing_is_known_before_anything_is_measured():
    assert (None, None) == (CostModel().seconds_per_token, CostModel().seconds_per_block)


def test_a_tokens_cost_is_the_slope_and_what_a_step_costs_anyway_is_not_in_it():
    model = model_of(*((n, 0.5 + 0.01 * n) for n in (1, 40, 7, 200, 1)))

    assert pytest.approx(0.01) == model.seconds_per_token


def test_steps_of_one_size_give_their_mean():
    assert pytest.approx(0.02, rel=0.02) == model_of((10, 0.1), (10, 0.3)).seconds_per_token


def test_a_slope_that_cannot_be_gives_the_mean():
    """More tokens took less time: noise."""
    model = model_of((1, 0.2), (100, 0.1))

    assert pytest.approx(0.3 / 101, rel=0.03) == model.seconds_per_token


def test_a_blocks_cost_is_the_mean_over_blocks():
    model = CostModel()
    model.observe_copies(1, 0.02)
    model.observe_copies(3, 0.02)

    assert pytest.approx(0.01, rel=0.02) == model.seconds_per_block


def test_the_past_fades():
    """Steps and copies get a thousand times faster; three hundred measurements later the model knows."""
    model = model_of(*((n % 50 + 1, 1.0 * (n % 50 + 1)) for n in range(100)), copies=(1, 1.0))
    for n in range(300):
        model.observe_step(n % 50 + 1, 0.001 * (n % 50 + 1))
        model.observe_copies(1, 0.001)

    assert model.seconds_per_token is not None
    assert model.seconds_per_block is not None
    assert 0.001 <= model.seconds_per_token < 0.01
    assert 0.001 <= model.seconds_per_block < 0.01


def test_it_copies_once_to_know_what_that_costs():
    assert model_of((10, 0.1), (20, 0.2)).prefers_swap(1, 1000)


def test_it_copies_while_it_does_not_know_what_computing_costs():
    assert model_of(copies=(1, 9.0)).prefers_swap(1, 1000)


@pytest.mark.parametrize(("num_tokens", "num_blocks", "swaps"), [(101, 5, True), (99, 5, False), (0, 0, False)])
def test_it_takes_what_is_cheaper_out_and_in_counted(num_tokens: int, num_blocks: int, swaps: bool):
    """0.01 s a token, 0.1 s a block: five blocks out and in cost as much as a hundred tokens."""
    model = model_of((10, 0.6), (20, 0.7), copies=(2, 0.2))

    assert swaps == model.prefers_swap(num_tokens, num_blocks)


def test_swap_always_swaps():
    assert always_swap(0, 10**6)
