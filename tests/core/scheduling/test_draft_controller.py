"""The controller on a virtual clock: machine, pair and texts have given costs and chances, time is only added up."""

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import pytest

from core.config import SpeculativeConfig
from core.request import Request
from core.scheduling.draft_controller import AdaptiveDrafts, draft_policy
from core.scheduling.drafting import FixedDrafts
from core.step import DraftChoice, ModelRunnerOutput, SampledTokens, ScheduledRequest, SchedulerOutput
from tests import builders

NUM_DRAFTS = 12


def flat(num_rows: int) -> float:
    return 1.0


def steep(num_rows: int) -> float:
    return float(num_rows)


def tiled(num_rows: int) -> float:
    """Sixteen rows cost what one does."""
    return float(-(-num_rows // 16))


class Bench:
    """Requests without end, each with its own chance that a draft is kept.

    Args:
        chances: of each request; may be changed at any time, as `cost` and `draft_cost` may.
        cost: seconds of a step of the target by its rows.
        draft_cost: seconds of a pass of the draft model; None for prompt look-up.
        found: chance that look-up finds something.
    """

    def __init__(
        self,
        chances: Sequence[float],
        *,
        cost: Callable[[int], float] = flat,
        draft_cost: float | None = 0.1,
        found: float = 1.0,
    ) -> None:
        self.chances, self.cost, self.draft_cost, self.found = list(chances), cost, draft_cost, found
        self.policy = AdaptiveDrafts(NUM_DRAFTS, uses_draft_model=draft_cost is not None)
        self.requests = [self.request(f"r{i}") for i in range(len(chances))]
        self.random = Random(5)
        self.seconds, self.num_tokens = 0.0, 0
        self.chosen: list[dict[str, int]] = []
        self.reasons: list[str] = []
        self.disturbance = 1.0

    @staticmethod
    def request(request_id: str, max_tokens: int = 10**6, lag: int = 1) -> Request:
        made = builders.request(request_id, (1,) * 500, max_tokens, num_drafts=NUM_DRAFTS)
        made.num_computed_tokens, made.num_draft_computed_tokens = 499, 500 - lag
        return made

    def step(self) -> None:
        choice = self.policy.choose(self.requests, len(self.requests))
        self.chosen.append({r.request_id: choice.num_drafts.get(r.request_id, 0) for r in self.requests})
        self.reasons.append(choice.reason)
        shares = tuple(
            ScheduledRequest(r, 499, 1, self.chosen[-1][r.request_id], (0,), num_draft_catch_up=1)
            for r in self.requests
        )
        plan = SchedulerOutput(1, shares, draft_choice=choice)
        sampled = {s.request_id: self.verify(s.num_draft_slots, c) for s, c in zip(shares, self.chances, strict=True)}
        num_drafted = [one.num_draft_tokens for one in sampled.values()]
        passes = [(sum(n > i for n in num_drafted), self.draft_cost or 0.0) for i in range(max(num_drafted))]
        passes = passes if self.draft_cost is not None else []
        seconds = self.cost(len(shares) + sum(num_drafted)) * self.disturbance + sum(s for _, s in passes)
        self.policy.observe(plan, ModelRunnerOutput(sampled, draft_passes=passes), seconds)
        self.seconds += seconds
        self.num_tokens += sum(len(one.token_ids) for one in sampled.values())

    def verify(self, num_slots: int, chance: float) -> SampledTokens:
        num_drafted = num_slots if self.random.random() < self.found else 0
        num_accepted = next((i for i in range(num_drafted) if self.random.random() >= chance), num_drafted)
        return SampledTokens([0] * (num_accepted + 1), num_draft_tokens=num_drafted)

    def run(self, num_steps: int) -> "Bench":
        for _ in range(num_steps):
            self.step()
        return self

    def usual(self, last: int, request_id: str = "r0") -> int:
        """What this request drafts in most of the last steps that do not explore."""
        recent = list(zip(self.chosen, self.reasons, strict=True))[-last:]
        return Counter(c[request_id] for c, reason in recent if reason != "exploring").most_common(1)[0][0]

    @property
    def gain(self) -> float:
        """Tokens per second of all that was done, by those without drafts."""
        return self.num_tokens / self.seconds / (len(self.requests) / self.cost(len(self.requests)))


def speed_up(alpha: float, num_drafts: int, draft_cost: float) -> float:
    """Leviathan et al. 2023, theorem 3.8: where all rows cost the same."""
    return (1 - alpha ** (num_drafts + 1)) / ((1 - alpha) * (num_drafts * draft_cost + 1))


# It finds the best


@pytest.mark.parametrize(
    ("alpha", "draft_cost", "best"),
    [(0.5, 0.3, 1), (0.6, 0.2, 2), (0.7, 0.2, 3), (0.8, 0.2, 4), (0.8, 0.3, 3), (0.9, 0.3, 5)],
)
def test_it_comes_to_the_number_of_the_closed_form(alpha: float, draft_cost: float, best: int):
    """The published optima; they are flat, so one draft more or less is as good within a hundredth."""
    optimum = max(range(NUM_DRAFTS + 1), key=lambda k: speed_up(alpha, k, draft_cost))
    assert abs(best - optimum) <= 1
    bench = Bench([alpha], draft_cost=draft_cost).run(3000)

    assert abs(best - bench.usual(2000)) <= 1
    assert bench.gain >= 0.93 * speed_up(alpha, optimum, draft_cost)


@pytest.mark.parametrize(
    ("alpha", "draft_cost", "cost"),
    [(0.5, 0.9, flat), (0.05, 0.1, flat), (0.5, None, steep), (0.8, 0.3, steep)],
    ids=["dear drafts", "bad drafts", "dear rows, look-up", "dear rows, draft model"],
)
@pytest.mark.parametrize("num_requests", [1, 4])
def test_where_drafts_cannot_win_there_are_none_and_finding_out_costs_little(
    alpha: float, draft_cost: float | None, cost: Callable[[int], float], num_requests: int
):
    bench = Bench([alpha] * num_requests, draft_cost=draft_cost, cost=cost).run(2000)

    assert 0 == bench.usual(1500)
    assert bench.gain >= 0.95


def test_rows_that_cost_nothing_are_filled_and_no_others():
    """Eight requests and tiles of sixteen rows: one draft each is free, another would double the step."""
    bench = Bench([0.7] * 8, cost=tiled, draft_cost=0.0).run(1500)
    usual = [sum(chosen.values()) for chosen in bench.chosen[-500:]]
    assert 8 == Counter(usual).most_common(1)[0][0]
    assert bench.gain >= 0.95 * 1.7


def test_each_request_drafts_as_its_own_text_deserves():
    """Rows cost something, so only the one that copies is worth them; a look-up that finds nothing costs nothing."""
    bench = Bench([0.95, 0.1, 0.1], cost=lambda rows: 1 + rows / 4, draft_cost=None).run(1500)
    assert (0, 0) == (bench.usual(700, "r1"), bench.usual(700, "r2"))
    assert bench.usual(700, "r0") >= 4


def test_of_look_ups_that_rarely_find_something_the_rows_that_they_fill_count():
    """One in eight finds, and then nine in ten are kept; 32 requests are a full step, each row costs a third."""
    bench = Bench([0.9] * 32, cost=lambda rows: 20 + rows / 3, draft_cost=None, found=1 / 8).run(600)
    assert bench.usual(300) >= 3


# It notices changes


def test_it_starts_again_when_drafts_get_better():
    bench = Bench([0.05]).run(1500)
    assert 0 == bench.usual(500)
    bench.chances = [0.9]
    bench.run(4000)
    assert bench.usual(500) >= 4


def test_it_stops_when_drafts_get_worse():
    bench = Bench([0.9]).run(1000)
    assert bench.usual(500) >= 4
    bench.chances = [0.05]
    bench.run(500)
    assert 0 == bench.usual(100)


def test_it_stops_when_the_draft_model_gets_dear_and_starts_when_it_is_cheap_again():
    bench = Bench([0.7]).run(1000)
    assert bench.usual(500) >= 3
    bench.draft_cost = 1.5
    bench.run(500)
    assert 0 == bench.usual(100)
    bench.draft_cost = 0.05
    bench.run(4000)
    assert bench.usual(500) >= 3


def test_a_new_request_is_judged_by_what_others_have_shown():
    bench = Bench([0.05] * 4).run(1000)
    bench.requests = [bench.request(f"new{i}") for i in range(4)]
    bench.run(1)
    assert {0} == set(bench.chosen[-1].values()) or bench.reasons[-1] == "exploring"


def test_ups_and_downs_that_all_have_together_do_not_hide_what_is_usual():
    """Many requests that began together: sixteen steps in which nearly all is kept, sixteen in which little is."""
    bench = Bench([0.5] * 32, draft_cost=0.1)
    for turn in range(20):
        bench.chances = [0.98 if turn % 2 else 0.6] * 32
        bench.run(16)
        assert turn < 10 or 0.7 < bench.policy._of_all.rates[0] < 0.88


def test_one_disturbed_step_changes_nothing():
    bench = Bench([0.7], draft_cost=0.2).run(1000)
    bench.disturbance = 50.0
    bench.run(1)
    bench.disturbance = 1.0
    bench.run(20)
    assert abs(3 - bench.usual(20)) <= 1


@pytest.mark.parametrize("alpha", [0.05, 0.8])
def test_exploring_takes_no_more_than_its_share_of_the_time(alpha: float):
    bench = Bench([alpha], draft_cost=0.3).run(3000)
    num_exploring = bench.reasons.count("exploring")
    assert 10 < num_exploring
    assert bench.policy._explored_s <= bench.policy._total_s / 64 + 1 + 0.3 * NUM_DRAFTS
    assert num_exploring <= 3000 / 64 * 1.5 + 1


def test_looks_that_find_nothing_are_no_exploring():
    """It goes on until one is found, for they cost nothing."""
    bench = Bench([0.01], draft_cost=None, cost=steep).run(500)
    bench.found = 0.0
    bench.run(1000)
    assert bench.reasons[-500:].count("exploring") > 400
    assert 1.0 == pytest.approx(bench.gain, abs=0.03)


# What else it goes by


def a_request(name: str = "r", **fields: int) -> Request:
    return Bench.request(name, **fields)


def test_before_any_step_was_measured_everybody_drafts():
    policy = AdaptiveDrafts(NUM_DRAFTS, uses_draft_model=True)
    assert DraftChoice({"r": NUM_DRAFTS}, True, "measuring") == policy.choose([a_request()], 1)


def test_where_nobody_can_draft_there_is_nothing_to_choose():
    assert DraftChoice({}, True, "nobody") == AdaptiveDrafts(3, uses_draft_model=True).choose([], 4)


def test_a_limit_on_requests_holds_here_too():
    policy = AdaptiveDrafts(NUM_DRAFTS, uses_draft_model=True, max_requests=2)
    assert DraftChoice({}, False, "crowded") == policy.choose([a_request()], 3)
    assert "measuring" == policy.choose([a_request()], 2).reason


@pytest.mark.parametrize(("max_tokens", "drafts"), [(8, False), (1000, True)])
def test_a_long_lag_must_be_worth_catching_up_on(max_tokens: int, drafts: bool):
    """400 tokens that take eight steps of the target: too much for the last eight tokens."""
    bench = Bench([0.8], draft_cost=0.1).run(500)
    for _ in range(20):
        bench.policy._draft.observe(400, 8.0)
    bench.policy._explored_s = 1e9  # no exploring now
    behind = a_request("behind", max_tokens=max_tokens, lag=400)
    assert drafts == bool(bench.policy.choose([behind], 1).num_drafts)


def test_prompts_are_followed_while_drafts_pay():
    for alpha, follows in ((0.8, True), (0.02, False)):
        bench = Bench([alpha], draft_cost=0.3).run(500)
        assert follows == bench.policy.choose([], 1).follows


def test_steps_with_prompts_or_scripts_measure_no_rows():
    policy, request = AdaptiveDrafts(3, uses_draft_model=True), a_request()
    chunk = ScheduledRequest(request, 0, 7, 0, (0,))
    policy.observe(SchedulerOutput(1, (chunk,)), ModelRunnerOutput(), 5.0)
    assert "measuring" == policy.choose([request], 1).reason


def test_who_brings_a_prediction_drafts_all_it_wants_whatever_pays():
    bench = Bench([0.02], draft_cost=None, cost=steep).run(500)
    predicted = a_request("predicted")
    predicted.num_predicted_tokens = 8
    bench.policy._explored_s = 1e9  # no exploring now
    choice = bench.policy.choose([*bench.requests, predicted], 2)
    assert ({"predicted": NUM_DRAFTS}, "does_not_pay") == (dict(choice.num_drafts), choice.reason)
    assert "predicted" == bench.policy.choose([predicted], 1).reason


def test_the_outlook_says_what_it_goes_by():
    """c = 0.2; 16 rows cost as 1; 0.8 kept."""
    bench = Bench([0.8], draft_cost=0.2, cost=tiled).run(2000)
    outlook = bench.policy.outlook
    assert outlook is not None
    assert outlook.draft_cost == pytest.approx(0.2, abs=0.01)
    assert outlook.verification_costs[4] == pytest.approx(1.0, abs=0.01)
    assert outlook.expected_gain == pytest.approx(speed_up(0.8, 4, 0.2), rel=0.08)
    assert not set(outlook.verification_costs) - set(range(1, NUM_DRAFTS + 1))


# Which policy


def test_adaptive_is_the_default_and_a_fixed_number_has_a_limit_on_requests():
    assert isinstance(draft_policy(SpeculativeConfig()), AdaptiveDrafts)
    fixed = draft_policy(SpeculativeConfig(adaptive=False, method="ngram"))
    assert isinstance(fixed, FixedDrafts)
    assert (False, "fixed") == (fixed.uses_draft_model, fixed.choose([a_request()], 8).reason)
    assert "crowded" == fixed.choose([a_request()], 9).reason
    assert fixed.outlook is None


def test_without_speculation_those_that_bring_a_prediction_draft():
    policy = draft_policy(None)
    assert (False, {"r": NUM_DRAFTS}) == (policy.uses_draft_model, policy.choose([a_request()], 50).num_drafts)
