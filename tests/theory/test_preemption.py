"""THEORY B7, preemption: nobody can tell that it happened, what it copies is counted, and everybody gets to the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import Engine, EngineConfig, NewRequest, SamplingParams, SpeculativeConfig, load_engine
from core.block_hash import BlockHashes
from core.memory.block_manager import BlockManager, blocks_needed
from core.memory.host_tier import HostTier
from core.model.kv_cache import KVCache
from core.request import Request, RequestStatus
from core.scheduling.scheduler import ContinuousBatchingScheduler
from core.step import ModelRunnerOutput, SchedulerOutput, count_only
from tests import builders
from tests.builders import TINY_SIZES

MODES = ("recompute", "swap", "auto")
BLOCK_SIZE = 16
LARGEST = 96 + 32  # tokens of the largest request below
SMALL_POOL = -(-6 * LARGEST // (5 * BLOCK_SIZE))  # 1.2 times the largest request
LARGE_POOL = 10 * LARGEST // BLOCK_SIZE


# T7.1

SENTENCES = ("Once upon a time ", "The sea was calm, and ", "He opened the door. ", "A cat sat there. ")
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1, "seed": 7},
    {"temperature": 0.8, "top_p": 0.9, "seed": -3, "presence_penalty": 0.5},
)


def new_request(i: int) -> NewRequest:
    """One of the 32, two samples in every eighth; prompts of 6 to 96 tokens, some with the same beginning."""
    prompt = (SENTENCES[i % 4] * 6)[: 6 + (i * 37) % 91]
    params = SamplingParams(max_tokens=12 + i % 3 * 10, ignore_eos=True, num_logprobs=1, **SAMPLING[i % 3])
    siblings = (f"{i} again",) if i % 8 == 1 else ()
    return NewRequest(request_id=str(i), prompt_token_ids=tuple(prompt.encode()), params=params, sibling_ids=siblings)


REQUESTS = [new_request(i) for i in range(28)]  # 32 sequences
Answers = dict[str, list[tuple[int, object]]]


@dataclass(frozen=True)
class Outcome:
    """What everybody said, and the engine behind."""

    answers: Answers
    engine: Engine


def serve_all(num_blocks: int, num_drafts: int | None, **config: Any) -> Outcome:
    speculative = SpeculativeConfig(num_speculative_tokens=num_drafts) if num_drafts else None
    engine = load_engine(
        EngineConfig(block_size=BLOCK_SIZE, num_kv_blocks=num_blocks, speculative=speculative, num_threads=1, **config)
    )
    for request in REQUESTS:
        engine.add(request)
    outputs = builders.run(engine)
    answers = {name: [(t.token_id, t.logprobs) for o in parts for t in o.tokens] for name, parts in outputs.items()}
    return Outcome(answers, engine)


@cache
def in_a_large_pool() -> Answers:
    outcome = serve_all(LARGE_POOL * 4, None)
    assert 0 == outcome.engine.stats.num_preemptions
    return outcome.answers


def test_the_largest_request_is_the_one_that_the_pools_are_made_for():
    sizes = [len(r.prompt_token_ids) + (r.params.max_tokens or 0) for r in REQUESTS]

    assert 32 == sum(1 + len(r.sibling_ids) for r in REQUESTS)
    assert LARGEST >= max(sizes) > LARGEST - BLOCK_SIZE


@pytest.mark.parametrize("num_drafts", [None, 3], ids=["no speculation", "speculation"])
@pytest.mark.parametrize("mode", MODES)
def test_32_requests_in_a_pool_of_little_more_than_one_say_what_they_say_in_a_large_one(
    mode: str, num_drafts: int | None
):
    """T7.1, 1.2 times the working set of the largest: token ids and log-probabilities, greedy, seeded and forked."""
    outcome = serve_all(SMALL_POOL, num_drafts, preemption_mode=mode)
    stats = outcome.engine.stats

    assert in_a_large_pool() == outcome.answers
    assert stats.num_preemptions >= 5
    assert 32 == stats.finished["length"]
    assert (mode != "recompute") == (stats.num_swapped_out_blocks > 0)
    assert [SMALL_POOL, 0] == [stats.kv_blocks_free, stats.kv_blocks_used]


@pytest.mark.parametrize("mode", MODES)
def test_a_pool_of_ten_times_the_largest_request_changes_no_answer(mode: str):
    """T7.1, 10 times."""
    assert in_a_large_pool() == serve_all(LARGE_POOL, 3, preemption_mode=mode).answers


@pytest.mark.parametrize("config", [{"enable_prefix_caching": False}, {"max_num_batched_tokens": 24}], ids=str)
def test_nor_does_swapping_without_a_prefix_cache_or_in_chunks(config: dict[str, Any]):
    """T7.1: the second tier alone gives back what it took."""
    outcome = serve_all(SMALL_POOL, None, preemption_mode="swap", **config)

    assert in_a_large_pool() == outcome.answers
    assert outcome.engine.stats.num_swapped_in_blocks > 0


# T7.2

WORDS_PER_BLOCK = 2 * TINY_SIZES.num_layers * BLOCK_SIZE * TINY_SIZES.num_kv_heads * TINY_SIZES.head_dim


class MeteredCache(KVCache):
    """Counts the bytes that arrive: each place is made NaN first, and what is a number afterwards was copied."""

    num_bytes_out = num_bytes_in = 0

    def store(self, pairs: Sequence[tuple[int, int]]) -> None:
        for pair in pairs:
            self._tier[pair[1]] = np.nan
            super().store([pair])
            self.num_bytes_out += 4 * np.count_nonzero(~np.isnan(self._tier[pair[1]]))

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        for pair in pairs:
            places = (self.keys_LBSGE[:, pair[1]], self.values_LBSGE[:, pair[1]])
            for place in places:
                place[:] = np.nan
            super().load([pair])
            self.num_bytes_in += sum(4 * np.count_nonzero(~np.isnan(place)) for place in places)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(2, 40)), min_size=2, max_size=8), st.integers(0, 4))
def test_bytes_copied_are_those_of_the_blocks_newly_stored_and_fetched(lengths: list[tuple[int, int]], spare: int):
    """T7.2, against a set of hashes: out what the tier lacks of each victim's full blocks, in what a return finds."""
    num_blocks = max(blocks_needed(prompt + output, BLOCK_SIZE) for prompt, output in lengths) + spare
    cache = MeteredCache(TINY_SIZES, num_blocks, BLOCK_SIZE, num_tier_slots=100)
    tier: set[bytes] = set()
    num_stored = num_fetched = 0
    requests = [
        Request(str(i), [i] * prompt, SamplingParams(max_tokens=output)) for i, (prompt, output) in enumerate(lengths)
    ]
    by_id = {request.request_id: request for request in requests}

    def leading(request: Request, num_tokens: int) -> list[bytes]:
        num_full = num_tokens // BLOCK_SIZE
        return BlockHashes(BLOCK_SIZE).up_to(request.token_ids, num_full)

    def execute(plan: SchedulerOutput) -> ModelRunnerOutput:
        nonlocal num_stored, num_fetched
        for victim in plan.preempted:
            contents = leading(by_id[victim], num_computed[victim])
            num_stored += len(set(contents) - tier)
            tier.update(contents)
        for returning in (s.request for s in plan.scheduled if num_computed[s.request_id] == 0):
            num_fetched += sum(h in tier for h in leading(returning, returning.num_tokens - 1))
        cache.store(plan.tier_stores)
        cache.load(plan.tier_loads)
        return count_only(plan)

    scheduler = ContinuousBatchingScheduler(
        8, BlockManager(num_blocks, BLOCK_SIZE), execute=execute, tier=HostTier(100)
    )
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_unfinished_requests:
        num_computed = {request.request_id: request.num_computed_tokens for request in requests}
        scheduler.step()

    num_block_bytes = 4 * WORDS_PER_BLOCK
    assert [num_stored * num_block_bytes, num_fetched * num_block_bytes] == [cache.num_bytes_out, cache.num_bytes_in]


