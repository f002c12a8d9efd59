"""Who may draft in a step, and how much: what the planner asks before it gives out draft slots.

A policy answers with integers, which the plan records, so that a run can be repeated from its plans. It is asked before
anything of the step is drawn; that is what keeps the law of the output whatever it answers (see `draft_controller`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from core.request import Request


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The most drafts of each request by id; whoever is not named has none.

    `follows`: whether the draft model keeps up with prompts. `reason`: why so, for the record and the metrics.
    """

    num_drafts: Mapping[str, int] = field(default_factory=dict)
    follows: bool = True
    reason: str = ""


class DraftPolicy(Protocol):
    """Chooses. `uses_draft_model`: drafts come from a model, which must have computed a request's tokens first."""

    @property
    def uses_draft_model(self) -> bool: ...

    def choose(self, requests: Sequence[Request], num_requests: int) -> DraftChoice:
        """For those that could use drafts, in a step of `num_requests` in all."""


class FixedDrafts:
    """As many as each wants; with more than `max_requests` in a step (None: no limit) nobody drafts."""

    def __init__(self, max_requests: int | None = None, *, uses_draft_model: bool = True) -> None:
        self.uses_draft_model = uses_draft_model
        self._max_requests = max_requests

    def choose(self, requests: Sequence[Request], num_requests: int) -> DraftChoice:
        if self._max_requests is not None and num_requests > self._max_requests:
            return DraftChoice(follows=False, reason="crowded")
        return DraftChoice({request.request_id: request.num_drafts_wanted for request in requests}, reason="fixed")
