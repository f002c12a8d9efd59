"""The pace of steps: what may be expected of the next, from those of its size."""

import pytest

from core.pace import StepPace


def pace(*steps: tuple[int, float]) -> StepPace:
    it = StepPace()
    for num_tokens, seconds in steps:
        it.observe(num_tokens, seconds)
    return it


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (1, 0.01),  # its own size
        (5, 0.3),  # that of 4 to 7
        (2, 0.3),  # no such step: the next larger is as long as it can be
        (64, 0.3 * 16),  # larger than all: in proportion
    ],
)
def test_a_step_is_expected_to_take_as_long_as_the_longest_of_its_size(num_tokens: int, expected: float):
    assert expected == pytest.approx(
        pace((1, 0.01), (4, 0.2), (7, 0.3), (6, 0.1), (1, 0.001)).longest_s(num_tokens), 0.1
    )


def test_of_the_first_step_nothing_is_known():
    assert pace().longest_s(1) is None


def test_a_hiccup_is_forgotten():
    it = pace((8, 100.0), *[(8, 0.5)] * 400)

    assert 0.5 == it.longest_s(8)
