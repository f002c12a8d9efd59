"""The runner: tokens are those of the target alone, with any drafter or none, in any batch, however often preempted."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest

import core.decoding.sampler
import core.model_runner
from core.decoding.proposers import Draft, DraftModelProposer, NgramProposer, Proposal
from core.memory.block_manager import BlockManager
from core.model.kv_cache import KVCache
from core.model_runner import ModelRunner
from core.request import Request
from core.sampling_params import SamplingParams
from core.scheduling.draft_controller import AdaptiveDrafts
from core.scheduling.drafting import FixedDrafts
from core.scheduling.scheduler import ContinuousBatchingScheduler
from core.step import DraftChoice, ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from tests import oracle
from tests.core.small_models import (
    DRAFT,
    EOS,
    TARGET,
    Model,
    a_request,
    a_runner,
    good_draft_for,
    outputs,
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
DRAFTERS = (*DRAFTS, "look-up")
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


def runner_of(drafter: str, num_blocks: int, block_size: int = 4) -> ModelRunner:
    proposer = NgramProposer(1, 3) if drafter == "look-up" else None
    return a_runner(MODEL, DRAFTS.get(drafter), num_blocks, block_size, proposer=proposer)


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


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("num_drafts", [1, 3, 6])
@pytest.mark.parametrize(("num_blocks", "token_limit"), [(LARGE, None), (LARGE, 7), (TINY, None), (TINY, 9)])
def test_keyed_tokens_are_those_of_the_target_alone(
    drafter: str, num_drafts: int, num_blocks: int, token_limit: int | None
) -> None:
    runner = runner_of(drafter, num_blocks)
    drafting = FixedDrafts(uses_draft_model=drafter != "look-up")
    served = serve(
        runner, keyed_requests(num_drafts), num_blocks=num_blocks, token_limit=token_limit, drafting=drafting
    )

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
    served = serve(runner_of("good", LARGE), keyed_requests(3), num_blocks=LARGE)
    assert 0.2 < served.num_accepted / served.num_drafts < 0.95
    looked_up = serve(runner_of("look-up", LARGE), keyed_requests(3), num_blocks=LARGE)
    assert 0.05 < looked_up.num_accepted / looked_up.num_drafts < 0.95


@pytest.mark.parametrize("max_batch", [1, 2, 5])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_keyed_tokens_are_the_same_in_any_batch_and_block_size(max_batch: int, block_size: int) -> None:
    runner = runner_of("good", LARGE, block_size)
    requests = keyed_requests(3)[::-1]
    served = serve(runner, requests, num_blocks=LARGE, block_size=block_size, max_batch=max_batch)
    assert decoded_alone() == outputs(served)


def test_requests_may_want_different_numbers_of_drafts() -> None:
    requests = keyed_requests()
    for i, request in enumerate(requests):
        request.num_speculative_tokens = i % 4
    assert decoded_alone() == outputs(serve(runner_of("good", LARGE), requests, num_blocks=LARGE))


def test_logprobs_are_bit_equal_with_and_without_speculation() -> None:
    def logprobs(drafter: str, num_blocks: int) -> dict[str, list[object]]:
        requests = keyed_requests(4, num_logprobs=5)
        served = serve(runner_of(drafter, num_blocks), requests, num_blocks=num_blocks)
        return {request_id: [token.logprobs for token in tokens] for request_id, tokens in served.tokens.items()}

    plain = logprobs("none", LARGE)
    assert all(all(entries) for entries in plain.values())
    for drafter, num_blocks in [("good", LARGE), ("bad", TINY), ("itself", TINY), ("look-up", TINY)]:
        assert plain == logprobs(drafter, num_blocks)


def test_logprobs_are_of_the_raw_law_of_the_target() -> None:
    requests = keyed_requests(3, num_logprobs=2)
    served = serve(runner_of("good", LARGE), requests, num_blocks=LARGE)
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
    share = ScheduledRequest(copy, 0, len(tokens), num_drafts, range(40), len(tokens))
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


@pytest.mark.parametrize("shares_prefixes", [False, True])
@pytest.mark.parametrize(("num_blocks", "token_limit"), [(LARGE, None), (LARGE, 16), (TINY, 16)])
def test_draft_model_that_fell_behind_while_too_many_ran_drafts_as_one_that_starts_afresh(
    num_blocks: int, token_limit: int | None, shares_prefixes: bool
) -> None:
    """With more than two in a step nobody drafts. Blocks it has no keys of may be found by others."""
    recorders: list[Recorder] = []

    def make(*args: Any) -> Recorder:
        recorders.append(Recorder(*args))
        return recorders[0]

    requests = [
        a_request(
            f"r{i}",
            [*prompt_of(4)[:8], *prompt_of(i)[:12]],
            SamplingParams(max_tokens=8 + 7 * (i % 3), ignore_eos=True, seed=i if i % 2 else None),
            drafts=1 + i % 4,
            seed=i,
        )
        for i in range(9)
    ]
    served = serve(
        a_runner(MODEL, DRAFTS["good"], num_blocks, 4, make),
        requests,
        num_blocks=num_blocks,
        token_limit=token_limit,
        max_batch=4,
        drafting=FixedDrafts(2),
        enable_prefix_caching=shares_prefixes,
    )
    assert (num_blocks == TINY) == bool(served.num_preemptions)
    proposals = recorders[0].proposals
    assert 5 < len(proposals) < served.num_steps
    for request, tokens, proposed in proposals:
        expected = from_scratch(good_draft_for(MODEL), request, tokens, len(proposed.token_ids))
        assert expected.token_ids == proposed.token_ids
        assert [law_V.tolist() for law_V in expected.laws] == [law_V.tolist() for law_V in proposed.laws]


# Requests without a seed


@pytest.mark.parametrize("num_blocks", [LARGE, TINY])
def test_no_noise_decides_twice(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed never draw with the same key again, preempted or not."""
    keys: list[tuple[Any, ...]] = []

    def noted(make: Callable[..., np.random.Generator]) -> Callable[..., np.random.Generator]:
        def generator(seed: int, choice: int, position: int, purpose: int, index: int = 0) -> np.random.Generator:
            keys.append((seed, choice, position, purpose, index))
            return make(seed, choice, position, purpose, index)

        return generator

    monkeypatch.setattr(core.decoding.sampler, "generator", noted(core.decoding.sampler.generator))
    monkeypatch.setattr(core.model_runner, "generator", noted(core.model_runner.generator))
    requests = [
        a_request(str(i), prompt_of(i), SamplingParams(max_tokens=20, ignore_eos=True), drafts=i % 4, seed=i)
        for i in range(8)
    ]
    served = serve(runner_of("good", num_blocks), requests, num_blocks=num_blocks, token_limit=20)
    assert (num_blocks == TINY) == bool(served.num_preemptions)
    assert len(keys) > 160
    assert len(keys) == len(set(keys))


