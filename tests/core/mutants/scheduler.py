"""Schedulers that are wrong in one way each. The machine must tell every one of them from the real one.

PreemptsTheOldest           the oldest running request gives way
PreemptsWithoutNeed         somebody gives way while a block is free
KeepsVictimsBlocks          a preempted request stays in its blocks
KeepsComputedTokens         a preempted request believes that its KV is still there
ComesBackTooEarly           a preempted request is admitted to room for its first chunk only
AdmitsTheYoungest           last come, first served
AdmitsBeyondMaxBatch        a request more than there are places
IgnoresTheTokenBudget       computes whatever is missing
DraftsPastTheEnd            draft slots for tokens that max_tokens forbids
KeepsDraftSlots             slots of rejected drafts stay reserved
AdvancesByDrafted           rejected drafts count as computed
AdvancesBeforeTheStep       a chunk counts as computed when it is scheduled
EmitsPastTheEnd             what an accepted run brings behind its end is said as well
LeaksFinishedBlocks         a finished request's blocks stay taken
LeaksAbortedBlocks          an aborted request's blocks stay taken
RollsBackAllButOne          after a step that raised, the last request keeps its reservation
FailsTheWholeStep           one culprit takes everybody in the step with it
ForgetsTheCulpritsNeighbours  behind a culprit, nobody is run again
"""

from collections.abc import Sequence
from dataclasses import replace

from core.request import FinishReason, Request
from core.scheduling.policy import FirstComeFirstServed
from core.scheduling.scheduler import ContinuousBatchingScheduler, _Share
from core.step import ModelRunnerOutput, SampledTokens, ScheduledRequest, SchedulerOutput


class _OldestFirst(FirstComeFirstServed):
    def victim(self, running: Sequence[Request]) -> Request | None:
        return running[0] if len(running) > 1 else None


class _YoungestFirst(FirstComeFirstServed):
    def next_to_admit(self, waiting: Sequence[Request]) -> Request:
        return waiting[-1]


class PreemptsTheOldest(ContinuousBatchingScheduler):
    def _preempt_one(self) -> str:
        self._policy = _OldestFirst()
        return super()._preempt_one()


class PreemptsWithoutNeed(ContinuousBatchingScheduler):
    def _schedule_running(self, shares: list[_Share], preempted: list[str]) -> None:
        if len(self._running) > 1 and self.block_manager.num_free_blocks == 1:
            preempted.append(self._preempt_one())
        super()._schedule_running(shares, preempted)


class KeepsVictimsBlocks(ContinuousBatchingScheduler):
    def _preempt_one(self) -> str:
        victim = self._running[-1]
        self.block_manager.fork(victim.request_id, f"ghost of {victim.request_id} {self.num_preemptions}")
        return super()._preempt_one()


class KeepsComputedTokens(ContinuousBatchingScheduler):
    def _preempt_one(self) -> str:
        victim = self._running[-1]
        num_computed = victim.num_computed_tokens
        name = super()._preempt_one()
        victim.num_computed_tokens = min(num_computed, victim.num_tokens - 1)
        return name


class ComesBackTooEarly(ContinuousBatchingScheduler):
    def _may_come_back(self, request: Request) -> bool:
        return True


class AdmitsTheYoungest(ContinuousBatchingScheduler):
    def _admit(self, shares: list[_Share]) -> None:
        self._policy = _YoungestFirst()
        super()._admit(shares)


class AdmitsBeyondMaxBatch(ContinuousBatchingScheduler):
    def _admit(self, shares: list[_Share]) -> None:
        self.max_batch += 1
        super()._admit(shares)
        self.max_batch -= 1


class IgnoresTheTokenBudget(ContinuousBatchingScheduler):
    def _budget(self, shares: list[_Share]) -> int:
        return 2**63


class DraftsPastTheEnd(ContinuousBatchingScheduler):
    def _reserve_drafts(self, shares: list[_Share]) -> None:
        super()._reserve_drafts(shares)
        for share in shares:
            if share.yields_token and self._budget(shares) and not share.num_draft_slots:
                share.num_draft_slots = self._reserve(share.request, 1)


