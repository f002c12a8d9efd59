"""Makes the plan of a step: who computes how many tokens, in which blocks, and who gives way.

It reserves, admits and preempts, but advances nobody: tokens and their KV come with `update()`. In order: the running,
oldest first, preempting the youngest only when free blocks do not cover one token; then the waiting, as long as there
are places, tokens and blocks; then drafts, from what is left, so that they are dropped before anyone gives way.

How many drafts is a policy's affair. A draft model computes at most as many tokens in a step as the target may, besides
its drafts; a request on whose tokens it has not caught up has no draft slots yet.

A waiting request first takes over the leading blocks that the pool knows by their hashes. If the next one it could hit
is being computed by somebody in this very step, it waits a step and looks again, so that a burst with one prompt
computes it once.
"""

import logging
from collections.abc import Iterable
from itertools import islice

from core.errors import InvariantViolation
from core.memory.block_manager import BlockManager, blocks_needed
from core.memory.host_tier import HostTier, TierEntry
from core.memory.prefix_ghost import PrefixGhost
from core.request import Request, RequestStatus
from core.scheduling.drafting import DraftPolicy
from core.scheduling.policy import FirstComeFirstServed
from core.scheduling.preemption import Swaps
from core.scheduling.queues import RequestQueues, family_size
from core.step import DraftChoice, ScheduledRequest, SchedulerOutput

logger = logging.getLogger(__name__)
_UNLIMITED = 2**63


class _Share:
    """One request's part of a plan in the making."""

    __slots__ = ("num_draft_catch_up", "num_draft_slots", "num_tokens", "request")

    def __init__(self, request: Request, num_tokens: int) -> None:
        self.request = request
        self.num_tokens = num_tokens
        self.num_draft_slots = 0
        self.num_draft_catch_up = 0

    @property
    def yields_token(self) -> bool:
        return self.num_tokens == self.request.num_missing_tokens

    @property
    def may_draft(self) -> bool:
        """Siblings about to be born have one row of logits for all."""
        return self.request.num_drafts_wanted > 0 and self.yields_token and not self.request.siblings

    @property
    def draft_lag(self) -> int:
        """Tokens with KV after this step that the draft model has not computed."""
        return self.request.num_computed_tokens + self.num_tokens - self.request.num_draft_computed_tokens


