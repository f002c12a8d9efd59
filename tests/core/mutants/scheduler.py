"""Schedulers that are wrong in one way each. The machine must tell every one of them from the real one.

Who runs, and what they may have:
PreemptsTheOldest           the oldest running request gives way
PreemptsWithoutNeed         somebody gives way while a block is free
KeepsVictimsBlocks          a preempted request stays in its blocks
ComesBackAheadOfItself      a preempted request believes that KV of a token more than it hit is there
ComesBackTooEarly           a preempted request is admitted to room for its first chunk only
AdmitsTheYoungest           last come, first served
AdmitsBeyondMaxBatch        a request more than there are places
IgnoresTheTokenBudget       computes whatever is missing
DraftsPastTheEnd            draft slots for tokens that max_tokens forbids
DraftsUnasked               a draft more than the policy allows
DraftsBeforeCatchingUp      draft slots for a request that the draft model has not caught up with
CatchesUpAtOnce             the draft model computes whatever it lacks

What a step leaves behind:
KeepsDraftSlots             slots of rejected drafts stay reserved
AdvancesByDrafted           rejected drafts count as computed
AdvancesBeforeTheStep       a chunk counts as computed when it is scheduled
EmitsPastTheEnd             what an accepted run brings behind its end is said as well
LeaksFinishedBlocks         a finished request's blocks stay taken
LeaksAbortedBlocks          an aborted request's blocks stay taken
RollsBackAllButOne          after a step that raised, the last request keeps its reservation
FailsTheWholeStep           one culprit takes everybody in the step with it
ForgetsTheCulpritsNeighbours  behind a culprit, nobody is run again

Samples of one prompt:
ForksAReferenceTooFew       a sibling's last block is not counted as shared
MissesTheCopy               the writer has a block of its own, which nobody fills
LeavesTheSourceUnpinned     the source of a copy under way is held by nobody
BornBehindItsParent         a sibling believes that one token less has KV
SpeaksForItsSiblings        siblings are born with the parent's token, not with their own
TakesItsSiblingsAlong       unborn siblings end with the request that is aborted
HeirStartsOver              who inherits an aborted request's blocks does not know of their KV

Shared prefixes:
PublishesBeforeTheStep      a hash can be found before anybody has computed the block
LeavesOutTheSalt            tenants hit each other's blocks
HitsTheLastToken            a full hit leaves nothing to compute, so there are no logits
DoesNotWait                 a block that somebody is computing in this step is computed twice
WaitsForEver                a request waits for blocks that nobody computes
ResetSparesTheRunning       those that run bring back what the reset has hidden

The second tier:
KeepsAFailedStore           what a failed step was to store is found, and is not there
ForgetsToStore              the second tier believes that it has what nobody copied there
LoadsIntoTheBlockBefore     contents come back one block too early
ResetForgetsTheTier         after a reset, the second tier still serves
BelievesTheDraftHalf        the draft model's half of a stored block counts as filled, whatever it is
KeepsTheDraftMark           so does that of a block that is taken again
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from core.memory.block_manager import BlockManager
from core.memory.block_pool import BlockPool
from core.memory.host_tier import HostTier, TierEntry
from core.request import FinishReason, Request
from core.scheduling.planner import StepPlanner, _Share
from core.scheduling.policy import FirstComeFirstServed
from core.scheduling.scheduler import ContinuousBatchingScheduler
from core.step import DraftChoice, ModelRunnerOutput, SampledTokens, ScheduledRequest, SchedulerOutput


class _OldestFirst(FirstComeFirstServed):
    def victim(self, running: Sequence[Request]) -> Request | None:
        return running[0] if len(running) > 1 else None


class _YoungestFirst(FirstComeFirstServed):
    def admission_order(self, waiting: Sequence[Request]) -> Sequence[Request]:
        return waiting[::-1]


class PreemptsTheOldest(StepPlanner):
    def _preempt_one(self) -> str:
        self._policy = _OldestFirst()
        return super()._preempt_one()


class PreemptsWithoutNeed(StepPlanner):
    def _schedule_running(self) -> list[str]:
        too_early = []
        if len(self._queues.running) > 1 and self._manager.num_free_blocks == 1:
            too_early.append(self._preempt_one())
        return too_early + super()._schedule_running()


class KeepsVictimsBlocks(StepPlanner):
    def _preempt_one(self) -> str:
        victim = self._queues.running[-1]
        self._manager.fork(victim.request_id, f"ghost of {victim.request_id} {self.num_preemptions}")
        return super()._preempt_one()


class ComesBackAheadOfItself(StepPlanner):
    def _take_in(self, request: Request, num_tokens: int) -> None:
        super()._take_in(request, num_tokens)
        if request.num_preemptions and request.num_computed_tokens == 0 and num_tokens > 1:
            request.num_computed_tokens += 1
            self._shares[-1].num_tokens -= 1


class ComesBackTooEarly(StepPlanner):
    def _may_come_back(self, request: Request, hits: list[bytes]) -> bool:
        return True


class AdmitsTheYoungest(StepPlanner):
    def _admit(self) -> None:
        self._policy = _YoungestFirst()
        super()._admit()


class AdmitsBeyondMaxBatch(StepPlanner):
    def _admit(self) -> None:
        self._max_batch += 1
        super()._admit()
        self._max_batch -= 1


class IgnoresTheTokenBudget(StepPlanner):
    def plan(self) -> SchedulerOutput:
        self._token_limit = 2**63
        return super().plan()


class DraftsPastTheEnd(StepPlanner):
    def _num_drafts(self, share: _Share, choice: DraftChoice) -> int:
        is_at_its_end = share.yields_token and not share.request.num_drafts_wanted
        return 1 if is_at_its_end else super()._num_drafts(share, choice)


class DraftsUnasked(StepPlanner):
    def _num_drafts(self, share: _Share, choice: DraftChoice) -> int:
        return min(super()._num_drafts(share, choice) + 1, share.request.num_drafts_wanted) if share.may_draft else 0


class DraftsBeforeCatchingUp(StepPlanner):
    def _plan_drafts(self) -> DraftChoice:
        choice = super()._plan_drafts()
        for share in self._shares:
            if share.may_draft and 0 < share.num_draft_catch_up < share.draft_lag:
                share.num_draft_slots = self.reserve(share.request, min(1, self._budget))
                self._budget -= share.num_draft_slots
        return choice


class CatchesUpAtOnce(StepPlanner):
    def _plan_drafts(self) -> DraftChoice:
        limit, self._token_limit = self._token_limit, 2**63
        choice = super()._plan_drafts()
        self._token_limit = limit
        return choice


class KeepsDraftSlots(ContinuousBatchingScheduler):
    def _advance(self, scheduled: ScheduledRequest, result: ModelRunnerOutput) -> list[Request]:
        reserved = self.block_manager.num_tokens(scheduled.request_id)
        members = super()._advance(scheduled, result)
        self.block_manager.append(scheduled.request_id, reserved - scheduled.request.num_computed_tokens)
        return members


class AdvancesByDrafted(ContinuousBatchingScheduler):
    def _advance(self, scheduled: ScheduledRequest, result: ModelRunnerOutput) -> list[Request]:
        members = super()._advance(scheduled, result)
        sampled = result.sampled.get(scheduled.request_id)
        if sampled is not None:
            num_rejected = sampled.num_draft_tokens - sampled.num_accepted_tokens
            scheduled.request.num_computed_tokens += num_rejected
            self.block_manager.append(scheduled.request_id, num_rejected)
        return members


class AdvancesBeforeTheStep(StepPlanner):
    def plan(self) -> SchedulerOutput:
        plan = super().plan()
        for share in self._shares:
            if not share.yields_token:
                share.request.num_computed_tokens += share.num_tokens
        return plan


class EmitsPastTheEnd(ContinuousBatchingScheduler):
    def _append(self, scheduled: ScheduledRequest, request: Request, sampled: SampledTokens | None) -> None:
        super()._append(scheduled, request, sampled)
        num_emitted = request.num_tokens - scheduled.end
        if sampled is not None and num_emitted < len(sampled.token_ids):
            last, tracker = self._outputs.pop(), self._trackers[request.request_id]
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
        if self._queues.find(request_id) in self._queues.running:
            self.block_manager.fork(request_id, f"ghost of {request_id}")
        super().abort(request_id)


class RollsBackAllButOne(ContinuousBatchingScheduler):
    def _plan_alone(self, plan: SchedulerOutput, scheduled: ScheduledRequest) -> SchedulerOutput:
        if scheduled is plan.scheduled[-1]:
            self._planner.reserve(scheduled.request, scheduled.num_tokens)
        return super()._plan_alone(plan, scheduled)


class FailsTheWholeStep(ContinuousBatchingScheduler):
    def _run_one_by_one(self, plan: SchedulerOutput) -> list[str]:
        return [name for s in plan.scheduled for name in self._fail(s.request, RuntimeError("the runner fails"))]


class ForgetsTheCulpritsNeighbours(ContinuousBatchingScheduler):
    def _run_one_by_one(self, plan: SchedulerOutput) -> list[str]:
        finished: list[str] = []
        for scheduled in plan.scheduled:
            finished += super()._run_one_by_one(replace(plan, scheduled=(scheduled,)))
            if scheduled.request.finish_reason is FinishReason.ERROR:
                break
        return finished


class ForksAReferenceTooFew(BlockManager):
    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        super().fork(parent_id, child_id)
        last = self._tables[child_id][-1]
        if self.pool.ref_count(last) > 1:
            self.pool.release(last)


class MissesTheCopy(StepPlanner):
    def plan(self) -> SchedulerOutput:
        return replace(super().plan(), block_copies=())


class LeavesTheSourceUnpinned(ContinuousBatchingScheduler):
    def schedule(self) -> SchedulerOutput:
        return self._planner.plan()


class BornBehindItsParent(ContinuousBatchingScheduler):
    def _append(self, scheduled: ScheduledRequest, request: Request, sampled: SampledTokens | None) -> None:
        if request is not scheduled.request:
            request.num_computed_tokens -= 1
            self.block_manager.truncate(request.request_id, request.num_computed_tokens)
        super()._append(scheduled, request, sampled)


class SpeaksForItsSiblings(ContinuousBatchingScheduler):
    def _append(self, scheduled: ScheduledRequest, request: Request, sampled: SampledTokens | None) -> None:
        self._spoken = sampled if request is scheduled.request else self._spoken
        super()._append(scheduled, request, self._spoken)


class TakesItsSiblingsAlong(ContinuousBatchingScheduler):
    def _hand_down(self, request: Request) -> None:
        for sibling in list(request.siblings):
            self.abort(sibling.request_id)


class HeirStartsOver(ContinuousBatchingScheduler):
    def _hand_down(self, request: Request) -> None:
        heir = request.siblings[0]
        super()._hand_down(request)
        heir.restart()


class PublishesBeforeTheStep(StepPlanner):
    def _take_in(self, request: Request, num_tokens: int) -> None:
        super()._take_in(request, num_tokens)
        size = self._manager.block_size
        if self._shares_prefixes:
            num_full = (request.num_computed_tokens + num_tokens) // size
            self._manager.publish(request.request_id, request.block_hashes(size, num_full))


class LeavesOutTheSalt(ContinuousBatchingScheduler):
    def add_request(self, request: Request) -> None:
        for member in (request, *request.siblings):
            member.cache_salt = b""
        super().add_request(request)


class HitsTheLastToken(StepPlanner):
    def _could_hit(self, request: Request, num_tokens: int) -> list[bytes]:
        return super()._could_hit(request, min(num_tokens + 1, request.num_tokens + 1))


class DoesNotWait(StepPlanner):
    def _is_being_computed(self, request: Request, num_hits: int) -> bool:
        return False


class WaitsForEver(StepPlanner):
    def _is_being_computed(self, request: Request, num_hits: int) -> bool:
        return self._queues.num_running > 0 and num_hits < len(self._could_hit(request, request.num_prompt_tokens))


class ResetSparesTheRunning(ContinuousBatchingScheduler):
    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        for request in self._queues.running:
            request.is_unshareable = False


class KeepsAFailedStore(HostTier):
    def forget(self, slots: set[int]) -> None:
        return


class ForgetsToStore(StepPlanner):
    def plan(self) -> SchedulerOutput:
        return replace(super().plan(), tier_stores=())


class LoadsIntoTheBlockBefore(StepPlanner):
    def _swap_in(self, request: Request, num_hits: int, tier_hits: list[TierEntry]) -> None:
        super()._swap_in(request, num_hits, tier_hits)
        table = self._manager.block_table(request.request_id)
        before = {block: table[i - 1] for i, block in enumerate(table)}
        self._loads = [(slot, before.get(block, block)) for slot, block in self._loads]


class ResetForgetsTheTier(ContinuousBatchingScheduler):
    def reset_prefix_cache(self) -> None:
        tier, self._tier = self._tier, None
        super().reset_prefix_cache()
        self._tier = tier


class BelievesTheDraftHalf(HostTier):
    def store(self, block_hash: bytes, *, is_draft_filled: bool) -> int | None:
        return super().store(block_hash, is_draft_filled=True)


class _KeepsMarks(BlockPool):
    def forget(self, block: int) -> None:
        was_filled = self.is_draft_filled(block)
        super().forget(block)
        if was_filled:
            self.mark_draft_filled(block)


class KeepsTheDraftMark(BlockManager):
    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.pool = _KeepsMarks(num_blocks)


Part = ContinuousBatchingScheduler | StepPlanner | BlockManager | HostTier

MUTANTS: list[type[Part]] = [
    PreemptsTheOldest,
    PreemptsWithoutNeed,
    KeepsVictimsBlocks,
    ComesBackAheadOfItself,
    ComesBackTooEarly,
    AdmitsTheYoungest,
    AdmitsBeyondMaxBatch,
    IgnoresTheTokenBudget,
    DraftsPastTheEnd,
    DraftsUnasked,
    DraftsBeforeCatchingUp,
    CatchesUpAtOnce,
    KeepsDraftSlots,
    AdvancesByDrafted,
    AdvancesBeforeTheStep,
    EmitsPastTheEnd,
    LeaksFinishedBlocks,
    LeaksAbortedBlocks,
    RollsBackAllButOne,
    FailsTheWholeStep,
    ForgetsTheCulpritsNeighbours,
    ForksAReferenceTooFew,
    MissesTheCopy,
    LeavesTheSourceUnpinned,
    BornBehindItsParent,
    SpeaksForItsSiblings,
    TakesItsSiblingsAlong,
    HeirStartsOver,
    PublishesBeforeTheStep,
    LeavesOutTheSalt,
    HitsTheLastToken,
    DoesNotWait,
    WaitsForEver,
    ResetSparesTheRunning,
    KeepsAFailedStore,
    ForgetsToStore,
    LoadsIntoTheBlockBefore,
    ResetForgetsTheTier,
    BelievesTheDraftHalf,
    KeepsTheDraftMark,
]


def on_planner(broken: type[StepPlanner]) -> type[ContinuousBatchingScheduler]:
    """The scheduler with a planner that is broken."""

    class OnPlanner(ContinuousBatchingScheduler):
        def __init__(self, *args: object, **settings: object) -> None:
            super().__init__(*args, **settings)  # type: ignore[arg-type]
            self._planner.__class__ = broken

    return OnPlanner


def parts_with(mutant: type[Part]) -> dict[str, type]:
    """The machine's parts with a broken one among them."""
    if issubclass(mutant, StepPlanner):
        return {"scheduler_class": on_planner(mutant)}
    if issubclass(mutant, BlockManager):
        return {"manager_class": mutant}
    return {"tier_class" if issubclass(mutant, HostTier) else "scheduler_class": mutant}
