"""The scheduler and its blocks against decoding one request at a time.

Requests come, leave, step and fail at random, on pools and budgets so small that they preempt each other all the time.
`CheckedRunner` reads every KV slot back; outputs must be those of `decode_alone`. What a step may do besides is
worked out here from what stood before it: who may be preempted, who may come back, how much may be computed.
"""

import logging
from random import Random
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.errors import InvalidRequest
from core.memory.block_manager import BlockManager
from core.request import FinishReason, Request, RequestStatus
from core.scheduling.scheduler import ContinuousBatchingScheduler, StepReport
from core.step import SchedulerOutput
from tests.builders import request
from tests.core.scheduling.checked_runner import EOS, VOCAB_SIZE, CheckedRunner, decode_alone

MAX_UNFINISHED = 8
seeds = st.integers(0, 2**16)


def has_requests(machine: "SchedulerMachine") -> bool:
    return bool(machine.unfinished)


class SchedulerMachine(RuleBasedStateMachine):
    scheduler_class: ClassVar[type[ContinuousBatchingScheduler]] = ContinuousBatchingScheduler

    @initialize(
        max_batch=st.sampled_from([4, 3, 2, 1]),
        num_blocks=st.integers(3, 9),
        block_size=st.sampled_from([1, 2, 1, 3, 2, 4]),  # small ones are short of blocks more often
        token_limit=st.none() | st.integers(1, 7),
        max_model_len=st.none() | st.integers(4, 12),
    )
    def start(
        self, max_batch: int, num_blocks: int, block_size: int, token_limit: int | None, max_model_len: int | None
    ) -> None:
        logging.disable(logging.ERROR)  # steps raise here all the time, and each is logged with its plan
        self.num_blocks, self.block_size, self.max_batch = num_blocks, block_size, max_batch
        self.token_limit, self.max_model_len = token_limit, max_model_len
        self.manager = BlockManager(num_blocks, block_size)
        self.runner = CheckedRunner(num_blocks, block_size)
        self.scheduler = self.scheduler_class(
            max_batch,
            self.manager,
            execute=self.runner,
            max_num_batched_tokens=token_limit,
            max_model_len=max_model_len,
        )
        self.unfinished: dict[str, Request] = {}  # in order of arrival
        self.oracle: dict[str, list[int]] = {}
        self.said: dict[str, list[int]] = {}

    def ceiling(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    def running(self) -> list[Request]:
        return [r for r in self.unfinished.values() if r.status is RequestStatus.RUNNING]

    def pick(self, number: int) -> str:
        return list(self.unfinished)[number % len(self.unfinished)]

    # What users do

    @precondition(lambda self: len(self.unfinished) < MAX_UNFINISHED)
    @rule(num_prompt=st.integers(1, 9), max_tokens=st.integers(1, 9), num_drafts=st.integers(0, 3), seed=seeds)
    def add(self, num_prompt: int, max_tokens: int, num_drafts: int, seed: int) -> None:
        if self.max_model_len is not None:
            num_prompt = min(num_prompt, self.max_model_len - 1)
        random = Random(seed)
        prompt = [random.randrange(VOCAB_SIZE) for _ in range(num_prompt)]
        new = request(f"r{len(self.oracle)}", prompt, max_tokens, eos={EOS}, num_drafts=num_drafts)
        if self.ceiling(num_prompt + max_tokens - 1) > self.num_blocks:
            with pytest.raises(InvalidRequest, match=f"{num_prompt} prompt tokens and max_tokens {max_tokens} need"):
                self.scheduler.add_request(new)
            return
        self.scheduler.add_request(new)
        self.unfinished[new.request_id] = new
        room = max_tokens if self.max_model_len is None else min(max_tokens, self.max_model_len - num_prompt)
        self.oracle[new.request_id] = decode_alone(prompt, room)
        self.said[new.request_id] = []

    @precondition(has_requests)
    @rule(number=st.integers(0, 59))
    def abort(self, number: int) -> None:
        gone = self.unfinished.pop(self.pick(number))
        self.scheduler.abort(gone.request_id)
        assert FinishReason.ABORT is gone.finish_reason
        assert gone.output_token_ids == self.oracle[gone.request_id][: gone.num_output_tokens]

    @rule(seed=seeds, chance=st.sampled_from([0.0, 0.5, 0.9, 1.0]), num_steps=st.integers(1, 4))
    def step(self, seed: int, chance: float, num_steps: int) -> None:
        for i in range(num_steps):
            self.step_and_check(seed + i, chance)
            self.check_all()

    @precondition(has_requests)
    @rule(seed=seeds, chance=st.sampled_from([0.0, 0.5, 1.0]))
    def step_that_raises(self, seed: int, chance: float) -> None:
        """Nobody is to blame: it must be as if nothing had happened."""
        self.runner.fails_once = True
        self.step_and_check(seed, chance)

    @precondition(has_requests)
    @rule(seed=seeds, chance=st.sampled_from([0.0, 0.5, 1.0]), number=st.integers(0, 59))
    def step_with_a_culprit(self, seed: int, chance: float, number: int) -> None:
        self.runner.culprit = self.pick(number)
        self.step_and_check(seed, chance)
        self.runner.culprit = None

    def step_and_check(self, seed: int, chance: float) -> None:
        self.runner.random, self.runner.chance_of_good_draft = Random(seed), chance
        self.runner.plans.clear()
        running, num_free = self.running(), self.manager.num_free_blocks
        blocks = {r.request_id: self.manager.block_table(r.request_id) for r in running}
        report = self.scheduler.step()
        if not self.runner.plans:
            assert not self.unfinished, "requests wait and nothing is done"
            assert ([], [], 0) == report
            return
        plan = self.runner.plans[0]
        self.check_plan(plan)
        self.check_preemptions(plan, running, num_free, {name: len(table) for name, table in blocks.items()})
        self.check_admissions(plan, running, num_free)
        self.take_outputs(plan, report)

    # What a step may do

    def check_plan(self, plan: SchedulerOutput) -> None:
        assert self.token_limit is None or 1 <= plan.num_tokens <= self.token_limit
        for s in plan.scheduled:
            assert s.num_tokens >= 1
            most = s.request.num_prompt_tokens + s.request.max_tokens
            most = most if self.max_model_len is None else min(most, self.max_model_len)
            # As the plan was made: tokens known then, drafts, and the one that the target adds.
            assert not s.num_draft_slots or s.end + s.num_draft_slots + 1 <= most, "a draft that cannot be emitted"
            assert self.ceiling(s.end + s.num_draft_slots) == len(s.block_ids)

    def check_preemptions(
        self, plan: SchedulerOutput, running: list[Request], num_free: int, num_blocks: dict[str, int]
    ) -> None:
        """Youngest first, and each only while free blocks do not cover one token for everyone the budget reaches."""
        left = [r.request_id for r in running]
        for victim in plan.preempted:
            asking = left if self.token_limit is None else left[: self.token_limit]
            needed = sum(1 for name in asking if self.is_full(name, num_blocks))
            assert needed > num_free, "preempted while free blocks cover what the step asks"
            assert len(left) > 1, "the oldest is never a victim"
            assert victim == left.pop()
            num_free += num_blocks[victim]

    def is_full(self, name: str, num_blocks: dict[str, int]) -> bool:
        return self.slots_before[name] == num_blocks[name] * self.block_size

    def check_admissions(self, plan: SchedulerOutput, running: list[Request], num_free: int) -> None:
        """First come, first served; a preempted request comes back to room for all its tokens and one more."""
        known = {r.request_id for r in running}
        for s in plan.scheduled:
            if s.request_id not in known:
                assert not plan.preempted, "admitted in a step that preempts"
                if self.preempted_before[s.request_id]:
                    num_tokens = len(self.tokens_before[s.request_id])
                    assert num_free >= min(self.ceiling(num_tokens + 1), self.num_blocks)
            num_free -= self.ceiling(s.end) - self.ceiling(s.start)

    def take_outputs(self, plan: SchedulerOutput, report: StepReport) -> None:
        outputs = self.scheduler.take_outputs()
        assert [s.request_id for s in plan.scheduled] == report.scheduled
        assert len({output.request_id for output in outputs}) == len(outputs)
        assert {output.request_id for output in outputs if output.is_finished} == set(report.finished)
        for output in outputs:
            name = output.request_id
            self.said[name] += [token.token_id for token in output.tokens]
            assert self.said[name] == self.oracle[name][: len(self.said[name])]
            assert len(self.said[name]) == output.num_generated_tokens
        for s in plan.scheduled:
            assert s.request.is_finished or s.end <= s.request.num_computed_tokens, "scheduled and not advanced"
        for output in outputs:
            name = output.request_id
            if output.is_finished:
                self.check_end(self.unfinished.pop(name), output.error)

    def check_end(self, ended: Request, error: str | None) -> None:
        name = ended.request_id
        if name == self.runner.culprit:
            assert FinishReason.ERROR is ended.finish_reason
            assert "RuntimeError: a request fails" == error
            return
        assert self.oracle[name] == self.said[name]
        by_eos = self.said[name][-1] == EOS
        assert (FinishReason.STOP if by_eos else FinishReason.LENGTH) is ended.finish_reason

    # What holds after each of them

    @invariant()
    def books_balance(self) -> None:
        self.scheduler.check_invariants()
        assert self.num_blocks == self.manager.num_free_blocks + self.manager.pool.num_used_blocks
        assert len(self.unfinished) == self.scheduler.num_running + self.scheduler.num_waiting

    @invariant()
    def blocks_are_exactly_those_of_the_running(self) -> None:
        """Spans manager and scheduler: each running request has the blocks of its computed tokens, nobody else any."""
        running = self.running()
        assert len(running) == self.scheduler.num_running <= self.max_batch
        tables = [self.manager.block_table(r.request_id) for r in running]
        assert [self.ceiling(r.num_computed_tokens) for r in running] == [len(table) for table in tables]
        used = [block for table in tables for block in table]
        assert len(set(used)) == len(used) == self.manager.pool.num_used_blocks

    @invariant()
    def waste_stays_behind_the_last_token(self) -> None:
        """T1.1: fewer than a block's slots for each running request."""
        num_slots = self.manager.pool.num_used_blocks * self.block_size
        num_computed = sum(r.num_computed_tokens for r in self.running())
        assert 0 <= num_slots - num_computed <= (self.block_size - 1) * self.scheduler.num_running

    @invariant()
    def nobody_has_passed_an_older_one(self) -> None:
        is_running = [r.status is RequestStatus.RUNNING for r in self.unfinished.values()]
        assert is_running == sorted(is_running, reverse=True)

    @invariant()
    def remember(self) -> None:
        """What the next step is judged by."""
        self.slots_before = {r.request_id: r.num_computed_tokens for r in self.running()}
        self.preempted_before = {n: r.status is RequestStatus.PREEMPTED for n, r in self.unfinished.items()}
        self.tokens_before = {n: list(r.token_ids) for n, r in self.unfinished.items()}

    def check_all(self) -> None:
        self.books_balance()
        self.blocks_are_exactly_those_of_the_running()
        self.waste_stays_behind_the_last_token()
        self.nobody_has_passed_an_older_one()
        self.remember()

    def teardown(self) -> None:
        try:
            if hasattr(self, "scheduler"):
                self.drain()
        finally:
            logging.disable(logging.NOTSET)

    def drain(self) -> None:
        """The oldest gets on in every step, so all end within so many steps as they have tokens, one after another."""
        most = sum(r.num_prompt_tokens + r.max_tokens for r in self.unfinished.values())
        for _ in range(most):
            if not self.unfinished:
                break
            self.step_and_check(0, 0.7)
            self.check_all()
        assert not self.unfinished
        assert self.num_blocks == self.manager.num_free_blocks
