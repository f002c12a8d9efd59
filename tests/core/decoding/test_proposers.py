"""The draft model's proposals: what that model would say by itself, for as many tokens as there are slots."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from core.decoding.proposers import Draft, DraftModelProposer, Proposal, is_keyed
from core.model.kv_cache import KVCache
from core.request import Request, SamplingParams
from core.step import ScheduledRequest, SchedulerOutput
from tests import oracle
from tests.core.small_models import DRAFT, EOS, Model, a_request, random_tensors

MODEL = Model(DRAFT, random_tensors(DRAFT, 3))
PROMPT = (5, 7, 1, 9, 3, 2, 11)
BLOCK_SIZE = 4


def a_proposer() -> DraftModelProposer:
    return DraftModelProposer(MODEL.transformer(), KVCache(DRAFT, 64, BLOCK_SIZE))


def scheduled(
    request: Request, slots: int, *, start: int = 0, num_tokens: int | None = None, first_block: int = 0
) -> ScheduledRequest:
    num_tokens = request.num_tokens - start if num_tokens is None else num_tokens
    return ScheduledRequest(request, start, num_tokens, slots, range(first_block, first_block + 8))


def propose(proposer: DraftModelProposer, *shares: ScheduledRequest) -> Proposal:
    return proposer.propose(SchedulerOutput(1, shares))


def request_of(prompt: Sequence[int] = PROMPT, *, request_id: str = "r", **params: Any) -> Request:
    return a_request(request_id, prompt, SamplingParams(max_tokens=50, **params), drafts=5, seed=77)


KEYED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 8},
    {"seed": -8, "temperature": 0.7, "top_k": 6, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"seed": 9, "top_p": 0.8, "min_p": 0.05, "presence_penalty": 1.0, "logit_bias": {4: 2.0}, "min_tokens": 9},
]


@pytest.mark.parametrize("params", KEYED, ids=str)
@pytest.mark.parametrize("slots", [1, 4])
def test_keyed_drafts_are_the_draft_models_own_text(params: dict[str, Any], slots: int) -> None:
    request = request_of(**params)
    expected = oracle.decode_alone(
        lambda tokens: oracle.llama_logits(DRAFT, MODEL.tensors, tokens)[-1], PROMPT, request.params, eos_token_ids=EOS
    )[:slots]
    proposal = propose(a_proposer(), scheduled(request, slots))
    assert expected == proposal.drafts["r"].token_ids
    assert [] == proposal.drafts["r"].laws


def test_other_drafts_bring_the_processed_laws_they_were_drawn_from() -> None:
    request = request_of(temperature=0.8, top_k=9, presence_penalty=0.5)
    draft = propose(a_proposer(), scheduled(request, 4)).drafts["r"]

    assert (4, 4) == (len(draft.token_ids), len(draft.laws))
    for i, (token, law_V) in enumerate(zip(draft.token_ids, draft.laws, strict=True)):
        output = draft.token_ids[:i]
        logits_V = oracle.llama_logits(DRAFT, MODEL.tensors, [*PROMPT, *output])[-1]
        np.testing.assert_allclose(
            oracle.sampling_law(list(logits_V), request.params, PROMPT, output), law_V, atol=1e-5
        )
        assert law_V[token] > 0


def test_drafts_are_the_same_in_any_company_and_any_blocks() -> None:
    requests = [request_of(PROMPT[: 2 + i], request_id=f"r{i}", **params) for i, params in enumerate([*KEYED, {}])]
    shares = [scheduled(r, 1 + i, first_block=8 * i) for i, r in enumerate(requests)]
    together = propose(a_proposer(), *shares).drafts
    for i, request in enumerate(requests):
        alone = propose(a_proposer(), scheduled(request, 1 + i, first_block=40)).drafts[request.request_id]
        assert 1 + i == len(alone.token_ids)
        assert_same_draft(alone, together[request.request_id])


def assert_same_draft(expected: Draft, got: Draft) -> None:
    assert expected.token_ids == got.token_ids
    assert [law_V.tolist() for law_V in expected.laws] == [law_V.tolist() for law_V in got.laws]


@pytest.mark.parametrize("slots", [0, 1, 3])
def test_draft_model_has_kv_of_all_it_was_fed(slots: int) -> None:
    """It is never fed its own last draft."""
    proposal = propose(a_proposer(), scheduled(request_of(), slots))
    assert {"r": len(PROMPT) + max(0, slots - 1)} == proposal.draft_computed
    assert ({"r"} if slots else set()) == set(proposal.drafts)


def test_draft_model_follows_a_chunk_and_proposes_nothing() -> None:
    proposer, request = a_proposer(), request_of(temperature=0)
    proposal = propose(proposer, scheduled(request, 0, num_tokens=3))
    assert ({}, {"r": 3}) == (proposal.drafts, proposal.draft_computed)

    request.num_computed_tokens = request.num_draft_computed_tokens = 3
    chunked = propose(proposer, scheduled(request, 3, start=3)).drafts["r"]
    assert_same_draft(propose(a_proposer(), scheduled(request_of(temperature=0), 3)).drafts["r"], chunked)


def test_draft_model_catches_up_on_what_the_target_is_ahead() -> None:
    """After a step whose drafts were all kept, it lacks the last of them as well as the bonus token."""
    proposer, request = a_proposer(), request_of(temperature=0)
    request.token_ids += propose(proposer, scheduled(request, 3)).drafts["r"].token_ids
    request.num_draft_computed_tokens = len(PROMPT) + 2
    request.num_computed_tokens = len(PROMPT) + 3
    request.token_ids.append(4)
    later = propose(proposer, scheduled(request, 3, start=len(PROMPT) + 3)).drafts["r"]

    fresh = request_of(temperature=0)
    fresh.token_ids = list(request.token_ids)
    assert_same_draft(propose(a_proposer(), scheduled(fresh, 3)).drafts["r"], later)


def test_request_without_speculation_is_not_followed() -> None:
    request = request_of()
    request.num_speculative_tokens = 0
    assert Proposal() == propose(a_proposer(), scheduled(request, 0))


def test_greedy_and_seeded_requests_are_keyed() -> None:
    assert is_keyed(request_of(temperature=0))
    assert is_keyed(request_of(seed=0))
    assert not is_keyed(request_of())


def test_copied_blocks_are_copied_in_the_draft_cache_too() -> None:
    proposer, request = a_proposer(), request_of(temperature=0)
    propose(proposer, scheduled(request, 0))
    proposer.copy_blocks([(0, 50), (1, 51)])
    request.token_ids.append(6)
    request.num_draft_computed_tokens = len(PROMPT)
    copied = ScheduledRequest(request, len(PROMPT), 1, 3, [50, 51, 52])

    fresh = request_of(temperature=0)
    fresh.token_ids = list(request.token_ids)
    assert_same_draft(propose(a_proposer(), scheduled(fresh, 3)).drafts["r"], propose(proposer, copied).drafts["r"])
