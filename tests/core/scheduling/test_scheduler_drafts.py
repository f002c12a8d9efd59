"""Draft slots by example: who gets them, and what becomes of what was drafted."""

from core.request import DraftOutcome, FinishReason
from core.step import ModelRunnerOutput, SampledTokens, SchedulerOutput
from tests.builders import request, scheduler
from tests.core.scheduling.driving import Recorder, drain


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


def test_the_draft_model_is_behind_no_further_than_its_target():
    """It ran over four drafts, of which none was accepted."""
    result = ModelRunnerOutput({"a": SampledTokens([0], num_draft_tokens=4)}, {"a": 7})
    it = scheduler(execute=lambda plan: result)
    a = request("a", [1, 2, 3], 9, num_drafts=4)
    it.add_request(a)
    it.step()

    assert (3, 3) == (a.num_computed_tokens, a.num_draft_computed_tokens)