# Numbers that are none


def poisoned(row: int) -> Model:
    """The same model (its output matrix is its own), but one token's embedding is no number."""
    embedding_VD = MODEL.tensors["model.embed_tokens.weight"].copy()
    embedding_VD[row] = np.nan
    return Model(MODEL.config, MODEL.tensors | {"model.embed_tokens.weight": embedding_VD})


def test_numbers_that_are_none_fail_their_request_and_spoil_no_block_for_others() -> None:
    """A masked slot is multiplied by 0, and 0 times NaN is NaN: none may ever get into the pool."""
    bias = {23: -100.0}
    good = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logit_bias=bias)
    alone = serve(runner_of("none", 8), [a_request("good", [1, 4, 5], good)], num_blocks=8)
    manager = BlockManager(8, 4)
    scheduler = ContinuousBatchingScheduler(4, manager, execute=a_runner(poisoned(23), None, 8, 4))
    said: dict[str, list[int]] = {"bad": [], "good": [], "later": []}
    errors = {}
    for name, prompt in {"bad": [23] * 9, "good": [1, 4, 5]}.items():
        scheduler.add_request(a_request(name, prompt, good))
    for _ in range(2):
        while scheduler.has_unfinished_requests:
            scheduler.step()
            for output in scheduler.take_outputs():
                said[output.request_id] += [token.token_id for token in output.tokens]
                errors[output.request_id] = output.error
        if not said["later"]:
            scheduler.add_request(a_request("later", [1, 4, 5], good))  # in the blocks that the bad one had

    expected = [token.token_id for token in alone.tokens["good"]]
    assert {"bad": [], "good": expected, "later": expected} == said
    assert "NumericalFault" in (errors["bad"] or "")
    assert 8 == manager.num_free_blocks


# A run and its record


class Noted:
    """The controller on a machine of any speed, keeping what was planned and chosen."""

    uses_draft_model = True
    outlook = None

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self._policy, self._random = runner, AdaptiveDrafts(4, uses_draft_model=True), Random(1)
        self.choices: list[DraftChoice] = []
        self.plans: list[list[tuple[object, ...]]] = []

    def choose(self, requests: Sequence[Request], num_requests: int) -> DraftChoice:
        self.choices.append(self._policy.choose(requests, num_requests))
        return self.choices[-1]

    def observe(self, plan: SchedulerOutput, result: ModelRunnerOutput, seconds: float) -> None:
        self._policy.observe(plan, result, seconds)

    def __call__(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.plans.append([(s.request_id, s.start, s.end, s.num_draft_slots, *s.block_ids) for s in plan.scheduled])
        assert self.choices[-1] == plan.draft_choice
        result = self._runner(plan)
        passes = [(num_rows, self._random.random()) for num_rows, _ in result.draft_passes]
        result = replace(result, draft_passes=passes)
        self.observe(plan, result, sum(seconds for _, seconds in passes) + self._random.expovariate(1.0))
        return result


class FromRecord(Noted):
    """Chooses what was chosen."""

    def __init__(self, runner: ModelRunner, record: Sequence[DraftChoice]) -> None:
        super().__init__(runner)
        self._record = iter(record)

    def choose(self, requests: Sequence[Request], num_requests: int) -> DraftChoice:
        self.choices.append(next(self._record))
        return self.choices[-1]


@pytest.mark.parametrize(("num_blocks", "token_limit"), [(LARGE, None), (TINY, 9)])
def test_a_run_can_be_repeated_from_what_its_plans_record(num_blocks: int, token_limit: int | None) -> None:
    """The clock decided how many drafts there were; the record alone gives the same plans, and tokens without a seed.

    Those with a seed have their tokens whatever was chosen.
    """

    def run(make: Callable[[ModelRunner], Noted]) -> tuple[Noted, dict[str, list[int]]]:
        noted = make(runner_of("good", num_blocks))
        unseeded = [a_request(f"u{i}", prompt_of(i), SamplingParams(max_tokens=20), drafts=4, seed=i) for i in range(4)]
        served = serve(
            noted, [*keyed_requests(4), *unseeded], num_blocks=num_blocks, token_limit=token_limit, drafting=noted
        )
        return noted, outputs(served)

    first, said = run(Noted)
    assert {"pays", "exploring"} <= {choice.reason for choice in first.choices}
    assert len({k for choice in first.choices for k in choice.num_drafts.values()}) > 1
    again, said_again = run(lambda runner: FromRecord(runner, first.choices))
    assert (first.plans, said) == (again.plans, said_again)
    assert decoded_alone() == {name: ids for name, ids in said.items() if name.startswith("r")}
