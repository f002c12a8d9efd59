"""Proposals: what the draft model would say by itself, or what followed the last tokens before; never past the slots.

A draft model that fell behind catches up; a look-up is a search through the request's own tokens.
"""

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.decoding.proposers import (
    Draft,
    DraftModelProposer,
    NgramIndex,
    NgramProposer,
    Proposal,
    Proposer,
    is_keyed,
)
from core.model.kv_cache import KVCache
from core.request import Request
from core.sampling_params import SamplingParams
from core.scheduling.drafting import FixedDrafts
from core.scripted import RequestScript
from core.step import ScheduledRequest, SchedulerOutput
from core.tokenizer import ByteTokenizer
from tests import oracle
from tests.core.small_models import DRAFT, EOS, TARGET, Model, a_request, a_runner, random_tensors, serve

MODEL = Model(DRAFT, random_tensors(DRAFT, 3))
PROMPT = (5, 7, 1, 9, 3, 2, 11)
BLOCK_SIZE = 4


def a_proposer() -> DraftModelProposer:
    return DraftModelProposer(MODEL.transformer(), KVCache(DRAFT, 64, BLOCK_SIZE))


def scheduled(
    request: Request,
    slots: int,
    *,
    start: int = 0,
    num_tokens: int | None = None,
    first_block: int = 0,
    catch_up: int | None = None,
) -> ScheduledRequest:
    """If nothing else is said, the draft model catches up on all that the target computes."""
    num_tokens = request.num_tokens - start if num_tokens is None else num_tokens
    behind = start + num_tokens - request.num_draft_computed_tokens if catch_up is None else catch_up
    return ScheduledRequest(request, start, num_tokens, slots, range(first_block, first_block + 8), behind)


def propose(proposer: Proposer, *shares: ScheduledRequest) -> Proposal:
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


@pytest.mark.parametrize("slots", [1, 3])
def test_draft_model_has_kv_of_all_it_was_fed(slots: int) -> None:
    """It is never fed its own last draft."""
    proposal = propose(a_proposer(), scheduled(request_of(), slots))
    assert {"r": len(PROMPT) + slots - 1} == proposal.draft_computed
    assert {"r"} == set(proposal.drafts)


def test_draft_model_runs_over_no_more_than_the_plan_says() -> None:
    """One drafts, one is followed, one is caught up on in part, one is left alone."""
    shares = (
        scheduled(request_of(), 2),
        scheduled(request_of(request_id="followed"), 0, first_block=8),
        scheduled(request_of(request_id="part"), 0, first_block=16, catch_up=3),
        scheduled(request_of(request_id="alone"), 0, first_block=24, catch_up=0),
    )
    proposal = propose(a_proposer(), *shares)
    assert {"r"} == set(proposal.drafts)
    assert {"r": len(PROMPT) + 1, "followed": len(PROMPT), "part": 3} == proposal.draft_computed


def test_draft_model_does_not_run_for_nobody() -> None:
    assert Proposal() == propose(a_proposer(), scheduled(request_of(), 0, catch_up=0))


def test_catching_up_in_parts_comes_to_the_same_as_at_once() -> None:
    proposer, request = a_proposer(), request_of(temperature=0)
    for num_seen, catch_up in ((0, 3), (3, 2)):
        request.num_draft_computed_tokens = num_seen
        proposal = propose(proposer, scheduled(request, 0, catch_up=catch_up))
        assert {"r": num_seen + catch_up} == proposal.draft_computed
    request.num_draft_computed_tokens = 5
    at_once = propose(a_proposer(), scheduled(request_of(temperature=0), 3)).drafts["r"]
    assert_same_draft(at_once, propose(proposer, scheduled(request, 3)).drafts["r"])


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 3}, {}], ids=str)
@pytest.mark.parametrize("num_seen", [0, 4, len(PROMPT)])
def test_draft_model_that_fell_behind_proposes_as_one_that_starts_afresh(params: dict[str, Any], num_seen: int) -> None:
    """It has seen the beginning; nobody drafted since, while the target went on by a few tokens."""
    proposer, request = a_proposer(), request_of(**params)
    if num_seen:
        seen = a_request("r", PROMPT[:num_seen], request.params, drafts=5, seed=77)
        propose(proposer, scheduled(seen, 1))
    request.num_draft_computed_tokens = num_seen
    for token_id in (6, 8, 3):
        share = scheduled(request, 0, start=request.num_computed_tokens, catch_up=0)
        assert Proposal() == propose(proposer, share)
        request.num_computed_tokens = share.end
        request.token_ids.append(token_id)
    caught_up = propose(proposer, scheduled(request, 3, start=request.num_computed_tokens))

    fresh = request_of(**params)
    fresh.token_ids = list(request.token_ids)
    assert_same_draft(propose(a_proposer(), scheduled(fresh, 3)).drafts["r"], caught_up.drafts["r"])
    assert {"r": len(PROMPT) + 3 + 2} == caught_up.draft_computed


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


