"""What may be asked."""

import math
from typing import Any

import pytest

from core.errors import InvalidRequest
from core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "[0, 2]"),
        ("temperature", 2.1, "[0, 2]"),
        ("temperature", math.nan, "[0, 2]"),
        ("temperature", math.inf, "[0, 2]"),
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", 1.1, "(0, 1]"),
        ("min_p", -0.1, "[0, 1]"),
        ("min_p", 1.1, "[0, 1]"),
        ("presence_penalty", -2.1, "[-2, 2]"),
        ("presence_penalty", 2.1, "[-2, 2]"),
        ("frequency_penalty", -2.1, "[-2, 2]"),
        ("frequency_penalty", math.nan, "[-2, 2]"),
        ("repetition_penalty", 0.0, "(0, 2]"),
        ("repetition_penalty", 2.1, "(0, 2]"),
        ("top_k", -2, "[-1, 9223372036854775807]"),
        ("min_tokens", -1, "[0, 9223372036854775807]"),
        ("max_tokens", -1, "[0, 9223372036854775807]"),
        ("seed", 2**63, "[-9223372036854775808, 9223372036854775807]"),
        ("seed", -(2**63) - 1, "[-9223372036854775808, 9223372036854775807]"),
    ],
)
def test_a_value_out_of_range_is_refused_with_field_value_and_limit(field: str, value: Any, allowed: str):
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{field: value})

    assert (f"{field} is {value}, allowed is {allowed}", field) == (str(refused.value), refused.value.param)


@pytest.mark.parametrize(
    ("params", "message", "param"),
    [
        ({"logit_bias": {5: 1.0, 7: 101.0}}, "logit_bias of token 7 is 101.0, allowed is [-100, 100]", "logit_bias"),
        ({"logit_bias": {5: math.nan}}, "logit_bias of token 5 is nan, allowed is [-100, 100]", "logit_bias"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 is more than max_tokens 4", "min_tokens"),
        ({"stop": ("a",) * 5}, "stop has 5 strings, limit is 4", "stop"),
        ({"stop": ("a", "")}, "stop has an empty string", "stop"),
    ],
)
def test_what_does_not_fit_together_is_refused(params: dict[str, Any], message: str, param: str):
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**params)

    assert (message, param) == (str(refused.value), refused.value.param)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 2},
        {"top_p": 1, "min_p": 1, "top_k": -1},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 2},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"max_tokens": 4, "min_tokens": 4},
        {"max_tokens": None, "min_tokens": 10**6},
        {"logit_bias": {0: -100, 1: 100}},
        {"stop": ("a", "b", "c", "d")},
    ],
)
def test_limits_themselves_are_allowed(params: dict[str, Any]):
    assert params == {name: getattr(SamplingParams(**params), name) for name in params}


def test_only_temperature_zero_is_greedy():
    assert [True, False] == [SamplingParams(temperature=t).is_greedy for t in (0, 1e-9)]


def test_more_stop_ids_than_anybody_needs_are_refused():
    """Each token is held against all of them, in the thread that steps the engine."""
    SamplingParams(stop_token_ids=tuple(range(1024)))
    with pytest.raises(InvalidRequest, match="stop_token_ids has 1025 ids, limit is 1024") as refused:
        SamplingParams(stop_token_ids=(1,) * 1025)
    assert "stop_token_ids" == refused.value.param
