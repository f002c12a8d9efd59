"""The messages of one step: what the scheduler plans, what the runner returns.

`schedule -> execute -> update`: the plan goes to `execute` and its result to `update`. Whatever was decided (tokens,
draft slots, blocks, copies) stands in the plan, so a run can be replayed from its plans.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from core.request import DraftOutcome, Request, TokenLogprobs


@dataclass(slots=True)  # not frozen, as `core.request.OutputToken` is not
class ScheduledRequest:
    """A request's share of a step.

    `request` is for reading only. Tokens [start, start + num_tokens) are computed; behind them lie
    `num_draft_slots` reserved slots that the runner may fill with drafts. `block_ids` is the table that covers all.
    The draft model, if there is one, first computes `num_draft_catch_up` tokens from where it has come to.
    """

    request: Request
    start: int
    num_tokens: int
    num_draft_slots: int
    block_ids: Sequence[int]
    num_draft_catch_up: int = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def catches_up(self) -> bool:
        """True if all its known tokens are computed after this step, so that the last row's logits say the next."""
        return self.start + self.num_tokens == len(self.request.token_ids)

    @property
    def born_siblings(self) -> tuple[Request, ...]:
        """Further samples of its prompt that go their own ways from this step on."""
        return tuple(self.request.siblings) if self.request.siblings and self.catches_up else ()

    @property
    def yields_token(self) -> bool:
        """True if the step ends with a token for it: it catches up, and may have one."""
        return self.request.max_tokens > 0 and self.catches_up

    @property
    def yielding_requests(self) -> tuple[Request, ...]:
        """Who gets a token from this step: nobody, or the request with those siblings that are born by it."""
        return (self.request, *self.request.siblings) if self.yields_token else ()

    @property
    def scored_positions(self) -> range:
        """Prompt tokens whose log-probabilities this step is to give: the row at t - 1 gives those of the token at t.

        What is recorded is not given again when the request catches up once more.
        """
        request = self.request
        if request.params.num_prompt_logprobs is None:
            return range(0)
        first_row = max(self.start, len(request.prompt_logprobs))
        return range(first_row + 1, min(self.end + 1, request.num_prompt_tokens))

    @property
    def summed_positions(self) -> range:
        """Prompt tokens whose hidden states this step is to add to the request's sum; each is added once."""
        request = self.request
        if not request.params.embed:
            return range(0)
        return range(max(self.start, request.num_summed_rows), min(self.end, request.num_prompt_tokens))


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The most drafts of each request by id; whoever is not named has none.

    `follows`: whether the draft model keeps up with prompts. `reason`: why so, for the record and the metrics.
    """

    num_drafts: Mapping[str, int] = field(default_factory=dict)
    follows: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step.

    What must happen to memory is done before anything is computed, in this order: `tier_stores` (block, tier slot),
    `block_copies` (source, destination), `tier_loads` (tier slot, block). `draft_choice`: what the draft slots were
    given out by.
    """

    step: int
    scheduled: tuple[ScheduledRequest, ...]
    block_copies: tuple[tuple[int, int], ...] = ()
    preempted: tuple[str, ...] = ()
    tier_stores: tuple[tuple[int, int], ...] = ()
    tier_loads: tuple[tuple[int, int], ...] = ()
    draft_choice: DraftChoice = field(default_factory=DraftChoice)

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens + s.num_draft_slots for s in self.scheduled)

    def describe(self) -> str:
        """One line a request, for the log when a step raises. Numbers only, no text of users."""
        rows = [
            f"{s.request_id}: tokens {s.start}..{s.end} of {s.request.num_tokens}, "
            f"{s.num_draft_slots} draft slots, blocks {list(s.block_ids)}"
            for s in self.scheduled
        ]
        return f"step {self.step}, copies {list(self.block_copies)}, preempted {list(self.preempted)}\n" + "\n".join(
            rows
        )


@dataclass(slots=True)  # not frozen, as `core.request.OutputToken` is not
class SampledTokens:
    """A request's new tokens: its accepted drafts and the one token that the target adds.

    `is_predicted`: the drafts came from the request's prediction. `acceptance_bound`: of drafts drawn from a law, what
    no rule could pass (see `speculative.acceptance_bounds`).
    """

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None] = ()
    num_draft_tokens: int = 0
    is_predicted: bool = False
    acceptance_bound: float | None = None

    @property
    def num_accepted_tokens(self) -> int:
        return len(self.token_ids) - 1

    def outcome(self, num_emitted: int) -> DraftOutcome | None:
        """What became of its drafts when so many of its tokens were emitted; None if there were none."""
        if not self.num_draft_tokens:
            return None
        return DraftOutcome(self.num_draft_tokens, self.num_accepted_tokens, num_emitted, self.is_predicted)


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """By request id: new tokens of those that yield one, and how many tokens the draft model has KV of, if it ran.

    `tier_seconds`: what stores and loads of the second tier took. `prompt_logprobs`: one for each scored position.
    `draft_passes`: rows and seconds of each pass of the draft model.
    `hidden_sums`: of those with summed positions, with what was summed before.
    """

    sampled: Mapping[str, SampledTokens] = field(default_factory=dict)
    draft_computed: Mapping[str, int] = field(default_factory=dict)
    tier_seconds: float = 0.0
    prompt_logprobs: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
    draft_passes: Sequence[tuple[int, float]] = ()
    hidden_sums: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


Execute = Callable[[SchedulerOutput], ModelRunnerOutput]


def count_only(plan: SchedulerOutput) -> ModelRunnerOutput:
    """An `execute` that computes nothing: every request that yields gets one token, id 0, whatever it is certain."""
    return ModelRunnerOutput(
        {r.request_id: _certain_token(r) for s in plan.scheduled for r in s.yielding_requests},
        prompt_logprobs=certain_prompts(plan.scheduled),
        hidden_sums=_ones(plan.scheduled),
    )


def _certain_token(request: Request) -> SampledTokens:
    return SampledTokens((0,), () if request.params.num_logprobs is None else (TokenLogprobs(0.0),))


def _ones(scheduled: Iterable[ScheduledRequest]) -> dict[str, tuple[float, ...]]:
    """Sums of hidden states that are all (1, 0)."""
    rows = {s.request_id: s.summed_positions for s in scheduled}
    return {request_id: (float(positions.stop), 0.0) for request_id, positions in rows.items() if positions}


def certain_prompts(scheduled: Iterable[ScheduledRequest]) -> dict[str, list[TokenLogprobs]]:
    """Log-probabilities of prompts that no model looks at: every token is certain."""
    return {s.request_id: [TokenLogprobs(0.0)] * len(s.scored_positions) for s in scheduled if s.scored_positions}
