"""Where drafts come from: a small model over the same vocabulary, or what has been said before.

The draft model has no second pool: its keys and values lie in arrays of their own at the same block ids, so whatever
the block manager does holds for both. It catches up on the tokens that the plan names, and proposes up to as many as
the plan has slots for. Drafting: Leviathan et al. 2023, arXiv:2211.17192.

Prompt look-up finds the last few tokens earlier in the request's own tokens and proposes what followed them there. Its
law is a point mass, for which the keyed rule accepts exactly as often as any other (with the target's probability of
the draft), so its drafts carry no laws. Saxena 2023, prompt lookup decoding.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from core.decoding.sampler import law, sample_draft, sample_keyed
from core.errors import NumericalFault
from core.model.numerics import Cache, Model
from core.model.transformer import flat_batch
from core.request import Request
from core.step import ScheduledRequest, SchedulerOutput


@dataclass(slots=True)
class Draft:
    """Proposed tokens of one request, and the laws they were drawn from (none for the keyed rule, which needs none)."""

    token_ids: list[int] = field(default_factory=list)
    laws: list[NDArray[np.float64]] = field(default_factory=list)
    is_predicted: bool = False


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts by request id, and how many tokens the draft model now has keys and values of.

    `passes`: rows and seconds of each pass of the draft model, what it draws included.
    """

    drafts: Mapping[str, Draft] = field(default_factory=dict)
    draft_computed: Mapping[str, int] = field(default_factory=dict)
    passes: Sequence[tuple[int, float]] = ()


def is_keyed(request: Request) -> bool:
    """True if the token at a position is a function of law and seed alone, so that drafts must not show in the text."""
    return request.params.is_greedy or request.params.seed is not None


class Proposer(Protocol):
    """Makes drafts for a plan. `caches` are those of its own that follow the target's blocks."""

    @property
    def caches(self) -> Sequence[Cache]: ...

    def propose(self, plan: SchedulerOutput) -> Proposal: ...


class NgramIndex:
    """Where each run of `min_n` to `max_n` tokens was last followed by another, for one growing sequence."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._lengths = range(max_n, min_n - 1, -1)
        self._tokens: list[int] = []
        self._next_position: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in what the sequence has beyond what was taken in before."""
        for token_id in token_ids[len(self._tokens) :]:
            end = len(self._tokens)
            for n in self._lengths:
                if n <= end:
                    self._next_position[tuple(self._tokens[end - n :])] = end
            self._tokens.append(token_id)

    def look_up(self, num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens that followed the longest known tail; [] if none is known."""
        for n in self._lengths:
            position = self._next_position.get(tuple(self._tokens[-n:])) if n <= len(self._tokens) else None
            if position is not None:
                return self._tokens[position : position + num_tokens]
        return []


class NgramProposer:
    """Proposes by prompt look-up."""

    caches: Sequence[Cache] = ()

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n, self._max_n = min_n, max_n
        self._indices: WeakKeyDictionary[Request, NgramIndex] = WeakKeyDictionary()

    def propose(self, plan: SchedulerOutput) -> Proposal:
        """Look up for everybody who has draft slots."""
        drafts = {}
        for scheduled in plan.scheduled:
            request = scheduled.request
            if scheduled.num_draft_slots and request.script is None:
                index = self._indices.setdefault(request, NgramIndex(self._min_n, self._max_n))
                index.extend(request.token_ids)
                drafts[request.request_id] = Draft(within_grammar(request, index.look_up(scheduled.num_draft_slots)))
        return Proposal(drafts)


def within_grammar(request: Request, draft: list[int]) -> list[int]:
    """The draft up to what the request's grammar forbids."""
    if request.constraint is None:
        return draft
    return draft[: request.constraint.num_allowed(request.output_token_ids, draft)]


class DraftModelProposer:
    """Proposes with a draft model; `cache` has the target's number of blocks and block size, `clock` gives seconds."""

    def __init__(self, model: Model, cache: Cache, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.cache = cache
        self.caches = [cache]
        self._model = model

    def propose(self, plan: SchedulerOutput) -> Proposal:
        """Run the draft model over what the plan has it catch up on, then on over its own tokens in the draft slots."""
        followed = [s for s in plan.scheduled if s.num_draft_catch_up]
        drafts = {s.request_id: Draft() for s in followed if s.num_draft_slots}
        computed = {s.request_id: s.request.num_draft_computed_tokens + s.num_draft_catch_up for s in followed}
        runs = [(s, _catch_up(s), s.request.num_draft_computed_tokens) for s in followed]
        passes = []
        while runs:
            started_s, num_rows = self._clock(), sum(len(tokens) for _, tokens, _ in runs)
            logits_RV = self._forward(runs)
            for (scheduled, _, _), logits_V in zip(runs, logits_RV, strict=True):
                if scheduled.request_id in drafts:
                    _extend(drafts[scheduled.request_id], logits_V, scheduled.request)
            passes.append((num_rows, self._clock() - started_s))
            unfinished = [s for s, _, _ in runs if s.request_id in drafts and _goes_on(drafts[s.request_id], s)]
            runs = [(s, drafts[s.request_id].token_ids[-1:], computed[s.request_id]) for s in unfinished]
            for scheduled in unfinished:
                computed[scheduled.request_id] += 1
        return Proposal(drafts, computed, tuple(passes))

    def _forward(self, runs: Sequence[tuple[ScheduledRequest, Sequence[int], int]]) -> NDArray[np.float32]:
        batch = flat_batch([(tokens, position, s.block_ids) for s, tokens, position in runs], self.cache.block_size)
        last_rows = np.array([span.row + span.num_tokens - 1 for span in batch.spans])
        logits_RV = self._model.forward(batch, self.cache, last_rows)
        if not np.isfinite(logits_RV.max(axis=1)).all():
            raise NumericalFault("logits of the draft model are not finite")
        return logits_RV


def _goes_on(draft: Draft, scheduled: ScheduledRequest) -> bool:
    """Whether there is a slot left, and something to say."""
    if len(draft.token_ids) >= scheduled.num_draft_slots:
        return False
    request = scheduled.request
    return request.constraint is None or not request.constraint.is_complete(
        [*request.output_token_ids, *draft.token_ids]
    )


def _catch_up(scheduled: ScheduledRequest) -> list[int]:
    """The next tokens that the draft model has not seen, as many as the plan says."""
    start = scheduled.request.num_draft_computed_tokens
    return scheduled.request.token_ids[start : start + scheduled.num_draft_catch_up]


def _extend(draft: Draft, logits_V: NDArray[np.float32], request: Request) -> None:
    if is_keyed(request):
        draft.token_ids.append(sample_keyed(logits_V, request, draft.token_ids))
        return
    law_V = law(logits_V, request, draft.token_ids)
    draft.token_ids.append(sample_draft(law_V, request, len(draft.token_ids)))
    draft.laws.append(law_V)
