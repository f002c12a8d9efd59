import math

import pytest

from loadgen.options import BenchOptions


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_rate": 0.0}, "--request-rate"),
        ({"request_rate": math.nan}, "--request-rate"),
        ({"burstiness": 0.0}, "--burstiness"),
        ({"burstiness": 2.0, "arrival": "poisson"}, "--burstiness shapes gamma"),
        ({"duration_s": 5.0}, "--duration needs"),
        ({"max_error_rate": 1.5}, "--max-error-rate"),
        ({"random_range_ratio": 1.0}, "--random-range-ratio"),
        ({"endpoint": "/v1/chat/completions"}, "a chat endpoint takes text"),
        ({"percentile_metrics": ("tttf",)}, "'tttf' is none of"),
        ({"goodput_s": {"itl": 0.1}}, "'itl' is none of"),
        ({"metric_percentiles": (100.0,)}, "--metric-percentiles"),
    ],
)
def test_what_makes_no_sense_is_refused_naming_the_option(fields, message):
    with pytest.raises(ValueError, match=message):
        BenchOptions(**fields)


def test_prompt_and_file_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match="exclude each other"):
        BenchOptions(prompt="a", dataset_path=tmp_path)


def test_burstiness_alone_means_gamma_arrivals():
    assert "gamma" == BenchOptions(burstiness=0.5).arrival_law
    assert "poisson" == BenchOptions().arrival_law


def test_a_rate_makes_an_open_loop_and_a_limit_alone_a_closed_one():
    assert BenchOptions(max_concurrency=4).schedule() is None
    assert 100 == len(BenchOptions().schedule().offsets_s)
    assert 0.0 == BenchOptions().schedule().horizon_s
    assert 5.0 == pytest.approx(BenchOptions(request_rate=5.0, max_concurrency=4).schedule().planned_rate)


@pytest.mark.parametrize(
    ("num_prompts", "duration_s", "expected"), [(30, None, 30), (None, 4.0, 20), (30, 4.0, 20), (10, 4.0, 10)]
)
def test_of_number_and_duration_the_shorter_decides(num_prompts, duration_s, expected):
    options = BenchOptions(request_rate=5.0, num_prompts=num_prompts, duration_s=duration_s)

    assert expected == len(options.schedule().offsets_s)


@pytest.mark.parametrize("text", [{}, {"prompt": "Once"}])
def test_warm_up_prompts_differ_from_the_measured(text):
    options = BenchOptions(**text)
    measured = {options.prompts()(index).content for index in range(10)}

    assert not measured & {options.warmup_prompts()(index).content for index in range(10)}
