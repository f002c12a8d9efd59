import math
from fractions import Fraction

import numpy as np
import pytest

from loadgen.metrics import (
    Window,
    achieved_rate,
    client_queue,
    distribution,
    e2el,
    e2el_corrected,
    icl,
    itl,
    little_residual,
    max_stall,
    measure,
    meets,
    min_samples,
    ntpot,
    order_statistic_interval,
    schedule_delay,
    steady_window,
    tpot,
    ttft,
    ttft_corrected,
)
from loadgen.record import NOT_SENT, TIMEOUT, Failure
from tests.loadgen.builders import record

FAILED = Failure(TIMEOUT, "")


def test_each_latency_is_the_difference_it_is_named_for():
    request = record(t_sched=1.0, t_queue=1.25, t_send=2.0, chunks=[(4.0, 1), (5.0, 1), (8.0, 2)])

    assert 1.0 == schedule_delay(request)
    assert 0.75 == client_queue(request)
    assert (2.0, 3.0) == (ttft(request), ttft_corrected(request))
    assert (6.0, 7.0) == (e2el(request), e2el_corrected(request))
    assert 4.0 / 3 == tpot(request)
    assert 6.0 / 4 == ntpot(request)
    assert [1.0, 3.0] == icl(request)
    assert [1.0, 1.5, 1.5] == itl(request)
    assert 3.0 == max_stall(request)


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
def test_several_tokens_per_chunk_share_its_gap(tokens):
    """k tokens every g: the chunk gap is g, a token's time g/k, pooled and on average."""
    request = record(chunks=[(0.5 + 0.009 * j, tokens) for j in range(4)])

    assert [0.009] * 3 == pytest.approx(icl(request))
    assert [0.009 / tokens] * (3 * tokens) == pytest.approx(itl(request))
    assert 0.009 / tokens == pytest.approx(tpot(request))


def test_token_times_agree_with_the_stream_however_it_is_cut():
    """The gaps of a stream sum to its length, so mean ITL and TPOT are the same number."""
    request = record(chunks=[(1.0, 4), (1.3, 1), (1.4, 7), (3.0, 2)])

    assert 2.0 == pytest.approx(sum(itl(request)))
    assert tpot(request) == pytest.approx(np.mean(itl(request)))


def test_a_single_chunk_has_no_time_per_token():
    """It is left out and counted, never 0."""
    found = measure("tpot", [record(chunks=[(1.0, 5)]), record(chunks=[(1.0, 1), (1.5, 1)])])

    assert tpot(record(chunks=[(1.0, 5)])) is None
    assert (1, 1, 0.5) == (found.num_samples, found.num_undefined, found.mean)


def test_failures_are_in_no_latency():
    ok = record(t_sched=0.0, chunks=[(1.0, 1), (2.0, 1)])
    failed = record(t_sched=0.0, chunks=[(50.0, 1), (99.0, 1)], failure=FAILED)

    for name in ("ttft", "itl", "icl", "e2el", "tpot", "e2el_corrected", "schedule_delay"):
        assert measure(name, [ok]).ordered.tolist() == measure(name, [ok, failed]).ordered.tolist()
    assert measure("ttft", [failed]) is None


def test_a_stall_is_hidden_by_means_and_shown_by_max_stall():
    """One request of 100 freezes for a second in the middle of 101 tokens that come every 10 ms."""

    def stream(freeze_s):
        return record(chunks=[(0.01 * j + (freeze_s if j >= 50 else 0.0), 1) for j in range(101)])

    records = [stream(1.0 if index == 42 else 0.0) for index in range(100)]

    assert 0.010 == pytest.approx(measure("tpot", records).mean, rel=0.011)
    assert 0.010 == pytest.approx(measure("tpot", records).percentile(99).value, rel=0.02)
    assert 1.010 == pytest.approx(measure("max_stall", records).max)
    assert 0.0199 < measure("max_stall", records).percentile(99).value


def test_latency_from_the_intended_time_tells_of_a_stall_that_a_closed_loop_hides():
    """100 requests a second; 100 s at 1 ms each, then the server stands still for 100 s (the example of wrk2).

    A client that waits for each answer sees one slow request; the users who would have come meanwhile, 10,000.
    """
    served = [record(t_sched=0.01 * i, chunks=[(0.01 * i + 0.001, 1)]) for i in range(10_000)]
    stalled = [record(t_sched=100 + 0.01 * i, t_send=200.0, chunks=[(200.0, 1)]) for i in range(10_000)]
    closed_loop = [*served, record(t_sched=100.0, chunks=[(200.0, 1)])]

    intended = measure("e2el_corrected", [*served, *stalled])
    naive = measure("e2el", closed_loop)
    assert 25.0 == pytest.approx(intended.mean, rel=1e-3)
    assert 0.0055 == pytest.approx(intended.percentile(50).value, rel=1e-3)
    assert 98.0 == pytest.approx(intended.percentile(99).value, rel=1e-3)
    assert 0.011 == pytest.approx(naive.mean, rel=1e-3)
    assert 0.001 == pytest.approx(naive.percentile(99).value)


