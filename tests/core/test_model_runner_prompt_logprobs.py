"""Log-probabilities of prompts: the oracle's, however the prompt is cut, cached, preempted or sampled; told once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import core.model_runner
from core.errors import InvariantViolation
from core.request import FinishReason, Request, TokenLogprobs
from core.sampling_params import SamplingParams
from core.step import ModelRunnerOutput, SchedulerOutput, count_only
from tests import builders, oracle
from tests.core.small_models import TARGET, Model, Served, a_request, a_runner, good_draft_for, random_tensors, serve

MODEL = Model(TARGET, random_tensors(TARGET, 0))
BLOCK_SIZE = 4


def some_prompt(length: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng([length, seed]).integers(0, TARGET.vocab_size, length)]


def scored(prompt: Sequence[int], *, name: str = "r", num_top: int = 3, max_tokens: int = 6, **params: Any) -> Request:
    asked = {"temperature": 0.0, "ignore_eos": True, **params}
    return a_request(name, prompt, SamplingParams(max_tokens=max_tokens, num_prompt_logprobs=num_top, **asked))


def oracle_logprobs(prompt: Sequence[int]) -> NDArray[np.float64]:
    """(T, V): row t is the law of the token behind token t."""
    return np.log(oracle.softmax(oracle.llama_logits(MODEL.config, MODEL.tensors, prompt)))


def assert_the_oracles(request: Request) -> None:
    prompt = request.token_ids[: request.num_prompt_tokens]
    assert len(prompt) - 1 == len(request.prompt_logprobs)
    for law_V, token_id, found in zip(oracle_logprobs(prompt), prompt[1:], request.prompt_logprobs, strict=False):
        ranked = np.argsort(-law_V, kind="stable").tolist()
        assert law_V[token_id] == pytest.approx(found.logprob, abs=1e-4)
        assert ranked.index(token_id) + 1 == found.rank
        assert ranked[: len(found.top)] == [token for token, _ in found.top]
        assert law_V[ranked[: len(found.top)]] == pytest.approx([logprob for _, logprob in found.top], abs=1e-4)


class Counting:
    """The real runner; counts the scored rows of each request."""

    def __init__(self, num_blocks: int, *, drafts: bool = False) -> None:
        draft = good_draft_for(MODEL) if drafts else None
        self._runner = a_runner(MODEL, draft, num_blocks, BLOCK_SIZE)
        self.num_scored: dict[str, int] = {}

    def __call__(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        result = self._runner(plan)
        for name, found in result.prompt_logprobs.items():
            self.num_scored[name] = self.num_scored.get(name, 0) + len(found)
        return result


def run(*requests: Request, num_blocks: int = 200, drafts: bool = False, **limits: Any) -> tuple[Served, Counting]:
    counting = Counting(num_blocks, drafts=drafts)
    return serve(counting, requests, num_blocks=num_blocks, block_size=BLOCK_SIZE, **limits), counting


@pytest.mark.parametrize("token_limit", [None, 7, 1])
@pytest.mark.parametrize("length", [1, 2, 23])
def test_they_are_the_oracles_however_the_prompt_is_cut(length: int, token_limit: int | None) -> None:
    alone, request = scored(some_prompt(length)), scored(some_prompt(length))
    run(alone)
    run(request, scored(some_prompt(9), name="other"), token_limit=token_limit)

    assert_the_oracles(request)
    assert alone.prompt_logprobs == request.prompt_logprobs  # to the bit


def test_a_prompt_that_is_cached_is_computed_again_and_others_may_hit_it() -> None:
    prompt = some_prompt(33)
    first, again, plain = scored(prompt), scored(prompt, name="again"), a_request("p", prompt, SamplingParams())
    run(first, again, plain, enable_prefix_caching=True, max_batch=1)

    assert [0, 0, 32] == [request.num_cached_tokens for request in (first, again, plain)]
    assert_the_oracles(first)
    assert first.prompt_logprobs == again.prompt_logprobs


@pytest.mark.parametrize("caching", [False, True])
def test_preempted_in_the_middle_of_its_prompt_no_row_is_given_twice(caching: bool) -> None:
    """The older one grows while the younger still computes its prompt, a few tokens a step, and has to give way."""
    older = scored(some_prompt(5), name="older", max_tokens=38)
    younger = scored(some_prompt(30), name="younger", max_tokens=3)
    served, counting = run(older, younger, num_blocks=11, token_limit=2, enable_prefix_caching=caching)

    assert served.num_preemptions >= 1
    assert {"older": 4, "younger": 29} == counting.num_scored
    assert_the_oracles(younger)


def test_on_resume_only_blocks_with_recorded_rows_may_be_hit() -> None:
    request = scored(some_prompt(33))
    request.prompt_logprobs = [TokenLogprobs(-1.0)] * 13
    assert 13 == request.num_unneeded_rows

    request.prompt_logprobs = [TokenLogprobs(-1.0)] * 32
    assert 32 == request.num_unneeded_rows  # all are known: the last token's row is needed, as for everybody
    assert 32 == a_request("p", some_prompt(33), SamplingParams()).num_unneeded_rows


@pytest.mark.parametrize("drafts", [False, True])
def test_samples_of_one_prompt_all_have_them_with_drafts_or_without(drafts: bool) -> None:
    prompt = some_prompt(17)
    siblings = [scored(prompt, name=f"r.{i}", seed=i, temperature=1.0) for i in (1, 2)]
    family = Request("r", prompt, siblings[0].params, siblings=siblings)
    for member in (family, *siblings):
        member.num_speculative_tokens = 2 * drafts
    _, counting = run(family, drafts=drafts)

    assert {"r": 16} == counting.num_scored
    for member in (family, *siblings):
        assert_the_oracles(member)


def test_no_more_than_a_few_rows_of_logits_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core.model_runner, "SCORED_ROWS", 16)
    request, whole = scored(some_prompt(50)), scored(some_prompt(50))
    counting = Counting(200)
    model, sizes = counting._runner._model, []
    real = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden_RD: sizes.append(len(hidden_RD)) or real(hidden_RD))
    serve(counting, [request], num_blocks=200, block_size=BLOCK_SIZE)
    monkeypatch.undo()
    run(whole)

    assert [1, 16, 16, 16, 1] == sizes[:5]
    assert whole.prompt_logprobs == request.prompt_logprobs


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("token_limit", [None, 3])
def test_without_tokens_to_come_a_prompt_is_scored_and_that_is_all(num_samples: int, token_limit: int | None) -> None:
    family = builders.family("a", num_samples, [1] * 8, max_tokens=0, num_prompt_logprobs=0)
    scheduler = builders.scheduler(num_blocks=2, max_num_batched_tokens=token_limit)
    scheduler.add_request(family)
    while scheduler.has_unfinished_requests:
        scheduler.step()
        scheduler.check_invariants()
    outputs = scheduler.take_outputs()

    assert num_samples == len(outputs)
    for output in outputs:
        assert (FinishReason.LENGTH, 0, ()) == (output.finish_reason, output.num_generated_tokens, output.tokens)
        assert (TokenLogprobs(0.0),) * 7 == output.prompt_logprobs
    assert 2 == scheduler.block_manager.num_free_blocks


def test_they_come_with_the_first_output_and_not_again() -> None:
    engine = builders.engine()
    engine.add(builders.new_request("a", [1, 2, 3], 3, num_prompt_logprobs=1, sibling_ids=("b",)))
    engine.add(builders.new_request("c", [1], 3))
    outputs = builders.run(engine)

    told = {name: [output.prompt_logprobs for output in found] for name, found in outputs.items()}
    once = [(TokenLogprobs(0.0),) * 2, None, None]
    assert {"a": once, "b": once, "c": [None] * 3} == told


def test_a_script_has_certain_prompts() -> None:
    engine = builders.engine()
    engine.add(builders.new_request("a", [1, 2, 3], 3, num_prompt_logprobs=1, script=("x",)))

    assert (TokenLogprobs(0.0),) * 2 == builders.run(engine)["a"][0].prompt_logprobs


def test_a_runner_that_forgets_them_is_found_out() -> None:
    def forgetful(plan: SchedulerOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput(count_only(plan).sampled)

    scheduler = builders.scheduler(execute=forgetful)
    scheduler.add_request(builders.request(prompt=[1, 2], num_prompt_logprobs=0))
    with pytest.raises(InvariantViolation, match="1 score"):
        scheduler.step()


def test_a_prompt_without_tokens_to_come_may_fill_the_context_and_is_counted_once() -> None:
    engine = builders.engine(max_model_len=16, num_kv_blocks=4)
    engine.add(builders.new_request("a", [1] * 16, 0, sibling_ids=("b",)))
    builders.run(engine)

    assert (16, 0) == (engine.stats.num_prompt_tokens, engine.stats.num_generation_tokens)
    assert 2 == engine.stats.finished["length"]
    assert 2 == engine.stats.histograms["e2e_request_latency_seconds"].count
    assert 0 == engine.stats.histograms["time_to_first_token_seconds"].count
