"""Chooses how many tokens each request drafts in each step, none included, so that most tokens come per second.

A step of b requests takes T(b) seconds, and T(b + drafts) with drafts to verify; a draft model adds D(r) for every pass
over r requests. Draft i of a request is kept with some chance, and counts only if those before it were: S_i, the
product up to i, falls with i. So for any number of drafts in all, the likeliest are the best; the controller goes down
the list of all S of all requests, adds one draft after the other, and stops where

    (b + sum of S) / (T(b + drafts) + sum of D)

is largest, or gives out none if that is not `_MARGIN` above b / T(b). With one request, equal chances a, c = D(1)/T(1)
and v = T(1 + k)/T(1) this is (1 - a^(k+1)) / ((1 - a)(v + k c)), Leviathan et al. 2023 with the cost of verification.

All of it is measured while serving (`draft_measures`). A request's own acceptance is drawn towards that of all, and
forgotten with time, so that whoever drafts no more is given another chance. Requests that bring a prediction draft all
they want: their callers ask for it, and are told how it went. One step in many explores: nobody drafts,
or somebody drafts who would not. Such steps take at most `_EXPLORED_SHARE` of the time, whatever they cost.

**The law stays exact.** The numbers are chosen before the step's drafts are drawn, from what earlier steps have shown:
tokens, acceptances, times. The noise of this step's drafts and of their verification is keyed by the position where it
starts, which no earlier step has used, so it is independent of the choice. For each number the rules emit tokens with
the target's law behind the tokens before; hence they do so for a number chosen from the past, and by induction over
steps the whole output has the target's law. A number that looked at the drafts (leaving out the unlikely ones, say)
would break it. For greedy and seeded requests, and for look-up and predictions, the number does not show at all.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from core.config import SpeculativeConfig
from core.request import Request
from core.scheduling.draft_measures import Acceptance, CostCurve
from core.scheduling.drafting import DraftOutlook, DraftPolicy, FixedDrafts
from core.step import DraftChoice, ModelRunnerOutput, SchedulerOutput

_MARGIN = 0.02  # gain that drafts must promise
_EXPLORED_SHARE = 1 / 64
_FIRST_EXPLORATIONS = 4  # soon after the start, _FIRST_EXPLORATIONS steps apart
_HORIZON = 32  # steps over which catching up on a long text must pay
_MEMORY_OF_ALL, _MEMORY_OF_ONE = 255 / 256, 63 / 64
_PRIOR_WEIGHT = 16.0
_FORGETTING = 0.99  # of a request's own acceptance, per step
_HOPE = {"kept": 2.8, "tried": 4.0}  # of drafts before any was tried


@dataclass(slots=True)
class _Record:
    """A request's own acceptance, and the step of the last verification."""

    acceptance: Acceptance
    step: int


