"""Continuous batching: who computes how many tokens in this step, in which blocks, and who gives way.

There is no prefill phase and no decode phase: every request has tokens, some of them with KV, and a step lets it catch
up, within `max_num_batched_tokens`. Chunked prompts, resuming after preemption and verifying drafts are the same thing.

Order of effects in a step: `schedule()` reserves blocks (for the running, oldest first, preempting the youngest only
when free blocks do not cover one token; then for those admitted; then, from what is left, for drafts). `execute`
computes. `update()` advances: tokens, ends, blocks given back. Nothing advances before that, so when `execute` raises,
reservations go back and the requests are run one at a time, that only the culprit fails. Preemptions stand.

Iteration-level scheduling: Yu et al. 2022 (Orca, OSDI). Catching up: vLLM's V1 scheduler.
"""

import bisect
import logging
from collections.abc import Iterable
from typing import NamedTuple

from core.errors import DuplicateRequest, InvalidRequest, InvariantViolation, UnknownRequest
from core.memory.block_manager import BlockManager, blocks_needed
from core.request import FinishReason, Request, RequestOutput, RequestStatus, SamplingParams
from core.scheduling.policy import FirstComeFirstServed
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


class _Share:
    """One request's part of a plan in the making."""

    def __init__(self, request: Request, num_tokens: int) -> None:
        self.request = request
        self.num_tokens = num_tokens
        self.num_draft_slots = 0

    @property
    def yields_token(self) -> bool:
        return self.num_tokens == self.request.num_missing_tokens


