"""Continuous batching by example. The machine in test_scheduler_machine.py mixes all of it."""

import pytest

from core.errors import DuplicateRequest, InvalidRequest, InvariantViolation, UnknownRequest
from core.request import FinishReason, RequestStatus
from core.scheduling.scheduler import ContinuousBatchingScheduler
from core.step import ModelRunnerOutput, SampledTokens
from tests.builders import family, request, scheduler
from tests.core.scheduling.checked_runner import CheckedRunner, decode_alone
from tests.core.scheduling.driving import Recorder, drain

# Limits


def test_limits_below_one_are_refused():
    with pytest.raises(ValueError, match="max_batch is 0, at least 1 is needed"):
        scheduler(max_batch=0)
    with pytest.raises(ValueError, match="max_num_batched_tokens is 0, at least 1 is needed"):
        scheduler(max_num_batched_tokens=0)


def test_a_request_that_fits_nowhere_is_refused_with_the_numbers():
    it = scheduler(num_blocks=3, block_size=4)

    with pytest.raises(
        InvalidRequest, match="6 prompt tokens and max_tokens 8 need 4 KV blocks of 4 tokens, 3 exist"
    ) as refused:
        it.add("a", 6, 8)
    assert "max_tokens" == refused.value.param
    assert not it.has_unfinished_requests


def test_the_last_token_needs_no_slot():
    """12 slots hold 6 + 7 tokens: the thirteenth is never fed back."""
    it = scheduler(num_blocks=3, block_size=4)
    it.add("a", 6, 7)

    assert 7 == drain(it)


def test_an_id_in_use_is_refused_and_free_again_after_the_end():
    it = scheduler()
    it.add("a", 1, 1)
    with pytest.raises(DuplicateRequest, match="request 'a' exists already"):
        it.add("a", 1, 1)
    it.step()

    it.add("a", 1, 1)
    assert 1 == it.num_waiting


# Who runs


def test_a_step_on_nothing_does_nothing():
    it = scheduler(execute=lambda plan: pytest.fail("nothing is to be executed"))

    assert ([], [], 0) == it.step()


def test_the_step_that_completes_a_prompt_yields_its_first_token():
    it = scheduler()
    it.add("a", 9, 3)

    assert [("a" in (r := it.step()).scheduled, r.finished) for _ in range(3)] == [
        (True, []),
        (True, []),
        (True, ["a"]),
    ]


def test_first_come_first_served_within_max_batch():
    it = scheduler(max_batch=2)
    for name, length in (("a", 3), ("b", 1), ("c", 1)):
        it.add(name, 1, length)

    assert [(["a", "b"], ["b"], 2), (["a", "c"], ["c"], 2), (["a"], ["a"], 1)] == [it.step() for _ in range(3)]


def test_nobody_passes_a_request_that_does_not_fit_yet():
    it = scheduler(num_blocks=3, block_size=4)
    it.add("a", 4, 2)
    it.step()
    it.add("big", 12, 1)
    it.add("small", 1, 1)

    assert ["a"] == it.step().scheduled
    assert ["big"] == it.step().scheduled
    assert ["small"] == it.step().scheduled


def test_a_long_prompt_is_computed_in_chunks_and_others_go_on_beside_it():
    recorder = Recorder()
    it = scheduler(execute=recorder, max_num_batched_tokens=4)
    it.add("a", 2, 5)
    it.add("b", 7, 1)
    drain(it)

    assert [{"a": (2, 0), "b": (2, 0)}, {"a": (1, 0), "b": (3, 0)}, {"a": (1, 0), "b": (2, 0)}, {"a": (1, 0)}] == (
        recorder.shares[:4]
    )


def test_a_chunked_prompt_takes_blocks_chunk_by_chunk():
    it = scheduler(num_blocks=10, block_size=2, max_num_batched_tokens=4)
    it.add("a", 12, 1)

    taken = []
    while it.has_unfinished_requests:
        it.step()
        taken.append(it.block_manager.pool.num_used_blocks)
    assert [2, 4, 0] == taken


def test_a_chunk_shrinks_to_the_free_blocks_instead_of_preempting():
    """In the second step b misses five tokens and the budget has seven; its blocks have room for three."""
    recorder = Recorder()
    it = scheduler(num_blocks=6, block_size=2, execute=recorder, max_num_batched_tokens=8)
    it.add("a", 3, 2)
    it.add("b", 10, 1)
    drain(it)

    assert [{"a": (3, 0), "b": (5, 0)}, {"a": (1, 0), "b": (3, 0)}, {"b": (2, 0)}] == recorder.shares
    assert 0 == it.num_preemptions


