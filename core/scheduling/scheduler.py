"""Continuous batching: requests come, advance together step by step, and leave as soon as they are done.

There is no prefill phase and no decode phase: every request has tokens, some of them with KV, and a step lets it catch
up, within `max_num_batched_tokens`. Chunked prompts, prefix hits, resuming after preemption and verifying drafts are
the same thing.

Order of effects in a step: `schedule()` reserves blocks (see `planner`). `execute` computes. `update()` advances:
siblings born, tokens, blocks made findable, ends, blocks given back. Nothing advances before that, so when `execute`
raises, reservations go back and the requests are run one at a time, that only the culprit fails. Preemptions stand.

Iteration-level scheduling: Yu et al. 2022 (Orca, OSDI). Catching up: vLLM's V1 scheduler.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from core.errors import InvalidRequest, InvariantViolation, UnknownRequest
from core.memory.block_manager import BlockManager, blocks_needed
from core.memory.host_tier import HostTier
from core.memory.prefix_ghost import PrefixGhost
from core.request import FinishReason, Request, RequestOutput
from core.sampling_params import SamplingParams
from core.scheduling.drafting import DraftPolicy, FixedDrafts
from core.scheduling.planner import StepPlanner
from core.scheduling.policy import FirstComeFirstServed
from core.scheduling.preemption import Swaps, always_swap
from core.scheduling.publishing import BlockPublisher
from core.scheduling.queues import RequestQueues, family_size
from core.scheduling.stopping import StopTracker
from core.step import Execute, ModelRunnerOutput, SampledTokens, ScheduledRequest, SchedulerOutput, count_only

logger = logging.getLogger(__name__)

_FATAL = (InvariantViolation, MemoryError)  # the engine cannot go on after these


class StepReport(NamedTuple):
    """What a step did: ids of the requests it computed tokens for, ids of those that ended, places taken.

    Requests that end in the step are in `scheduled`, in `finished` and counted in `num_running`.
    """

    scheduled: list[str]
    finished: list[str]
    num_running: int


class ContinuousBatchingScheduler:
    """Runs requests over a BlockManager, at most `max_batch` at once.

    Args:
        max_batch: most requests running at once.
        block_manager: the pool; the scheduler is its only user.
        execute: computes a plan; the default merely counts tokens.
        max_num_batched_tokens: most tokens computed in a step; None for no limit.
        max_model_len: prompt and output together never pass it; None for no limit.
        policy: who is admitted next and who is preempted.
        tier: where blocks of preempted requests may be copied to.
        swaps: whether they are, for each victim; with a tier and without this, always.
        ghost: told of every prompt looked up and every block published.
        drafting: how many drafts each may have; by default as many as it wants, and no draft model follows.
        enable_prefix_caching: let requests with equal beginnings share blocks. Off by default here, since requests of
            which only lengths are known (`add`) all begin alike.
    """

    def __init__(
        self,
        max_batch: int,
        block_manager: BlockManager,
        *,
        execute: Execute = count_only,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        policy: FirstComeFirstServed | None = None,
        enable_prefix_caching: bool = False,
        tier: HostTier | None = None,
        swaps: Swaps = always_swap,
        ghost: PrefixGhost | None = None,
        drafting: DraftPolicy | None = None,
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch is {max_batch}, at least 1 is needed")
        if max_num_batched_tokens is not None and max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens is {max_num_batched_tokens}, at least 1 is needed")
        self.max_batch = max_batch
        self.num_recomputed_tokens = 0  # computed a second time, after a preemption
        self.block_manager = block_manager
        self._queues = RequestQueues()
        self._planner = StepPlanner(
            self._queues,
            block_manager,
            policy or FirstComeFirstServed(),
            max_batch=max_batch,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            shares_prefixes=enable_prefix_caching,
            tier=tier,
            swaps=swaps,
            ghost=ghost,
            drafting=drafting or FixedDrafts(uses_draft_model=False),
        )
        self._execute = execute
        self._max_model_len = max_model_len
        self._publisher = BlockPublisher(block_manager, ghost) if enable_prefix_caching else None
        self._tier = tier
        self._trackers: dict[str, StopTracker] = {}
        self._outputs: list[RequestOutput] = []
        self._pinned: list[int] = []  # sources of block copies that the plan under way reads

    # Requests come and go

    def add(self, request_id: str, num_prompt_tokens: int, max_tokens: int) -> None:
        """Add a request of which only lengths matter."""
        self.add_request(Request(request_id, [0] * num_prompt_tokens, SamplingParams(max_tokens=max_tokens)))

    def add_request(self, request: Request) -> None:
        """Queue a request, with its siblings if it is to be sampled several times.

        Raises:
            DuplicateRequest: its id is in use.
            InvalidRequest: even alone it could not fit the pool, or it has more samples than there are places.
        """
        self._refuse_what_never_fits(request)
        self._queues.add(request)
        for member in (request, *request.siblings):
            self._trackers[member.request_id] = StopTracker(member, self._max_model_len)

    def _refuse_what_never_fits(self, request: Request) -> None:
        if family_size(request) > self.max_batch:
            raise InvalidRequest(f"n is {family_size(request)}, at most {self.max_batch} run at once", "n")
        manager = self.block_manager
        # The last token is never fed back, so it needs no slot.
        num_slots = request.num_prompt_tokens + max(0, request.max_tokens - 1)
        needed = blocks_needed(num_slots, manager.block_size)
        if needed > manager.num_blocks:
            raise InvalidRequest(
                f"{request.num_prompt_tokens} prompt tokens and max_tokens {request.max_tokens} need {needed} KV blocks"
                f" of {manager.block_size} tokens, {manager.num_blocks} exist",
                "max_tokens",
            )

    def abort(self, request_id: str) -> None:
        """End a request at once and give back its blocks; it yields no further output. Its siblings go on."""
        request = self._queues.find(request_id)
        if request is None:
            raise UnknownRequest(f"request {request_id!r} is unknown")
        parent = self._queues.parent_of(request)
        if parent is not None:
            parent.siblings.remove(request)
        elif request.siblings:
            self._hand_down(request)
        request.finish(FinishReason.ABORT)
        self._remove(request)

    def _hand_down(self, request: Request) -> None:
        """The eldest unborn sibling takes the place of a request that leaves before the prompt is computed."""
        heir, *others = request.siblings
        request.siblings, heir.siblings = [], others
        if request in self._queues.running:
            self.block_manager.fork(request.request_id, heir.request_id)
            heir.take_progress(request)
            self._queues.set_running(heir)
        else:
            heir.take_progress(request)
            heir.status = request.status
            self._queues.set_waiting(heir)

    def reset_prefix_cache(self) -> None:
        """No request will hit what has been computed so far. Those that run are not disturbed."""
        self.block_manager.pool.forget_hashes()
        if self._tier is not None:
            self._tier.clear()
        for request in self._queues.running:
            request.is_unshareable = True

    @property
    def has_unfinished_requests(self) -> bool:
        return len(self._queues) > 0

    @property
    def num_running(self) -> int:
        return self._queues.num_running

    @property
    def num_waiting(self) -> int:
        return self._queues.num_waiting

    @property
    def num_deferred(self) -> int:
        """Of the waiting, those that the last step let wait for a block being computed."""
        return self._planner.num_deferred

    @property
    def num_preemptions(self) -> int:
        return self._planner.num_preemptions

    def unfinished_requests(self) -> list[Request]:
        """All that run or wait, in no order."""
        return self._queues.all()

    def find(self, request_id: str) -> Request | None:
        """The unfinished request with this id, or None."""
        return self._queues.find(request_id)

    def take_outputs(self) -> list[RequestOutput]:
        """What the requests have said since the last call, handed over; at most one output a request and step."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # One step

    def step(self) -> StepReport:
        """Schedule, execute, update.

        Raises:
            InvariantViolation, MemoryError: the engine cannot go on. What else `execute` raises fails one request.
        """
        if not self.has_unfinished_requests:
            return StepReport([], [], 0)
        plan = self.schedule()
        num_running = self.num_running
        try:
            result = self._execute(plan)
        except _FATAL:
            raise
        except Exception as error:
            _log("step raised, its requests are run one at a time", error, plan)
            finished = self._run_one_by_one(plan)
        else:
            finished = self.update(plan, result)
        return StepReport([s.request_id for s in plan.scheduled], finished, num_running)

    def schedule(self) -> SchedulerOutput:
        """Reserve blocks for the next step and say who computes what. Advances nobody."""
        plan = self._planner.plan()
        for source, _ in plan.block_copies:
            self.block_manager.pool.share(source)
            self._pinned.append(source)
        return plan

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[str]:
        """Advance the plan's requests by what was computed; returns the ids of those that ended."""
        self._unpin()
        finished = []
        for scheduled in plan.scheduled:
            for request in self._advance(scheduled, result):
                if request.is_finished:
                    finished.append(request.request_id)
                    self._remove(request)
        return finished

    def _advance(self, scheduled: ScheduledRequest, result: ModelRunnerOutput) -> list[Request]:
        """Advance one request; returns it and its siblings, if this step bore them."""
        request, yielding, born = scheduled.request, scheduled.yielding_requests, scheduled.born_siblings
        if result.prompt_logprobs or request.params.num_prompt_logprobs is not None:
            self._record_prompt_logprobs(scheduled, result)
        if scheduled.start < request.num_lost_tokens:
            self.num_recomputed_tokens += min(scheduled.end, request.num_lost_tokens) - scheduled.start
        if request.params.embed:
            self._record_hidden_sum(scheduled, result)
        request.num_computed_tokens = scheduled.end
        if born:
            request.siblings = []
        for sibling in born:
            # Before anybody appends: all go on from the same blocks, and whoever writes first copies.
            self.block_manager.fork(request.request_id, sibling.request_id)
            sibling.take_progress(request)
            self._queues.set_running(sibling)
        for member in yielding:
            self._append(scheduled, member, result.sampled.get(member.request_id))
        if not yielding and request.request_id in result.sampled:
            raise InvariantViolation(f"{request!r} yields no token, yet the runner returned one")
        if not yielding and scheduled.catches_up:
            self._finish_empty([request, *born])
        if request.request_id in result.draft_computed:
            # The draft model ran over drafts that may have been rejected.
            num_draft_computed = result.draft_computed[request.request_id]
            request.num_draft_computed_tokens = min(num_draft_computed, request.num_computed_tokens)
        if scheduled.num_draft_slots:  # those rejected give their slots back
            self.block_manager.truncate(request.request_id, request.num_computed_tokens)
        if self._publisher is not None:
            self._publisher.publish(request)
        return [request, *born]

    def _record_prompt_logprobs(self, scheduled: ScheduledRequest, result: ModelRunnerOutput) -> None:
        found = result.prompt_logprobs.get(scheduled.request_id, ())
        if len(found) != len(scheduled.scored_positions):
            raise InvariantViolation(f"{scheduled.request!r} should have {len(scheduled.scored_positions)} scores")
        scheduled.request.prompt_logprobs.extend(found)

    def _record_hidden_sum(self, scheduled: ScheduledRequest, result: ModelRunnerOutput) -> None:
        if scheduled.summed_positions:
            request = scheduled.request
            if request.request_id not in result.hidden_sums:
                raise InvariantViolation(f"{request!r} should have a sum of hidden states")
            request.num_summed_rows = scheduled.summed_positions.stop
            request.hidden_sum = result.hidden_sums[request.request_id]

    def _finish_empty(self, requests: Sequence[Request]) -> None:
        """End those that wanted their prompt computed and not one token."""
        for request in requests:
            request.finish(FinishReason.LENGTH)
            self._outputs.append(self._trackers[request.request_id].take_output())

    def _append(self, scheduled: ScheduledRequest, request: Request, sampled: SampledTokens | None) -> None:
        """Give a request its new tokens, one at a time."""
        if sampled is None:
            raise InvariantViolation(f"{request!r} should have yielded a token")
        num_accepted = sampled.num_accepted_tokens
        if num_accepted > scheduled.num_draft_slots:
            raise InvariantViolation(f"{request!r} accepted more drafts than it had slots")
        tracker, num_before = self._trackers[request.request_id], request.num_tokens
        request.num_computed_tokens += num_accepted
        if num_accepted == 0 and not sampled.logprobs:
            tracker.append(sampled.token_ids[0])
        else:
            logprobs = sampled.logprobs or [None] * len(sampled.token_ids)
            for token_id, token_logprobs in zip(sampled.token_ids, logprobs, strict=True):
                tracker.append(token_id, token_logprobs)
                if request.is_finished:
                    break
        drafts = sampled.outcome(request.num_tokens - num_before) if sampled.num_draft_tokens else None
        self._outputs.append(tracker.take_output(drafts))

    # When a step raises

    def _run_one_by_one(self, plan: SchedulerOutput) -> list[str]:
        if self._tier is not None:
            self._tier.forget({slot for _, slot in plan.tier_stores})
        if plan.block_copies or plan.tier_loads:
            # Nobody knows how far the step had come, so they are made (again) before a source can be given back.
            self._execute(SchedulerOutput(plan.step, (), plan.block_copies, tier_loads=plan.tier_loads))
        self._unpin()
        for scheduled in plan.scheduled:
            self.block_manager.truncate(scheduled.request_id, scheduled.start)
        finished = []
        for scheduled in plan.scheduled:
            alone = self._plan_alone(plan, scheduled)
            try:
                result = self._execute(alone)
            except _FATAL:
                raise
            except Exception as error:
                _log("request failed", error, alone)
                finished += self._fail(scheduled.request, error)
            else:
                finished += self.update(alone, result)
        return finished

    def _plan_alone(self, plan: SchedulerOutput, scheduled: ScheduledRequest) -> SchedulerOutput:
        request = scheduled.request
        num_tokens = self._planner.reserve(request, scheduled.num_tokens)
        if num_tokens < scheduled.num_tokens:
            raise InvariantViolation(f"{request!r} lost its room while a step was rolled back")
        num_draft_slots = self._planner.reserve(request, scheduled.num_draft_slots)
        if copies := self.block_manager.take_copies():
            raise InvariantViolation(f"{request!r} needs copies {copies} that were made before")
        alone = self._planner.scheduled(request, num_tokens, num_draft_slots, scheduled.num_draft_catch_up)
        return SchedulerOutput(plan.step, (alone,))

    def _fail(self, request: Request, error: Exception) -> list[str]:
        family = [request, *request.siblings]
        request.siblings = []
        for member in family:
            member.is_refused = isinstance(error, InvalidRequest)
            member.error = str(error) if member.is_refused else f"{type(error).__name__}: {error}"
            member.finish(FinishReason.ERROR)
            self._outputs.append(self._trackers[member.request_id].take_output())
            self._remove(member)
        return [member.request_id for member in family]

    # Bookkeeping

    def _unpin(self) -> None:
        for block in self._pinned:
            self.block_manager.pool.release(block)
        self._pinned = []

    def _remove(self, request: Request) -> None:
        if self.block_manager.holds(request.request_id):
            self.block_manager.free(request.request_id)
        self._queues.remove(request)
        del self._trackers[request.request_id]

    def check_invariants(self) -> None:
        """Raise InvariantViolation unless the scheduler's books agree with each other and with the block manager's."""
        manager = self.block_manager
        manager.check_invariants(self._pinned)
        self._queues.check_invariants(self.max_batch)
        for request in self._queues.running:
            if manager.num_tokens(request.request_id) != request.num_computed_tokens:
                raise InvariantViolation(f"{request!r} holds {manager.num_tokens(request.request_id)} slots")
        if manager.pool.num_used_blocks and not self._queues.running:
            raise InvariantViolation(f"{manager.pool.num_used_blocks} blocks are used, yet nothing runs")
        for request in self._queues.waiting:
            if manager.holds(request.request_id):
                raise InvariantViolation(f"{request!r} waits and yet holds blocks")


def _log(what: str, error: Exception, plan: SchedulerOutput) -> None:
    """A fault of ours with all that is known of it; of a request's own no more than what it is told."""
    if isinstance(error, InvalidRequest):
        logger.info("%s: %s", what, error)
    else:
        logger.error("%s\n%s", what, plan.describe(), exc_info=error)
