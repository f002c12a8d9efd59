"""From a plan to tokens: propose, run the model once over everybody, verify, sample.

The plan's requests become one flat batch; a request's known tokens are followed by its drafts, so verifying them is
just more rows. Blocks are copied before anything is computed. Nothing here changes a request: results go back to the
scheduler's `update()`.

Two rules accept drafts. Greedy requests and those with a seed are keyed: at every position the target's token is a
function of its law and the noise of that position, and a draft counts if it is that token, so the text is the same with
any drafter or none. The others use a rule of `speculative`, which accepts more.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.decoding.noise import Purpose, generator
from core.decoding.proposers import Draft, Proposal, Proposer
from core.decoding.sampler import law, sample_keyed, token_logprobs
from core.decoding.speculative import Verify, acceptance_bounds, verify_blocks
from core.errors import NumericalFault
from core.model.numerics import Cache, Model
from core.model.transformer import flat_batch
from core.request import Request, TokenLogprobs
from core.step import ModelRunnerOutput, SampledTokens, ScheduledRequest, SchedulerOutput

Floats = NDArray[np.float32]
SCORED_ROWS = 64  # of a prompt, whose logits are held at a time


class ModelRunner:
    """The `execute` of a real engine.

    Args:
        model: the target.
        cache: its keys and values.
        proposer: where drafts come from; None for no speculation.
        verify: the rule for requests without a seed whose drafts were drawn from a law.
        clock: seconds; tells what copies to and from the second tier take.
        no_tokens: ids that no token stands for, with which the model's vocabulary is padded. They have no probability.
    """

    def __init__(
        self,
        model: Model,
        cache: Cache,
        proposer: Proposer | None = None,
        *,
        verify: Verify = verify_blocks,
        clock: Callable[[], float] = time.perf_counter,
        no_tokens: Sequence[int] = (),
    ) -> None:
        self._model = model
        self._no_tokens = np.array(no_tokens, np.int64)
        self._cache = cache
        self._proposer = proposer
        self._clock = clock
        self._verify = verify
        self._caches = [cache, *(proposer.caches if proposer else ())]

    def __call__(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the plan: keys and values of its tokens, and new tokens of those requests that yield."""
        tier_seconds = self._move_blocks(plan)
        if not plan.scheduled:
            return ModelRunnerOutput(tier_seconds=tier_seconds)
        proposal = self._proposer.propose(plan) if self._proposer else Proposal()
        yielding = [s for s in plan.scheduled if s.yields_token]
        drafts = [proposal.drafts.get(s.request_id, Draft()) for s in yielding]
        rows, prompt_logprobs, hidden_sums = self._run_target(plan, proposal)
        accepted = _accept(yielding, drafts, rows, self._verify)
        sampled = {
            s.request_id: SampledTokens(
                tokens, _logprobs(s.request, tokens, logits), len(draft.token_ids), draft.is_predicted, bound
            )
            for s, draft, (tokens, bound), logits in zip(yielding, drafts, accepted, rows, strict=True)
        }
        for scheduled, logits in zip(yielding, rows, strict=True):
            sampled |= {sibling.request_id: _sample(sibling, logits) for sibling in scheduled.request.siblings}
        return ModelRunnerOutput(
            sampled, proposal.draft_computed, tier_seconds, prompt_logprobs, proposal.passes, hidden_sums
        )

    def _move_blocks(self, plan: SchedulerOutput) -> float:
        """What must happen to memory first, in the plan's order; returns the seconds that the second tier took."""
        started_s = self._clock()
        for cache in self._caches:
            cache.store(plan.tier_stores)
        stored_s = self._clock()
        for cache in self._caches:
            cache.copy_blocks(plan.block_copies)
        copied_s = self._clock()
        for cache in self._caches:
            cache.load(plan.tier_loads)
        return stored_s - started_s + self._clock() - copied_s

    def _run_target(
        self, plan: SchedulerOutput, proposal: Proposal
    ) -> tuple[list[Floats], dict[str, list[TokenLogprobs]], dict[str, tuple[float, ...]]]:
        """(K+1, V) logits for each request that yields: behind its last token and behind each of its drafts.

        And the log-probabilities of those prompt tokens that are to be scored, and sums of those to be summed.
        """
        runs, num_wanted = [], []
        for s in plan.scheduled:
            draft = proposal.drafts.get(s.request_id, Draft()).token_ids
            runs.append((s.request.token_ids[s.start : s.end] + draft, s.start, s.block_ids))
            num_wanted.append(len(draft) + 1 if s.yields_token else 0)
        batch = flat_batch(runs, self._cache.block_size)
        ends = [span.row + span.num_tokens for span in batch.spans]
        wanted = [np.arange(end - num, end) for end, num in zip(ends, num_wanted, strict=True)]
        scored = [
            span.row + np.array(s.scored_positions, np.int64) - 1 - s.start
            for s, span in zip(plan.scheduled, batch.spans, strict=True)
        ]
        summed = [
            span.row + np.array(s.summed_positions, np.int64) - s.start
            for s, span in zip(plan.scheduled, batch.spans, strict=True)
            if s.request.params.embed
        ]
        hidden_RD = self._model.hidden_states(batch, self._cache, np.concatenate([*wanted, *scored, *summed]))
        starts = np.cumsum([0, *num_wanted])
        scored_RD, summed_RD = np.split(hidden_RD[starts[-1] :], [sum(map(len, scored))])
        logits_RV = self._logits(hidden_RD[: starts[-1]])
        rows = [logits_RV[a : a + num] for a, num in zip(starts[:-1], num_wanted, strict=True) if num]
        return rows, self._score(plan.scheduled, scored_RD), _hidden_sums(plan.scheduled, summed_RD)

    def _score(self, scheduled: Sequence[ScheduledRequest], hidden_RD: Floats) -> dict[str, list[TokenLogprobs]]:
        """Log-probabilities at the scored positions of all, whose rows before them lie one after another."""
        found: dict[str, list[TokenLogprobs]] = {}
        for s in scheduled:
            own_RD, hidden_RD = np.split(hidden_RD, [len(s.scored_positions)])
            num_top = s.request.params.num_prompt_logprobs
            if num_top is not None and len(own_RD):
                found[s.request_id] = self._score_one(
                    own_RD, [s.request.token_ids[t] for t in s.scored_positions], num_top
                )
        return found

    def _score_one(self, hidden_RD: Floats, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """A few rows at a time, for a prompt's logits would take more memory than its keys and values."""
        found = []
        for i in range(0, len(token_ids), SCORED_ROWS):
            logits_RV = self._logits(hidden_RD[i : i + SCORED_ROWS])
            chunk = zip(logits_RV, token_ids[i : i + SCORED_ROWS], strict=True)
            found += [token_logprobs(logits_V, token_id, num_top) for logits_V, token_id in chunk]
        return found

    def _logits(self, hidden_RD: Floats) -> Floats:
        logits_RV = self._model.logits(hidden_RD)
        if not np.isfinite(logits_RV.max(axis=1, initial=0.0)).all():
            raise NumericalFault("logits are not finite")
        logits_RV[:, self._no_tokens] = -np.inf
        return logits_RV


def _hidden_sums(scheduled: Sequence[ScheduledRequest], hidden_RD: Floats) -> dict[str, tuple[float, ...]]:
    """Sums of hidden states, with what was summed before, of those that embed; their rows lie one after another.

    One row after the other: the sum has the same bits however the prompt was cut into chunks.
    """
    if not np.isfinite(hidden_RD).all():
        raise NumericalFault("hidden states are not finite")
    sums: dict[str, tuple[float, ...]] = {}
    for s in (s for s in scheduled if s.request.params.embed):
        own_RD, hidden_RD = np.split(hidden_RD, [len(s.summed_positions)])
        if len(own_RD):
            before_1D = np.array(s.request.hidden_sum or np.zeros(own_RD.shape[1]), ndmin=2)
            sums[s.request_id] = tuple(np.add.accumulate(np.concatenate([before_1D, own_RD]), axis=0)[-1].tolist())
    return sums


class _Accepted(NamedTuple):
    """New tokens, the accepted drafts and one more; and the bound of their number where the drafts have laws."""

    token_ids: list[int]
    bound: float | None = None


def _accept(
    yielding: Sequence[ScheduledRequest], drafts: Sequence[Draft], rows: Sequence[Floats], verify: Verify
) -> list[_Accepted]:
    """What each request gets. Drafts with laws are judged together by length."""
    accepted = [_Accepted([]) for _ in yielding]
    by_length: dict[int, list[int]] = {}
    for i, (scheduled, draft) in enumerate(zip(yielding, drafts, strict=True)):
        if draft.laws:
            by_length.setdefault(len(draft.token_ids), []).append(i)
        else:
            accepted[i] = _Accepted(_accept_keyed(scheduled.request, draft.token_ids, rows[i]))
    for members in by_length.values():
        requests = [yielding[i].request for i in members]
        group = _accept_by_rule(requests, [drafts[i] for i in members], [rows[i] for i in members], verify)
        for i, one in zip(members, group, strict=True):
            accepted[i] = one
    return accepted


def _sample(sibling: Request, logits_1V: Floats) -> SampledTokens:
    """The first token of a further sample: the same row of logits, the sibling's own noise."""
    tokens = [sample_keyed(logits_1V[0], sibling)]
    return SampledTokens(tokens, _logprobs(sibling, tokens, logits_1V))


def _accept_keyed(request: Request, draft: Sequence[int], logits_KV: Floats) -> list[int]:
    """Walk along the draft for as long as it says what the target says."""
    tokens: list[int] = []
    for i, logits_V in enumerate(logits_KV):
        tokens.append(sample_keyed(logits_V, request, tokens))
        if i < len(draft) and tokens[-1] != draft[i]:
            break
    return tokens


def _accept_by_rule(
    requests: Sequence[Request], drafts: Sequence[Draft], rows: Sequence[Floats], verify: Verify
) -> list[_Accepted]:
    """All drafts have the same length. Draws are keyed by where the verification starts."""
    draft_RK = np.array([draft.token_ids for draft in drafts])
    target_RKV = np.stack([_laws(r, d.token_ids, logits) for r, d, logits in zip(requests, drafts, rows, strict=True)])
    draft_probs_RKV = np.stack([np.stack(draft.laws) for draft in drafts])
    num_draws = draft_RK.shape[1] + 1
    uniforms_RK = np.stack(
        [generator(r.seed, r.choice, r.num_tokens, Purpose.ACCEPT).random(num_draws) for r in requests]
    )
    num_accepted_R, bonus_R = verify(draft_RK, target_RKV, draft_probs_RKV, uniforms_RK)
    bound_R = acceptance_bounds(draft_RK, target_RKV, draft_probs_RKV)
    return [
        _Accepted([*draft.token_ids[:num], bonus], bound)
        for draft, num, bonus, bound in zip(
            drafts, num_accepted_R.tolist(), bonus_R.tolist(), bound_R.tolist(), strict=True
        )
    ]


def _laws(request: Request, draft: Sequence[int], logits_KV: Floats) -> NDArray[np.float64]:
    """(K+1, V): row i is the law after i draft tokens, processed over exactly those tokens."""
    return np.stack([law(logits_V, request, draft[:i]) for i, logits_V in enumerate(logits_KV)])


def _logprobs(request: Request, tokens: Sequence[int], logits_KV: Floats) -> list[TokenLogprobs] | tuple[()]:
    num_top = request.params.num_logprobs
    if num_top is None:
        return ()
    return [token_logprobs(logits_V, token, num_top) for token, logits_V in zip(tokens, logits_KV, strict=False)]