def test_the_mapped_file_holds_the_bytes_that_the_counter_says(tmp_path: Path):
    """T7.2 of the whole engine, for target and draft: no slot of the file is used twice, so its words are copies."""
    config = {"preemption_mode": "swap", "swap_file": tmp_path / "tier", "swap_space_bytes": 2**25}
    outcome = serve_all(SMALL_POOL, 3, **config)
    num_out = outcome.engine.stats.num_swapped_out_blocks

    assert outcome.engine.stats.swap_slots_used == num_out
    for name in ("target", "draft"):
        words = np.memmap(tmp_path / f"tier.{name}", np.float32, "r")
        per_block = words.size // outcome.engine.config.num_tier_slots
        assert num_out * per_block == np.count_nonzero(words)
    assert in_a_large_pool() == outcome.answers


# T7.4


class WatchedScheduler(ContinuousBatchingScheduler):
    """Looks at every plan that preempts: was it needed, was the oldest spared, had the victim not just come back?"""

    _returned: frozenset[str] = frozenset()  # who came back with the last plan

    def schedule(self) -> SchedulerOutput:
        manager = self.block_manager
        running = sorted((r for r in self.unfinished_requests() if manager.holds(r.request_id)), key=lambda r: r.age)
        preempted_before = {r.request_id for r in self.unfinished_requests() if r.status is RequestStatus.PREEMPTED}
        num_free = manager.num_free_blocks
        # Chunks shrink and drafts are dropped first, so what a step asks at least is one token for each.
        asking = [r.request_id for r in running if r.num_computed_tokens % manager.block_size == 0]
        plan = super().schedule()
        if plan.preempted:
            assert len(asking) > num_free, "somebody gave way although free blocks covered what the step asked"
            assert running[0].request_id not in plan.preempted
        for victim in self._returned & set(plan.preempted):
            assert set(asking) - {victim}, f"{victim} came back without room for one token more"
        self._returned = frozenset(preempted_before & {s.request_id for s in plan.scheduled})
        return plan


