"""Draft slots in a plan: as many as the policy allows, for those with whom the draft model has caught up; scripts."""

from collections.abc import Mapping, Sequence

import pytest

from core.request import Request
from core.sampling_params import SamplingParams
from core.scheduling.drafting import DraftPolicy, FixedDrafts
from core.scripted import RequestScript
from core.step import DraftChoice, ModelRunnerOutput, SchedulerOutput
from core.tokenizer import ByteTokenizer
from tests import builders


class Given:
    """A policy that says what it is told to, and remembers what it was asked."""

    def __init__(self, num_drafts: Mapping[str, int], *, follows: bool = False, uses_draft_model: bool = True) -> None:
        self.uses_draft_model = uses_draft_model
        self.choice = DraftChoice(num_drafts, follows, "given")
        self.asked: list[tuple[list[str], int]] = []

    def choose(self, requests: Sequence[Request], num_requests: int) -> DraftChoice:
        self.asked.append(([r.request_id for r in requests], num_requests))
        return self.choice


def slots(plan: SchedulerOutput) -> dict[str, int]:
    return {s.request_id: s.num_draft_slots for s in plan.scheduled}


def catch_ups(plan: SchedulerOutput) -> dict[str, int]:
    return {s.request_id: s.num_draft_catch_up for s in plan.scheduled}


def plan_of(requests: Sequence[Request], drafting: DraftPolicy, token_limit: int | None = None) -> SchedulerOutput:
    scheduler = builders.scheduler(8, drafting=drafting, max_num_batched_tokens=token_limit)
    for request in requests:
        scheduler.add_request(request)
    return scheduler.schedule()


def drafting(num: int) -> list[Request]:
    return [builders.request(f"r{i}", max_tokens=9, num_drafts=3) for i in range(num)]


def scripted(request_id: str) -> Request:
    """Says three tokens in its first step."""
    script = RequestScript((("a", "b", "c"), "d"), ByteTokenizer())
    return Request(request_id, (1,), SamplingParams(max_tokens=9), script=script)


# How many


@pytest.mark.parametrize("max_requests", [None, 3, 4])
def test_as_many_as_may_draft_do(max_requests: int | None):
    plan = plan_of(drafting(3), FixedDrafts(max_requests))
    assert ({"r0": 3, "r1": 3, "r2": 3}, "fixed") == (slots(plan), plan.draft_choice.reason)


@pytest.mark.parametrize("max_requests", [1, 2])
def test_one_too_many_and_nobody_drafts(max_requests: int):
    plan = plan_of(drafting(3), FixedDrafts(max_requests))
    assert ({"r0": 0, "r1": 0, "r2": 0}, "crowded") == (slots(plan), plan.draft_choice.reason)


def test_each_has_what_the_policy_allows_and_no_more_than_it_wants():
    plan = plan_of(drafting(4), Given({"r0": 2, "r1": 0, "r2": 7}))
    assert ({"r0": 2, "r1": 0, "r2": 3, "r3": 0}, "given") == (slots(plan), plan.draft_choice.reason)


def test_the_policy_is_asked_for_those_alone_that_could_draft():
    """Not for a chunk, the last token, a request that wants none, one that is born by this step, or a script."""
    policy = Given({})
    others = [
        builders.request("last", max_tokens=1, num_drafts=3),
        builders.request("plain", max_tokens=9),
        builders.family("parent", 2, max_tokens=9, num_drafts=3),
        scripted("script"),
        builders.request("chunk", prompt=(1,) * 9, max_tokens=9, num_drafts=3),
    ]
    plan_of([*drafting(2), *others], policy, token_limit=10)
    assert [(["r0", "r1"], 7)] == policy.asked


def test_those_who_want_no_drafts_count_too():
    """Their rows fill the step as well; a chunk of a prompt is one request."""
    plain = builders.request("plain", prompt=(1,) * 9, max_tokens=9)
    assert {"r0": 0, "r1": 0, "plain": 0} == slots(plan_of([*drafting(2), plain], FixedDrafts(2), token_limit=8))


def test_scripts_say_their_groups_however_many_run():
    plan = plan_of([*drafting(2), scripted("s"), scripted("t")], FixedDrafts(1))
    assert {"r0": 0, "r1": 0, "s": 2, "t": 2} == slots(plan)


def test_drafts_come_back_when_the_batch_is_small_again():
    scheduler = builders.scheduler(8, drafting=FixedDrafts(1, uses_draft_model=False))
    scheduler.add_request(builders.request("short", max_tokens=2, num_drafts=3))
    scheduler.add_request(builders.request("long", max_tokens=9, num_drafts=3))
    seen = []
    for _ in range(3):
        plan = scheduler.schedule()
        seen.append(slots(plan))
        scheduler.update(plan, builders.count_only(plan))
        scheduler.check_invariants()
    assert [{"short": 0, "long": 0}, {"short": 0, "long": 0}, {"long": 3}] == seen