class AdaptiveDrafts:
    """The policy that measures.

    Args:
        num_positions: most drafts of a request and step.
        uses_draft_model: drafts come from a model; else making them costs nothing.
        max_requests: with more requests than this in a step nobody drafts; None for no limit.
    """

    def __init__(self, num_positions: int, *, uses_draft_model: bool, max_requests: int | None = None) -> None:
        self.uses_draft_model = uses_draft_model
        self.outlook: DraftOutlook | None = DraftOutlook()
        self._num_positions = num_positions
        self._max_requests = max_requests or math.inf
        self._target, self._draft = CostCurve(), CostCurve()
        self._of_all = Acceptance(num_positions, 1.0, **_HOPE)
        self._of_one: WeakKeyDictionary[Request, _Record] = WeakKeyDictionary()
        self._drafted_share = 1.0  # of the drafts that were allowed: look-up does not always find something
        self._step = 0
        self._total_s = self._explored_s = 0.0
        self._num_explored = 0
        self._is_paying = True
        self._best: Mapping[str, int] = {}  # for those asked about last, and until which step it stands
        self._asked: tuple[object, ...] = ()
        self._good_until = 0

    # Choosing

    def choose(self, requests: Sequence[Request], num_requests: int) -> DraftChoice:
        """For those that could use drafts, in a step of `num_requests` in all."""
        if num_requests > self._max_requests:
            return DraftChoice(follows=False, reason="crowded")
        if not requests:
            return DraftChoice(follows=self._is_paying, reason="nobody")
        if not self._target.is_measured:
            return DraftChoice({r.request_id: r.num_drafts_wanted for r in requests}, reason="measuring")
        asked_for = {r.request_id: r.num_drafts_wanted for r in requests if r.num_predicted_tokens}
        requests = [r for r in requests if not r.num_predicted_tokens]
        choice = self._chosen(requests, num_requests) if requests else DraftChoice({}, self._is_paying, "predicted")
        return replace(choice, num_drafts={**choice.num_drafts, **asked_for})

    def _chosen(self, requests: Sequence[Request], num_requests: int) -> DraftChoice:
        best = self._best_for(requests, num_requests)
        self._is_paying = bool(best)
        if self._is_time_to_explore():
            self._num_explored += 1
            return DraftChoice(self._other_than(best, requests, num_requests), self._is_paying, "exploring")
        return DraftChoice(best, self._is_paying, "pays" if best else "does_not_pay")

    def _is_time_to_explore(self) -> bool:
        if self._num_explored < _FIRST_EXPLORATIONS:
            return self._step >= _FIRST_EXPLORATIONS * (self._num_explored + 1)
        return self._explored_s < _EXPLORED_SHARE * self._total_s

    def _best_for(self, requests: Sequence[Request], num_requests: int) -> Mapping[str, int]:
        """The best numbers; the more requests, the longer they stand, for working them out takes as much longer.

        Not so at the start, where each step teaches much.
        """
        asked = (num_requests, *(request.request_id for request in requests))
        if asked != self._asked or self._step >= self._good_until:
            self._asked, self._good_until = asked, self._step + max(1, min(len(requests) // 4, self._step // 8))
            target_s = self._target.table(num_requests + self._num_positions * len(requests))
            self._best, gain = self._work_out(requests, num_requests, target_s)
            self.outlook = self._looked_at(num_requests, gain)
        return self._best

    def _work_out(
        self, requests: Sequence[Request], num_requests: int, target_s: Sequence[float]
    ) -> tuple[Mapping[str, int], float]:
        """The numbers of drafts that promise most tokens per second, and the gain that they promise."""
        # In a crowd a share of the look-ups that find something, alone the case that this one does.
        weight = max(self._drafted_share, 1 / len(requests))
        survivals = [self._survivals(request) for request in requests]
        drafts = sorted(
            (-survival, position, number)
            for number, of_one in enumerate(survivals)
            for position, survival in enumerate(of_one)
        )
        pass_s = self._pass_seconds(requests)
        base = best_rate = num_requests / target_s[num_requests]
        tokens, making_s, num_best = float(num_requests), 0.0, 0
        num_in_pass = [0] * self._num_positions
        for taken, (survival, position, number) in enumerate(drafts, start=1):
            tokens -= weight * survival
            making_s += pass_s[num_in_pass[position] + 1] - pass_s[num_in_pass[position]]
            making_s += self._catch_up_s(requests[number], survivals[number]) if position == 0 else 0.0
            num_in_pass[position] += 1
            rows = num_requests + max(position + 1, math.ceil(weight * taken))
            rate = tokens / (target_s[rows] + making_s)
            if rate > best_rate:
                best_rate, num_best = rate, taken
        if best_rate < base * (1 + _MARGIN):
            num_best, best_rate = 0, base
        best: dict[str, int] = {}
        for _, _, number in drafts[:num_best]:
            best[requests[number].request_id] = best.get(requests[number].request_id, 0) + 1
        return best, best_rate / base

    def _survivals(self, request: Request) -> list[float]:
        """The chance that its first, its first two, ... drafts are all kept."""
        rates = self._of_all.rates
        record = self._of_one.get(request)
        if record is not None:
            trust = _FORGETTING ** (self._step - record.step)
            rates = record.acceptance.rates_with(rates, _PRIOR_WEIGHT, trust)
        survivals, chance = [], 1.0
        for rate in rates[: request.num_drafts_wanted]:
            chance *= rate
            survivals.append(chance)
        return survivals

    def _pass_seconds(self, requests: Sequence[Request]) -> Sequence[float]:
        if not self.uses_draft_model:
            return [0.0] * (len(requests) + 1)
        return self._draft.table(len(requests))

    def _catch_up_s(self, request: Request, survivals: Sequence[float]) -> float:
        """A step's share of what the draft model has to compute before this request can draft at all."""
        lag = request.num_tokens - request.num_draft_computed_tokens
        if not self.uses_draft_model or lag <= 1 + self._num_positions:
            return 0.0
        table = self._draft.table(lag)
        num_steps = (request.max_tokens - request.num_output_tokens) / (1 + sum(survivals))
        return (table[lag] - table[1]) / max(1.0, min(_HORIZON, num_steps))

    def _other_than(self, best: Mapping[str, int], requests: Sequence[Request], num_requests: int) -> Mapping[str, int]:
        """By turns: nobody; what would be best if rows were as cheap as they may be; one more request.

        So that the cost of a step without drafts, that of others with drafts, and acceptance are all known.
        """
        turn = self._num_explored % 3
        if turn == 0 and best:
            return {}
        if turn != 2:
            hopes = self._target.hopes(num_requests + self._num_positions * len(requests))
            hoped, _ = self._work_out(requests, num_requests, hopes)
            if hoped and hoped != best:
                return hoped
        idle = [r for r in requests if best.get(r.request_id, 0) < r.num_drafts_wanted]
        if not idle:
            return {}
        request = min(idle, key=self._reluctance)
        return {**best, request.request_id: request.num_drafts_wanted}

    def _reluctance(self, request: Request) -> tuple[int, int]:
        """Least behind first, of equals the one that has not drafted for longest."""
        lag = request.num_tokens - request.num_draft_computed_tokens if self.uses_draft_model else 0
        record = self._of_one.get(request)
        return lag, record.step if record else -1

    # Measuring

    def observe(self, plan: SchedulerOutput, result: ModelRunnerOutput, seconds: float) -> None:
        """A step was done: the plan, what came of it, and how long all of it took, the runner and the rest."""
        self._step += 1
        self._total_s += seconds
        num_drafted = sum(sampled.num_draft_tokens for sampled in result.sampled.values())
        is_without = not any(s.num_draft_slots for s in plan.scheduled)
        if plan.draft_choice.reason == "exploring" and (num_drafted or result.draft_passes or is_without):
            self._explored_s += seconds if self._num_explored > _FIRST_EXPLORATIONS else 0.0
        self._observe_costs(plan, result, num_drafted, seconds)
        if num_drafted:  # by steps and not by requests: texts that began together have their ups and downs together
            self._of_all.fade(_MEMORY_OF_ALL)
        for scheduled in plan.scheduled:
            request = scheduled.request
            if scheduled.num_draft_slots and request.script is None and not request.num_predicted_tokens:
                self._observe_drafts(request, scheduled.num_draft_slots, result)

    def _observe_costs(
        self, plan: SchedulerOutput, result: ModelRunnerOutput, num_drafted: int, seconds: float
    ) -> None:
        for num_rows, pass_seconds in result.draft_passes:
            self._draft.observe(num_rows, pass_seconds)
            seconds -= pass_seconds
        # Rows of prompts have no logits and nothing is drawn from them: they cost less.
        if all(s.num_tokens == 1 and s.request.script is None for s in plan.scheduled):
            self._target.observe(len(plan.scheduled) + num_drafted, seconds - result.tier_seconds)

    def _observe_drafts(self, request: Request, num_allowed: int, result: ModelRunnerOutput) -> None:
        sampled = result.sampled[request.request_id]
        num_drafted, num_accepted = sampled.num_draft_tokens, sampled.num_accepted_tokens
        self._drafted_share += (min(1.0, num_drafted / num_allowed) - self._drafted_share) * (1 - _MEMORY_OF_ALL)
        record = self._of_one.setdefault(request, _Record(Acceptance(self._num_positions, _MEMORY_OF_ONE), self._step))
        if num_drafted:
            self._of_all.observe(num_drafted, num_accepted)
            record.acceptance.fade(_FORGETTING ** (self._step - record.step))
            record.acceptance.observe(num_drafted, num_accepted)
        record.step = self._step

    def _looked_at(self, num_requests: int, gain: float) -> DraftOutlook:
        """What was gone by."""
        table = self._target.table(num_requests * (self._num_positions + 1))
        base, numbers = table[num_requests], range(1, self._num_positions + 1)
        costs = {k: table[rows] / base for k in numbers if self._target.has(rows := num_requests * (k + 1))}
        draft_cost = self._draft.table(num_requests)[num_requests] / base if self.uses_draft_model else 0.0
        return DraftOutlook(draft_cost, costs, gain)


def draft_policy(config: SpeculativeConfig | None) -> DraftPolicy:
    """The policy for a config; without one, requests that bring a prediction draft as much as they want."""
    if config is None:
        return FixedDrafts(uses_draft_model=False)
    uses_draft_model, limit = config.method == "draft_model", config.disable_by_batch_size
    if not config.adaptive:
        return FixedDrafts(limit, uses_draft_model=uses_draft_model)
    return AdaptiveDrafts(config.num_speculative_tokens, uses_draft_model=uses_draft_model, max_requests=limit)