def run_watched(
    lengths: Sequence[tuple[int, int]], num_blocks: int, block_size: int, tier: HostTier | None, budget: int | None
) -> list[Request]:
    """The requests, after a run of which every plan was watched."""
    scheduler = WatchedScheduler(32, BlockManager(num_blocks, block_size), tier=tier, max_num_batched_tokens=budget)
    requests = [
        Request(str(i), [i] * prompt, SamplingParams(max_tokens=output)) for i, (prompt, output) in enumerate(lengths)
    ]
    for request in requests:
        scheduler.add_request(request)
    most_steps = 2 * sum(prompt + output for prompt, output in lengths) ** 2
    for _ in range(most_steps):
        if not scheduler.has_unfinished_requests:
            break
        scheduler.step()
        scheduler.check_invariants()
    assert not scheduler.has_unfinished_requests
    return requests


def most_preemptions(requests: Sequence[Request], i: int, block_size: int) -> int:
    """A bound: each return yields a token, and each time it gives way somebody older has grown by a block."""
    grown_by_older = sum(blocks_needed(r.num_prompt_tokens + r.max_tokens, block_size) for r in requests[:i])
    return min(requests[i].max_tokens - 1, grown_by_older)


some_lengths = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=10)


@given(some_lengths, st.integers(0, 6), st.integers(1, 8), st.booleans())
def test_every_request_ends_and_gives_way_a_bounded_number_of_times(
    lengths: list[tuple[int, int]], spare: int, block_size: int, has_tier: bool
):
    """T7.4: no livelock; the oldest is never preempted; nobody is while free blocks cover what the step asks."""
    num_blocks = max(blocks_needed(sum(pair), block_size) for pair in lengths) + spare
    requests = run_watched(lengths, num_blocks, block_size, HostTier(8) if has_tier else None, None)

    for i, request in enumerate(requests):
        assert request.num_preemptions <= most_preemptions(requests, i, block_size)


@given(some_lengths, st.integers(0, 6), st.integers(1, 8), st.integers(1, 12))
def test_every_request_ends_when_prompts_come_in_chunks(
    lengths: list[tuple[int, int]], spare: int, block_size: int, budget: int
):
    """T7.4 in chunks of the budget, prompts and returns alike."""
    num_blocks = max(blocks_needed(sum(pair), block_size) for pair in lengths) + spare
    requests = run_watched(lengths, num_blocks, block_size, HostTier(8), budget)

    assert [output for _, output in lengths] == [request.num_output_tokens for request in requests]


@pytest.mark.parametrize("has_tier", [False, True], ids=["recompute", "swap"])
def test_32_requests_over_a_pool_of_little_more_than_one_give_way_a_few_times_each(has_tier: bool):
    """T7.4: 32 at once, each growing from 32 to 128 tokens, in 1.2 times what one needs."""
    requests = run_watched([(32, 96)] * 32, SMALL_POOL, BLOCK_SIZE, HostTier(1000) if has_tier else None, None)
    counts = [request.num_preemptions for request in requests]

    assert 0 == counts[0]
    assert 0 < max(counts) <= blocks_needed(96, BLOCK_SIZE)