class StepPlanner:
    """Plans over one pool and one pair of queues.

    Args:
        max_batch: most places taken at once.
        max_num_batched_tokens: most tokens computed in a step; None for no limit.
        max_model_len: prompt and output together never pass it; None for no limit.
        shares_prefixes: let requests hit blocks of others.
        tier: where victims' blocks are copied; None for no second tier.
        swaps: whether they are, for each victim.
        ghost: told of every prompt that is looked up.
        drafting: how many drafts each may have.
    """

    def __init__(
        self,
        queues: RequestQueues,
        block_manager: BlockManager,
        policy: FirstComeFirstServed,
        *,
        max_batch: int,
        max_num_batched_tokens: int | None,
        max_model_len: int | None,
        shares_prefixes: bool,
        tier: HostTier | None,
        swaps: Swaps,
        ghost: PrefixGhost | None,
        drafting: DraftPolicy,
    ) -> None:
        self.num_preemptions = 0
        self.num_deferred = 0  # requests that the last plan let wait for a block being computed
        self._queues = queues
        self._manager = block_manager
        self._policy = policy
        self._max_batch = max_batch
        self._token_limit = max_num_batched_tokens or _UNLIMITED
        self._max_model_len = max_model_len or _UNLIMITED
        self._shares_prefixes = shares_prefixes
        self._tier = tier
        self._swaps = swaps
        self._ghost = ghost
        self._drafting = drafting
        self._num_steps = 0
        self._shares: list[_Share] = []
        self._budget = 0
        self._in_flight: set[bytes] = set()
        self._stores: list[tuple[int, int]] = []
        self._loads: list[tuple[int, int]] = []

    def plan(self) -> SchedulerOutput:
        """Reserve blocks for the next step and say who computes what."""
        self._shares, self._budget, self._in_flight = [], self._token_limit, set()
        self._stores, self._loads, self.num_deferred = [], [], 0
        preempted = self._schedule_running()
        if not preempted:
            self._admit()
        draft_choice = self._plan_drafts()
        if not self._shares:
            raise InvariantViolation("requests are unfinished, yet none can be scheduled")
        self._num_steps += 1
        scheduled = [
            self.scheduled(s.request, s.num_tokens, s.num_draft_slots, s.num_draft_catch_up) for s in self._shares
        ]
        return SchedulerOutput(
            self._num_steps,
            tuple(scheduled),
            tuple(self._manager.take_copies()),
            tuple(preempted),
            tuple(self._stores),
            tuple(self._loads),
            draft_choice,
        )

    def scheduled(
        self, request: Request, num_tokens: int, num_draft_slots: int, num_draft_catch_up: int
    ) -> ScheduledRequest:
        """What is reserved for a request, with its table as it is now."""
        table = self._manager.block_table(request.request_id)
        start = request.num_computed_tokens
        return ScheduledRequest(request, start, num_tokens, num_draft_slots, table, num_draft_catch_up)

    def reserve(self, request: Request, num_tokens: int) -> int:
        """Reserve slots for that many tokens, or for as many as there is room for; returns how many."""
        if num_tokens == 0 or self._manager.append(request.request_id, num_tokens) is not None:
            return num_tokens
        num_tokens = self._manager.max_append(request.request_id)
        if self._manager.append(request.request_id, num_tokens) is None:
            raise InvariantViolation(f"{num_tokens} tokens of {request!r} do not fit where they should")
        return num_tokens

    # The running

    def _schedule_running(self) -> list[str]:
        """Give each its tokens, oldest first; returns the ids of those that had to give way."""
        preempted: list[str] = []
        running = list(self._queues.running)
        for i, request in enumerate(running):
            if self._budget == 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted by an older one
            num_tokens = self._reserve_catch_up(request, islice(running, i + 1, None))
            while num_tokens == 0:
                preempted.append(self._preempt_one())
                if request.status is not RequestStatus.RUNNING:
                    break  # it was the youngest itself
                num_tokens = self._reserve_catch_up(request, islice(running, i + 1, None))
            if num_tokens:
                self._take_in(request, num_tokens)
        return preempted

    def _reserve_catch_up(self, request: Request, younger: Iterable[Request]) -> int:
        num_tokens = min(request.num_missing_tokens, self._budget)
        if num_tokens > 1:
            num_tokens = min(num_tokens, self._room_beside(request, younger))
        return self.reserve(request, num_tokens)

    def _room_beside(self, request: Request, younger: Iterable[Request]) -> int:
        """Tokens it can have so that nobody younger gives way, or goes short, for a chunk that could have been shorter.

        At least 1. It may be far behind those younger than it: they passed it while it waited for a block.
        """
        manager = self._manager
        still_running = [r.request_id for r in younger if r.status is RequestStatus.RUNNING]
        num_asked = sum(1 for request_id in still_running if manager.needs_block(request_id))
        num_slots = manager.max_append(request.request_id) - num_asked * manager.block_size
        return max(1, min(num_slots, self._budget - len(still_running)))

    def _take_in(self, request: Request, num_tokens: int) -> None:
        self._shares.append(_Share(request, num_tokens))
        self._budget -= num_tokens
        if request.num_computed_tokens < request.num_prompt_tokens:
            self._in_flight.update(self._blocks_being_computed(request, num_tokens))

    def _preempt_one(self) -> str:
        running = self._queues.running
        victim = self._policy.victim(running)
        if victim is None:
            raise InvariantViolation(f"{running[0]!r} runs alone and does not fit; it should have been refused")
        self._swap_out(victim)
        self._manager.free(victim.request_id)
        victim.status = RequestStatus.PREEMPTED
        victim.restart()
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._queues.set_waiting(victim)
        logger.debug("request preempted", extra={"request_id": victim.request_id, "num_tokens": victim.num_tokens})
        return victim.request_id

    def _swap_out(self, victim: Request) -> None:
        """Have those of its full blocks that nobody else holds copied to the second tier."""
        manager = self._manager
        num_full = min(victim.num_computed_tokens, victim.num_tokens) // manager.block_size
        if self._tier is None or victim.is_unshareable or not self._swaps(victim.num_computed_tokens, num_full):
            return
        hashes = victim.block_hashes(manager.block_size, num_full)
        num_filled = victim.num_draft_computed_tokens // manager.block_size
        for i, block in enumerate(manager.block_table(victim.request_id)[:num_full]):
            if manager.pool.ref_count(block) == 1:
                slot = self._tier.store(hashes[i], is_draft_filled=i < num_filled)
                if slot is not None:
                    self._stores.append((block, slot))

    # The waiting

    def _admit(self) -> None:
        if self._queues.num_running >= self._max_batch:
            return
        for request in self._policy.admission_order(self._queues.waiting):
            if self._budget == 0 or self._queues.num_running + family_size(request) > self._max_batch:
                return
            hits, tier_hits = self._hits(request)
            if self._is_being_computed(request, len(hits) + len(tier_hits)):
                self.num_deferred += 1
            elif not self._admit_one(request, hits, tier_hits):
                return

    def _admit_one(self, request: Request, hits: list[bytes], tier_hits: list[TierEntry]) -> bool:
        manager = self._manager
        num_cached = (len(hits) + len(tier_hits)) * manager.block_size
        num_tokens = min(request.num_tokens - num_cached, self._budget)
        if not self._may_come_back(request, hits):
            return False
        if manager.allocate(request.request_id, num_cached + num_tokens, block_hashes=hits) is None:
            return False
        if request.status is RequestStatus.WAITING:
            if self._ghost is not None and not request.needs_every_row:
                self._ghost.look_up(self._could_hit(request, request.num_tokens), request.num_tokens)
            request.num_cached_tokens = num_cached
            request.num_host_cached_tokens = len(tier_hits) * manager.block_size
        self._swap_in(request, len(hits), tier_hits)
        request.num_computed_tokens = num_cached
        request.num_published_blocks = len(hits)
        request.num_draft_filled_blocks = manager.num_draft_filled(request.request_id)
        request.num_draft_computed_tokens = request.num_draft_filled_blocks * manager.block_size
        self._queues.set_running(request)
        self._take_in(request, num_tokens)
        return True

    def _swap_in(self, request: Request, num_hits: int, tier_hits: list[TierEntry]) -> None:
        """Have its next blocks filled from the second tier."""
        table = self._manager.block_table(request.request_id)
        for i, entry in enumerate(tier_hits, start=num_hits):
            self._loads.append((entry.slot, table[i]))
            if entry.is_draft_filled:
                self._manager.mark_draft_filled(request.request_id, i, i + 1)

    def _may_come_back(self, request: Request, hits: list[bytes]) -> bool:
        """A preempted request waits for room for all its tokens and one more, or it would only be preempted again."""
        if request.status is not RequestStatus.PREEMPTED:
            return True
        manager = self._manager
        needed = min(blocks_needed(request.num_tokens + 1, manager.block_size), manager.num_blocks)
        return needed - manager.num_in_use(hits) <= manager.num_free_blocks

    # Prefixes

    def _could_hit(self, request: Request, num_tokens: int) -> list[bytes]:
        """Hashes of the leading full blocks among so many tokens that are needed for nothing but their KV."""
        if not self._shares_prefixes and self._tier is None:
            return []
        size = self._manager.block_size
        return request.block_hashes(size, min(num_tokens - 1, request.num_unneeded_rows) // size)

    def _hits(self, request: Request) -> tuple[list[bytes], list[TierEntry]]:
        """Its leading blocks that the pool holds, and those behind them that the second tier holds."""
        hashes = self._could_hit(request, request.num_tokens)
        num_known = self._manager.num_known(hashes)
        tier_hits = [] if self._tier is None else self._tier.leading_hits(hashes[num_known:])
        return hashes[:num_known], tier_hits

    def _is_being_computed(self, request: Request, num_hits: int) -> bool:
        """True if the next prompt block it could hit will exist after this step."""
        hashes = self._could_hit(request, request.num_prompt_tokens)
        return num_hits < len(hashes) and hashes[num_hits] in self._in_flight

    def _blocks_being_computed(self, request: Request, num_tokens: int) -> list[bytes]:
        size = self._manager.block_size
        start, end = request.num_computed_tokens // size, (request.num_computed_tokens + num_tokens) // size
        if not self._shares_prefixes or request.is_unshareable or start == end:
            return []
        return request.block_hashes(size, end)[start:]

    # Drafts

    def _plan_drafts(self) -> DraftChoice:
        """Catch-up of the draft model and draft slots, oldest first, as far as the policy's choice can be met."""
        candidates = [s for s in self._shares if s.may_draft]
        unscripted = [s.request for s in candidates if s.request.script is None]
        choice = self._drafting.choose(unscripted, len(self._shares))
        draft_budget = self._token_limit
        for share in self._shares if self._drafting.uses_draft_model else candidates:
            num_drafts = self._num_drafts(share, choice)
            if self._is_followed(share, choice, num_drafts):
                share.num_draft_catch_up = min(share.draft_lag, draft_budget)
                draft_budget -= share.num_draft_catch_up
                if share.num_draft_catch_up < share.draft_lag:
                    continue
            share.num_draft_slots = self.reserve(share.request, min(num_drafts, self._budget))
            self._budget -= share.num_draft_slots
        return choice

    def _num_drafts(self, share: _Share, choice: DraftChoice) -> int:
        if not share.may_draft:
            return 0
        request = share.request
        wanted = request.num_drafts_wanted
        if request.script is None:  # scripts say their groups in one step, however many run
            wanted = min(wanted, choice.num_drafts.get(request.request_id, 0))
        context_left = self._max_model_len - request.num_tokens - 1  # one token more comes behind the drafts
        return max(0, min(wanted, context_left))

    def _is_followed(self, share: _Share, choice: DraftChoice, num_drafts: int) -> bool:
        """Whether the draft model computes its tokens: it drafts, or its prompt is to be known when it does.

        Samples about to be born are always followed: each of them would have to catch up on the prompt alone.
        """
        request = share.request
        if not self._drafting.uses_draft_model or not request.num_speculative_tokens or request.script is not None:
            return False
        is_prompt = request.num_computed_tokens < request.num_prompt_tokens
        return num_drafts > 0 or bool(request.siblings) or (choice.follows and is_prompt)
