"""The contracts of the six names, as tests that any implementation can be held to.

    LAB_MODULE=your.module pytest tests/lab/test_lab.py          (without it: core)

Only the six names and what their contracts promise are used: which block is taken, which exception is
raised for an unknown id and how a law is laid out over [0, 1) are the implementation's own affair.
"""

from __future__ import annotations

import heapq
import importlib
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.lab.laws import (
    ScriptedRng,
    every_outcome,
    joint_law,
    midpoints,
    rolled,
    sequence_law,
    total_variation,
)

lab: Any = importlib.import_module(os.environ.get("LAB_MODULE", "core"))

# Ratios 1, 1, 1/2, 1/4; residual (3/4, 1/4, 0, 0); overlap 0.6. The residual has two tokens, so that a draw from the
# wrong law shows.
TARGET, DRAFT = (0.5, 0.3, 0.1, 0.1), (0.2, 0.2, 0.2, 0.4)
PIECES = (4, 20)


def refuses(call: Callable[..., object], *args: object) -> bool:
    """Whether the call raises. "Not written yet" is no refusal."""
    try:
        call(*args)
    except NotImplementedError:
        raise
    except Exception:
        return True
    return False


def table(manager: Any, request_id: str) -> list[int]:
    return list(manager.block_table(request_id))


def roomy_scheduler(max_batch: int) -> Any:
    """A scheduler that never runs out of blocks in these tests."""
    return lab.ContinuousBatchingScheduler(max_batch, lab.BlockManager(4096, 16))


def run(scheduler: Any, limit: int = 20_000) -> list[SimpleNamespace]:
    """Step until nobody is left; every step's report, with ids as sorted lists."""
    reports: list[SimpleNamespace] = []
    while scheduler.has_unfinished_requests:
        assert len(reports) < limit, "no end in sight"
        report = scheduler.step()
        reports.append(
            SimpleNamespace(
                scheduled=sorted(report.scheduled),
                finished=sorted(report.finished),
                num_running=report.num_running,
            )
        )
    return reports


def run_outputs(output_lens: Sequence[int], max_batch: int) -> list[SimpleNamespace]:
    """Serve requests of one prompt token each, all there from the start."""
    scheduler = roomy_scheduler(max_batch)
    for index, length in enumerate(output_lens):
        scheduler.add(f"{index:05d}", 1, length)
    return run(scheduler)


def bimodal_outputs(num_requests: int) -> list[int]:
    """As chat traffic often is: mostly short answers (16), one in ten long (512), in a fixed shuffled order."""
    return [512 if u < 0.1 else 16 for u in np.random.default_rng(7).random(num_requests)]


def list_scheduling_steps(output_lens: Sequence[int], max_batch: int) -> int:
    """When the last is done if each takes, in order, the place that is free first: the ideal of no waiting."""
    places = [0] * max_batch
    for length in output_lens:
        heapq.heapreplace(places, places[0] + length)
    return max(places)


# --- Blocks and what they waste --------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "expected"), [(4, 1), (8, 2), (12, 3), (4096, 1024)])
def test_exact_multiples_need_no_extra_block(num_tokens: int, expected: int) -> None:
    assert expected == lab.blocks_needed(num_tokens, 4)


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 1), (3, 1), (5, 2), (9, 3)])
def test_a_begun_block_counts_whole(num_tokens: int, expected: int) -> None:
    assert expected == lab.blocks_needed(num_tokens, 4)


def test_no_tokens_need_no_blocks() -> None:
    assert 0 == lab.blocks_needed(0, 16)


def test_blocks_of_one_slot_are_tokens() -> None:
    assert 7 == lab.blocks_needed(7, 1)


@pytest.mark.parametrize(("num_tokens", "block_size"), [(-1, 4), (4, 0), (4, -1)])
def test_impossible_sizes_are_refused(num_tokens: int, block_size: int) -> None:
    with pytest.raises(ValueError):
        lab.blocks_needed(num_tokens, block_size)


def test_waste_on_skewed_batches() -> None:
    waste = lab.kv_cache_blocks_fragmentation([1, 30, 5], 16)

    assert (28, 54) == (waste.paged_waste, waste.naive_waste)  # 15 + 2 + 11 and 29 + 0 + 25