def test_greedy_and_seeded_requests_are_keyed() -> None:
    assert is_keyed(request_of(temperature=0))
    assert is_keyed(request_of(seed=0))
    assert not is_keyed(request_of())


def test_copied_blocks_are_copied_in_the_draft_cache_too() -> None:
    proposer, request = a_proposer(), request_of(temperature=0)
    propose(proposer, scheduled(request, 1))
    for cache in proposer.caches:
        cache.copy_blocks([(0, 50), (1, 51)])
    request.token_ids.append(6)
    request.num_draft_computed_tokens = len(PROMPT)
    copied = ScheduledRequest(request, len(PROMPT), 1, 3, [50, 51, 52], 1)

    fresh = request_of(temperature=0)
    fresh.token_ids = list(request.token_ids)
    assert_same_draft(propose(a_proposer(), scheduled(fresh, 3)).drafts["r"], propose(proposer, copied).drafts["r"])


# Prompt look-up


def index_of(tokens: Sequence[int], min_n: int = 1, max_n: int = 3) -> NgramIndex:
    index = NgramIndex(min_n, max_n)
    index.extend(tokens)
    return index


def searched(tokens: Sequence[int], min_n: int, max_n: int, num_tokens: int) -> list[int]:
    """The look-up by going back through the tokens, longest tail first."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                return list(tokens[start + n : start + n + num_tokens])
    return []


def test_longest_tail_is_found_first() -> None:
    tokens = [1, 2, 3, 9, 9, 5, 2, 3, 8, 8, 3, 7, 7, 1, 2, 3]
    assert [9, 9] == index_of(tokens, 1, 3).look_up(2)
    assert [8, 8] == index_of(tokens, 1, 2).look_up(2)
    assert [7, 7] == index_of(tokens, 1, 1).look_up(2)


def test_shorter_tails_are_tried_down_to_the_least() -> None:
    tokens = [3, 7, 7, 1, 2, 3]
    assert [7] == index_of(tokens, 1, 3).look_up(1)
    assert [] == index_of(tokens, 2, 3).look_up(1)


def test_last_occurrence_wins() -> None:
    assert [6] == index_of([1, 2, 5, 1, 2, 6, 1, 2]).look_up(1)


def test_tail_does_not_find_itself() -> None:
    assert [] == index_of([1, 2, 3]).look_up(2)
    assert [] == index_of([]).look_up(2)


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, [5]), (3, [5, 6, 1]), (4, [5, 6, 1, 2]), (9, [5, 6, 1, 2])])
def test_look_up_stops_at_slots_and_at_the_end_of_what_was_said(num_tokens: int, expected: list[int]) -> None:
    assert expected == index_of([1, 2, 5, 6, 1, 2]).look_up(num_tokens)


@given(
    tokens=st.lists(st.integers(0, 3), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=5),
    lengths=st.tuples(st.integers(1, 4), st.integers(0, 3)),
    num_tokens=st.integers(1, 6),
)
def test_index_grown_in_pieces_finds_what_a_search_finds(
    tokens: list[int], cuts: list[int], lengths: tuple[int, int], num_tokens: int
) -> None:
    min_n, max_n = lengths[0], sum(lengths)
    index = NgramIndex(min_n, max_n)
    for end in [*sorted(cuts), len(tokens)]:
        index.extend(tokens[:end])
        index.extend(tokens[:end])  # nothing new
        expected = searched(tokens[:end], min_n, max_n, num_tokens)
        assert expected == index.look_up(num_tokens)
        assert index_of(tokens[:end], min_n, max_n).look_up(num_tokens) == expected


COPIED = (5, 7, 1, 9, 5, 7)


def test_look_up_fills_the_slots_and_brings_no_laws() -> None:
    requests = [request_of(COPIED, request_id=f"r{i}") for i in range(4)]
    drafts = propose(NgramProposer(1, 3), *(scheduled(r, i) for i, r in enumerate(requests))).drafts
    assert {"r1": Draft([1]), "r2": Draft([1, 9]), "r3": Draft([1, 9, 5])} == drafts


def test_look_up_that_finds_nothing_drafts_nothing() -> None:
    assert {"r": Draft()} == propose(NgramProposer(1, 3), scheduled(request_of((1, 2, 3)), 4)).drafts


def test_scripts_are_not_looked_up() -> None:
    script = RequestScript((("a", "b"),), ByteTokenizer())
    request = Request("r", COPIED, SamplingParams(max_tokens=9), script=script)
    assert {} == propose(NgramProposer(1, 3), scheduled(request, 1)).drafts


def test_requests_of_one_name_do_not_see_each_other() -> None:
    """An id comes again; what was said under it before is nobody's affair."""
    proposer = NgramProposer(1, 3)
    propose(proposer, scheduled(request_of(COPIED), 1))
    assert [4] == propose(proposer, scheduled(request_of((7, 4, 7)), 1)).drafts["r"].token_ids


