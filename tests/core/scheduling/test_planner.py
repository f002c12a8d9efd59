"""Plans by example: what is hit, who waits for whom, who comes back, what is moved, who has drafts.

Nothing is computed here: `Planning` advances requests as if it had been. The machine mixes all of it with the rest.
"""

from collections.abc import Sequence

import pytest

from core.errors import InvariantViolation
from core.memory.block_manager import BlockManager
from core.memory.host_tier import HostTier
from core.memory.prefix_ghost import PrefixGhost
from core.request import Request, RequestStatus
from core.scheduling.drafting import FixedDrafts
from core.scheduling.planner import StepPlanner
from core.scheduling.policy import FirstComeFirstServed
from core.scheduling.preemption import Swaps, always_swap
from core.scheduling.queues import RequestQueues
from core.step import SchedulerOutput
from tests.builders import family, request


class Planning:
    """A planner over a pool of its own, and steps that compute nothing."""

    def __init__(
        self,
        *requests: Request,
        num_blocks: int = 20,
        block_size: int = 2,
        max_batch: int = 4,
        token_limit: int | None = None,
        shares_prefixes: bool = True,
        num_tier_slots: int = 0,
        swaps: Swaps = always_swap,
        ghost: PrefixGhost | None = None,
    ) -> None:
        self.manager = BlockManager(num_blocks, block_size)
        self.queues = RequestQueues()
        self.tier = HostTier(num_tier_slots) if num_tier_slots else None
        self.planner = StepPlanner(
            self.queues,
            self.manager,
            FirstComeFirstServed(),
            max_batch=max_batch,
            max_num_batched_tokens=token_limit,
            max_model_len=None,
            shares_prefixes=shares_prefixes,
            tier=self.tier,
            swaps=swaps,
            ghost=ghost,
            drafting=FixedDrafts(),
        )
        self.add(*requests)

    def add(self, *requests: Request) -> None:
        for each in requests:
            self.queues.add(each)

    def step(self) -> SchedulerOutput:
        """Plan, and let everybody have got on: KV, a token 0 for those that yield, blocks to be found."""
        plan = self.planner.plan()
        for s in plan.scheduled:
            s.request.num_computed_tokens = s.end
            self.manager.truncate(s.request_id, s.end)
            num_full = s.end // self.manager.block_size
            self.manager.publish(s.request_id, s.request.block_hashes(self.manager.block_size, num_full))
            if s.end == s.request.num_tokens:
                s.request.token_ids.append(0)
        return plan

    def end(self, ended: Request) -> None:
        self.manager.free(ended.request_id)
        self.queues.remove(ended)


def shares(plan: SchedulerOutput) -> dict[str, tuple[int, int]]:
    """By request: where it starts, how many tokens it computes."""
    return {s.request_id: (s.start, s.num_tokens) for s in plan.scheduled}


def test_a_plan_for_nobody_is_our_own_mistake():
    with pytest.raises(InvariantViolation, match="none can be scheduled"):
        Planning().step()


def test_who_runs_alone_and_does_not_fit_should_have_been_refused():
    it = Planning(request("a", [1] * 4, 9), num_blocks=2)
    it.step()

    with pytest.raises(InvariantViolation, match="runs alone and does not fit; it should have been refused"):
        it.step()


def test_steps_are_numbered():
    it = Planning(request("a", [1], 9))

    assert [1, 2, 3] == [it.step().step for _ in range(3)]


# Hits


@pytest.mark.parametrize(("prompt", "num_cached"), [([1, 2, 3, 4, 5], 4), ([1, 2, 3, 4], 2), ([1, 2], 0), ([1, 3], 0)])
def test_full_leading_blocks_are_hit_and_a_token_is_always_left(prompt: Sequence[int], num_cached: int):
    first, second = request("a", [1, 2, 3, 4, 5, 6]), request("b", prompt)
    it = Planning(first)
    it.step()
    it.add(second)
    plan = it.step()

    assert (num_cached, len(prompt) - num_cached) == shares(plan)["b"]
    assert (num_cached, 0) == (second.num_cached_tokens, second.num_host_cached_tokens)
    num_hits = num_cached // 2
    assert it.manager.block_table("a")[:num_hits] == it.manager.block_table("b")[:num_hits]


