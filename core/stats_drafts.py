"""What became of drafts, counted: the part of the statistics that exists for speculation.

Positions are counted up to a bound, for each is a label of its own in the metrics, and scripts may say groups of any
length in one step.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from core.config import MAX_SPECULATIVE_TOKENS
from core.scheduling.drafting import DRAFT_REASONS
from core.step import SampledTokens, SchedulerOutput

ACCEPTANCE_WINDOW_STEPS = 256


class DraftGatherer:
    """Counts drafts. `num_positions`: most of a request and step, so many positions are there from the start."""

    def __init__(self, num_positions: int) -> None:
        self._num_passes, self._draft_s = 0, 0.0
        self._num_drafts = self._num_draft_tokens = self._num_accepted_tokens = 0
        self._accepted_per_position = [0] * num_positions
        self._steps: Counter[str] = Counter(dict.fromkeys(DRAFT_REASONS, 0))
        self._window: deque[tuple[int, int]] = deque(maxlen=ACCEPTANCE_WINDOW_STEPS)  # (drafted, accepted) a step
        # (drafts with laws, tokens accepted of them, bound of that) a step
        self._bounds: deque[tuple[int, int, float]] = deque(maxlen=ACCEPTANCE_WINDOW_STEPS)

    def on_plan(self, plan: SchedulerOutput) -> None:
        """A plan was computed."""
        if plan.draft_choice.reason:
            self._steps[plan.draft_choice.reason] += 1

    def on_verified(self, num_drafted: Sequence[int], num_accepted: Sequence[int]) -> None:
        """A step verified drafts: how many tokens of each request, and how many of those were emitted."""
        for drafted, accepted in zip(num_drafted, num_accepted, strict=True):
            self._num_drafts += 1
            self._num_draft_tokens += drafted
            self._num_accepted_tokens += accepted
            missing = min(drafted, MAX_SPECULATIVE_TOKENS) - len(self._accepted_per_position)
            self._accepted_per_position += [0] * max(0, missing)
            for position in range(min(accepted, MAX_SPECULATIVE_TOKENS)):
                self._accepted_per_position[position] += 1
        if num_drafted:
            self._window.append((sum(num_drafted), sum(num_accepted)))

    def on_passes(self, passes: Sequence[tuple[int, float]]) -> None:
        """The draft model ran: rows and seconds of each pass."""
        self._num_passes += len(passes)
        self._draft_s += sum(seconds for _, seconds in passes)

    def on_bounds(self, sampled: Sequence[SampledTokens]) -> None:
        """The same step, as the rule saw it: those whose drafts were drawn from laws have a bound."""
        bounded = [(s.num_accepted_tokens, s.acceptance_bound) for s in sampled if s.acceptance_bound is not None]
        if bounded:
            self._bounds.append((len(bounded), sum(a for a, _ in bounded), sum(bound for _, bound in bounded)))

    def snapshot(self) -> dict[str, Any]:
        """The fields of `EngineStats` that are kept here."""
        drafted, accepted = (sum(step[i] for step in self._window) for i in range(2))
        num, of_those, bound = (sum(step[i] for step in self._bounds) for i in range(3))
        return {
            "num_draft_passes": self._num_passes,
            "draft_seconds": self._draft_s,
            "num_drafts": self._num_drafts,
            "num_draft_tokens": self._num_draft_tokens,
            "num_accepted_tokens": self._num_accepted_tokens,
            "accepted_per_position": tuple(self._accepted_per_position),
            "acceptance_rate": accepted / drafted if drafted else 0.0,
            "mean_accepted": of_those / num if num else 0.0,
            "mean_accepted_bound": bound / num if num else 0.0,
            "draft_steps": dict(self._steps),
        }