def test_percentiles_are_linear_between_order_statistics():
    assert 3.97 == pytest.approx(distribution([4.0, 1.0, 3.0, 2.0]).percentile(99).value)
    assert 2.5 == distribution([4.0, 1.0, 3.0, 2.0]).percentile(50).value


@pytest.mark.parametrize(("percent", "needed"), [(99, 368), (90, 36), (50, 6), (1, 368)])
def test_a_percentile_is_resolved_from_the_size_that_can_hold_its_interval(percent, needed):
    assert needed == min_samples(percent)
    assert not distribution([float(i) for i in range(needed - 1)]).percentile(percent).is_resolved
    assert distribution([float(i) for i in range(needed)]).percentile(percent).is_resolved
    assert distribution([float(i) for i in range(needed - 1)]).percentile(percent).interval is None


def test_the_interval_is_the_tightest_whose_binomial_tails_are_small_enough():
    """Against the binomial law summed term by term, in exact fractions."""
    for num, percent in [(50, 50), (100, 90), (500, 99)]:
        share = Fraction(percent, 100)
        masses = [math.comb(num, k) * share**k * (1 - share) ** (num - k) for k in range(num + 1)]
        low, high = order_statistic_interval(np.arange(1.0, num + 1), percent)

        assert sum(masses[: int(low)]) <= Fraction("0.025") < sum(masses[: int(low) + 1])
        assert sum(masses[: int(high) - 1]) < Fraction("0.975") <= sum(masses[: int(high)])


def test_the_interval_covers_the_true_percentile_as_often_as_it_says():
    rng = np.random.default_rng(0)
    median = math.log(2)
    intervals = [order_statistic_interval(np.sort(rng.exponential(1.0, 60)), 50) for _ in range(2000)]

    assert 0.945 <= np.mean([low <= median <= high for low, high in intervals]) <= 0.985


def test_pooled_values_have_no_interval_because_they_are_not_independent():
    records = [record(chunks=[(0.1 * j, 1) for j in range(100)]) for _ in range(10)]

    assert measure("itl", records).percentile(99).is_resolved
    assert measure("itl", records).percentile(99).interval is None


def test_achieved_rate_falls_by_how_late_the_last_request_left():
    on_time = [record(t_sched=0.5 * i) for i in range(10)]
    late = [record(t_sched=0.5 * i, t_send=1.0 * i) for i in range(10)]

    assert 2.0 == achieved_rate(on_time, 5.0)
    assert 10 / (5.0 + 4.5) == achieved_rate(late, 5.0)


def test_a_request_that_never_left_is_not_in_the_achieved_rate():
    records = [record(t_sched=0.0), record(t_sched=0.5, failure=Failure(NOT_SENT, ""))]

    assert 1.0 == achieved_rate(records, 1.0)


def test_the_steady_window_leaves_out_filling_and_draining():
    records = [record(t_sched=float(i), chunks=[(i + 3.0, 1)]) for i in range(10)]
    window = steady_window(records)

    assert Window(3.0, 9.0) == window
    assert [4.0, 5.0, 6.0, 7.0, 8.0, 9.0] == [r.t_last for r in window.completions(records)]


def test_there_is_no_steady_window_when_all_left_before_one_was_answered():
    assert steady_window([record(chunks=[(5.0, 1)]), record(t_sched=1.0, chunks=[(6.0, 1)])]) is None


def test_littles_law_holds_in_a_steady_window_and_not_while_a_queue_grows():
    steady = [record(t_sched=float(i), chunks=[(i + 3.0, 1)]) for i in range(100)]
    growing = [record(t_sched=float(i), chunks=[(3.0 + 2.0 * i, 1)]) for i in range(100)]

    assert 0.0 == pytest.approx(little_residual(steady, steady_window(steady)), abs=1e-9)
    assert little_residual(growing, steady_window(growing)) > 0.3


def test_limits_are_met_by_requests_that_succeed_within_all_of_them():
    request = record(chunks=[(1.0, 1), (2.0, 1)])

    assert meets(request, {"ttft": 1.0, "e2el": 2.0})
    assert not meets(request, {"ttft": 1.0, "e2el": 1.9})
    assert not meets(record(chunks=[(1.0, 1)], failure=FAILED), {"ttft": 5.0})
    assert meets(record(chunks=[(1.0, 1)]), {"tpot": 0.1})