def test_one_long_sequence_makes_everybody_pay_only_without_pages() -> None:
    waste = lab.kv_cache_blocks_fragmentation([2048] + [16] * 63, 16)

    assert (0, 63 * 2032) == (waste.paged_waste, waste.naive_waste)


def test_equal_lengths_waste_nothing_when_reserved_by_the_longest() -> None:
    waste = lab.kv_cache_blocks_fragmentation([5, 5, 5], 4)

    assert (9, 0) == (waste.paged_waste, waste.naive_waste)


def test_no_sequences_waste_nothing() -> None:
    assert (0, 0) == tuple(lab.kv_cache_blocks_fragmentation([], 16))


@pytest.mark.parametrize("block_size", [1, 2, 16, 100])
def test_paged_waste_is_less_than_a_block_per_sequence(block_size: int) -> None:
    seq_lens = list(range(1, 201))
    each = [lab.kv_cache_blocks_fragmentation([length], block_size).paged_waste for length in seq_lens]

    assert block_size - 1 == max(each)
    assert 0 <= min(each)
    assert sum(each) == lab.kv_cache_blocks_fragmentation(seq_lens, block_size).paged_waste


# --- The block manager -----------------------------------------------------------------------------------------


def test_allocate_takes_what_the_tokens_need() -> None:
    manager = lab.BlockManager(6, 4)

    assert 6 == manager.num_free_blocks
    taken = manager.allocate("a", 8)
    assert 2 == len(set(taken))
    assert list(taken) == table(manager, "a")
    assert 4 == manager.num_free_blocks


def test_no_block_has_two_owners() -> None:
    manager = lab.BlockManager(7, 4)
    for request_id, num_tokens in (("a", 9), ("b", 4), ("c", 12)):
        manager.allocate(request_id, num_tokens)

    assert 7 == len({block for request_id in "abc" for block in table(manager, request_id)})


def test_append_allocates_new_block_only_when_last_is_full() -> None:
    manager = lab.BlockManager(8, 4)
    manager.allocate("a", 3)
    lengths = []
    for _ in range(9):  # tokens 4 to 12
        taken = manager.append("a")
        assert len(taken) <= 1
        lengths.append(len(table(manager, "a")))

    assert [1, 2, 2, 2, 2, 3, 3, 3, 3] == lengths
    assert 5 == manager.num_free_blocks


def test_append_within_last_block_needs_no_memory() -> None:
    manager = lab.BlockManager(1, 4)
    manager.allocate("a", 3)

    assert [] == manager.append("a")
    assert manager.append("a") is None


def test_append_of_several_tokens_takes_every_block_they_need() -> None:
    manager = lab.BlockManager(8, 4)
    before = list(manager.allocate("a", 3))
    taken = list(manager.append("a", 6))

    assert 2 == len(taken)
    assert before + taken == table(manager, "a")
    assert [] == manager.append("a", 3)  # tokens 10 to 12


def test_allocate_out_of_memory_is_none_and_changes_nothing() -> None:
    manager = lab.BlockManager(3, 4)
    manager.allocate("a", 4)

    assert manager.allocate("b", 9) is None
    assert 2 == manager.num_free_blocks
    assert refuses(manager.block_table, "b")
    assert 2 == len(manager.allocate("b", 8))


def test_append_out_of_memory_is_none_and_changes_nothing() -> None:
    manager = lab.BlockManager(3, 4)
    manager.allocate("a", 6)
    before = table(manager, "a")

    assert manager.append("a", 7) is None  # 13 tokens need two more, one is there
    assert 1 == manager.num_free_blocks
    assert before == table(manager, "a")
    assert [] == manager.append("a", 2)  # still six tokens: two fit the last block
    assert 1 == len(manager.append("a"))


def test_freed_blocks_are_used_again() -> None:
    manager = lab.BlockManager(2, 4)
    first = set(manager.allocate("a", 8))
    assert manager.allocate("b", 1) is None

    manager.free("a")
    assert 2 == manager.num_free_blocks
    assert first == set(manager.allocate("b", 8))


