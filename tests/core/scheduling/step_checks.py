"""What a step may do, worked out from what stood before it.

Who may be preempted, who may come back, who must wait for whom, how much may be computed. The plan is looked at when it
has been carried out, so all that was true before is remembered first.
"""

from collections import Counter
from collections.abc import Sequence
from random import Random

from core.memory.block_manager import BlockManager
from core.request import Request, RequestStatus
from core.scheduling.queues import family_size
from core.step import DraftChoice, ScheduledRequest, SchedulerOutput
from tests.core.scheduling.checked_runner import CheckedRunner


class RandomDrafts:
    """A draft policy that changes its mind in every step."""

    def __init__(self, *, uses_draft_model: bool) -> None:
        self.uses_draft_model = uses_draft_model
        self.random = Random(0)
        self.allowed: dict[str, int] = {}  # by the last choice

    def choose(self, requests: Sequence[Request], num_requests: int) -> DraftChoice:
        limit = self.random.choice([0, 1, 9, 9])
        self.allowed = {r.request_id: self.random.randint(0, min(limit, r.num_drafts_wanted)) for r in requests}
        return DraftChoice(self.allowed, follows=self.random.random() < 0.5)


class StepChecks:
    """Of the scheduler's machine, which sets what is named here."""

    manager: BlockManager
    runner: CheckedRunner
    num_blocks: int
    block_size: int
    max_batch: int
    token_limit: int | None
    max_model_len: int | None
    shares_prefixes: bool
    groups: dict[str, str]
    unfinished: dict[str, Request]
    drafts: RandomDrafts

    def ceiling(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    def running(self) -> list[Request]:
        return [r for r in self.unfinished.values() if r.status is RequestStatus.RUNNING]

    def waiting(self) -> list[Request]:
        unborn = {sibling.request_id for r in self.unfinished.values() for sibling in r.siblings}
        return [r for n, r in self.unfinished.items() if r.status is not RequestStatus.RUNNING and n not in unborn]

    def remember(self) -> None:
        """What the next step is judged by."""
        self.free_before = self.manager.num_free_blocks
        self.running_before, self.waiting_before = self.running(), self.waiting()
        self.places_before = {r.request_id: family_size(r) for r in self.unfinished.values()}
        self.tables_before = {r.request_id: self.manager.block_table(r.request_id) for r in self.running_before}
        self.slots_before = {r.request_id: r.num_computed_tokens for r in self.running_before}
        self.preempted_before = {n for n, r in self.unfinished.items() if r.status is RequestStatus.PREEMPTED}
        self.tokens_before = {n: list(r.token_ids) for n, r in self.unfinished.items()}

    # What a step may do

    def check_plan(self, plan: SchedulerOutput) -> None:
        assert self.token_limit is None or 1 <= plan.num_tokens <= self.token_limit
        assert self.token_limit is None or sum(s.num_draft_catch_up for s in plan.scheduled) <= self.token_limit
        for s in plan.scheduled:
            assert s.num_tokens >= 1
            most = s.request.num_prompt_tokens + s.request.max_tokens
            most = most if self.max_model_len is None else min(most, self.max_model_len)
            # As the plan was made: tokens known then, drafts, and the one that the target adds.
            assert not s.num_draft_slots or s.end + s.num_draft_slots + 1 <= most, "a draft that cannot be emitted"
            assert self.ceiling(s.end + s.num_draft_slots) == len(s.block_ids)
            assert s.num_draft_slots <= self.drafts.allowed.get(s.request_id, 0), "more drafts than the policy allows"

    def check_preemptions(self, plan: SchedulerOutput) -> None:
        """Youngest first, and each only while free blocks do not cover one token for everyone the budget reaches."""
        left, gone = [r.request_id for r in self.running_before], set[str]()
        for victim in plan.preempted:
            asking = left if self.token_limit is None else left[: self.token_limit]
            held = Counter(block for name in left for block in self.tables_before[name])
            num_free = self.free_before + len(self.blocks_of(gone) - set(held))
            assert self.num_blocks_asked(asking, held) > num_free, "preempted while free blocks cover what is asked"
            assert len(left) > 1, "the oldest is never a victim"
            assert victim == left.pop()
            gone.add(victim)

    def blocks_of(self, names: set[str]) -> set[int]:
        return {block for name in names for block in self.tables_before[name]}

    def num_blocks_asked(self, names: list[str], held: Counter[int]) -> int:
        """One for whoever has filled its last block, and a copy for all but one that share one partly filled."""
        partial = [n for n in names if self.slots_before[n] % self.block_size]
        sharing = Counter(self.tables_before[name][-1] for name in partial)
        return len(names) - len(partial) + sum(min(num, held[b] - 1) for b, num in sharing.items())

    def check_admissions(self, plan: SchedulerOutput) -> None:
        """Nobody in a step that preempts; a preempted request comes back to room for all its tokens and one more."""
        used = {block for name, table in self.tables_before.items() for block in table}
        for s in plan.scheduled:
            table = s.block_ids[: self.ceiling(s.end)]
            if s.request_id not in self.tables_before:
                assert not plan.preempted, "admitted in a step that preempts"
                if s.request_id in self.preempted_before:
                    shared = sum(1 for block in s.block_ids[: s.start // self.block_size] if block in used)
                    needed = min(self.ceiling(len(self.tokens_before[s.request_id]) + 1), self.num_blocks)
                    assert needed - shared <= self.num_blocks - len(used), "comes back too early"
            used |= set(table)
        for s in plan.scheduled:
            if s.request_id not in self.tables_before:
                assert s.start % self.block_size == 0
                assert self.shares_prefixes or s.request_id in self.preempted_before or s.start == 0

    def check_who_waits(self, plan: SchedulerOutput) -> None:
        """First come, first served, but for those that wait for a block that somebody older computes in this step.

        And nobody that could run waits without a reason: places, tokens or blocks are short.
        """
        if plan.preempted:
            return
        order = [s.request_id for s in plan.scheduled]
        admitted = [s for s in plan.scheduled if s.request_id not in self.tables_before]
        num_passed, may_be_blocked = 0, False
        for waiting in self.waiting_before:
            if waiting.request_id in order:
                share = plan.scheduled[order.index(waiting.request_id)]
                assert not self.is_computed_by(waiting, share.start, plan.scheduled[: order.index(waiting.request_id)])
                num_passed += 1
            elif self.can_wait_for_somebody(waiting, plan):
                may_be_blocked |= self.lacks_room(waiting, plan)
            else:
                assert num_passed == len(admitted), "somebody passed a request that waits for nobody"
                assert may_be_blocked or self.lacks_room(waiting, plan), "nothing keeps a request from running"
                return

    def is_computed_by(self, waiting: Request, start: int, shares: tuple[ScheduledRequest, ...]) -> bool:
        """Whether a block of its prompt that it could hit, the one that begins at `start`, is in somebody's share."""
        name, end = waiting.request_id, start + self.block_size
        tokens = self.tokens_before[name]
        if not self.shares_prefixes or end >= waiting.num_prompt_tokens:
            return False
        return any(
            s.start < end <= s.end
            and s.request_id not in self.runner.undisturbed
            and s.start < s.request.num_prompt_tokens
            and self.groups[s.request_id] == self.groups[name]
            and self.tokens_before[s.request_id][:end] == tokens[:end]
            for s in shares
        )

    def can_wait_for_somebody(self, waiting: Request, plan: SchedulerOutput) -> bool:
        starts = range(0, waiting.num_prompt_tokens, self.block_size)
        return any(self.is_computed_by(waiting, start, plan.scheduled) for start in starts)

    def lacks_room(self, waiting: Request, plan: SchedulerOutput) -> bool:
        """Asked of the plan as it was before drafts took what was left."""
        places = sum(
            self.places_before[name] for name in {*self.tables_before, *(s.request_id for s in plan.scheduled)}
        )
        num_tokens = sum(s.num_tokens for s in plan.scheduled)
        used = {block for table in self.tables_before.values() for block in table}
        used |= {block for s in plan.scheduled for block in s.block_ids[: self.ceiling(s.end)]}
        needed = self.ceiling(len(self.tokens_before[waiting.request_id]) + 1)
        return (
            places + self.places_before[waiting.request_id] > self.max_batch
            or num_tokens == self.token_limit
            or needed > self.num_blocks - len(used)
        )
