"""The runner without seeds: tokens have the law of the target, whoever drafts, and a broken rule is noticed."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import core.decoding.noise
import core.model_runner
from core.decoding.proposers import Draft, NgramProposer, Proposal, Proposer
from core.decoding.speculative import VERIFICATION_RULES, verify_blocks, verify_drafts
from core.sampling_params import SamplingParams
from core.step import SchedulerOutput
from tests import oracle
from tests.builders import TINY_SIZES
from tests.core.decoding.plain_rules import plain_block_rule, plain_rule
from tests.core.small_models import (
    EOS,
    Model,
    Served,
    a_request,
    a_runner,
    outputs,
    random_tensors,
    serve,
)

SMALL = replace(TINY_SIZES, vocab_size=5)
SMALL_MODEL = Model(SMALL, random_tensors(SMALL, 1, loudness=1.0))
SMALL_DRAFT = Model(SMALL, random_tensors(SMALL, 2, loudness=1.0))
SMALL_PROMPT = (1, 4, 0, 3, 1, 4, 0)  # says something twice, for the look-up
NUM_SAMPLES, LENGTH = 1500, 3
PARAMS = {
    "temperature 1": SamplingParams(max_tokens=LENGTH, ignore_eos=True),
    "processed": SamplingParams(
        max_tokens=LENGTH, ignore_eos=True, temperature=0.8, top_k=4, presence_penalty=0.7, logit_bias={3: 0.5}
    ),
    "masked": SamplingParams(max_tokens=LENGTH, min_tokens=LENGTH, repetition_penalty=1.3, frequency_penalty=0.4),
}


def law_of_first_tokens(params: SamplingParams) -> oracle.Doubles:
    """(V, V, V) the exact chance of each three tokens."""
    eos = frozenset() if params.ignore_eos else EOS

    def after(context: tuple[int, ...]) -> oracle.Doubles:
        logits_V = oracle.llama_logits(SMALL, SMALL_MODEL.tensors, [*SMALL_PROMPT, *context])[-1]
        return oracle.sampling_law(list(logits_V), params, SMALL_PROMPT, context, eos)

    law = np.zeros((SMALL.vocab_size,) * LENGTH)
    for tokens, chance in oracle.law_of_sequences(after, LENGTH).items():
        law[tokens] = chance
    return law


def many(params: SamplingParams, num_drafts: int, drafter: Proposer | None = None, **rule: Any) -> Served:
    """The first tokens of many requests without a seed, drafted by the small model or by another drafter."""
    num_blocks = 64 * 8
    requests = [a_request(str(i), SMALL_PROMPT, params, drafts=num_drafts, seed=i) for i in range(NUM_SAMPLES)]
    runner = a_runner(SMALL_MODEL, None if drafter else SMALL_DRAFT, num_blocks, 4, proposer=drafter, **rule)
    served = serve(runner, requests, num_blocks=num_blocks, max_batch=64)
    assert 0 < served.num_accepted < served.num_drafts
    return served


def misfit(params: SamplingParams, num_drafts: int, drafter: Proposer | None = None, **rule: Any) -> float:
    """How badly these tokens fit the exact law; more than 1 is too badly."""
    counts = np.zeros((SMALL.vocab_size,) * LENGTH, int)
    for ids in outputs(many(params, num_drafts, drafter, **rule)).values():
        counts[tuple(ids)] += 1
    return oracle.chi_square(counts, law_of_first_tokens(params))


@pytest.mark.parametrize("rule", VERIFICATION_RULES)
@pytest.mark.parametrize("name", PARAMS)
def test_unseeded_tokens_have_the_targets_law(name: str, rule: str) -> None:
    assert misfit(PARAMS[name], num_drafts=2, verify=VERIFICATION_RULES[rule]) < 1


@pytest.mark.parametrize("rule", VERIFICATION_RULES)
def test_unseeded_tokens_have_the_targets_law_over_several_steps(rule: str) -> None:
    assert misfit(PARAMS["temperature 1"], num_drafts=1, verify=VERIFICATION_RULES[rule]) < 1


@pytest.mark.parametrize("num_drafts", [1, 2])
@pytest.mark.parametrize("name", PARAMS)
def test_unseeded_tokens_have_the_targets_law_with_looked_up_drafts(name: str, num_drafts: int) -> None:
    assert misfit(PARAMS[name], num_drafts, NgramProposer(1, 3)) < 1


def test_whole_drafts_are_judged_unless_the_runner_is_told_otherwise() -> None:
    params = PARAMS["temperature 1"]
    silent, token, block = (
        many(params, 2, **rule) for rule in ({}, {"verify": verify_drafts}, {"verify": verify_blocks})
    )
    assert outputs(block) == outputs(silent)
    assert outputs(block) != outputs(token)
    assert token.num_accepted / token.num_drafts < block.num_accepted / block.num_drafts


@pytest.mark.parametrize("plain", [plain_rule, plain_block_rule])
@pytest.mark.parametrize("broken", ["ratio turned round", "residual from the target", "bonus from the draft"])
def test_broken_rule_does_not_have_the_targets_law(broken: str, plain: oracle.Rule) -> None:
    assert misfit(PARAMS["temperature 1"], num_drafts=2, verify=partial(plain, broken=broken)) > 1


class Pretender(NgramProposer):
    """Says that its drafts were drawn uniformly, which they were not."""

    def propose(self, plan: SchedulerOutput) -> Proposal:
        proposal = super().propose(plan)
        uniform_V = np.full(SMALL.vocab_size, 1 / SMALL.vocab_size)
        return Proposal(
            {
                request_id: Draft(draft.token_ids, [uniform_V] * len(draft.token_ids))
                for request_id, draft in proposal.drafts.items()
            }
        )


def test_looked_up_drafts_with_a_law_they_were_not_drawn_from_do_not_have_the_targets_law() -> None:
    assert misfit(PARAMS["temperature 1"], 2, Pretender(1, 3)) > 1


def test_one_noise_for_all_steps_does_not_have_the_targets_law(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = core.decoding.noise.generator

    def reused(seed: int, choice: int, position: int, *rest: Any) -> np.random.Generator:
        return fresh(seed, choice, 0, *rest)

    monkeypatch.setattr(core.decoding.noise, "generator", reused)
    monkeypatch.setattr(core.model_runner, "generator", reused)
    assert misfit(PARAMS["temperature 1"], num_drafts=1) > 1
