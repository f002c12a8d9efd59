"""The sampler: its law is the one the parameters describe, and tokens come from that law."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.decoding.sampler import LOGPROB_FLOOR, law, process_logits, sample_draft, sample_keyed, token_logprobs
from core.errors import NothingAllowed
from core.request import Request
from core.sampling_params import SamplingParams
from tests import oracle
from tests.core.small_models import EOS, a_request

V = 8
FULL = np.array([2.5, -1.0, 0.5, 2.5, -3.0, 0.0, 1.25, 0.5], np.float32)


def asked(output: Sequence[int] = (), prompt: Sequence[int] = (1,), **params: Any) -> Request:
    request = a_request("r", prompt, SamplingParams(max_tokens=100, **params))
    request.token_ids += output
    return request


def direct(logits_V: np.ndarray, request: Request) -> np.ndarray:
    prompt = request.token_ids[: request.num_prompt_tokens]
    return oracle.sampling_law(list(logits_V), request.params, prompt, request.output_token_ids, EOS)


# Logits in eighths and parameters that are exact in binary, so that float32 and float64 have the same ties.
eighths = st.integers(-40, 40).map(lambda n: n / 8)
rows = st.lists(eighths, min_size=V, max_size=V).map(lambda row: np.array(row, np.float32))
tokens = st.integers(0, V - 1)
parameters: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 0.25, 0.7, 1.0, 2.0]),
    "top_k": st.integers(-1, V + 2),
    "top_p": st.sampled_from([0.0137, 0.2713, 0.5119, 0.8641, 0.9931, 1.0]),
    "min_p": st.sampled_from([0.0, 0.0213, 0.1717, 0.5531, 1.0]),
    "presence_penalty": st.integers(-8, 8).map(lambda n: n / 4),
    "frequency_penalty": st.integers(-8, 8).map(lambda n: n / 4),
    "repetition_penalty": st.sampled_from([0.5, 1.0, 1.25, 2.0]),
    "logit_bias": st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.25, 3.0, 100.0]), max_size=3),
    "min_tokens": st.integers(0, 6),
    "stop_token_ids": st.lists(tokens, max_size=2).map(tuple),
    # Never so narrow that, with all of the above, nothing is left.
    "allowed_token_ids": st.sets(tokens, min_size=V - 2).map(tuple),
    "bad_words": st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
}


def combined() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=parameters)


def assert_same_law(logits_V: np.ndarray, request: Request) -> None:
    probs_V = law(logits_V, request)
    np.testing.assert_allclose(direct(logits_V, request), probs_V, atol=1e-6)
    assert 1 == pytest.approx(probs_V.sum())


@pytest.mark.parametrize("name", parameters)
def test_law_of_each_parameter_alone(name: str) -> None:
    @given(
        row=rows,
        value=parameters[name],
        prompt=st.lists(tokens, min_size=1, max_size=5),
        output=st.lists(tokens, max_size=5),
    )
    def check(row: np.ndarray, value: Any, prompt: list[int], output: list[int]) -> None:
        assert_same_law(row, asked(output, prompt, **{name: value}))

    check()


@given(
    row=rows, params=combined(), prompt=st.lists(tokens, min_size=1, max_size=5), output=st.lists(tokens, max_size=5)
)
def test_law_of_all_combinations(row: np.ndarray, params: dict[str, Any], prompt: list[int], output: list[int]) -> None:
    assert_same_law(row, asked(output, prompt, **params))


@given(row=rows, params=combined(), output=st.lists(tokens, max_size=4), draft=st.lists(tokens, max_size=4))
def test_tokens_of_a_draft_count_as_output(
    row: np.ndarray, params: dict[str, Any], output: list[int], draft: list[int]
) -> None:
    behind, before = asked([*output, *draft], **params), asked(output, **params)
    assert np.array_equal(law(row, behind), law(row, before, draft))
    assert sample_keyed(row, behind) == sample_keyed(row, before, draft)


@given(row=rows, params=combined(), output=st.lists(tokens, max_size=4))
def test_logits_that_came_in_are_left_as_they_were(row: np.ndarray, params: dict[str, Any], output: list[int]) -> None:
    before = row.copy()
    process_logits(row, asked(output, **params))
    assert np.array_equal(before, row)


def test_nothing_asked_is_the_softmax() -> None:
    np.testing.assert_allclose(oracle.softmax(FULL.astype(np.float64)), law(FULL, asked()), rtol=1e-12)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, 1), (0.499, 1), (0.501, 2), (0.749, 2), (0.751, 3), (0.874, 3), (0.876, 4), (1.0, 4)]
)
def test_top_p_keeps_the_smallest_set_that_has_it(top_p: float, kept: int) -> None:
    logits_V = np.log([0.125, 0.5, 0.125, 0.25]).astype(np.float32)
    assert [1, 3, 0, 2][:kept] == np.argsort(-law(logits_V, asked(top_p=top_p)), kind="stable")[:kept].tolist()
    assert kept == np.count_nonzero(law(logits_V, asked(top_p=top_p)))


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.5, 2), (0.75, 3)])
def test_top_p_that_a_set_has_exactly_needs_no_more(top_p: float, kept: int) -> None:
    assert list(range(kept)) == np.flatnonzero(law(np.zeros(4, np.float32), asked(top_p=top_p))).tolist()


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 0.3}, {"top_k": 3}, {"top_k": 4}, {"top_p": 0.55}], ids=str)
def test_of_equals_at_a_border_lower_ids_stay(params: dict[str, Any]) -> None:
    logits_V = np.array([1, 3, 3, 1, 3, 3], np.float32)
    kept = np.flatnonzero(law(logits_V, asked(**params))).tolist()
    assert [1, 2, 4, 5][: len(kept)] == kept


@pytest.mark.parametrize("spread", [0.0, 0.5, 8.0])
@pytest.mark.parametrize(
    "params", [{"top_p": 0.31}, {"top_p": 0.973}, {"top_k": 1200, "top_p": 0.9}, {"top_k": 3}], ids=str
)
def test_law_over_a_large_vocabulary(spread: float, params: dict[str, Any]) -> None:
    """A nucleus is looked for among few tokens first; it may be wider, and all may be equal."""
    logits_V = np.random.default_rng(1).standard_normal(1500).astype(np.float32) * np.float32(spread)
    assert_same_law(logits_V, asked(**params))


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 8), (0.99, 2), (1.0, 2), (0.13, 5), (0.14, 3), (0.29, 2)])
def test_min_p_is_relative_to_the_most_likely(min_p: float, kept: int) -> None:
    assert kept == np.count_nonzero(law(FULL, asked(min_p=min_p)))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("repetition_penalty", 2.0, [1, 0.5, 0.5, 0.5, 0.5, 1, 1, 1]),
        ("presence_penalty", 2.0, [1, 1, 1, -1, -1, 1, 1, 1]),
        ("frequency_penalty", 0.5, [1, 1, 1, 0, 0.5, 1, 1, 1]),
    ],
)
def test_repetition_counts_prompt_and_output_the_others_output_alone(
    name: str, value: float, expected: list[float]
) -> None:
    greedy = asked([3, 3, 4], [1, 2], temperature=0, **{name: value})
    assert expected == process_logits(np.ones(V, np.float32), greedy).tolist()


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    raw = np.array([2, -2, 0, 2, -2, 0], np.float32)
    greedy = asked(prompt=[0, 1, 2], temperature=0, repetition_penalty=2.0)
    assert [1, -4, 0, 2, -2, 0] == process_logits(raw, greedy).tolist()


def test_end_is_masked_until_min_tokens_have_come() -> None:
    """Drafts under test count as having come."""
    for num_output, num_drafted in product(range(4), range(4)):
        probs_V = law(FULL, asked([0] * num_output, min_tokens=2, stop_token_ids=(5,)), [0] * num_drafted)
        assert (num_output + num_drafted >= 2) == bool(probs_V[2] > 0) == bool(probs_V[5] > 0)


def test_bias_of_100_decides_and_forbids() -> None:
    assert 1 == pytest.approx(law(FULL, asked(logit_bias={4: 100.0}))[4])
    assert 0 == pytest.approx(law(FULL, asked(logit_bias={0: -100.0}))[0])


def test_greedy_takes_the_most_likely_and_of_equals_the_lowest_id() -> None:
    assert 0 == sample_keyed(FULL, asked(temperature=0))
    assert 6 == sample_keyed(FULL, asked(temperature=0, logit_bias={6: 5.0}))
    assert [1, *[0] * 7] == law(FULL, asked(temperature=0)).tolist()


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    """Equal logits stay equal; nothing overflows."""
    np.testing.assert_allclose([0.5, 0, 0, 0.5, 0, 0, 0, 0], law(FULL, asked(temperature=temperature)), atol=1e-9)
    assert {0, 3} == {sample_keyed(FULL, asked([1] * i, temperature=temperature)) for i in range(20)}


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.5}, {"top_k": 4, "presence_penalty": 0.5}, {"top_p": 0.8, "min_p": 0.2}], ids=str
)
def test_tokens_come_with_the_frequencies_of_the_law(params: dict[str, Any]) -> None:
    """Keyed tokens over seeds and positions, and draft tokens over indices. Fixed seeds."""
    counts = np.zeros((2, V), int)
    for i in range(4000):
        request = a_request("r", [1] * (1 + i % 7), SamplingParams(seed=i, **params))
        counts[0, sample_keyed(FULL, request)] += 1
        counts[1, sample_draft(law(FULL, request), request, i % 5)] += 1
    expected = direct(FULL, asked(**params))
    for row in counts:
        assert oracle.chi_square(row, expected) < 1
        assert oracle.chi_square(row, direct(FULL, asked(**params | {"temperature": 1.3}))) > 1


def test_keyed_token_is_the_documented_function_of_seed_choice_and_position() -> None:
    for seed, choice, length in [(7, 0, 1), (-3, 2, 9), (2**62, 1, 4)]:
        request = a_request("r", [1] * length, SamplingParams(seed=seed), choice=choice)
        noisy_V = np.log(law(FULL, request)) + oracle.keyed_gumbel(seed, choice, length, V)
        assert noisy_V.argmax() == sample_keyed(FULL, request)


def test_a_filter_does_not_move_the_noise_of_the_others() -> None:
    """A token that survives the filter and wins without it wins with it."""
    for seed in range(200):
        free = sample_keyed(FULL, a_request("r", [1], SamplingParams(seed=seed)))
        filtered = a_request("r", [1], SamplingParams(seed=seed, top_k=3))
        if law(FULL, filtered)[free] > 0:
            assert free == sample_keyed(FULL, filtered)


@given(row=rows, token=tokens, num_top=st.integers(0, V + 3))
def test_logprobs_are_of_the_raw_law(row: np.ndarray, token: int, num_top: int) -> None:
    expected = np.log(oracle.softmax(row.astype(np.float64)))
    got = token_logprobs(row, token, num_top)
    ranked = sorted(range(V), key=lambda t: (-row[t], t))[:num_top]

    assert expected[token] == pytest.approx(got.logprob)
    assert ranked == [t for t, _ in got.top]
    assert [expected[t] for t in ranked] == pytest.approx([value for _, value in got.top])


def test_logprobs_stay_finite() -> None:
    logits_V = np.array([0, -np.inf, 3e4, -1e38], np.float32)
    got = token_logprobs(logits_V, 1, 4)
    assert LOGPROB_FLOOR == got.logprob
    assert [0.0, LOGPROB_FLOOR, LOGPROB_FLOOR, LOGPROB_FLOOR] == [value for _, value in got.top]


@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": 3, "stop_token_ids": tuple(range(V))},
        {"allowed_token_ids": (5,), "bad_words": ((5,),)},
        {"allowed_token_ids": (2,), "min_tokens": 1},
    ],
)
def test_a_law_without_any_token_is_the_requests_fault_and_not_token_0(params: dict[str, Any]) -> None:
    with pytest.raises(NothingAllowed, match="leave no token that may come next"):
        process_logits(FULL, asked(**params))


@pytest.mark.parametrize(
    ("output", "forbidden"),
    [((), [6]), ((3,), [4, 6]), ((0, 3), [4, 6]), ((3, 4), [5, 6]), ((4, 3), [4, 6]), ((0, 3, 4), [5, 6]), ((4,), [6])],
)
def test_a_bad_word_is_cut_off_before_its_last_token(output: tuple[int, ...], forbidden: list[int]) -> None:
    law_V = law(FULL, asked(output, bad_words=((3, 4), (3, 4, 5), (6,))))
    drafted_V = law(FULL, asked(bad_words=((3, 4), (3, 4, 5), (6,))), output)

    assert forbidden == np.flatnonzero(law_V == 0).tolist() == np.flatnonzero(drafted_V == 0).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1e-46, 1e-300])
def test_a_tiny_penalty_gives_a_law(penalty: float, temperature: float) -> None:
    law_V = law(FULL, asked(prompt=(0, 1), repetition_penalty=penalty, temperature=temperature))
    assert 1.0 == pytest.approx(law_V.sum())
    assert 0 == law_V.argmax()  # a positive logit divided by almost nothing
