"""What a model's limits let through, asked of an engine, for it is there that they are kept."""

import pytest

from core.errors import ContextLengthExceeded, InvalidRequest
from core.sampling_params import SamplingParams
from tests.builders import engine, new_request


@pytest.mark.parametrize(
    ("prompt", "params", "message", "param"),
    [
        ([], {}, "prompt has 0 tokens, at least 1 is needed", "prompt"),
        ([0, 257], {}, "prompt has token id 257, allowed is [0, 256]", "prompt"),
        ([-1], {}, "prompt has token id -1, allowed is [0, 256]", "prompt"),
        ([1], {"logit_bias": {300: 1.0}}, "logit_bias has token id 300, allowed is [0, 256]", "logit_bias"),
        ([1], {"stop_token_ids": (257,)}, "stop_token_ids has token id 257, allowed is [0, 256]", "stop_token_ids"),
        ([1], {"num_logprobs": 21}, "logprobs is 21, allowed is [0, 20]", "logprobs"),
        ([1], {"num_logprobs": -1}, "logprobs is -1, allowed is [0, 20]", "logprobs"),
    ],
)
def test_what_the_model_cannot_do_is_refused_with_field_value_and_limit(
    prompt: list[int], params: dict[str, object], message: str, param: str
):
    it = engine()
    with pytest.raises(InvalidRequest) as refused:
        it.check(prompt, SamplingParams(**params))  # type: ignore[arg-type]
    assert (message, param) == (str(refused.value), refused.value.param)

    with pytest.raises(InvalidRequest) as refused:
        it.add(new_request(prompt=prompt, **params))
    assert (message, param) == (str(refused.value), refused.value.param)
    assert not it.has_unfinished_requests


def test_absent_max_tokens_is_the_room_that_the_context_leaves():
    assert 64 - 10 == engine().check([1] * 10, SamplingParams(max_tokens=None)).max_tokens


def test_absent_max_tokens_clips_min_tokens_too():
    checked = engine().check([1] * 60, SamplingParams(max_tokens=None, min_tokens=9))

    assert (4, 4) == (checked.max_tokens, checked.min_tokens)


def test_checking_changes_nothing():
    params = SamplingParams(max_tokens=None)
    engine().check([1], params)

    assert params.max_tokens is None


def test_prompt_and_output_together_must_fit_the_context():
    it = engine()
    it.check([1] * 60, SamplingParams(max_tokens=4))
    with pytest.raises(ContextLengthExceeded) as refused:
        it.check([1] * 60, SamplingParams(max_tokens=5))

    assert (
        "This model's maximum context length is 64 tokens: the prompt is too long for max_tokens 5"
        " (60 tokens leave room for 4)",
        "max_tokens",
    ) == (str(refused.value), refused.value.param)


@pytest.mark.parametrize("max_tokens", [None, 1])
def test_a_prompt_must_leave_room_for_a_token(max_tokens: int | None):
    it = engine()
    it.check([1] * 63, SamplingParams(max_tokens=max_tokens))
    with pytest.raises(ContextLengthExceeded) as refused:
        it.check([1] * 64, SamplingParams(max_tokens=max_tokens))

    assert (
        "This model's maximum context length is 64 tokens: prompt is too long, 64 tokens and at least 1 to come",
        "prompt",
    ) == (str(refused.value), refused.value.param)


def test_a_prompt_beyond_the_pool_is_told_how_many_blocks_it_needs():
    with pytest.raises(ContextLengthExceeded, match=r"needs 5 KV blocks of 4 tokens, 3 exist"):
        engine(num_kv_blocks=3).check([1] * 17, SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("config", "limit"),
    [({}, 64), ({"max_model_len": 20}, 20), ({"max_model_len": 500}, 64), ({"num_kv_blocks": 3, "block_size": 5}, 15)],
)
def test_the_context_is_the_least_of_model_flag_and_pool(config: dict[str, int], limit: int):
    assert limit == engine(**config).max_model_len


def test_the_number_of_blocks_must_be_known():
    with pytest.raises(ValueError, match="num_kv_blocks is not set"):
        engine(num_kv_blocks=None)
