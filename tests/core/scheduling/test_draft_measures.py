"""Curves of cost and rates of acceptance: what was measured, faded, and drawn towards what is likely."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.scheduling.draft_measures import Acceptance, CostCurve


def curve_of(*measured: tuple[int, float]) -> CostCurve:
    curve = CostCurve()
    for num_rows, seconds in measured:
        curve.observe(num_rows, seconds)
    return curve


def test_before_anything_is_measured_all_is_free():
    assert [0.0] * 5 == list(CostCurve().table(4))
    assert not CostCurve().is_measured


def test_between_measurements_it_is_straight_beyond_them_flat_below_them_in_proportion():
    curve = curve_of((4, 2.0), (8, 4.0), (2, 2.0))
    assert [0.0, 1.0, 2.0, 2.0, 2.0, 2.5, 3.0, 3.5, 4.0, 4.0, 4.0] == list(curve.table(10))[:11]
    assert (True, False) == (curve.has(4), curve.has(5))


def test_it_may_be_hoped_that_some_rows_more_cost_nothing():
    curve = curve_of((4, 2.0), (8, 4.0), (9, 5.0))
    assert [0.0, 0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 3.5, 4.0, 5.0, 5.0] == list(curve.hopes(10))[:11]


def test_a_clock_that_stands_still_measures_nothing():
    assert not curve_of((4, 0.0), (4, -1.0)).is_measured


def test_fewer_rows_never_take_longer():
    """4 rows were seen twice, 8 once: between them the mean, weighted."""
    table = curve_of((4, 3.0), (4, 3.0), (8, 1.5)).table(8)
    assert table[4] == table[8] == pytest.approx(2.5, abs=0.02)


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0.001, 10)), min_size=1, max_size=40))
def test_a_curve_never_falls_and_stays_within_what_was_measured(measured: list[tuple[int, float]]):
    curve = curve_of(*measured)
    table = list(curve.table(310))[:311]
    assert sorted(table) == table
    assert all(value <= max(seconds for _, seconds in measured) + 1e-9 for value in table)
    assert table[310] >= min(seconds for _, seconds in measured) - 1e-9


def test_old_measurements_fade():
    curve = curve_of(*[(4, 1.0)] * 50, *[(4, 2.0)] * 150)
    assert curve.table(4)[4] == pytest.approx(2.0, abs=0.06)


def test_what_was_not_measured_for_long_yields_to_what_comes():
    """A hundred steps of 8 rows later, one step of 4 rows counts as much as all before it."""
    curve = curve_of(*[(4, 1.0)] * 50, *[(8, 3.0)] * 250, (4, 2.0))
    assert curve.table(4)[4] > 1.7


def test_one_disturbance_does_not_count_for_more_than_twice_what_is_known():
    curve = curve_of(*[(4, 1.0)] * 40, (4, 30.0))
    assert curve.table(4)[4] < 1.05


def test_many_rows_share_bins_a_sixteenth_wide_and_few_do_not():
    curve = curve_of((31, 1.0), (64, 2.0))
    assert [True, False, False, True, True, False] == [curve.has(n) for n in (31, 30, 32, 63, 64, 65)]


def test_only_drafts_up_to_the_first_that_fell_were_tried():
    acceptance = Acceptance(4, 1.0)
    acceptance.observe(3, 1)
    acceptance.observe(3, 3)
    acceptance.observe(1, 0)
    assert [2 / 3, 1 / 2, 1.0, 0.0] == acceptance.rates


def test_more_drafts_than_positions_are_counted_as_far_as_they_go():
    acceptance = Acceptance(2, 1.0)
    acceptance.observe(9, 9)
    assert [1.0, 1.0] == acceptance.rates


def test_old_verifications_count_less():
    acceptance = Acceptance(1, 0.5)
    acceptance.observe(1, 1)
    acceptance.observe(1, 0)
    assert [0.5 / 1.5] == acceptance.rates


def test_a_few_trials_are_drawn_towards_the_prior_and_less_so_the_more_they_are_trusted():
    acceptance = Acceptance(2, 1.0)
    for _ in range(8):
        acceptance.observe(1, 0)
    assert [0.4, 0.5] == acceptance.rates_with([0.8, 0.5], 8.0, 1.0)
    assert [8 * 0.8 / 10, 0.5] == pytest.approx(acceptance.rates_with([0.8, 0.5], 8.0, 0.25))


def test_faded_trials_are_as_little_trusted():
    acceptance = Acceptance(1, 1.0, kept=4.0, tried=8.0)
    acceptance.fade(0.5)
    assert ([0.5], [4.0 / 8]) == (acceptance.rates, acceptance.rates_with([0.5], 4.0, 1.0))
    assert [(2 + 4 * 0.8) / 8] == pytest.approx(acceptance.rates_with([0.8], 4.0, 1.0))
