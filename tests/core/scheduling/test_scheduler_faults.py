"""Steps that raise, and results that do not answer their plan."""

import logging

import pytest

from core.errors import InvariantViolation
from core.request import FinishReason
from core.step import ModelRunnerOutput, SampledTokens, SchedulerOutput, count_only
from tests.builders import request, scheduler


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