def test_pool_never_shrinks_over_many_requests() -> None:
    manager = lab.BlockManager(3, 4)
    for round_ in range(50):
        manager.allocate("a", 1 + round_ % 8)
        manager.append("a", 4)
        manager.free("a")
        assert 3 == manager.num_free_blocks


def test_tables_need_not_be_contiguous() -> None:
    manager = lab.BlockManager(5, 4)
    owner = {manager.allocate(name, 4)[0]: name for name in "abcde"}
    every_other = sorted(owner)[::2]
    for block in every_other:
        manager.free(owner[block])

    taken = list(manager.allocate("f", 12))
    assert every_other == sorted(taken)  # no two of them adjacent
    assert taken == table(manager, "f")


def test_a_table_only_grows_at_its_end() -> None:
    manager = lab.BlockManager(6, 2)
    for name in "abc":
        manager.allocate(name, 2)
    manager.free("b")
    before = table(manager, "a")
    taken = list(manager.append("a", 4))

    assert before + taken == table(manager, "a")


def test_truncate_gives_back_whole_blocks() -> None:
    manager = lab.BlockManager(4, 4)
    before = list(manager.allocate("a", 15))
    manager.truncate("a", 6)

    assert before[:2] == table(manager, "a")
    assert 2 == manager.num_free_blocks
    assert [] == manager.append("a", 2)  # six tokens are left, so the second block has room for two
    assert 1 == len(manager.append("a"))


def test_fork_shares_blocks_instead_of_taking_more() -> None:
    manager = lab.BlockManager(4, 4)
    manager.allocate("parent", 8)
    manager.fork("parent", "child")

    assert 2 == manager.num_free_blocks
    assert table(manager, "parent") == table(manager, "child")


@pytest.mark.parametrize(("first", "second"), [("parent", "child"), ("child", "parent")])
def test_shared_blocks_go_back_with_their_last_holder(first: str, second: str) -> None:
    manager = lab.BlockManager(4, 4)
    before = list(manager.allocate("parent", 8))
    manager.fork("parent", "child")

    manager.free(first)
    assert 2 == manager.num_free_blocks
    assert before == table(manager, second)
    manager.free(second)
    assert 4 == manager.num_free_blocks


@pytest.mark.parametrize("writer", ["parent", "child"])
def test_a_shared_block_is_copied_before_it_is_written(writer: str) -> None:
    manager = lab.BlockManager(6, 4)
    before = list(manager.allocate("parent", 6))
    manager.fork("parent", "child")
    manager.append(writer)
    other = "child" if writer == "parent" else "parent"

    assert before == table(manager, other)
    assert before[0] == table(manager, writer)[0]  # full, so nobody writes it: still shared
    assert before[1] != table(manager, writer)[1]


def test_forks_that_part_at_a_full_block_copy_nothing() -> None:
    manager = lab.BlockManager(4, 4)
    before = list(manager.allocate("parent", 8))
    manager.fork("parent", "child")
    manager.append("child")
    manager.append("parent")

    assert before == table(manager, "parent")[:2] == table(manager, "child")[:2]
    assert table(manager, "parent")[2] != table(manager, "child")[2]
    assert 0 == manager.num_free_blocks


