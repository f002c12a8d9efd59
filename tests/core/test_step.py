"""The messages of one step."""

from core.request import DraftOutcome
from core.step import SampledTokens, ScheduledRequest, SchedulerOutput, count_only
from tests.builders import plan, request


def share(num_tokens: int, *, start: int = 0, num_draft_slots: int = 0, name: str = "a") -> ScheduledRequest:
    return ScheduledRequest(request(name, prompt=[71] * 6), start, num_tokens, num_draft_slots, [4, 2])


def test_a_share_yields_a_token_only_when_it_computes_the_last_known_one():
    assert [False, True, True] == [s.yields_token for s in (share(5), share(6), share(2, start=4))]
    assert (4, 6) == (share(2, start=4).start, share(2, start=4).end)


def test_a_plans_tokens_are_those_it_computes_and_its_draft_slots():
    it = SchedulerOutput(0, (share(3), share(6, num_draft_slots=2, name="b")))

    assert 11 == it.num_tokens


def test_a_plan_describes_itself_in_numbers_alone():
    it = SchedulerOutput(7, (share(2, start=4, num_draft_slots=1),), ((1, 2),), ("b",))

    assert (
        "step 7, copies [(1, 2)], preempted ['b']\na: tokens 4..6 of 6, 1 draft slots, blocks [4, 2]" == it.describe()
    )


def test_accepted_are_all_new_tokens_but_the_last():
    assert [0, 3] == [SampledTokens(tokens).num_accepted_tokens for tokens in ([5], [5, 6, 7, 8])]


def test_what_became_of_drafts_is_known_when_it_is_known_how_many_tokens_were_emitted():
    predicted = SampledTokens([5, 6, 7], num_draft_tokens=4, is_predicted=True)
    outcome = predicted.outcome(2)

    assert DraftOutcome(4, 2, 2, is_predicted=True) == outcome
    assert (1, 2) == (outcome.num_gained, outcome.num_drafts_emitted)
    assert SampledTokens([5]).outcome(1) is None


def test_counting_gives_a_token_to_everyone_who_yields():
    done = request("b", prompt=[1])
    result = count_only(SchedulerOutput(0, (share(3), *plan(done).scheduled)))

    assert {"b": SampledTokens((0,))} == result.sampled
