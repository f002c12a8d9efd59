"""Drafts from what the caller expects to be said: the old version of a file it has edited, say.

The output is followed through the predicted text. While they agree, what comes next there is the draft. When they part
the place is lost, and found again behind the nearest run of a few tokens that the output ends with. Where the
prediction has nothing to offer the engine's own proposer drafts as it would without one. Taken from a text, drafts
are point masses and carry no laws, as those of prompt look-up.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from core.decoding.proposers import Draft, Proposal, Proposer, within_grammar
from core.model.numerics import Cache
from core.request import Request
from core.step import ScheduledRequest, SchedulerOutput

_RUN_LENGTHS = (4, 3, 2)  # tokens by which a lost place is found again, longest first


class PredictedText:
    """One predicted text, and the place in it that one growing output has come to."""

    def __init__(self, predicted: Sequence[int]) -> None:
        self._predicted = tuple(predicted)
        self._place, self._is_lost, self._num_seen = 0, False, 0
        self._places: dict[tuple[int, ...], list[int]] = {}  # behind each run, in order
        for end in range(1, len(self._predicted)):
            for length in _RUN_LENGTHS:
                if length <= end:
                    self._places.setdefault(self._predicted[end - length : end], []).append(end)

    def look_up(self, output: Sequence[int], num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens that the prediction has behind this output; [] if they have parted or it ends."""
        for end in range(self._num_seen, len(output)):
            self._follow(output, end)
        self._num_seen = len(output)
        return [] if self._is_lost else list(self._predicted[self._place : self._place + num_tokens])

    def _follow(self, output: Sequence[int], end: int) -> None:
        if not self._is_lost and self._predicted[self._place : self._place + 1] == (output[end],):
            self._place += 1
            return
        for length in _RUN_LENGTHS:
            if places := self._places.get(tuple(output[max(0, end + 1 - length) : end + 1])):
                # Texts are mostly gone through from front to back, so first ahead of where they parted.
                self._place = places[min(bisect_left(places, self._place), len(places) - 1)]
                self._is_lost = False
                return
        self._is_lost = True


class PredictionProposer:
    """Drafts from the predictions of those requests that bring one, and lets `inner`, if any, do so for the rest."""

    def __init__(self, inner: Proposer | None = None) -> None:
        self._inner = inner
        self._texts: WeakKeyDictionary[Request, PredictedText] = WeakKeyDictionary()

    @property
    def caches(self) -> Sequence[Cache]:
        return self._inner.caches if self._inner else ()

    def propose(self, plan: SchedulerOutput) -> Proposal:
        """Look up for everybody who has draft slots and a prediction; the others' slots go to `inner`."""
        predicted = {s.request_id: draft for s in plan.scheduled if (draft := self._look_up(s)).token_ids}
        if self._inner is None:
            return Proposal(predicted)
        shares = tuple(_share_of_inner(s, is_served=s.request_id in predicted) for s in plan.scheduled)
        proposal = self._inner.propose(replace(plan, scheduled=shares))
        return replace(proposal, drafts={**proposal.drafts, **predicted})

    def _look_up(self, scheduled: ScheduledRequest) -> Draft:
        request = scheduled.request
        num_tokens = min(scheduled.num_draft_slots, request.num_predicted_tokens)
        if not num_tokens or request.script is not None:
            return Draft()
        text = self._texts.setdefault(request, PredictedText(request.prediction))
        draft = within_grammar(request, text.look_up(request.output_token_ids, num_tokens))
        return Draft(draft, is_predicted=True)


def _share_of_inner(scheduled: ScheduledRequest, *, is_served: bool) -> ScheduledRequest:
    """No slots where there is a draft already, and never more than the engine's own proposer may fill."""
    limit = 0 if is_served else scheduled.request.num_speculative_tokens
    return scheduled if scheduled.num_draft_slots <= limit else replace(scheduled, num_draft_slots=limit)