class KeepsDraftSlots(ContinuousBatchingScheduler):
    def _advance(self, scheduled: ScheduledRequest, sampled: SampledTokens | None) -> None:
        reserved = self.block_manager.num_tokens(scheduled.request_id)
        super()._advance(scheduled, sampled)
        self.block_manager.append(scheduled.request_id, reserved - scheduled.request.num_computed_tokens)


class AdvancesByDrafted(ContinuousBatchingScheduler):
    def _advance(self, scheduled: ScheduledRequest, sampled: SampledTokens | None) -> None:
        super()._advance(scheduled, sampled)
        if sampled is not None:
            num_rejected = sampled.num_draft_tokens - sampled.num_accepted_tokens
            scheduled.request.num_computed_tokens += num_rejected
            self.block_manager.append(scheduled.request_id, num_rejected)


class AdvancesBeforeTheStep(ContinuousBatchingScheduler):
    def _freeze(self, shares: list[_Share], preempted: list[str]) -> SchedulerOutput:
        plan = super()._freeze(shares, preempted)
        for share in shares:
            if not share.yields_token:
                share.request.num_computed_tokens += share.num_tokens
        return plan


class EmitsPastTheEnd(ContinuousBatchingScheduler):
    def _advance(self, scheduled: ScheduledRequest, sampled: SampledTokens | None) -> None:
        tracker = self._trackers[scheduled.request_id]
        super()._advance(scheduled, sampled)
        num_emitted = scheduled.request.num_tokens - scheduled.end
        if sampled is not None and num_emitted < len(sampled.token_ids):
            last = self._outputs.pop()
            tracker.append(sampled.token_ids[num_emitted])
            rest = tracker.take_output()
            self._outputs.append(replace(rest, tokens=last.tokens + rest.tokens))


class LeaksFinishedBlocks(ContinuousBatchingScheduler):
    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> list[str]:
        finished = super().update(plan, result)
        for name in finished:
            self.block_manager.allocate(f"ghost of {name}", 1)
        return finished


class LeaksAbortedBlocks(ContinuousBatchingScheduler):
    def abort(self, request_id: str) -> None:
        if self._requests[request_id] in self._running:
            self.block_manager.fork(request_id, f"ghost of {request_id}")
        super().abort(request_id)


class RollsBackAllButOne(ContinuousBatchingScheduler):
    def _roll_back(self, plan: SchedulerOutput) -> None:
        super()._roll_back(replace(plan, scheduled=plan.scheduled[:-1]))


class FailsTheWholeStep(ContinuousBatchingScheduler):
    def _run_one_by_one(self, plan: SchedulerOutput) -> list[str]:
        for scheduled in plan.scheduled:
            self._fail(scheduled.request, RuntimeError("a request fails"))
        return [s.request_id for s in plan.scheduled]


class ForgetsTheCulpritsNeighbours(ContinuousBatchingScheduler):
    def _run_one_by_one(self, plan: SchedulerOutput) -> list[str]:
        finished: list[str] = []
        for scheduled in plan.scheduled:
            finished += super()._run_one_by_one(replace(plan, scheduled=(scheduled,)))
            if scheduled.request.finish_reason is FinishReason.ERROR:
                break
        return finished


MUTANTS: list[type[ContinuousBatchingScheduler]] = [
    PreemptsTheOldest,
    PreemptsWithoutNeed,
    KeepsVictimsBlocks,
    KeepsComputedTokens,
    ComesBackTooEarly,
    AdmitsTheYoungest,
    AdmitsBeyondMaxBatch,
    IgnoresTheTokenBudget,
    DraftsPastTheEnd,
    KeepsDraftSlots,
    AdvancesByDrafted,
    AdvancesBeforeTheStep,
    EmitsPastTheEnd,
    LeaksFinishedBlocks,
    LeaksAbortedBlocks,
    RollsBackAllButOne,
    FailsTheWholeStep,
    ForgetsTheCulpritsNeighbours,
]