@pytest.mark.parametrize("settings", [{"shares_prefixes": False}, {}])
def test_without_sharing_or_under_another_salt_nothing_is_hit(settings: dict[str, bool]):
    salt = b"" if settings else b"salt"
    it = Planning(request("a", [1, 2, 3]), **settings)  # type: ignore[arg-type]
    it.step()
    if settings:  # as the scheduler does: without sharing nothing is published
        it.manager.pool.forget_hashes()
    it.add(request("b", [1, 2, 3], salt=salt))

    assert (0, 3) == shares(it.step())["b"]


def test_behind_the_pools_hits_come_those_of_the_second_tier():
    """Of seven tokens the pool has two, the tier the next four; blocks to be filled from there are in the plan."""
    it = Planning(num_tier_slots=4)
    assert it.tier is not None
    wanted = request("a", [1, 2, 3, 4, 5, 6, 7])
    hashes = wanted.block_hashes(2, 3)
    it.manager.allocate("other", 2)
    it.manager.publish("other", hashes[:1])
    for block_hash in (b"else", *hashes[1:]):
        it.tier.store(block_hash, is_draft_filled=block_hash == hashes[1])
    it.add(wanted)
    plan = it.planner.plan()

    table = it.manager.block_table("a")
    assert {"a": (6, 1)} == shares(plan)
    assert ((1, table[1]), (2, table[2])) == plan.tier_loads
    assert (6, 4) == (wanted.num_cached_tokens, wanted.num_host_cached_tokens)
    assert [False, True, False] == [it.manager.pool.is_draft_filled(block) for block in table[:3]]
    assert it.manager.block_table("other") == table[:1]


def test_the_draft_model_has_what_the_leading_filled_blocks_hold():
    first, second = request("a", [1, 2, 3, 4, 5]), request("b", [1, 2, 3, 4, 5])
    it = Planning(first)
    it.step()
    it.manager.mark_draft_filled("a", 0, 1)
    it.add(second)
    it.planner.plan()

    assert (4, 2, 1) == (second.num_computed_tokens, second.num_draft_computed_tokens, second.num_draft_filled_blocks)


def test_a_prompt_is_looked_up_once_whatever_becomes_of_it():
    ghost = PrefixGhost(2, 4)
    a, b = request("a", [1, 2, 3], 4), request("b", [1, 2, 4], 4)
    it = Planning(a, b, num_blocks=4, ghost=ghost)
    for _ in range(4):
        it.step()
    assert 1 == b.num_preemptions
    it.end(a)
    ghost.publish(b.block_hashes(2, 1))
    it.step()
    ghost.look_up([], 6)  # to as many again the hit rate would tell of a second look-up

    assert RequestStatus.RUNNING is b.status
    assert (0.0, 12) == (ghost.infinite_hit_rate, ghost._num_queried_tokens)


def test_a_prompt_that_could_hit_nothing_is_not_looked_up():
    """Each of its rows is wanted; what a larger cache would have hit is nothing either."""
    ghost = PrefixGhost(2, 4)
    it = Planning(request("a", [1, 2, 3], num_prompt_logprobs=0), request("b", [4, 3, 2, 1]), ghost=ghost)
    it.step()

    assert 4 == ghost._num_queried_tokens


# Waiting for a block being computed


def test_a_long_prompt_leaves_a_token_to_each_of_those_that_passed_it():
    """It is older than they are, and as long as it has anything to compute it could have the whole budget."""
    long, passing = request("b", [1, 2, *range(20)]), request("c", [9, 9])
    it = Planning(request("a", [1, 2, 3]), long, passing, token_limit=6)

    assert {"a": (0, 3), "c": (0, 2)} == shares(it.step())
    assert {"a": (3, 1), "c": (2, 1), "b": (2, 4)} == shares(it.step())
    assert {"a": (4, 1), "b": (6, 4), "c": (3, 1)} == shares(it.step())


