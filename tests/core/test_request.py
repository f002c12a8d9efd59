"""What may be asked, and how a request counts itself."""

import math
import pickle
from typing import Any

import pytest

from core.errors import InvalidRequest
from core.request import FinishReason, NewRequest, Request, RequestOutput, RequestStatus, SamplingParams
from tests.builders import new_request, request


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


def test_a_request_needs_a_prompt_and_max_tokens():
    with pytest.raises(InvalidRequest, match="prompt has 0 tokens, at least 1 is needed") as refused:
        request(prompt=[])
    assert "prompt" == refused.value.param
    with pytest.raises(InvalidRequest, match="max_tokens is not set"):
        Request("a", [1], SamplingParams(max_tokens=None))


def test_a_new_request_waits_with_nothing_computed():
    it = request(prompt=[1, 2, 3])

    assert RequestStatus.WAITING is it.status
    assert (3, 3, 0, 0, 3) == (
        it.num_tokens,
        it.num_prompt_tokens,
        it.num_output_tokens,
        it.num_computed_tokens,
        it.num_missing_tokens,
    )


def test_output_is_what_stands_behind_the_prompt():
    prompt = [1, 2]
    it = request(prompt=prompt)
    it.token_ids += [7, 8]
    it.num_computed_tokens = 3

    assert ([7, 8], 2, 4, 1) == (it.output_token_ids, it.num_output_tokens, it.num_tokens, it.num_missing_tokens)
    assert [1, 2] == prompt


@pytest.mark.parametrize(("num_output", "wanted"), [(0, 3), (1, 3), (2, 2), (3, 1), (4, 0)])
def test_drafts_wanted_leave_room_for_the_token_behind_them(num_output: int, wanted: int):
    it = request(max_tokens=5, num_drafts=3)
    it.token_ids += [0] * num_output

    assert wanted == it.num_drafts_wanted


def test_the_first_reason_to_finish_stands():
    it = request()
    assert not it.is_finished
    it.finish(FinishReason.STOP, "X")
    it.finish(FinishReason.ABORT)

    assert (True, FinishReason.STOP, "X", RequestStatus.FINISHED) == (
        it.is_finished,
        it.finish_reason,
        it.stop_reason,
        it.status,
    )


def test_its_repr_shows_numbers_and_no_tokens():
    it = request(prompt=[71, 72])

    assert "Request('a', waiting, 2 prompt + 0 output tokens, 0 computed)" == repr(it)


def test_what_crosses_to_the_engine_and_back_can_be_pickled():
    new = new_request(script=["a", ("b", b"\xff")], stop=("X",), logit_bias={3: 1.0}, seed=4)
    output = RequestOutput("a", "text", (), 1, 0, 2, FinishReason.STOP, "X")

    assert new == pickle.loads(pickle.dumps(new))
    assert output == pickle.loads(pickle.dumps(output))
    assert isinstance(new, NewRequest)


def test_vllms_finish_reasons_are_the_labels():
    assert ["stop", "length", "abort", "error"] == [reason.value for reason in FinishReason]


def test_more_stop_ids_than_anybody_needs_are_refused():
    """Each token is held against all of them, in the thread that steps the engine."""
    SamplingParams(stop_token_ids=tuple(range(1024)))
    with pytest.raises(InvalidRequest, match="stop_token_ids has 1025 ids, limit is 1024") as refused:
        SamplingParams(stop_token_ids=(1,) * 1025)
    assert "stop_token_ids" == refused.value.param