@pytest.mark.parametrize(("max_requests", "num_blocks"), [(4, 8), (8, 16)])
def test_slots_that_are_not_reserved_take_no_blocks(max_requests: int, num_blocks: int):
    """Eight requests of one token: with seven drafts each they fill two blocks of four, without one."""
    scheduler = builders.scheduler(8, drafting=FixedDrafts(max_requests))
    for i in range(8):
        scheduler.add_request(builders.request(f"r{i}", max_tokens=9, num_drafts=7))
    scheduler.schedule()
    assert num_blocks == scheduler.block_manager.pool.num_used_blocks


# What the draft model has to catch up on


def prompts(*lengths: int, num_drafts: int = 3) -> list[Request]:
    return [
        builders.request(f"r{i}", prompt=(1,) * num, max_tokens=99, num_drafts=num_drafts)
        for i, num in enumerate(lengths)
    ]


def following(plan: SchedulerOutput) -> ModelRunnerOutput:
    """Everybody gets a token, and the draft model does what the plan says."""
    computed = {
        s.request_id: s.request.num_draft_computed_tokens + s.num_draft_catch_up
        for s in plan.scheduled
        if s.num_draft_catch_up
    }
    return ModelRunnerOutput(builders.count_only(plan).sampled, computed)


def test_those_that_draft_are_caught_up_with_and_nobody_else():
    assert {"r0": 5, "r1": 0} == catch_ups(plan_of(prompts(5, 6), Given({"r0": 1})))


def test_prompts_are_followed_where_the_policy_says_so():
    """In a chunk too, though nobody can draft behind it."""
    plan = plan_of(prompts(5, 6), Given({"r0": 1}, follows=True), token_limit=8)
    assert {"r0": 5, "r1": 3} == catch_ups(plan)


def test_samples_about_to_be_born_are_followed_whatever_the_policy_says():
    """Each of them would have to catch up on the prompt alone."""
    parent = builders.family("parent", 3, (1,) * 5, 9, num_drafts=3)
    assert {"parent": 5} == catch_ups(plan_of([parent], Given({})))


@pytest.mark.parametrize("policy", [FixedDrafts(), Given({}, follows=True)], ids=["drafting", "not drafting"])
def test_nobody_is_followed_who_wants_no_drafts_or_is_scripted(policy: DraftPolicy):
    assert {"r0": 0, "s": 0} == catch_ups(plan_of([*prompts(5, num_drafts=0), scripted("s")], policy))


def test_without_a_draft_model_there_is_nothing_to_catch_up_on():
    plan = plan_of(prompts(5, 6), FixedDrafts(uses_draft_model=False))
    assert ({"r0": 0, "r1": 0}, {"r0": 3, "r1": 3}) == (catch_ups(plan), slots(plan))


def test_outputs_are_followed_only_for_drafts():
    """The policy follows, and allows no drafts: the prompt is kept up with, what comes behind it is not."""
    scheduler = builders.scheduler(8, drafting=Given({}, follows=True))
    scheduler.add_request(prompts(5)[0])
    seen = []
    for _ in range(3):
        plan = scheduler.schedule()
        seen.append(catch_ups(plan)["r0"])
        scheduler.update(plan, following(plan))
    assert [5, 0, 0] == seen


def test_a_long_lag_is_caught_up_within_the_budget_oldest_first_and_only_then_are_there_drafts():
    """Two prompts of 11 and 4 tokens in the first step, unseen by the draft model; then 7 tokens a step."""
    policy = Given({})
    scheduler = builders.scheduler(8, drafting=policy, max_num_batched_tokens=15)
    for request in prompts(11, 4):
        scheduler.add_request(request)
    scheduler.update(plan := scheduler.schedule(), following(plan))
    policy.choice = DraftChoice({"r0": 3, "r1": 2})
    scheduler._planner._token_limit = 7
    seen = []
    for _ in range(4):
        plan = scheduler.schedule()
        seen.append((catch_ups(plan), slots(plan)))
        scheduler.update(plan, following(plan))
    assert [
        ({"r0": 7, "r1": 0}, {"r0": 0, "r1": 0}),  # of 12 and 5
        ({"r0": 6, "r1": 1}, {"r0": 3, "r1": 0}),  # each step adds a token
        ({"r0": 1, "r1": 6}, {"r0": 3, "r1": 2}),
        ({"r0": 1, "r1": 1}, {"r0": 3, "r1": 2}),
    ] == seen
