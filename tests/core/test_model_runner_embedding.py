"""Embeddings: the mean of the oracle's hidden states, however the prompt is cut, cached or preempted."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from core.errors import InvariantViolation
from core.request import FinishReason, Request, RequestOutput
from core.sampling_params import SamplingParams
from core.step import ModelRunnerOutput, SchedulerOutput, count_only
from tests import builders, oracle
from tests.core.small_models import TARGET, Model, Served, a_request, a_runner, good_draft_for, random_tensors, serve

MODEL = Model(TARGET, random_tensors(TARGET, 0))
BLOCK_SIZE = 4
EMBED = SamplingParams(max_tokens=0, embed=True)


def some_prompt(length: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng([length, seed]).integers(0, TARGET.vocab_size, length)]


def run(*requests: Request, num_blocks: int = 200, drafts: bool = False, **limits: Any) -> Served:
    runner = a_runner(MODEL, good_draft_for(MODEL) if drafts else None, num_blocks, BLOCK_SIZE)
    return serve(runner, requests, num_blocks=num_blocks, block_size=BLOCK_SIZE, **limits)


def embedding_of(prompt: Sequence[int]) -> tuple[float, ...]:
    """By a request that has the model to itself."""
    request = a_request("alone", prompt, EMBED)
    run(request)
    assert request.embedding is not None
    return request.embedding


@pytest.mark.parametrize("length", [1, 2, 23])
def test_it_is_the_mean_of_the_oracles_hidden_states(length: int) -> None:
    prompt = some_prompt(length)
    hidden_TD = oracle.llama_hidden(MODEL.config, MODEL.tensors, prompt)

    assert hidden_TD.mean(axis=0) == pytest.approx(np.array(embedding_of(prompt)), abs=1e-5)


@pytest.mark.parametrize("token_limit", [7, 1])
@pytest.mark.parametrize("drafts", [False, True])
def test_it_has_the_same_bits_in_chunks_and_among_others(token_limit: int, drafts: bool) -> None:
    prompt = some_prompt(23)
    request = a_request("e", prompt, EMBED, drafts=2 * drafts)
    others = [a_request(f"o{i}", some_prompt(9, i), SamplingParams(), drafts=2 * drafts) for i in range(3)]
    served = run(others[0], request, *others[1:], token_limit=token_limit, drafts=drafts)

    assert embedding_of(prompt) == request.embedding
    assert ([], FinishReason.LENGTH) == (served.ids("e"), request.finish_reason)


def test_no_block_is_hit_and_others_may_hit_those_it_leaves() -> None:
    prompt = some_prompt(33)
    first, again, plain = (
        a_request("a", prompt, EMBED),
        a_request("b", prompt, EMBED),
        a_request("c", prompt, SamplingParams()),
    )
    run(first, again, plain, enable_prefix_caching=True, max_batch=1)

    assert [0, 0, 32] == [request.num_cached_tokens for request in (first, again, plain)]
    assert embedding_of(prompt) == first.embedding == again.embedding


@pytest.mark.parametrize("caching", [False, True])
def test_preempted_in_the_middle_each_row_still_counts_once(caching: bool) -> None:
    """The older one grows while the younger still computes its prompt, a few tokens a step, and has to give way."""
    prompt = some_prompt(30)
    older = a_request("older", some_prompt(5), SamplingParams(max_tokens=38, temperature=0, ignore_eos=True))
    younger = a_request("younger", prompt, EMBED)
    served = run(older, younger, num_blocks=11, token_limit=2, enable_prefix_caching=caching)

    assert served.num_preemptions >= 1
    assert embedding_of(prompt) == younger.embedding


def test_on_resume_only_blocks_with_summed_rows_may_be_hit() -> None:
    request = a_request("e", some_prompt(33), EMBED)
    assert 0 == request.num_unneeded_rows

    request.num_summed_rows = 13
    assert 13 == request.num_unneeded_rows


def test_it_comes_with_the_only_output_and_the_prompt_may_fill_the_context() -> None:
    engine = builders.engine(max_num_batched_tokens=10)
    request = builders.new_request(prompt=[1] * engine.max_model_len, max_tokens=0, embed=True)
    engine.add(request)
    (output,) = builders.run(engine)["a"]

    assert isinstance(output, RequestOutput)
    assert ((1.0, 0.0), 0, FinishReason.LENGTH) == (
        output.embedding,
        output.num_generated_tokens,
        output.finish_reason,
    )
    assert engine.max_model_len == engine.stats.num_prompt_tokens


def test_a_runner_that_forgets_the_sum_ends_the_engine() -> None:
    def forgetful(plan: SchedulerOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput(count_only(plan).sampled)

    engine = builders.engine(forgetful)
    engine.add(builders.new_request(max_tokens=0, embed=True))
    with pytest.raises(InvariantViolation, match="sum of hidden states"):
        engine.step()
