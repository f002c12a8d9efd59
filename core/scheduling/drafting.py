"""Who may draft in a step, and how much: what the planner asks before it gives out draft slots.

A policy answers with integers, which the plan records, so that a run can be repeated from its plans. It is asked before
anything of the step is drawn; that is what keeps the law of the output whatever it answers (see `draft_controller`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from core.request import Request
from core.step import DraftChoice, ModelRunnerOutput, SchedulerOutput

# Why a step's drafts are as many as they are; "nobody" where nobody could draft.
DRAFT_REASONS = ("pays", "does_not_pay", "exploring", "measuring", "predicted", "fixed", "crowded", "nobody")


@dataclass(frozen=True, slots=True)
class DraftOutlook:
    """What an adaptive policy goes by, with the last batch that could draft.

    `draft_cost`: a draft step in target steps (c). `verification_costs`: a step that verifies k drafts of everybody in
    steps without (v), for those k for which as many rows have been measured. `expected_gain`: tokens per second in
    those without drafts.
    """

    draft_cost: float = 0.0
    verification_costs: Mapping[int, float] = field(default_factory=dict)
    expected_gain: float = 1.0


class DraftPolicy(Protocol):
    """Chooses. `uses_draft_model`: drafts come from a model, which must have computed a request's tokens first."""

    @property
    def uses_draft_model(self) -> bool: ...

    @property
    def outlook(self) -> DraftOutlook | None:
        """What it goes by at present; None if it goes by nothing."""

    def choose(self, requests: Sequence[Request], num_requests: int) -> DraftChoice:
        """For those that could use drafts, in a step of `num_requests` in all."""

    def observe(self, plan: SchedulerOutput, result: ModelRunnerOutput, seconds: float) -> None:
        """A step was done: the plan, what came of it, and how long all of it took, the runner and the rest."""


class FixedDrafts:
    """As many as each wants; with more than `max_requests` in a step (None: no limit) nobody drafts."""

    outlook: DraftOutlook | None = None

    def __init__(self, max_requests: int | None = None, *, uses_draft_model: bool = True) -> None:
        self.uses_draft_model = uses_draft_model
        self._max_requests = max_requests

    def choose(self, requests: Sequence[Request], num_requests: int) -> DraftChoice:
        if self._max_requests is not None and num_requests > self._max_requests:
            return DraftChoice(follows=False, reason="crowded")
        return DraftChoice({request.request_id: request.num_drafts_wanted for request in requests}, reason="fixed")

    def observe(self, plan: SchedulerOutput, result: ModelRunnerOutput, seconds: float) -> None:
        """It goes by nothing."""