def test_a_request_waits_for_a_block_that_is_being_computed_and_hits_it_in_the_next_step():
    it = Planning(*(request(name, [1, 2, 3, 4, 5]) for name in "abc"))

    assert {"a": (0, 5)} == shares(it.step())
    assert (2, 1) == (it.planner.num_deferred, it.queues.num_running)
    assert {"a": (5, 1), "b": (4, 1), "c": (4, 1)} == shares(it.step())
    assert 0 == it.planner.num_deferred


def test_others_pass_whoever_waits_for_a_block():
    it = Planning(request("a", [1, 2, 3]), request("b", [1, 2, 3]), request("c", [7, 2, 3]))

    assert ["a", "c"] == [s.request_id for s in it.step().scheduled]


def test_whoever_waited_computes_only_what_it_could_not_hit():
    """b could hit six blocks of one token, of which a computes all: it has to compute its last token itself."""
    it = Planning(request("a", [1, 2, 3, 4, 5, 6, 7]), request("b", [1, 2, 3, 4, 5, 6, 9]), token_limit=6, block_size=1)
    plans = [shares(it.step()) for _ in range(3)]

    assert [{"a": (0, 6)}, {"a": (6, 1), "b": (6, 1)}, {"a": (7, 1), "b": (7, 1)}] == plans


@pytest.mark.parametrize(
    ("second", "settings"),
    [
        (request("b", [1, 2]), {}),  # its only block holds its last token
        (request("b", [1, 3, 3]), {}),
        (request("b", [1, 2, 3], salt=b"salt"), {}),
        (request("b", [1, 2, 3]), {"shares_prefixes": False}),
        (request("b", [1, 2, 3]), {"block_size": 4}),  # no full block
    ],
)
def test_nobody_waits_for_a_block_that_it_could_not_hit(second: Request, settings: dict[str, int]):
    it = Planning(request("a", [1, 2, 3]), second, **settings)  # type: ignore[arg-type]

    assert {"a", "b"} == set(shares(it.step()))


def test_nobody_waits_for_a_block_that_will_not_be_shared():
    """What a computes builds on KV from before a reset."""
    a = request("a", [1, 2, 3, 4, 5])
    it = Planning(a)
    it.step()
    it.manager.pool.forget_hashes()
    it.manager.truncate("a", 1)
    a.num_computed_tokens, a.is_unshareable = 1, True
    it.add(request("b", [1, 2, 3, 4, 5]))

    assert {"a": (1, 5), "b": (0, 5)} == shares(it.step())


# Giving way and coming back


def collide(**settings: object) -> tuple[Planning, Request, Request]:
    """Five slots in blocks of one: old has three tokens, young two; old's next needs a block."""
    old, young = request("old", [1, 2, 3], 4), request("young", [4, 5], 3)
    it = Planning(old, young, num_blocks=5, block_size=1, **settings)  # type: ignore[arg-type]
    it.step()
    return it, old, young


def test_the_youngest_gives_way_and_starts_over():
    it, _, young = collide()
    plan = it.planner.plan()

    assert (("young",), ["old"]) == (plan.preempted, [s.request_id for s in plan.scheduled])
    assert (RequestStatus.PREEMPTED, 0, 1) == (young.status, young.num_computed_tokens, young.num_preemptions)
    assert not it.manager.holds("young")


@pytest.mark.parametrize(("num_free", "comes_back"), [(3, False), (4, True)])
def test_a_preempted_request_waits_for_room_for_all_its_tokens_and_one_more(num_free: int, comes_back: bool):
    it, old, young = collide(shares_prefixes=False)
    it.step()
    it.end(old)
    it.manager.pool.forget_hashes()
    it.manager.allocate("another", 5 - num_free)
    it.add(request("new", [9], 1))
    assert 3 == young.num_tokens
    if comes_back:
        assert (0, 3) == shares(it.step())["young"]
    else:  # and nobody passes it
        with pytest.raises(InvariantViolation, match="none can be scheduled"):
            it.step()


