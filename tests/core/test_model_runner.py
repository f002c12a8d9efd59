"""The runner: tokens are those of the target alone, with any drafter or none, in any batch, however often preempted."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

import core.decoding.noise
import core.model_runner
from core.decoding.proposers import Draft, DraftModelProposer, Proposal
from core.model.config import ModelConfig
from core.model.kv_cache import KVCache
from core.request import Request, SamplingParams
from core.step import ScheduledRequest, SchedulerOutput
from tests import oracle
from tests.core.decoding.test_speculative import plain_rule
from tests.core.small_models import (
    DRAFT,
    EOS,
    TARGET,
    Model,
    Served,
    a_request,
    a_runner,
    good_draft_for,
    random_tensors,
    serve,
)

MODEL = Model(TARGET, random_tensors(TARGET, 0))
DRAFTS: dict[str, Model | None] = {
    "none": None,
    "good": good_draft_for(MODEL),
    "bad": Model(DRAFT, random_tensors(DRAFT, 9)),
    "itself": MODEL,
}
LARGE, TINY = 400, 13

MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "ignore_eos": True, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {7: 1.5}},
    {"temperature": 0, "min_tokens": 9, "stop_token_ids": (3, 11)},
    {"seed": 1},
    {"seed": -2, "temperature": 0.6, "top_k": 7, "presence_penalty": 0.9, "ignore_eos": True},
    {"seed": 2**62, "temperature": 1.4, "top_p": 0.8, "min_p": 0.03, "min_tokens": 12},
    {"seed": 4, "repetition_penalty": 0.8, "frequency_penalty": -0.3, "stop_token_ids": (5,), "min_tokens": 6},
    {"seed": 5, "logit_bias": {2: -100.0, 8: 2.0}, "top_k": 12, "top_p": 0.9},
]


def prompt_of(i: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(i).integers(0, TARGET.vocab_size, 3 + 4 * i % 19)]


def keyed_requests(num_drafts: int = 0, **more: Any) -> list[Request]:
    return [
        a_request(
            f"r{i}", prompt_of(i), SamplingParams(max_tokens=20, **params, **more), drafts=num_drafts, choice=i % 3
        )
        for i, params in enumerate(MIXED)
    ]


@cache
def decoded_alone() -> dict[str, list[int]]:
    """Each request's output, token by token over the whole sequence, in float64, with nobody else there."""
    return {
        request.request_id: oracle.decode_alone(
            lambda tokens: oracle.llama_logits(TARGET, MODEL.tensors, tokens)[-1],
            prompt_of(i),
            request.params,
            choice=request.choice,
            eos_token_ids=EOS,
        )
        for i, request in enumerate(keyed_requests())
    }


def outputs(served: Served) -> dict[str, list[int]]:
    return {request_id: served.ids(request_id) for request_id in served.tokens}


@pytest.mark.parametrize("drafter", DRAFTS)
@pytest.mark.parametrize("num_drafts", [1, 3, 6])
@pytest.mark.parametrize(("num_blocks", "token_limit"), [(LARGE, None), (LARGE, 7), (TINY, None), (TINY, 9)])
def test_keyed_tokens_are_those_of_the_target_alone(
    drafter: str, num_drafts: int, num_blocks: int, token_limit: int | None
) -> None:
    runner = a_runner(MODEL, DRAFTS[drafter], num_blocks, 4)
    served = serve(runner, keyed_requests(num_drafts), num_blocks=num_blocks, token_limit=token_limit)

    assert decoded_alone() == outputs(served)
    assert (num_blocks == TINY) == bool(served.num_preemptions)
    assert (drafter != "none") == bool(served.num_drafts)
    if drafter == "itself" and num_blocks == LARGE and token_limit is None:
        assert served.num_drafts == served.num_accepted > 0


def test_outputs_are_worth_comparing() -> None:
    """They go on for a while, end for several reasons, and the drafters are kept and refused."""
    lengths = [len(tokens) for tokens in decoded_alone().values()]
    assert 20 in lengths
    assert min(lengths) < 20
    assert len(MIXED) == len({tuple(tokens) for tokens in decoded_alone().values()})
    served = serve(a_runner(MODEL, DRAFTS["good"], LARGE, 4), keyed_requests(3), num_blocks=LARGE)
    assert 0.2 < served.num_accepted / served.num_drafts < 0.95


@pytest.mark.parametrize("max_batch", [1, 2, 5])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_keyed_tokens_are_the_same_in_any_batch_and_block_size(max_batch: int, block_size: int) -> None:
    runner = a_runner(MODEL, DRAFTS["good"], LARGE, block_size)
    requests = keyed_requests(3)[::-1]
    served = serve(runner, requests, num_blocks=LARGE, block_size=block_size, max_batch=max_batch)
    assert decoded_alone() == outputs(served)


