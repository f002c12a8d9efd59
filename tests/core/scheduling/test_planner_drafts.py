"""Draft slots in a plan: everybody has theirs until too many share the step, and scripts even then."""

from collections.abc import Sequence

import pytest

from core.request import Request, SamplingParams
from core.scripted import RequestScript
from core.step import SchedulerOutput
from core.tokenizer import ByteTokenizer
from tests import builders


def slots(plan: SchedulerOutput) -> dict[str, int]:
    return {s.request_id: s.num_draft_slots for s in plan.scheduled}


def plan_of(requests: Sequence[Request], max_drafting: int | None, token_limit: int | None = None) -> SchedulerOutput:
    scheduler = builders.scheduler(8, max_drafting=max_drafting, max_num_batched_tokens=token_limit)
    for request in requests:
        scheduler.add_request(request)
    return scheduler.schedule()


def drafting(num: int) -> list[Request]:
    return [builders.request(f"r{i}", max_tokens=9, num_drafts=3) for i in range(num)]


def scripted(request_id: str) -> Request:
    """Says three tokens in its first step."""
    script = RequestScript((("a", "b", "c"), "d"), ByteTokenizer())
    return Request(request_id, (1,), SamplingParams(max_tokens=9), script=script)


@pytest.mark.parametrize("max_drafting", [None, 3, 4])
def test_as_many_as_may_draft_do(max_drafting: int | None):
    assert {"r0": 3, "r1": 3, "r2": 3} == slots(plan_of(drafting(3), max_drafting))


@pytest.mark.parametrize("max_drafting", [1, 2])
def test_one_too_many_and_nobody_drafts(max_drafting: int):
    assert {"r0": 0, "r1": 0, "r2": 0} == slots(plan_of(drafting(3), max_drafting))


def test_those_who_want_no_drafts_count_too():
    """Their rows fill the step as well; a chunk of a prompt is one request."""
    plain = builders.request("plain", prompt=(1,) * 9, max_tokens=9)
    assert {"r0": 0, "r1": 0, "plain": 0} == slots(plan_of([*drafting(2), plain], 2, token_limit=8))


def test_scripts_say_their_groups_however_many_run():
    assert {"r0": 0, "r1": 0, "s": 2, "t": 2} == slots(plan_of([*drafting(2), scripted("s"), scripted("t")], 1))


def test_drafts_come_back_when_the_batch_is_small_again():
    scheduler = builders.scheduler(8, max_drafting=1)
    scheduler.add_request(builders.request("short", max_tokens=2, num_drafts=3))
    scheduler.add_request(builders.request("long", max_tokens=9, num_drafts=3))
    seen = []
    for _ in range(3):
        plan = scheduler.schedule()
        seen.append(slots(plan))
        scheduler.update(plan, builders.count_only(plan))
        scheduler.check_invariants()
    assert [{"short": 0, "long": 0}, {"short": 0, "long": 0}, {"long": 3}] == seen


@pytest.mark.parametrize(("max_drafting", "num_blocks"), [(4, 8), (8, 16)])
def test_slots_that_are_not_reserved_take_no_blocks(max_drafting: int, num_blocks: int):
    """Eight requests of one token: with seven drafts each they fill two blocks of four, without one."""
    scheduler = builders.scheduler(8, max_drafting=max_drafting)
    for i in range(8):
        scheduler.add_request(builders.request(f"r{i}", max_tokens=9, num_drafts=7))
    scheduler.schedule()
    assert num_blocks == scheduler.block_manager.pool.num_used_blocks