def test_the_token_budget_reaches_the_oldest_first():
    recorder = Recorder()
    it = scheduler(execute=recorder, max_num_batched_tokens=2)
    for name in "abc":
        it.add(name, 1, 3)
    drain(it)

    assert [["a", "b"]] * 3 + [["c"]] * 3 == [list(share) for share in recorder.shares]


# Preemption


def two_that_collide() -> ContinuousBatchingScheduler:
    """Both fit at first; with three tokens each the pool of five slots is too small for both."""
    it = scheduler(num_blocks=5, block_size=1)
    it.add("old", 2, 4)
    it.add("young", 2, 4)
    it.step()
    return it


def test_the_youngest_gives_way_only_when_blocks_do_not_cover():
    it = two_that_collide()
    assert (0, 1) == (it.num_preemptions, it.block_manager.num_free_blocks)

    assert ["old"] == it.step().scheduled
    assert (1, 1, 1) == (it.num_preemptions, it.num_running, it.num_waiting)


def test_a_preempted_request_starts_over_and_keeps_its_tokens():
    it = two_that_collide()
    young = it.find("young")
    assert young is not None
    it.step()

    assert RequestStatus.PREEMPTED is young.status
    assert (0, 1, 1) == (young.num_computed_tokens, young.num_output_tokens, young.num_preemptions)


def test_what_is_computed_again_is_counted_apart():
    """The young one's two prompt tokens, and with them the place of the token it had."""
    it = two_that_collide()
    assert 0 == it.num_recomputed_tokens
    while it.has_unfinished_requests:
        it.step()

    assert (1, 2) == (it.num_preemptions, it.num_recomputed_tokens)


def test_a_preempted_request_comes_back_when_all_its_tokens_and_one_more_fit():
    """When a has gone, b and c have two tokens each: b takes two of four slots, and two are not enough for c."""
    it = scheduler(num_blocks=4, block_size=1)
    for name, num_prompt_tokens in (("a", 2), ("b", 1), ("c", 1)):
        it.add(name, num_prompt_tokens, 2)

    assert [["a", "b", "c"], ["a"], ["b"], ["c"]] == [it.step().scheduled for _ in range(4)]
    assert (2, False) == (it.num_preemptions, it.has_unfinished_requests)


def test_preemption_admits_nobody_in_the_same_step():
    it = two_that_collide()
    it.add("new", 1, 1)

    assert ["old"] == it.step().scheduled


def test_the_oldest_is_never_a_victim_and_all_finish():
    it = scheduler(num_blocks=6, block_size=1)
    requests = [request(f"r{i}", [1, 2], 5) for i in range(4)]
    for each in requests:
        it.add_request(each)
    drain(it)

    assert 0 == requests[0].num_preemptions
    assert it.num_preemptions == sum(r.num_preemptions for r in requests) > 0
    assert {FinishReason.LENGTH} == {r.finish_reason for r in requests}


def test_a_chunk_shrinks_before_anybody_younger_gives_way():
    """While "long" waited for a's blocks, "young" passed it. Its chunk could take the last block that "young" needs."""
    it = scheduler(num_blocks=12, block_size=1, max_num_batched_tokens=6, enable_prefix_caching=True)
    it.add_request(request("a", [1, 2], 1))
    it.add_request(request("long", list(range(1, 11)), 2))
    it.add_request(request("young", [99], 3))

    assert [["a", "young"], ["young", "long"], ["long", "young"]] == [it.step().scheduled for _ in range(3)]
    assert 0 == it.num_preemptions


# Several samples


def test_a_sample_that_ends_with_its_first_token_has_ended():
    """Said by its own choice: the parent goes on."""
    a = family("a", 2, [1, 2], max_tokens=3, eos={7})
    sibling = a.siblings[0]
    said = {"a": SampledTokens((5,)), "a.1": SampledTokens((7,))}
    it = scheduler(execute=lambda plan: ModelRunnerOutput(said))
    it.add_request(a)
    report = it.step()
    it.check_invariants()

    assert (["a"], ["a.1"], 2) == report
    assert (RequestStatus.RUNNING, RequestStatus.FINISHED) == (a.status, sibling.status)