def test_blocks_that_somebody_uses_count_as_room():
    """Two of its four blocks are those of a request with the same beginning, which runs."""
    it, old, young = collide()
    it.step()
    it.end(old)
    it.manager.pool.forget_hashes()
    it.manager.allocate("alike", 2)
    it.manager.publish("alike", young.block_hashes(1, 2))
    it.manager.allocate("another", 1)

    assert 2 == it.manager.num_free_blocks
    assert (2, 1) == shares(it.step())["young"]


# The second tier


def test_a_victims_full_blocks_go_to_the_second_tier_before_they_are_freed():
    asked: list[tuple[int, int]] = []

    def swaps(num_tokens: int, num_blocks: int) -> bool:
        asked.append((num_tokens, num_blocks))
        return True

    old, young = request("old", [1, 2, 3], 4), request("young", [4, 5, 6], 4)
    it = Planning(old, young, num_blocks=4, block_size=2, num_tier_slots=3, swaps=swaps)
    it.step()
    blocks = it.manager.block_table("young")
    it.step()
    plan = it.planner.plan()

    assert ("young",) == plan.preempted
    assert [(4, 2)] == asked
    assert ((blocks[0], 0), (blocks[1], 1)) == plan.tier_stores
    assert it.tier is not None
    assert [0, 1] == [entry.slot for entry in it.tier.leading_hits(young.block_hashes(2, 2))]


def test_nothing_is_copied_for_a_victim_that_is_to_be_recomputed():
    it, _, _ = collide(num_tier_slots=3, swaps=lambda num_tokens, num_blocks: False)

    assert ((), ("young",)) == ((plan := it.planner.plan()).tier_stores, plan.preempted)


def test_what_others_still_hold_is_not_copied():
    it, _, young = collide(num_tier_slots=3)
    table = it.manager.block_table("young")
    it.manager.pool.share(table[0])
    plan = it.planner.plan()

    assert [table[1]] == [block for block, _ in plan.tier_stores]
    assert it.tier is not None
    assert it.tier.find(young.block_hashes(1, 1)[0]) is None


def test_what_builds_on_a_reset_cache_is_not_copied():
    it, _, young = collide(num_tier_slots=3)
    young.is_unshareable = True

    assert () == it.planner.plan().tier_stores
    assert not young.is_unshareable  # it starts over


def test_a_stored_block_says_whether_the_draft_model_has_it_too():
    it, _, young = collide(num_tier_slots=3)
    young.num_draft_computed_tokens = 1
    it.planner.plan()

    assert it.tier is not None
    assert [True, False] == [entry.is_draft_filled for entry in it.tier.leading_hits(young.block_hashes(1, 2))]


# Families


def test_a_family_waits_for_places_for_all_of_it():
    it = Planning(request("a", [1]), family("b", 3, [2]), request("c", [3]), max_batch=3)

    assert ["a"] == list(shares(it.step()))
    it.end(it.queues.running[0])
    assert ["b"] == list(shares(it.step()))


def test_unborn_samples_have_no_drafts():
    """The step that bears them has one row for all."""
    alone, several = request("a", [1], 9, num_drafts=3), family("b", 2, [2], 9, num_drafts=3)

    assert [3, 0] == [s.num_draft_slots for s in Planning(alone, several).planner.plan().scheduled]


def test_the_copy_of_a_shared_last_block_is_in_the_plan_once():
    a = request("a", [1, 2, 3], 9)
    it = Planning(a)
    it.step()
    it.manager.fork("a", "sibling")
    shared = it.manager.block_table("a")[-1]
    plan = it.step()

    assert ((shared, it.manager.block_table("a")[1]),) == plan.block_copies
    assert shared == it.manager.block_table("sibling")[-1]
    assert () == it.step().block_copies