def test_requests_may_want_different_numbers_of_drafts() -> None:
    requests = keyed_requests()
    for i, request in enumerate(requests):
        request.num_speculative_tokens = i % 4
    assert decoded_alone() == outputs(serve(a_runner(MODEL, DRAFTS["good"], LARGE, 4), requests, num_blocks=LARGE))


def test_logprobs_are_bit_equal_with_and_without_speculation() -> None:
    def logprobs(drafter: str, num_blocks: int) -> dict[str, list[object]]:
        requests = keyed_requests(4, num_logprobs=5)
        served = serve(a_runner(MODEL, DRAFTS[drafter], num_blocks, 4), requests, num_blocks=num_blocks)
        return {request_id: [token.logprobs for token in tokens] for request_id, tokens in served.tokens.items()}

    plain = logprobs("none", LARGE)
    assert all(all(entries) for entries in plain.values())
    for drafter, num_blocks in [("good", LARGE), ("bad", TINY), ("itself", TINY)]:
        assert plain == logprobs(drafter, num_blocks)


def test_logprobs_are_of_the_raw_law_of_the_target() -> None:
    requests = keyed_requests(3, num_logprobs=2)
    served = serve(a_runner(MODEL, DRAFTS["good"], LARGE, 4), requests, num_blocks=LARGE)
    for i, request in enumerate(requests):
        prompt = prompt_of(i)
        logits = oracle.llama_logits(TARGET, MODEL.tensors, [*prompt, *served.ids(request.request_id)])
        raw = np.log(oracle.softmax(logits[len(prompt) - 1 : -1]))
        for row, token in zip(raw, served.tokens[request.request_id], strict=True):
            assert token.logprobs is not None
            assert row[token.token_id] == pytest.approx(token.logprobs.logprob, abs=1e-4)
            assert np.sort(row)[::-1][:2] == pytest.approx([value for _, value in token.logprobs.top], abs=1e-4)


# The draft model's cache


class Recorder(DraftModelProposer):
    """Notes every proposal with the tokens it stood behind."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.proposals: list[tuple[Request, list[int], Draft]] = []

    def propose(self, plan: SchedulerOutput) -> Proposal:
        proposal = super().propose(plan)
        for s in plan.scheduled:
            if s.request_id in proposal.drafts:
                self.proposals.append((s.request, list(s.request.token_ids), proposal.drafts[s.request_id]))
        return proposal


def from_scratch(draft: Model, request: Request, tokens: Sequence[int], num_drafts: int) -> Draft:
    """What the draft model proposes behind these tokens when it has seen nothing before."""
    copy = a_request("copy", tokens[: request.num_prompt_tokens], request.params, drafts=9, choice=request.choice)
    copy.seed, copy.token_ids = request.seed, list(tokens)
    proposer = DraftModelProposer(draft.transformer(), KVCache(draft.config, 40, 4))
    share = ScheduledRequest(copy, 0, len(tokens), num_drafts, range(40))
    return proposer.propose(SchedulerOutput(1, (share,))).drafts["copy"]


@pytest.mark.parametrize("drafter", ["good", "bad", "itself"])
@pytest.mark.parametrize(("num_blocks", "token_limit"), [(LARGE, 16), (TINY, None), (TINY, 16)])
def test_drafts_of_a_long_run_are_those_of_a_draft_model_that_starts_afresh(
    drafter: str, num_blocks: int, token_limit: int | None
) -> None:
    """Through chunks, preemptions, refusals and drafts that were all kept, its cache holds exactly its request's."""
    recorders: list[Recorder] = []
    draft = DRAFTS[drafter]
    assert draft is not None

    def make(*args: Any) -> Recorder:
        recorders.append(Recorder(*args))
        return recorders[0]

    requests = keyed_requests(3) + [
        a_request(f"u{i}", prompt_of(i), SamplingParams(max_tokens=20, ignore_eos=True), drafts=2 + i, seed=i)
        for i in range(3)
    ]
    served = serve(
        a_runner(MODEL, draft, num_blocks, 4, make), requests, num_blocks=num_blocks, token_limit=token_limit
    )
    assert (num_blocks == TINY) == bool(served.num_preemptions)
    assert served.num_accepted
    assert len(recorders[0].proposals) > 30
    for request, tokens, proposed in recorders[0].proposals:
        expected = from_scratch(draft, request, tokens, len(proposed.token_ids))
        assert expected.token_ids == proposed.token_ids
        assert [law_V.tolist() for law_V in expected.laws] == [law_V.tolist() for law_V in proposed.laws]