# The prefix cache is reset


def test_after_a_reset_nobody_hits_what_was_computed_before_nor_what_builds_on_it():
    it = scheduler(block_size=2, enable_prefix_caching=True)
    it.add_request(request("before", [1, 2, 3, 4, 5], 9))
    it.step()
    it.reset_prefix_cache()
    for _ in range(3):
        it.step()
    after = request("after", [1, 2, 3, 4, 5, 0, 0, 9], 1)
    it.add_request(after)
    it.step()

    assert 0 == after.num_cached_tokens


def test_a_request_that_starts_over_after_a_reset_can_be_shared_again():
    it = scheduler(num_blocks=6, block_size=1, enable_prefix_caching=True)
    old, young = request("old", [1, 2], 4), request("young", [3, 4], 3)
    for each in (old, young):
        it.add_request(each)
    it.step()
    it.reset_prefix_cache()
    drain(it)
    assert 1 == young.num_preemptions
    again = request("again", [3, 4, 9], 1)
    it.add_request(again)
    it.step()

    assert 2 == again.num_cached_tokens


# Aborts


def test_an_aborted_request_frees_its_blocks_at_once_whatever_its_state():
    it = two_that_collide()
    it.add("waiting", 1, 1)
    it.step()
    old, young, waiting = (it.find(name) for name in ("old", "young", "waiting"))
    assert old is not None
    assert young is not None
    assert waiting is not None
    assert [RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.WAITING] == [
        r.status for r in (old, young, waiting)
    ]
    for each in (waiting, young, old):
        it.abort(each.request_id)
        it.check_invariants()
        assert (FinishReason.ABORT, RequestStatus.FINISHED) == (each.finish_reason, each.status)
    assert (5, False) == (it.block_manager.num_free_blocks, it.has_unfinished_requests)
    assert ([], [], 0) == it.step()


def test_aborting_an_unknown_or_finished_request_raises():
    it = scheduler()
    it.add("a", 1, 1)
    it.step()

    with pytest.raises(UnknownRequest, match="request 'a' is unknown"):
        it.abort("a")


# The books


def test_books_that_do_not_balance_are_noticed():
    it = two_that_collide()
    old, waiting = it.find("old"), it._queues.waiting
    assert old is not None
    for damage, repair, message in (
        (lambda: setattr(it, "max_batch", 1), lambda: setattr(it, "max_batch", 4), "2 places are taken, limit is 1"),
        (lambda: setattr(old, "age", (9, 0)), lambda: setattr(old, "age", (0, 0)), "a queue is out of order"),
        (
            lambda: setattr(old, "num_computed_tokens", 1),
            lambda: setattr(old, "num_computed_tokens", 2),
            "holds 2 slots",
        ),
        (lambda: waiting.append(old), lambda: waiting.clear(), "in no queue, or in two"),
    ):
        it.check_invariants()
        damage()
        with pytest.raises(InvariantViolation, match=message):
            it.check_invariants()
        repair()


def test_the_checked_runner_notices_a_slot_that_holds_somebody_elses_token():
    runner = CheckedRunner(num_blocks=4, block_size=2)
    it = scheduler(num_blocks=4, block_size=2, execute=runner)
    it.add_request(request("a", [1, 2, 3], 4))
    it.step()
    runner.slots[0] = runner.slots[1]

    with pytest.raises(InvariantViolation, match=r"a reads \[2, 2, 3\], its tokens are \[1, 2, 3\]; .* are \[0\]"):
        it.step()


def test_a_tenth_of_the_memory_gives_the_same_outputs():
    """Forty requests on a pool of a tenth of what they need together: preempted often, answers unchanged."""
    runner = CheckedRunner(num_blocks=12, block_size=4)
    runner.chance_of_good_draft = 0.5
    it = scheduler(max_batch=16, num_blocks=12, block_size=4, execute=runner, max_num_batched_tokens=32)
    requests = [request(f"r{i}", [i % 11, i % 7, i % 5], 12, eos={11}, num_drafts=i % 4) for i in range(40)]
    for each in requests:
        it.add_request(each)
    drain(it)

    assert it.num_preemptions > 10
    assert [decode_alone(r.token_ids[:3], 12) for r in requests] == [r.output_token_ids for r in requests]
