"""Continuous batching by example. The machine in test_scheduler_machine.py mixes all of it."""

import logging

import pytest

from core.errors import DuplicateRequest, InvalidRequest, InvariantViolation, UnknownRequest
from core.request import DraftOutcome, FinishReason, RequestStatus
from core.scheduling.scheduler import ContinuousBatchingScheduler
from core.step import ModelRunnerOutput, SampledTokens, SchedulerOutput, count_only
from tests.builders import family, request, scheduler
from tests.core.scheduling.checked_runner import CheckedRunner, decode_alone


def drain(it: ContinuousBatchingScheduler, max_steps: int = 1000) -> int:
    for num_steps in range(max_steps):
        if not it.has_unfinished_requests:
            return num_steps
        it.step()
        it.check_invariants()
    raise AssertionError(f"unfinished after {max_steps} steps")


class Recorder:
    """Keeps the plans it counts; accepts every draft."""

    def __init__(self) -> None:
        self.plans: list[SchedulerOutput] = []

    def __call__(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.plans.append(plan)
        return ModelRunnerOutput(
            {
                s.request_id: SampledTokens([0] * (s.num_draft_slots + 1), num_draft_tokens=s.num_draft_slots)
                for s in plan.scheduled
                if s.yields_token
            }
        )

    @property
    def shares(self) -> list[dict[str, tuple[int, int]]]:
        """(tokens, draft slots) by request, step by step."""
        return [{s.request_id: (s.num_tokens, s.num_draft_slots) for s in plan.scheduled} for plan in self.plans]


class Refuser:
    """Accepts no draft."""

    def __call__(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput(
            {
                s.request_id: SampledTokens((0,), num_draft_tokens=s.num_draft_slots)
                for s in plan.scheduled
                if s.yields_token
            }
        )


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


# Drafts


def test_drafts_get_what_the_budget_leaves_when_everybody_is_served():
    recorder = Recorder()
    it = scheduler(execute=recorder, max_num_batched_tokens=5)
    it.add_request(request("a", [1], 9, num_drafts=3))
    it.add_request(request("b", [1], 9, num_drafts=3))
    it.step()

    assert [{"a": (1, 3), "b": (1, 0)}] == recorder.shares


def test_drafts_are_dropped_before_anybody_gives_way():
    """Six slots: a has three tokens, b two, so that one slot is left for drafts that want four."""
    recorder = Recorder()
    it = scheduler(num_blocks=6, block_size=1, execute=recorder)
    it.add_request(request("a", [1] * 3, 4, num_drafts=2))
    it.add_request(request("b", [1] * 2, 4, num_drafts=2))
    it.step()

    assert ([{"a": (3, 1), "b": (2, 0)}], 0) == (recorder.shares, it.num_preemptions)


def test_rejected_drafts_give_their_slots_back():
    it = scheduler(num_blocks=10, block_size=1, execute=Refuser())
    it.add_request(request("a", [1, 2], 9, num_drafts=4))

    assert (8, 7, 6) == tuple((it.step(), it.block_manager.num_free_blocks)[1] for _ in range(3))


def test_accepted_drafts_are_computed_and_bring_one_token_more():
    it = scheduler(num_blocks=20, block_size=1, execute=Recorder())
    a = request("a", [1, 2], 9, num_drafts=3)
    it.add_request(a)
    it.step()

    assert (4, 5, 1) == (a.num_output_tokens, a.num_computed_tokens, a.num_missing_tokens)


def test_drafts_never_pass_max_tokens():
    recorder = Recorder()
    it = scheduler(execute=recorder)
    a = request("a", [1], 6, num_drafts=3)
    it.add_request(a)
    drain(it)

    assert ([{"a": (1, 3)}, {"a": (1, 1)}], 6) == (recorder.shares, a.num_output_tokens)


def test_drafts_never_pass_the_context():
    recorder = Recorder()
    it = scheduler(execute=recorder, max_model_len=8)
    a = request("a", [1], 50, num_drafts=3)
    it.add_request(a)
    drain(it)

    assert [{"a": (1, 3)}, {"a": (1, 2)}] == recorder.shares
    assert (8, FinishReason.LENGTH) == (a.num_tokens, a.finish_reason)


def test_a_prompt_in_the_middle_gets_no_draft_slots():
    recorder = Recorder()
    it = scheduler(execute=recorder, max_num_batched_tokens=4)
    it.add_request(request("a", [1] * 6, 4, num_drafts=2))
    drain(it)

    assert [{"a": (4, 0)}, {"a": (2, 2)}] == recorder.shares[:2]


def test_an_end_inside_an_accepted_run_cuts_the_rest_off():
    ended = scheduler(execute=lambda plan: ModelRunnerOutput({"a": SampledTokens([5, 7, 6, 6], num_draft_tokens=3)}))
    a = request("a", [1], 9, eos={7}, num_drafts=3)
    ended.add_request(a)
    report = ended.step()

    assert (["a"], [5, 7], FinishReason.STOP) == (report.finished, a.output_token_ids, a.finish_reason)
    (output,) = ended.take_outputs()
    assert (5, 7) == tuple(t.token_id for t in output.tokens)
    assert DraftOutcome(num_drafted=3, num_accepted=3, num_emitted=2) == output.drafts


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


# Steps that raise


class Failing:
    """Raises `error` whenever `culprit` is in the plan, None meaning anybody, at most `times` times."""

    def __init__(self, error: Exception, culprit: str | None, times: int = 1000) -> None:
        self.error, self.culprit, self.times = error, culprit, times

    def __call__(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        if self.times and (self.culprit is None or self.culprit in [s.request_id for s in plan.scheduled]):
            self.times -= 1
            raise self.error
        return count_only(plan)


def test_only_the_culprit_fails(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.ERROR)
    it = scheduler(execute=Failing(RuntimeError("bad row"), "b"))
    requests = [request(name, [1, 2], 2) for name in "abc"]
    for each in requests:
        it.add_request(each)
    report = it.step()

    assert (["a", "b", "c"], ["b"], 3) == report
    assert [1, 0, 1] == [r.num_output_tokens for r in requests]
    assert ("RuntimeError: bad row", FinishReason.ERROR) == (requests[1].error, requests[1].finish_reason)
    assert [None, "RuntimeError: bad row", None] == [output.error for output in it.take_outputs()]
    it.check_invariants()
    assert ["a", "c"] == it.step().finished


def test_the_plan_that_raised_is_in_the_log_without_any_text(caplog: pytest.LogCaptureFixture):
    it = scheduler(execute=Failing(RuntimeError("bad row"), "b", times=2), num_blocks=10)
    it.add_request(request("b", [71, 72, 73, 74, 75], 2, num_drafts=1))
    it.step()

    assert "b: tokens 0..5 of 5, 1 draft slots, blocks [0, 1]" in caplog.records[0].getMessage()
    assert "71" not in "".join(record.getMessage() for record in caplog.records)


def test_a_step_that_raises_once_is_as_if_nothing_had_happened():
    failing = scheduler(execute=Failing(RuntimeError("hiccup"), None, times=1), num_blocks=10)
    smooth = scheduler(num_blocks=10)
    for it in (failing, smooth):
        it.add("a", 5, 3)
        it.add("b", 2, 2)

    assert [smooth.step() for _ in range(3)] == [failing.step() for _ in range(3)]
    assert 10 == failing.block_manager.num_free_blocks


@pytest.mark.parametrize("error", [InvariantViolation("a book"), MemoryError()])
def test_what_the_engine_cannot_survive_is_passed_on(error: Exception):
    it = scheduler(execute=Failing(error, None))
    it.add("a", 1, 1)

    with pytest.raises(type(error)):
        it.step()


def test_it_is_passed_on_also_when_requests_are_run_one_by_one():
    errors = iter([RuntimeError("first"), MemoryError()])

    def execute(plan: SchedulerOutput) -> ModelRunnerOutput:
        raise next(errors)

    it = scheduler(execute=execute)
    it.add("a", 1, 1)
    with pytest.raises(MemoryError):
        it.step()


# What `execute` must return


@pytest.mark.parametrize(
    ("sampled", "message"),
    [
        ({}, "should have yielded a token"),
        ({"a": SampledTokens([0, 0], num_draft_tokens=1)}, "accepted more drafts than it had slots"),
    ],
)
def test_a_result_that_does_not_answer_the_plan_is_our_own_mistake(sampled: dict[str, SampledTokens], message: str):
    it = scheduler(execute=lambda plan: ModelRunnerOutput(sampled))
    it.add("a", 1, 2)

    with pytest.raises(InvariantViolation, match=message):
        it.step()


def test_a_token_in_the_middle_of_a_prompt_is_our_own_mistake():
    it = scheduler(execute=lambda plan: ModelRunnerOutput({"a": SampledTokens([0])}), max_num_batched_tokens=1)
    it.add("a", 2, 2)

    with pytest.raises(InvariantViolation, match="yields no token, yet the runner returned one"):
        it.step()


def test_the_draft_model_is_behind_no_further_than_its_target():
    """It ran over four drafts, of which none was accepted."""
    result = ModelRunnerOutput({"a": SampledTokens([0], num_draft_tokens=4)}, {"a": 7})
    it = scheduler(execute=lambda plan: result)
    a = request("a", [1, 2, 3], 9, num_drafts=4)
    it.add_request(a)
    it.step()

    assert (3, 3) == (a.num_computed_tokens, a.num_draft_computed_tokens)


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
