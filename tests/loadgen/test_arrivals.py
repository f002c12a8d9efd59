import math

import numpy as np
import pytest

from loadgen.arrivals import all_at_once, draw_gaps, schedule_duration, schedule_requests


@pytest.mark.parametrize(
    ("burstiness", "cv", "tolerance"),
    [(0.25, 2.0, 0.033), (0.5, math.sqrt(2), 0.025), (1.0, 1.0, 0.021), (4.0, 0.5, 0.017)],
)
@pytest.mark.parametrize("seed", range(3))
def test_gamma_gaps_vary_as_their_burstiness_says(burstiness, cv, tolerance, seed):
    """The coefficient of variation is 1/sqrt(burstiness); tolerances are three sigma at this sample size."""
    gaps = draw_gaps("gamma", 7.0, 20_000, seed=seed, burstiness=burstiness)

    assert cv == pytest.approx(gaps.std() / gaps.mean(), rel=tolerance)
    assert 1 / 7.0 == pytest.approx(gaps.mean(), rel=4 * cv / math.sqrt(20_000))


def test_poisson_gaps_are_exponential():
    """A quarter of them are below ln(4/3) means, half below ln 2, three quarters below ln 4."""
    gaps = draw_gaps("poisson", 5.0, 20_000, seed=0)
    quartiles = np.quantile(gaps, [0.25, 0.5, 0.75])

    assert [math.log(4 / 3) / 5, math.log(2) / 5, math.log(4) / 5] == pytest.approx(list(quartiles), rel=0.04)


def test_constant_gaps_are_one_over_the_rate():
    schedule = schedule_requests("constant", 10.0, 4, seed=0)

    assert [0.0, 0.1, 0.2, 0.3] == pytest.approx(list(schedule.offsets_s))
    assert 0.4 == pytest.approx(schedule.horizon_s)


def test_the_seed_alone_decides_the_schedule():
    first, again, other = (schedule_requests("poisson", 3.0, 50, seed=seed).offsets_s for seed in (1, 1, 2))

    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("arrival", ["poisson", "gamma", "constant"])
def test_an_exact_schedule_has_the_requested_mean_rate(arrival):
    schedule = schedule_requests(arrival, 8.0, 100, seed=3, burstiness=0.3 if arrival == "gamma" else 1.0)

    assert 8.0 == pytest.approx(schedule.planned_rate)
    assert 100 == len(schedule.offsets_s)
    assert 0.0 == schedule.offsets_s[0]
    assert np.all(np.diff(schedule.offsets_s) >= 0)


def test_a_schedule_as_drawn_keeps_its_sampling_error():
    schedule = schedule_requests("poisson", 8.0, 100, seed=3, is_exact=False)

    assert 8.0 != pytest.approx(schedule.planned_rate, rel=1e-6)


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_duration_bounds_the_schedule(is_exact):
    schedule = schedule_duration("poisson", 20.0, 30.0, seed=5, is_exact=is_exact)

    assert schedule.offsets_s[-1] < 30.0
    assert 600 == pytest.approx(len(schedule.offsets_s), abs=0 if is_exact else 4 * math.sqrt(600))


def test_all_at_once_has_no_rate():
    assert [0.0, 0.0, 0.0] == list(all_at_once(3).offsets_s)
    assert math.inf == all_at_once(3).planned_rate


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (math.inf, 1.0), (1.0, 0.0)])
def test_rates_and_shapes_must_be_positive_and_finite(rate, burstiness):
    with pytest.raises(ValueError, match="must be positive and finite"):
        draw_gaps("gamma", rate, 3, seed=0, burstiness=burstiness)