def num_indices() -> int:
    gc.collect()
    return sum(isinstance(thing, NgramIndex) for thing in gc.get_objects())


def test_index_goes_with_its_request() -> None:
    proposer, num_before = NgramProposer(1, 3), num_indices()
    requests = [request_of(COPIED, request_id=f"r{i}") for i in range(3)]
    propose(proposer, *(scheduled(request, 1) for request in requests))
    assert 3 == num_indices() - num_before
    del requests[0]
    assert 2 == num_indices() - num_before
    requests.clear()
    assert 0 == num_indices() - num_before


class RecordedLookUp(NgramProposer):
    """Notes every draft with the tokens it stood behind and its slots."""

    def __init__(self) -> None:
        super().__init__(1, 3)
        self.proposals: list[tuple[list[int], int, list[int]]] = []

    def propose(self, plan: SchedulerOutput) -> Proposal:
        proposal = super().propose(plan)
        for s in plan.scheduled:
            if s.request_id in proposal.drafts:
                draft = proposal.drafts[s.request_id].token_ids
                self.proposals.append((list(s.request.token_ids), s.num_draft_slots, draft))
        return proposal


@pytest.mark.parametrize(("num_blocks", "token_limit"), [(200, None), (13, None), (13, 9)])
def test_look_up_is_a_search_through_what_was_said_whatever_was_refused_or_preempted(
    num_blocks: int, token_limit: int | None
) -> None:
    proposer = RecordedLookUp()
    target = Model(TARGET, random_tensors(TARGET, 0))
    requests = [
        a_request(f"r{i}", COPIED[i % 3 :], SamplingParams(max_tokens=24, ignore_eos=True, **params), drafts=1 + i % 4)
        for i, params in enumerate([{"temperature": 0}, {"seed": 1}, {}, {"seed": 2, "temperature": 0.5}] * 2)
    ]
    runner = a_runner(target, None, num_blocks, BLOCK_SIZE, proposer=proposer)
    look_up = FixedDrafts(uses_draft_model=False)
    served = serve(runner, requests, num_blocks=num_blocks, token_limit=token_limit, drafting=look_up)

    assert (num_blocks == 13) == bool(served.num_preemptions)
    assert 0 < served.num_accepted < served.num_drafts
    assert len(proposer.proposals) > 50
    for tokens, slots, draft in proposer.proposals:
        assert searched(tokens, 1, 3, slots) == draft
        assert len(draft) <= slots