# Requests without a seed: the law is the target's

SMALL = ModelConfig(
    vocab_size=5,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=64,
)
SMALL_MODEL = Model(SMALL, random_tensors(SMALL, 1, loudness=1.0))
SMALL_DRAFT = Model(SMALL, random_tensors(SMALL, 2, loudness=1.0))
SMALL_PROMPT = (1, 4, 0)
NUM_SAMPLES, LENGTH = 1500, 3
PARAMS = {
    "temperature 1": SamplingParams(max_tokens=LENGTH, ignore_eos=True),
    "processed": SamplingParams(
        max_tokens=LENGTH, ignore_eos=True, temperature=0.8, top_k=4, presence_penalty=0.7, logit_bias={3: 0.5}
    ),
}


def law_of_first_tokens(params: SamplingParams) -> oracle.Doubles:
    """(V, V, V) the exact chance of each three tokens."""

    def after(context: tuple[int, ...]) -> oracle.Doubles:
        logits_V = oracle.llama_logits(SMALL, SMALL_MODEL.tensors, [*SMALL_PROMPT, *context])[-1]
        return oracle.sampling_law(list(logits_V), params, SMALL_PROMPT, context)

    law = np.zeros((SMALL.vocab_size,) * LENGTH)
    for tokens, chance in oracle.law_of_sequences(after, LENGTH).items():
        law[tokens] = chance
    return law


def misfit(params: SamplingParams, num_drafts: int) -> float:
    """How badly the first tokens of many requests fit the exact law; more than 1 is too badly."""
    num_blocks = 64 * 8
    requests = [a_request(str(i), SMALL_PROMPT, params, drafts=num_drafts, seed=i) for i in range(NUM_SAMPLES)]
    served = serve(a_runner(SMALL_MODEL, SMALL_DRAFT, num_blocks, 4), requests, num_blocks=num_blocks, max_batch=64)
    counts = np.zeros((SMALL.vocab_size,) * LENGTH, int)
    for ids in outputs(served).values():
        counts[tuple(ids)] += 1
    assert served.num_accepted < served.num_drafts
    return oracle.chi_square(counts, law_of_first_tokens(params))


@pytest.mark.parametrize("name", PARAMS)
def test_unseeded_tokens_have_the_targets_law(name: str) -> None:
    assert misfit(PARAMS[name], num_drafts=2) < 1


def test_unseeded_tokens_have_the_targets_law_over_several_steps() -> None:
    assert misfit(PARAMS["temperature 1"], num_drafts=1) < 1


@pytest.mark.parametrize("broken", ["ratio turned round", "residual from the target", "bonus from the draft"])
def test_broken_rule_does_not_have_the_targets_law(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core.model_runner, "verify_drafts", partial(plain_rule, broken=broken))
    assert misfit(PARAMS["temperature 1"], num_drafts=2) > 1


def test_one_noise_for_all_steps_does_not_have_the_targets_law(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = core.decoding.noise.generator

    def reused(seed: int, choice: int, position: int, *rest: Any) -> np.random.Generator:
        return fresh(seed, choice, 0, *rest)

    monkeypatch.setattr(core.decoding.noise, "generator", reused)
    monkeypatch.setattr(core.model_runner, "generator", reused)
    assert misfit(PARAMS["temperature 1"], num_drafts=1) > 1


@pytest.mark.parametrize("num_blocks", [LARGE, TINY])
def test_no_noise_decides_twice(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed never draw with the same key again, preempted or not."""
    keys: list[tuple[Any, ...]] = []

    def noted(make: Callable[..., np.random.Generator]) -> Callable[..., np.random.Generator]:
        def generator(seed: int, choice: int, position: int, purpose: int, index: int = 0) -> np.random.Generator:
            keys.append((seed, choice, position, purpose, index))
            return make(seed, choice, position, purpose, index)

        return generator

    monkeypatch.setattr(core.decoding.noise, "generator", noted(core.decoding.noise.generator))
    monkeypatch.setattr(core.model_runner, "generator", noted(core.model_runner.generator))
    requests = [
        a_request(str(i), prompt_of(i), SamplingParams(max_tokens=20, ignore_eos=True), drafts=i % 4, seed=i)
        for i in range(8)
    ]
    served = serve(a_runner(MODEL, DRAFTS["good"], num_blocks, 4), requests, num_blocks=num_blocks, token_limit=20)
    assert (num_blocks == TINY) == bool(served.num_preemptions)
    assert len(keys) > 160
    assert len(keys) == len(set(keys))
