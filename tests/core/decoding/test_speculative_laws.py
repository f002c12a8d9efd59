"""Rules over the laws that the sampler makes: with every logits processor the output keeps the processed law exactly.

Row i of a verification is the law processed over prompt, output and the drafts before it, so the tokens before a place
are split between output and drafts in every way here. The expected law is the parameters' by direct formulae.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from core.decoding.sampler import law
from core.decoding.speculative import VERIFICATION_RULES, Verify
from core.request import Request
from core.sampling_params import SamplingParams
from tests import oracle
from tests.core.small_models import a_request
from tests.oracle import Doubles, Laws

V, END, STOP = 4, 3, 1
PROMPT = (0, 2)
# Logits by the token before, in eighths: exact in float32 and in float64.
TARGET = np.array([[1.5, 0.25, -0.5, 0.0], [0.0, 1.25, 0.5, -0.75], [0.5, -1.0, 0.875, 0.25], [0.125, 0.75, 0.0, 1.0]])
DRAFT = np.array([[0.5, 0.75, 0.0, -0.25], [0.25, 0.5, 1.0, -0.5], [1.0, 0.0, 0.25, 0.5], [-0.5, 0.25, 1.0, 0.375]])
PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 0.6},
    "greedy": {"temperature": 0},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "presence_penalty": {"presence_penalty": 0.75},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.25},
    "logit_bias": {"logit_bias": {0: -1.5, 2: 1.0}},
    "banned": {"logit_bias": {1: -100.0}},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": (STOP,)},
    "allowed_token_ids": {"allowed_token_ids": (0, 2, END)},
    "bad_words": {"bad_words": ((0, 2), (1,))},
    "all": {
        "temperature": 1.25,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.05,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.25,
        "logit_bias": {2: 0.5},
        "min_tokens": 1,
    },
}
both_rules = pytest.mark.parametrize("rule", VERIFICATION_RULES.values(), ids=VERIFICATION_RULES)


class NoTokenTwice:
    """A grammar as the sampler sees one: the output never says a token twice in a row."""

    def allowed(self, token_ids: Sequence[int]) -> bytes:
        return bytes([0b1111 & ~(1 << token_ids[-1]) if token_ids else 0b1111])

    def is_complete(self, token_ids: Sequence[int]) -> bool:
        return False

    def num_allowed(self, token_ids: Sequence[int], draft: Sequence[int]) -> int:
        raise AssertionError("asked by proposers alone")


def request_behind(output: Sequence[int], params: SamplingParams, constraint: NoTokenTwice | None) -> Request:
    request = a_request("r", PROMPT, params)
    request.eos_token_ids, request.constraint = frozenset({END}), constraint
    request.token_ids += output
    return request


def sampled_laws(
    table: Doubles, params: SamplingParams, num_output: int, constraint: NoTokenTwice | None = None
) -> Laws:
    """What the sampler makes of the table's rows, the first tokens behind the prompt being output, the rest drafts."""

    def after(context: tuple[int, ...]) -> Doubles:
        request = request_behind(context[:num_output], params, constraint)
        logits_V = table[(PROMPT + context)[-1]].astype(np.float32)
        return law(logits_V, request, context[num_output:])

    return after


def expected_laws(params: SamplingParams) -> Laws:
    def after(context: tuple[int, ...]) -> Doubles:
        return oracle.sampling_law(list(TARGET[(PROMPT + context)[-1]]), params, PROMPT, context, frozenset({END}))

    return after


def error_of(rule: Verify, expected: Laws, target: Laws, draft: Laws, num_drafts: int) -> float:
    """Total variation of the first num_drafts + 2 tokens, written in two steps."""
    length = num_drafts + 2
    emitted = oracle.law_after_steps(rule, target, draft, num_drafts, length, num_steps=2)
    return oracle.total_variation(oracle.law_of_sequences(expected, length), emitted)


@both_rules
@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize(("num_drafts", "num_output"), [(1, 0), (1, 2), (2, 0), (2, 1)])
def test_the_processed_law_is_kept(rule: Verify, name: str, num_drafts: int, num_output: int) -> None:
    params = SamplingParams(max_tokens=9, **PROCESSORS[name])
    laws = [sampled_laws(table, params, num_output) for table in (TARGET, DRAFT)]
    assert error_of(rule, expected_laws(params), *laws, num_drafts) < 1e-12


@both_rules
@pytest.mark.parametrize("num_drafts", [1, 2])
def test_the_law_within_a_grammar_is_kept(rule: Verify, num_drafts: int) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.8)
    laws = [sampled_laws(table, params, 1, NoTokenTwice()) for table in (TARGET, DRAFT)]

    def expected(context: tuple[int, ...]) -> Doubles:
        free_V = oracle.sampling_law(list(TARGET[(PROMPT + context)[-1]]), params, PROMPT, context)
        free_V[list(context[-1:])] = 0
        return np.asarray(free_V / free_V.sum())

    assert error_of(rule, expected, *laws, num_drafts) < 1e-12


@both_rules
@pytest.mark.parametrize(
    "name", ["presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "bad_words"]
)
def test_laws_processed_without_the_drafts_before_them_are_not_kept(rule: Verify, name: str) -> None:
    """The mistake that this file is there to find: every row processed over the output alone."""
    params = SamplingParams(max_tokens=9, **PROCESSORS[name])

    def forgetful(table: Doubles) -> Laws:
        def after(context: tuple[int, ...]) -> Doubles:
            return law(table[(PROMPT + context)[-1]].astype(np.float32), request_behind((), params, None))

        return after

    assert error_of(rule, expected_laws(params), forgetful(TARGET), forgetful(DRAFT), 2) > 1e-3
