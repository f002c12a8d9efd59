"""The law under a grammar: renormalised over what it allows, with every processor, and the same with drafts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.decoding.constraints import GrammarCompiler
from core.decoding.sampler import law, sample_keyed
from core.decoding.speculative import VERIFICATION_RULES, Verify
from core.errors import NothingAllowed
from core.request import Request
from core.sampling_params import SamplingParams, StructuredOutput
from tests import oracle
from tests.core.decoding.letters import Letters
from tests.core.decoding.test_sampler import combined, rows
from tests.core.decoding.test_speculative import with_memory
from tests.core.small_models import EOS, a_request
from tests.oracle import Doubles, Laws

LANGUAGE = ("ab", "abc", "abab", "ca", "b", "bcbc", "aab", "cccc", "aaaaaa")
EIGHT = Letters("a", "b", "", "c", "ab", "bc", "ca", "cc")
FOUR = Letters("a", "b", "", "ab")
COMPILERS = {vocabulary: GrammarCompiler(vocabulary) for vocabulary in (EIGHT, FOUR)}
WANTED = StructuredOutput("choice", LANGUAGE)


def asked(vocabulary: Letters, output: Sequence[int] = (), **params: Any) -> Request:
    request = a_request("r", (1, 3), SamplingParams(max_tokens=100, **params))
    request.constraint = COMPILERS[vocabulary].compile(WANTED).constraint()
    request.token_ids += output
    return request


def direct(logits_V: np.ndarray, request: Request) -> Doubles | None:
    """By the definition; None where nothing may come."""
    params, output = request.params, request.output_token_ids
    left = EIGHT.allowed(LANGUAGE, output)
    if not left <= EOS:  # else the output ends, whatever else is asked for
        banned = {word[-1] for word in params.bad_words if [*output, word[-1]][-len(word) :] == list(word)}
        left = (
            left - banned - (set() if params.allowed_token_ids is None else {*range(8)} - {*params.allowed_token_ids})
        )
        ends = (
            {*EOS, *params.stop_token_ids} if len(output) < params.min_tokens else EOS if params.ignore_eos else set()
        )
        left = left - ends or left
    masked = [logit if token in left else -np.inf for token, logit in enumerate(logits_V.tolist())]
    plain = replace(params, min_tokens=0, allowed_token_ids=None, bad_words=())
    return oracle.sampling_law(masked, plain, (1, 3), output) if left else None


@st.composite
def walks(draw: st.DrawFn) -> list[int]:
    """Outputs that the language allows, whole ones and those that an end follows included."""
    output: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        output.append(draw(st.sampled_from(sorted(EIGHT.allowed(LANGUAGE, output)))))
    return output


@given(row=rows, params=combined(), ignore_eos=st.booleans(), output=walks())
def test_law_is_renormalised_over_what_is_allowed(
    row: np.ndarray, params: dict[str, Any], ignore_eos: bool, output: list[int]
) -> None:
    request = asked(EIGHT, output, ignore_eos=ignore_eos, **params)
    expected = direct(row, request)
    if expected is None:
        with pytest.raises(NothingAllowed):
            law(row, request)
    else:
        np.testing.assert_allclose(expected, law(row, request), atol=1e-6)


@given(row=rows, params=combined(), output=walks(), split=st.integers(0, 4))
def test_tokens_of_a_draft_count_as_output(
    row: np.ndarray, params: dict[str, Any], output: list[int], split: int
) -> None:
    behind, before = asked(EIGHT, output, **params), asked(EIGHT, output[:split], **params)
    if direct(row, behind) is None:
        return
    assert np.array_equal(law(row, behind), law(row, before, output[split:]))
    assert sample_keyed(row, behind) == sample_keyed(row, before, output[split:])


PROCESSED: list[dict[str, Any]] = [{}, {"temperature": 0.7, "top_k": 2, "presence_penalty": 1.5}, {"min_tokens": 2}]


def laws(seed: int, request: Request) -> Laws:
    """Processed by the sampler from a random law after every context; all asked of one constraint."""
    raw = with_memory(seed, FOUR.vocab_size)
    return lambda context: law(np.log(raw(context)).astype(np.float32), request, list(context))


@pytest.mark.parametrize("params", PROCESSED, ids=str)
@pytest.mark.parametrize("rule", VERIFICATION_RULES.values(), ids=VERIFICATION_RULES)
@pytest.mark.parametrize("num_drafts", [1, 2])
def test_drafts_do_not_change_the_law_of_what_is_said(rule: Verify, num_drafts: int, params: dict[str, Any]) -> None:
    """Exactly, over two steps; draft and target are held to one grammar, of which both ask in turn."""
    request = asked(FOUR, **params)
    target, draft = laws(1, request), laws(2, request)
    alone = oracle.law_of_sequences(target, 4)
    drafted = oracle.law_after_steps(rule, target, draft, num_drafts, 4, 2)

    assert oracle.total_variation(alone, drafted) < 1e-12
    said = {run for run, chance in drafted.items() if chance > 0}
    assert 3 < len(said)
    assert all(token in FOUR.allowed(LANGUAGE, run[:i]) for run in said for i, token in enumerate(run))


def test_a_draft_law_that_is_not_held_to_the_grammar_accepts_less_and_says_no_more() -> None:
    request = asked(FOUR)
    target, free = laws(1, request), with_memory(2, FOUR.vocab_size)
    rule = VERIFICATION_RULES["token"]

    assert (
        oracle.total_variation(oracle.law_of_sequences(target, 3), oracle.law_after_steps(rule, target, free, 2, 3, 2))
        < 1e-12
    )
    held = oracle.expected_accepted(rule, target, laws(2, request), 2)
    assert oracle.expected_accepted(rule, target, free, 2) < held