@pytest.mark.parametrize(("num_prompt_tokens", "num_samples"), [(8, 4), (9, 2), (3, 3)])
def test_samples_of_one_prompt_take_exactly_the_blocks_they_do_not_share(
    num_prompt_tokens: int, num_samples: int
) -> None:
    """L // B blocks stay shared, and each sample has the rest to itself: the last to leave a block keeps it."""
    manager = lab.BlockManager(64, 4)
    manager.allocate("0", num_prompt_tokens)
    for sample in range(1, num_samples):
        manager.fork("0", str(sample))
    num_shared = num_prompt_tokens // 4

    for num_output_tokens in range(1, 14):
        for sample in range(num_samples):
            manager.append(str(sample))
        num_own = -(-(num_prompt_tokens + num_output_tokens) // 4) - num_shared
        assert num_shared + num_samples * num_own == 64 - manager.num_free_blocks


def test_a_copy_that_finds_no_block_is_none_and_changes_nothing() -> None:
    manager = lab.BlockManager(1, 4)
    before = list(manager.allocate("parent", 3))
    manager.fork("parent", "child")

    assert manager.append("child") is None
    assert before == table(manager, "parent") == table(manager, "child")
    manager.free("parent")
    assert [] == manager.append("child")  # alone now: it may write where it is


def test_unknown_ids_are_refused_and_change_nothing() -> None:
    manager = lab.BlockManager(4, 4)
    before = list(manager.allocate("a", 5))

    assert refuses(manager.append, "ghost")
    assert refuses(manager.truncate, "ghost", 0)
    assert refuses(manager.fork, "ghost", "child")
    assert refuses(manager.free, "ghost")
    assert refuses(manager.block_table, "ghost")
    assert (2, before) == (manager.num_free_blocks, table(manager, "a"))


def test_doubled_ids_are_refused_and_change_nothing() -> None:
    manager = lab.BlockManager(4, 4)
    tables = [list(manager.allocate("a", 5)), list(manager.allocate("b", 3))]

    assert refuses(manager.allocate, "a", 1)
    assert refuses(manager.fork, "a", "b")
    assert (1, tables) == (manager.num_free_blocks, [table(manager, "a"), table(manager, "b")])


def test_a_freed_id_is_unknown_until_it_is_used_again() -> None:
    manager = lab.BlockManager(4, 4)
    manager.allocate("a", 5)
    manager.free("a")

    assert refuses(manager.free, "a")
    assert 4 == manager.num_free_blocks
    assert 1 == len(manager.allocate("a", 2))


# --- Continuous batching ---------------------------------------------------------------------------------------


def test_the_step_that_completes_a_prompt_yields_its_first_token() -> None:
    scheduler = roomy_scheduler(1)
    scheduler.add("a", 7, 1)
    report = scheduler.step()

    assert (["a"], ["a"]) == (list(report.scheduled), list(report.finished))
    assert 1 == report.num_running  # it held its place in this step
    assert not scheduler.has_unfinished_requests


def test_every_running_request_gets_one_token_a_step() -> None:
    scheduler = roomy_scheduler(3)
    for request_id, max_tokens in (("a", 1), ("b", 3), ("c", 5)):
        scheduler.add(request_id, 4, max_tokens)
    reports = run(scheduler)

    assert ["abc", "bc", "bc", "c", "c"] == ["".join(report.scheduled) for report in reports]
    assert ["a", "", "b", "", "c"] == ["".join(report.finished) for report in reports]


def test_admission_is_first_come_first_served() -> None:
    reports = run_outputs([2, 1, 1, 1], max_batch=1)

    assert [["00000"], ["00000"], ["00001"], ["00002"], ["00003"]] == [report.scheduled for report in reports]


def test_no_more_than_max_batch_run() -> None:
    reports = run_outputs([3, 1, 4, 1, 5, 9, 2, 6], max_batch=3)

    assert 3 == max(report.num_running for report in reports)
    assert all(len(report.scheduled) <= report.num_running for report in reports)


def test_a_place_left_is_taken_in_the_next_step() -> None:
    """Retirement in flight: the third starts when the short one is done, not when the long one is."""
    reports = run_outputs([2, 6, 3], max_batch=2)

    assert ["00000"] == reports[1].finished
    assert ["00001", "00002"] == reports[2].scheduled
    assert ["00002"] == reports[4].finished
    assert 6 == len(reports)


def test_a_request_may_join_while_others_run() -> None:
    scheduler = roomy_scheduler(2)
    scheduler.add("early", 3, 4)
    scheduler.step()
    scheduler.add("late", 3, 1)

    assert {"early", "late"} == set(scheduler.step().scheduled)


def test_blocks_return_when_a_request_finishes() -> None:
    manager = lab.BlockManager(8, 4)
    scheduler = lab.ContinuousBatchingScheduler(2, manager)
    scheduler.add("short", 8, 1)
    scheduler.add("long", 8, 3)
    scheduler.step()

    assert 5 <= manager.num_free_blocks < 8  # long holds two, or three if it also has room for what comes
    run(scheduler)
    assert 8 == manager.num_free_blocks


def test_has_unfinished_requests_says_whether_to_go_on() -> None:
    scheduler = roomy_scheduler(1)
    assert not scheduler.has_unfinished_requests
    scheduler.add("a", 2, 2)
    assert scheduler.has_unfinished_requests
    scheduler.step()
    assert scheduler.has_unfinished_requests
    scheduler.step()
    assert not scheduler.has_unfinished_requests


def test_a_request_waits_for_memory_though_a_place_is_free() -> None:
    scheduler = lab.ContinuousBatchingScheduler(2, lab.BlockManager(2, 4))
    scheduler.add("a", 7, 1)
    scheduler.add("b", 7, 1)

    assert [["a"], ["b"]] == [report.scheduled for report in run(scheduler)]


def test_a_small_request_does_not_overtake_one_that_waits_for_memory() -> None:
    scheduler = lab.ContinuousBatchingScheduler(3, lab.BlockManager(3, 4))
    scheduler.add("holder", 8, 4)
    scheduler.add("large", 11, 1)
    scheduler.add("small", 1, 1)
    order = [request_id for report in run(scheduler) for request_id in report.finished]

    assert order.index("large") < order.index("small")


@pytest.mark.parametrize("num_blocks", [4, 5, 7, 9])
def test_a_small_pool_still_finishes_everyone(num_blocks: int) -> None:
    """Four blocks hold one request at its longest: three at once must take turns, and the oldest never stops."""
    manager = lab.BlockManager(num_blocks, 4)
    scheduler = lab.ContinuousBatchingScheduler(3, manager)
    for request_id in "abcdef":
        scheduler.add(request_id, 4, 12)
    reports = run(scheduler, limit=500)

    assert list("abcdef") == sorted(request_id for report in reports for request_id in report.finished)
    assert all("a" in report.scheduled for report in reports[:12])
    assert num_blocks == manager.num_free_blocks


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    scheduler = lab.ContinuousBatchingScheduler(2, lab.BlockManager(2, 4))

    assert refuses(scheduler.add, "huge", 20, 4)
    assert not scheduler.has_unfinished_requests


def test_a_doubled_request_is_refused() -> None:
    scheduler = roomy_scheduler(2)
    scheduler.add("a", 2, 2)

    assert refuses(scheduler.add, "a", 2, 2)
    assert [["a"], ["a"]] == [report.scheduled for report in run(scheduler)]


@pytest.mark.parametrize(
    ("output_lens", "max_batch", "expected"),
    [
        ([], 4, 0),
        ([7], 4, 7),
        ([3, 1, 4, 1, 5], 2, 3 + 4 + 5),
        ([1, 9, 1, 9], 2, 18),
        ([1, 1, 9, 9], 2, 10),  # the given order is kept: sorting would be another policy
        ([9, 1, 1], 1, 11),
    ],
)
def test_static_batches_last_as_long_as_their_longest(output_lens: list[int], max_batch: int, expected: int) -> None:
    assert expected == lab.static_batching_steps(output_lens, max_batch)


def test_continuous_batching_beats_static_on_wasted_slot_steps() -> None:
    output_lens, max_batch = [2, 10, 2, 10, 2, 10, 2, 10], 2
    continuous = len(run_outputs(output_lens, max_batch))
    static = lab.static_batching_steps(output_lens, max_batch)
    wasted = [steps * max_batch - sum(output_lens) for steps in (continuous, static)]

    assert [4, 32] == wasted  # 26 and 40 steps of two places, for 48 tokens


@pytest.mark.parametrize("max_batch", [1, 3, 8, 16])
def test_places_are_never_idle_while_someone_waits(max_batch: int) -> None:
    """Steps equal list scheduling exactly: each request starts in the place that is free first."""
    output_lens = [int(n) for n in np.random.default_rng(3).geometric(1 / 20, size=60)]

    assert list_scheduling_steps(output_lens, max_batch) == len(run_outputs(output_lens, max_batch))


def test_equal_lengths_gain_nothing() -> None:
    assert lab.static_batching_steps([9] * 24, 8) == len(run_outputs([9] * 24, 8))


def test_bimodal_lengths_gain_more_than_fivefold() -> None:
    output_lens = bimodal_outputs(320)
    continuous = len(run_outputs(output_lens, 16))

    assert list_scheduling_steps(output_lens, 16) == continuous
    assert 5 * continuous < lab.static_batching_steps(output_lens, 16)


# --- Speculative decoding --------------------------------------------------------------------------------------


def accept_one(token: int, draws: Sequence[float]) -> tuple[int, int]:
    """Verify one draft token against TARGET; a bonus after acceptance is always token 2."""
    target_probs = np.array([TARGET, (0.0, 0.0, 1.0, 0.0)])
    num_accepted, bonus = lab.speculative_accept(np.array([token]), target_probs, np.array([DRAFT]), ScriptedRng(draws))
    return int(num_accepted), int(bonus)


def test_drafts_from_the_target_itself_are_all_accepted() -> None:
    rows = rolled(TARGET)
    num_accepted, _ = lab.speculative_accept(
        np.array([1, 2, 3]), rows[[0, 1, 2, 3]], rows[[0, 1, 2]], ScriptedRng([0.999] * 4)
    )

    assert 3 == num_accepted


@pytest.mark.parametrize(("token", "chance"), [(0, 1.0), (1, 1.0), (2, 0.5), (3, 0.25)])
def test_a_draft_is_accepted_with_the_ratio_of_target_to_draft(token: int, chance: float) -> None:
    """min(1, target / draft): 0.5/0.2, 0.3/0.2, 0.1/0.2, 0.1/0.4."""
    accepted = [accept_one(token, [draw, 0.5])[0] for draw in midpoints(100)]

    assert chance == sum(accepted) / 100
    assert sorted(accepted, reverse=True) == accepted  # small draws accept


def test_acceptance_stops_at_the_first_refusal() -> None:
    target_probs = np.array([TARGET] * 4)
    draft_probs = np.array([DRAFT] * 3)
    drafts = np.array([0, 3, 0])  # 0 is certain, 3 has one chance in four
    num_accepted, _ = lab.speculative_accept(drafts, target_probs, draft_probs, ScriptedRng([0.9, 0.9, 0.1, 0.5]))

    assert 1 == num_accepted


@pytest.mark.parametrize("token", [2, 3])
def test_a_refused_draft_is_replaced_from_the_residual(token: int) -> None:
    """(target - draft)+ is (0.3, 0.1, 0, 0): token 0 three times in four, and never what the draft had too much of."""
    outcomes = [accept_one(token, [0.99, draw]) for draw in midpoints(100)]

    assert {0} == {num_accepted for num_accepted, _ in outcomes}
    assert [75, 25, 0, 0] == np.bincount([bonus for _, bonus in outcomes], minlength=4).tolist()


def test_the_residual_is_of_the_refused_row() -> None:
    """Row 1 of 2 is refused. Its residual is all on token 3; that of row 0 is all on token 0."""
    target_probs = np.array([(0.6, 0.4, 0.0, 0.0), (0.0, 0.0, 0.4, 0.6), (0.0, 1.0, 0.0, 0.0)])
    draft_probs = np.array([(0.2, 0.8, 0.0, 0.0), (0.0, 0.0, 0.8, 0.2)])

    for draw in midpoints(10):
        result = lab.speculative_accept(np.array([0, 2]), target_probs, draft_probs, ScriptedRng([0.5, 0.9, draw]))
        assert (1, 3) == tuple(result)


def test_full_acceptance_adds_a_bonus_token_from_the_last_row() -> None:
    rows = rolled(TARGET)
    tokens = [
        lab.speculative_accept(np.array([0, 1]), rows[[0, 1, 2]], rows[[0, 1]], ScriptedRng([0.5, 0.5, draw]))
        for draw in midpoints(100)
    ]

    assert {2} == {num_accepted for num_accepted, _ in tokens}
    assert [10, 10, 50, 30] == np.bincount([bonus for _, bonus in tokens], minlength=4).tolist()


def test_without_drafts_the_token_is_the_targets_own() -> None:
    nothing = np.zeros(0, dtype=np.int64), np.array([TARGET]), np.zeros((0, 4))
    tokens = [lab.speculative_accept(*nothing, ScriptedRng([draw])) for draw in midpoints(100)]

    assert {0} == {num_accepted for num_accepted, _ in tokens}
    assert [50, 30, 10, 10] == np.bincount([bonus for _, bonus in tokens], minlength=4).tolist()


@pytest.mark.parametrize("draw", [0.01, 0.99])
@pytest.mark.parametrize("num_drafts", [0, 1, 4])
def test_one_draw_a_draft_and_one_more_are_always_taken(num_drafts: int, draw: float) -> None:
    """However early a draft is refused: the next step's draws must not depend on what happened in this one."""
    rng = ScriptedRng([draw] * (num_drafts + 1))
    lab.speculative_accept(
        np.full(num_drafts, 3),
        np.array([TARGET] * (num_drafts + 1)),
        np.array([DRAFT] * num_drafts).reshape(num_drafts, 4),
        rng,
    )

    assert num_drafts + 1 == rng.num_draws


@pytest.mark.parametrize(
    ("drafts", "target_shape", "draft_shape"),
    [
        (2, (2, 4), (2, 4)),  # no row for the bonus token
        (2, (4, 4), (2, 4)),
        (2, (3, 4), (1, 4)),
        (1, (3, 4), (2, 4)),
        (2, (3, 4), (2, 5)),  # two vocabularies
        (0, (2, 4), (0, 4)),
    ],
)
def test_shapes_that_disagree_are_refused(
    drafts: int, target_shape: tuple[int, int], draft_shape: tuple[int, int]
) -> None:
    with pytest.raises(ValueError):
        lab.speculative_accept(
            np.zeros(drafts, dtype=np.int64),
            np.full(target_shape, 1 / target_shape[1]),
            np.full(draft_shape, 1 / draft_shape[1]),
            ScriptedRng([0.5] * 5),
        )


@pytest.mark.parametrize(
    ("num_drafts", "expected"),
    [(1, 1.8), (2, 2.44), (3, 2.952), (4, 3.3616)],  # (1 - 0.8^(k+1)) / (1 - 0.8)
)
def test_tokens_per_step_follow_from_the_overlap_of_the_laws(num_drafts: int, expected: float) -> None:
    """Overlap sum min(target, draft) = 0.8 after every token; exact, over all drafts and draws."""
    target_VV = np.array([(0.5, 0.3, 0.15, 0.05)] * 4)
    draft_VV = np.array([(0.3, 0.3, 0.2, 0.2)] * 4)
    outcomes = every_outcome(lab.speculative_accept, target_VV, draft_VV, num_drafts, (4, 1))

    assert expected == pytest.approx(sum(chance * len(tokens) for chance, tokens in outcomes), abs=1e-9)


def test_spec_decode_preserves_target_distribution() -> None:
    """Sampled: pairs of tokens from two drafts a step have the target's frequencies (chi-square, p > 1e-4)."""
    rng = np.random.default_rng(2024)
    target_VV, draft_VV = rng.dirichlet(np.full(8, 4.0), size=8), rng.dirichlet(np.full(8, 4.0), size=8)
    num_samples, counts = 12_000, np.zeros((8, 8))
    for _ in range(num_samples):
        first = int(rng.choice(8, p=draft_VV[0]))
        drafts = [first, int(rng.choice(8, p=draft_VV[first]))]
        num_accepted, bonus = lab.speculative_accept(
            np.array(drafts), target_VV[[0, *drafts]], draft_VV[[0, first]], rng
        )
        tokens = [*drafts[:num_accepted], int(bonus)]
        if len(tokens) == 1:
            tokens.append(int(rng.choice(8, p=target_VV[tokens[0]])))
        counts[tokens[0], tokens[1]] += 1

    expected = num_samples * sequence_law(target_VV, 0, 2)
    assert ((counts - expected) ** 2 / expected).sum() < 113.7  # 63 degrees of freedom


@pytest.mark.parametrize("num_drafts", [0, 1, 2])
def test_spec_decode_preserves_target_distribution_exactly(num_drafts: int) -> None:
    """Enumerated: the joint law of the next K + 1 tokens is the target's to rounding."""
    target_VV = rolled(TARGET)
    law = joint_law(lab.speculative_accept, target_VV, rolled(DRAFT), num_drafts, PIECES)

    assert total_variation(law, sequence_law(target_VV, 0, num_drafts + 1)) < 1e-12
