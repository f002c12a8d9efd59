"""Drafts from a prediction: what comes next in it where the output agrees with it, nothing where they have parted.

Tokens are letters here, so that texts can be read.
"""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.decoding.prediction import PredictedText, PredictionProposer
from core.decoding.proposers import Draft, NgramProposer, Proposal, Proposer
from core.model.kv_cache import KVCache
from core.request import Request
from core.sampling_params import SamplingParams
from core.scripted import RequestScript
from core.step import SchedulerOutput
from core.tokenizer import ByteTokenizer
from tests import builders


def drafted(predicted: str, output: str, num_tokens: int = 4) -> str:
    """The draft behind the output, which the text has followed from its first token on."""
    text = PredictedText(predicted.encode())
    for end in range(len(output)):
        text.look_up(output[:end].encode(), num_tokens)
    return bytes(text.look_up(output.encode(), num_tokens)).decode()


@pytest.mark.parametrize(
    ("predicted", "output", "draft"),
    [
        ("abcdefgh", "", "abcd"),
        ("abcdefgh", "abc", "defg"),
        ("abcdefgh", "abcdefg", "h"),
        ("abcdefgh", "abcdefgh", ""),  # it is at its end
        ("abcdefgh", "abX", ""),  # parted
        ("abcdefgh", "abXde", "fgh"),  # a token replaced, and found again by two
        ("abcdefgh", "abXYZcdef", "gh"),  # some put in
        ("abcdefgh", "aefg", "h"),  # some left out
        ("abcdefgh", "XYZ", ""),  # never met
        ("abcdefgh", "abcdefghi", ""),  # goes on behind its end
        ("", "ab", ""),
        ("", "", ""),
        ("-ab1-ab2-ab3-", "-ab1-ab2", "-ab3"),  # where they agree, no look-up: not what followed -ab first or last
        ("-ab1-ab2-ab3-", "-ab1Xab", "2-ab"),  # parted, ab is met again: the next one ahead
        ("-ab1-ab2-ab3-", "-ab1-ab2-ab3-ab", "3-"),  # none ahead: the last one
        ("..xy..abxz.", "QabX..abx", "z."),  # the longest run that is known decides
    ],
)
def test_the_output_is_followed_through_the_prediction(predicted: str, output: str, draft: str) -> None:
    assert draft == drafted(predicted, output)


@given(st.text("abc", max_size=12), st.text("abc", max_size=12), st.integers(1, 4))
def test_drafts_are_a_function_of_the_tokens_however_many_came_at_a_time(
    predicted: str, output: str, num_tokens: int
) -> None:
    at_once = bytes(PredictedText(predicted.encode()).look_up(output.encode(), num_tokens)).decode()
    assert at_once == drafted(predicted, output, num_tokens)
    assert at_once in predicted
    assert len(at_once) <= num_tokens


class Chatterbox:
    """Drafts as many zeros as there are slots, and notes for whom it was asked."""

    caches: Sequence[KVCache] = ()

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}

    def propose(self, plan: SchedulerOutput) -> Proposal:
        self.slots = {s.request_id: s.num_draft_slots for s in plan.scheduled}
        return Proposal({name: Draft([0] * num) for name, num in self.slots.items() if num}, {"x": 3})


def a_request(name: str, prediction: str = "", output: str = "", *, own: int = 2, predicted: int = 5) -> Request:
    """It wants up to two drafts of the engine's own, and up to five from its prediction if it has one."""
    params = SamplingParams(max_tokens=50)
    request = Request(name, b"prompt", params, prediction=prediction.encode())
    request.token_ids += output.encode()
    request.num_speculative_tokens, request.num_predicted_tokens = own, predicted if prediction else 0
    return request


def test_requests_without_a_prediction_draft_as_without_this_proposer() -> None:
    plan = builders.plan(a_request("a"), a_request("b"), num_draft_slots=2)
    assert Chatterbox().propose(plan) == PredictionProposer(Chatterbox()).propose(plan)
    assert Proposal() == PredictionProposer().propose(plan)


def test_who_has_nothing_predicted_is_left_to_the_inner_proposer_and_its_limit() -> None:
    inner = Chatterbox()
    requests = a_request("served", "abcdefgh", "ab"), a_request("parted", "abcdefgh", "xyz"), a_request("plain")
    proposal = PredictionProposer(inner).propose(builders.plan(*requests, num_draft_slots=6))

    assert {"served": 0, "parted": 2, "plain": 2} == inner.slots
    assert list(b"cdefg") == proposal.drafts["served"].token_ids
    assert [0, 0] == proposal.drafts["parted"].token_ids == proposal.drafts["plain"].token_ids
    assert {"served": True, "parted": False, "plain": False} == {n: d.is_predicted for n, d in proposal.drafts.items()}
    assert [] == proposal.drafts["served"].laws
    assert {"x": 3} == proposal.draft_computed


@pytest.mark.parametrize(("slots", "draft"), [(0, None), (1, b"c"), (3, b"cde"), (9, b"cdefg")])
def test_never_more_than_there_are_slots_for(slots: int, draft: bytes | None) -> None:
    request = a_request("a", "abcdefgh", "ab")
    drafts = PredictionProposer().propose(builders.plan(request, num_draft_slots=slots)).drafts
    assert ({"a": draft} if draft else {}) == {name: bytes(d.token_ids) for name, d in drafts.items()}


class NoVowels:
    """A grammar as proposers see one."""

    def num_allowed(self, token_ids: Sequence[int], draft: Sequence[int]) -> int:
        return next((i for i, token in enumerate(draft) if token in b"aeiou"), len(draft))

    def allowed(self, token_ids: Sequence[int]) -> bytes:
        raise AssertionError("asked by the sampler alone")

    def is_complete(self, token_ids: Sequence[int]) -> bool:
        return False


def test_a_draft_ends_where_the_grammar_forbids_it() -> None:
    request, forbidden = a_request("a", "bcdefgh", "b"), a_request("f", "bcdefgh", "bcd")
    request.constraint = forbidden.constraint = NoVowels()
    inner = Chatterbox()
    proposal = PredictionProposer(inner).propose(builders.plan(request, forbidden, num_draft_slots=4))
    assert b"cd" == bytes(proposal.drafts["a"].token_ids)
    assert {"a": 0, "f": 2} == inner.slots  # nothing of it is left, so the inner proposer may try


def test_each_request_has_a_place_of_its_own() -> None:
    proposer: Proposer = PredictionProposer()
    one, other = a_request("one", "abcdef", "abc"), a_request("other", "abcdef", "a")
    drafts = proposer.propose(builders.plan(one, other, num_draft_slots=2)).drafts
    assert (b"de", b"bc") == (bytes(drafts["one"].token_ids), bytes(drafts["other"].token_ids))


def test_scripts_are_not_predicted() -> None:
    request = Request(
        "s", b"p", SamplingParams(max_tokens=9), prediction=b"abc", script=RequestScript(("a",), ByteTokenizer())
    )
    request.num_predicted_tokens = 3
    assert Proposal() == PredictionProposer().propose(builders.plan(request, num_draft_slots=2))


def test_the_inner_proposers_caches_are_its_own() -> None:
    inner = NgramProposer(1, 2)
    assert inner.caches == PredictionProposer(inner).caches
    assert () == PredictionProposer().caches