class ContinuousBatchingScheduler:
    """Runs requests over a BlockManager, at most `max_batch` at once.

    Args:
        max_batch: most requests running at once.
        block_manager: the pool; the scheduler is its only user.
        execute: computes a plan; the default merely counts tokens.
        max_num_batched_tokens: most tokens computed in a step; None for no limit.
        max_model_len: prompt and output together never pass it; None for no limit.
        policy: who is admitted next and who is preempted.
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
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch is {max_batch}, at least 1 is needed")
        if max_num_batched_tokens is not None and max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens is {max_num_batched_tokens}, at least 1 is needed")
        self.max_batch = max_batch
        self.block_manager = block_manager
        self.num_preemptions = 0
        self._execute = execute
        self._token_limit = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._policy = policy or FirstComeFirstServed()
        self._running: list[Request] = []  # both in order of age, oldest first
        self._waiting: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._trackers: dict[str, StopTracker] = {}
        self._outputs: list[RequestOutput] = []
        self._pinned: list[int] = []  # sources of block copies that the plan under way reads
        self._num_added = 0
        self._num_steps = 0

    # Requests come and go

    def add(self, request_id: str, num_prompt_tokens: int, max_tokens: int) -> None:
        """Add a request of which only lengths matter."""
        self.add_request(Request(request_id, [0] * num_prompt_tokens, SamplingParams(max_tokens=max_tokens)))

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            DuplicateRequest: its id is in use.
            InvalidRequest: even alone it could not fit the pool.
        """
        if request.request_id in self._requests:
            raise DuplicateRequest(f"request {request.request_id!r} exists already")
        self._refuse_what_never_fits(request)
        request.age = self._num_added
        self._num_added += 1
        self._requests[request.request_id] = request
        self._trackers[request.request_id] = StopTracker(request, self._max_model_len)
        self._insert(self._waiting, request)

    def _refuse_what_never_fits(self, request: Request) -> None:
        manager = self.block_manager
        # The last token is never fed back, so it needs no slot.
        num_slots = request.num_prompt_tokens + request.max_tokens - 1
        needed = blocks_needed(num_slots, manager.block_size)
        if needed > manager.num_blocks:
            raise InvalidRequest(
                f"{request.num_prompt_tokens} prompt tokens and max_tokens {request.max_tokens} need {needed} KV blocks"
                f" of {manager.block_size} tokens, {manager.num_blocks} exist",
                "max_tokens",
            )

    def abort(self, request_id: str) -> None:
        """End a request at once and give back its blocks; it yields no further output."""
        request = self._requests.get(request_id)
        if request is None:
            raise UnknownRequest(f"request {request_id!r} is unknown")
        request.finish(FinishReason.ABORT)
        self._remove(request)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def unfinished_requests(self) -> list[Request]:
        """All that run or wait, in no order."""
        return list(self._requests.values())

    def find(self, request_id: str) -> Request | None:
        """The unfinished request with this id, or None."""
        return self._requests.get(request_id)

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
        if not self._requests:
            return StepReport([], [], 0)
        plan = self.schedule()
        num_running = len(self._running)
        try:
            result = self._execute(plan)
        except _FATAL:
            raise
        except Exception:
            logger.exception("step raised, its requests are run one at a time\n%s", plan.describe())
            self._roll_back(plan)
            finished = self._run_one_by_one(plan)
        else:
            finished = self.update(plan, result)
        return StepReport([s.request_id for s in plan.scheduled], finished, num_running)

    def schedule(self) -> SchedulerOutput:
        """Reserve blocks for the next step and say who computes what. Advances nobody."""
        shares: list[_Share] = []
        preempted: list[str] = []
        self._schedule_running(shares, preempted)
        if not preempted:
            self._admit(shares)
        self._reserve_drafts(shares)
        if not shares:
            raise InvariantViolation("requests are unfinished, yet none can be scheduled")
        self._num_steps += 1
        return self._freeze(shares, preempted)

    def _budget(self, shares: list[_Share]) -> int:
        """Tokens that may still be scheduled in this step."""
        limit = self._token_limit
        if limit is None:
            return 2**63
        return limit - sum(share.num_tokens + share.num_draft_slots for share in shares)

    def _schedule_running(self, shares: list[_Share], preempted: list[str]) -> None:
        for request in list(self._running):
            budget = self._budget(shares)
            if budget == 0:
                return
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted by an older one
            num_tokens = self._reserve(request, min(request.num_missing_tokens, budget))
            while num_tokens == 0 and request.status is RequestStatus.RUNNING:
                preempted.append(self._preempt_one())
                if request.status is RequestStatus.RUNNING:
                    num_tokens = self._reserve(request, min(request.num_missing_tokens, budget))
            if num_tokens:
                shares.append(_Share(request, num_tokens))

    def _reserve(self, request: Request, num_tokens: int) -> int:
        """Reserve slots for that many tokens, or for as many as there is room for; returns how many."""
        num_tokens = min(num_tokens, self.block_manager.max_append(request.request_id))
        if num_tokens and self.block_manager.append(request.request_id, num_tokens) is None:
            raise InvariantViolation(f"{num_tokens} tokens of {request!r} do not fit where they should")
        return num_tokens

    def _preempt_one(self) -> str:
        victim = self._policy.victim(self._running)
        if victim is None:
            raise InvariantViolation(f"{self._running[0]!r} runs alone and does not fit; it should have been refused")
        self.block_manager.free(victim.request_id)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = victim.num_draft_computed_tokens = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._running.remove(victim)
        self._insert(self._waiting, victim)
        logger.debug("request preempted", extra={"request_id": victim.request_id, "num_tokens": victim.num_tokens})
        return victim.request_id

    def _admit(self, shares: list[_Share]) -> None:
        while self._waiting and len(self._running) < self.max_batch:
            num_tokens = self._budget(shares)
            if num_tokens == 0:
                return
            request = self._policy.next_to_admit(self._waiting)
            num_tokens = min(num_tokens, request.num_tokens)
            if not self._may_come_back(request):
                return
            if self.block_manager.allocate(request.request_id, num_tokens) is None:
                return
            self._waiting.remove(request)
            request.status = RequestStatus.RUNNING
            self._insert(self._running, request)
            shares.append(_Share(request, num_tokens))

    def _may_come_back(self, request: Request) -> bool:
        """A preempted request waits for room for all its tokens and one more, or it would only be preempted again."""
        if request.status is not RequestStatus.PREEMPTED:
            return True
        manager = self.block_manager
        needed = blocks_needed(request.num_tokens + 1, manager.block_size)
        return min(needed, manager.num_blocks) <= manager.num_free_blocks

    def _reserve_drafts(self, shares: list[_Share]) -> None:
        """Drafts get only what is left when everybody has been served, so they are dropped before anyone gives way."""
        for share in shares:
            if share.yields_token:
                wanted = min(share.request.num_drafts_wanted, self._budget(shares), self._context_left(share.request))
                share.num_draft_slots = self._reserve(share.request, max(0, wanted))

    def _context_left(self, request: Request) -> int:
        """Drafts that fit the context: behind them there is one token more."""
        if self._max_model_len is None:
            return 2**63
        return self._max_model_len - request.num_tokens - 1

    def _freeze(self, shares: list[_Share], preempted: list[str]) -> SchedulerOutput:
        copies = self.block_manager.take_copies()
        for source, _ in copies:
            self.block_manager.pool.share(source)
            self._pinned.append(source)
        scheduled = tuple(self._scheduled(s.request, s.num_tokens, s.num_draft_slots) for s in shares)
        return SchedulerOutput(self._num_steps, scheduled, tuple(copies), tuple(preempted))

    def _scheduled(self, request: Request, num_tokens: int, num_draft_slots: int) -> ScheduledRequest:
        table = self.block_manager.block_table(request.request_id)
        return ScheduledRequest(request, request.num_computed_tokens, num_tokens, num_draft_slots, table)

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[str]:
        """Advance the plan's requests by what was computed; returns the ids of those that ended."""
        self._unpin()
        finished = []
        for scheduled in plan.scheduled:
            self._advance(scheduled, result.sampled.get(scheduled.request_id))
            self._advance_draft(scheduled.request, result)
            if scheduled.request.is_finished:
                finished.append(scheduled.request_id)
                self._remove(scheduled.request)
        return finished

    def _advance(self, scheduled: ScheduledRequest, sampled: SampledTokens | None) -> None:
        request, tracker = scheduled.request, self._trackers[scheduled.request_id]
        if (sampled is not None) != scheduled.yields_token:
            raise InvariantViolation(
                f"{request!r} should {'' if scheduled.yields_token else 'not '}have yielded a token"
            )
        request.num_computed_tokens = scheduled.end
        if sampled is not None:
            if sampled.num_accepted_tokens > scheduled.num_draft_slots:
                raise InvariantViolation(f"{request!r} accepted more drafts than it had slots")
            request.num_computed_tokens += sampled.num_accepted_tokens
            logprobs = sampled.logprobs or [None] * len(sampled.token_ids)
            for token_id, token_logprobs in zip(sampled.token_ids, logprobs, strict=True):
                tracker.append(token_id, token_logprobs)
                if request.is_finished:
                    break
            self._outputs.append(tracker.take_output())
        # Rejected drafts give their slots back.
        self.block_manager.truncate(request.request_id, request.num_computed_tokens)

    @staticmethod
    def _advance_draft(request: Request, result: ModelRunnerOutput) -> None:
        computed = result.draft_computed.get(request.request_id, request.num_draft_computed_tokens)
        # The draft model ran over drafts that may have been rejected.
        request.num_draft_computed_tokens = min(computed, request.num_computed_tokens)

    # When a step raises

    def _roll_back(self, plan: SchedulerOutput) -> None:
        self._unpin()
        for scheduled in plan.scheduled:
            self.block_manager.truncate(scheduled.request_id, scheduled.start)

    def _run_one_by_one(self, plan: SchedulerOutput) -> list[str]:
        finished = []
        for scheduled in plan.scheduled:
            alone = self._plan_alone(plan, scheduled)
            try:
                result = self._execute(alone)
            except _FATAL:
                raise
            except Exception as error:
                logger.exception("request failed\n%s", alone.describe())
                self._unpin()
                self._fail(scheduled.request, error)
                finished.append(scheduled.request_id)
            else:
                finished += self.update(alone, result)
        return finished

    def _plan_alone(self, plan: SchedulerOutput, scheduled: ScheduledRequest) -> SchedulerOutput:
        request = scheduled.request
        num_tokens = self._reserve(request, scheduled.num_tokens)
        if num_tokens < scheduled.num_tokens:
            raise InvariantViolation(f"{request!r} lost its room while a step was rolled back")
        num_draft_slots = self._reserve(request, scheduled.num_draft_slots)
        return SchedulerOutput(plan.step, (self._scheduled(request, num_tokens, num_draft_slots),))

    def _fail(self, request: Request, error: Exception) -> None:
        request.error = f"{type(error).__name__}: {error}"
        request.finish(FinishReason.ERROR)
        self._outputs.append(self._trackers[request.request_id].take_output())
        self._remove(request)

    # Bookkeeping

    def _unpin(self) -> None:
        for block in self._pinned:
            self.block_manager.pool.release(block)
        self._pinned = []

    @staticmethod
    def _insert(queue: list[Request], request: Request) -> None:
        bisect.insort(queue, request, key=lambda r: r.age)

    def _remove(self, request: Request) -> None:
        if request in self._running:
            self._running.remove(request)
            self.block_manager.free(request.request_id)
        else:
            self._waiting.remove(request)
        del self._requests[request.request_id], self._trackers[request.request_id]

    def check_invariants(self) -> None:
        """Raise InvariantViolation unless the scheduler's books agree with each other and with the block manager's."""
        manager = self.block_manager
        manager.check_invariants(self._pinned)
        if len(self._running) > self.max_batch:
            raise InvariantViolation(f"{len(self._running)} requests run, limit is {self.max_batch}")
        queued = [r.request_id for r in (*self._running, *self._waiting)]
        if len(set(queued)) != len(queued) or set(queued) != set(self._requests):
            raise InvariantViolation("a request is in no queue, or in two")
        for queue in (self._running, self._waiting):
            self._check_ages(queue)
        for request in self._running:
            if manager.num_tokens(request.request_id) != request.num_computed_tokens:
                raise InvariantViolation(
                    f"{request!r} has {manager.num_tokens(request.request_id)} slots between steps"
                )
        if manager.pool.num_used_blocks and not self._running:
            raise InvariantViolation(f"{manager.pool.num_used_blocks} blocks are used, yet nothing runs")

    @staticmethod
    def _check_ages(queue: Iterable[Request]) -> None:
        ages = [request.age for request in queue]
        if ages != sorted(ages):
            raise InvariantViolation(f"a queue is out of order: {ages}")
