"""How a request counts itself."""

import pickle

import pytest

from core.errors import InvalidRequest
from core.request import FinishReason, NewRequest, Request, RequestOutput, RequestStatus
from core.sampling_params import SamplingParams
from tests.builders import new_request, request


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
